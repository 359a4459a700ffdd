#!/usr/bin/env bash
# Trains the speaker of the Lewis game with a listener; takes the same arguments as the game's original launcher:
#   bash launch/lewis.sh LISTENER_HOST [PORT] [EPOCHS] [DATASET] [SEED] [settings of launch/train.py ...]
#   bash launch/lewis.sh gpu07 9000 4 data/lewis 23 model.path=checkpoints/qwen2_5_vl_7b
#   LISTENER_MODEL=runs/listener/final bash launch/lewis.sh "" 9000 4 data/lewis 23    starts and stops the listener, too
# DATASET is a directory written by tools/data/make_lewis.py. The environment variable PICTURES sets its
# image directory (default: data/emoji), and EXPERIMENT sets the config. EPOCHS is converted to run.steps, based on the
# number of rounds in DATASET and the config's batch.prompts_per_step. If the listener is started here and there
# are several GPUs, the listener uses the last GPU and the run uses the others. On a single GPU, limit the
# listener's memory: services.listener.args=[--gpu-memory-utilization,0.3].
# Only this script converts the game's environment variables to settings: LISTENER_URL (used if LISTENER_HOST is
# empty; several URLs are separated by commas), LISTENER_TIMEOUT, LISTENER_CHUNK_SIZE, LISTENER_CHUNK_DELAY,
# LISTENER_MAX_RETRIES, LISTENER_BACKOFF_FACTOR, LISTENER_REWARD_MODE, NO_PROXY, DEBUG_MODE with LOG_PATH
# (without them, the log is written to the run directory). NO_PROXY has the same effect as in the game: the proxy
# variables are used only if NO_PROXY contains the listener, and the listener then bypasses the proxies.
# For the environment variables of a listener (INFERENCE_CONCURRENCY, ...), see:
#   python -m megatron_rl.tasks.lewis.server.listener_app --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi

host=${1-} port=${2-9000} epochs=${3-4} dataset=${4-data/lewis} seed=${5-23}
shift $(($# < 5 ? $# : 5))
words=(
    "experiment=${EXPERIMENT-lewis_speaker_7b_h100x4}" "run.seed=$seed" "task.data.images=${PICTURES-data/emoji}"
    "task.data.train=[$dataset/speaker:train]" "task.data.eval=[$dataset/speaker:test]"
)
if [[ -z $host${LISTENER_URL-}${LISTENER_MODEL-} ]]; then
    echo "error: LISTENER_HOST=: no listener is configured; give its host, LISTENER_URL, or LISTENER_MODEL=FOLDER to start one" >&2
    exit 1
fi
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
urls='' # separated by commas
if [[ -n $host ]]; then
    urls=http://$host:$port
elif [[ -n ${LISTENER_URL-} ]]; then
    urls=${LISTENER_URL//\/batch_score/} # remove the endpoint path that the game's variable contains
    urls=${urls//\/score/}
else
    own="kind: listener, model: '$LISTENER_MODEL', port: $port"
    if ((gpus > 1)); then
        gpus=$((gpus - 1)) # GPUs of the run; the listener uses the next one
        own+=", gpus: [$gpus]"
    fi
    words+=("services.listener={$own}" "task.listener.urls=[service:listener]")
fi
if [[ -n $urls ]]; then words+=("services.listener={kind: '', model: '', args: []}" "task.listener.urls=[$urls]"); fi

# excepted HOST: succeeds if NO_PROXY contains the host, one of its parent domains, or *
excepted() {
    local entry entries
    IFS=', ' read -ra entries <<<"${NO_PROXY-}"
    for entry in "${entries[@]}"; do
        entry=${entry%%:*}
        if [[ $entry == '*' || $1 == "${entry#.}" || $1 == *".${entry#.}" ]]; then return 0; fi
    done
    return 1
}
if [[ -n $urls ]]; then
    trusted=true
    for url in ${urls//,/ }; do
        name=${url#*://}
        name=${name%%/*}
        if ! excepted "${name%:*}"; then trusted=false; fi
    done
    if [[ $trusted == true ]]; then words+=(task.listener.proxy=true); fi
fi

# setting VARIABLE KEY: adds KEY=VALUE if the variable is set and not empty
setting() { if [[ -n ${!1-} ]]; then words+=("$2=${!1}"); fi; }
setting LISTENER_TIMEOUT task.listener.timeout_s
setting LISTENER_CHUNK_SIZE task.listener.chunk_size
setting LISTENER_CHUNK_DELAY task.listener.chunk_delay_s
setting LISTENER_MAX_RETRIES task.listener.max_attempts
setting LISTENER_BACKOFF_FACTOR task.listener.backoff_s
setting LISTENER_REWARD_MODE task.options.accuracy
debug=${DEBUG_MODE-} # parsed like in the services
case ${debug,,} in 1 | true | yes | on) words+=("task.options.log=${LOG_PATH-runs/lewis/predictions.jsonl}") ;; esac

count='import sys
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.data.records import RecordFiles
try:
    given = compose_settings(sys.argv[1:])
    rows = len(RecordFiles(given.task.data.train, images_root=given.task.data.images, key="task.data.train"))
except ValueError as error:
    sys.exit(f"error: {error}")
print(-(-given.run.steps * rows // given.batch.prompts_per_step))'
steps=$(python -c "$count" "${words[@]}" "$@" "run.steps=$epochs") # run.steps contains the number of epochs here
words+=("run.steps=$steps")
exec python launch/launch.py --nproc_per_node "$((gpus > 0 ? gpus : 1))" launch/train.py "${words[@]}" "$@"
