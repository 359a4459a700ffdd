#!/usr/bin/env bash
# The speaker of the Lewis game against a listener, in the calling form of the game's own launcher:
#   bash launch/lewis.sh LISTENER_HOST [PORT] [EPOCHS] [DATASET] [SEED] [settings of launch/train.py ...]
#   bash launch/lewis.sh gpu07 9000 4 data/lewis 23 model.path=checkpoints/qwen2_5_vl_7b
#   LISTENER_MODEL=runs/listener/final bash launch/lewis.sh "" 9000 4 data/lewis 23    starts the listener, waits for it, and ends it
# DATASET is a folder that tools/data/make_lewis.py wrote; its pictures are in PICTURES (data/emoji), EXPERIMENT is the recipe.
# The game's variables become settings here and nowhere else: LISTENER_URL (without a host; several by commas), LISTENER_TIMEOUT,
# LISTENER_CHUNK_SIZE, LISTENER_CHUNK_DELAY, LISTENER_MAX_RETRIES, LISTENER_BACKOFF_FACTOR, LISTENER_REWARD_MODE, NO_PROXY, DEBUG_MODE with
# LOG_PATH. A listener reads its own (INFERENCE_CONCURRENCY, ...): python -m megatron_rl.services.listener --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi

host=${1-} port=${2-9000} epochs=${3-4} dataset=${4-data/lewis} seed=${5-23}
shift $(($# < 5 ? $# : 5))
words=(
    "experiment=${EXPERIMENT-lewis_speaker_7b_h100x4}" "run.seed=$seed" "task.data.images=${PICTURES-data/emoji}"
    "task.data.train=[$dataset/speaker:train]" "task.data.eval=[$dataset/speaker:test]"
)
if [[ -n $host ]]; then
    words+=("task.listener.urls=[http://$host:$port]")
elif [[ -n ${LISTENER_URL-} ]]; then
    address=${LISTENER_URL//\/batch_score/} # the game's own names an endpoint, we ask several
    words+=("task.listener.urls=[${address//\/score/}]")
elif [[ -n ${LISTENER_MODEL-} ]]; then
    words+=("services.listener={kind: listener, model: '$LISTENER_MODEL', port: $port}" "task.listener.urls=[service:listener]")
else
    echo "error: LISTENER_HOST=: there is no listener; give its host, LISTENER_URL, or LISTENER_MODEL=FOLDER to start one" >&2
    exit 1
fi

# setting VARIABLE KEY: the variable's value, where it has one
setting() { if [[ -n ${!1-} ]]; then words+=("$2=${!1}"); fi; }
setting LISTENER_TIMEOUT task.listener.timeout_s
setting LISTENER_CHUNK_SIZE task.listener.chunk_size
setting LISTENER_CHUNK_DELAY task.listener.chunk_delay_s
setting LISTENER_MAX_RETRIES task.listener.tries
setting LISTENER_BACKOFF_FACTOR task.listener.backoff_s
setting LISTENER_REWARD_MODE task.options.accuracy
if [[ -n ${NO_PROXY-} ]]; then words+=(task.listener.proxy=true); fi
case ${DEBUG_MODE-} in 1 | true | True | yes | on) words+=("task.options.log=${LOG_PATH-runs/lewis/predictions.jsonl}") ;; esac

prompts=32 # a step's, as the recipe has it
for word in "$@"; do
    if [[ $word == batch.prompts_per_step=* ]]; then prompts=${word#*=}; fi
done
count='import sys; from megatron_rl.data.records import Records; print(len(Records(sys.argv[1:], images_root="")))'
rows=$(python -c "$count" "$dataset/speaker:train")
words+=("run.steps=$(((epochs * rows + prompts - 1) / prompts))")
processes=$(python -c 'import torch; print(torch.cuda.device_count() or 1)') # one a GPU
exec python launch/spawn.py --nproc_per_node "$processes" launch/train.py "${words[@]}" "$@"
