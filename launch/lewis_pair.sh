#!/usr/bin/env bash
# Trains the speaker and the listener of the Lewis game in two runs that communicate over HTTP only.
#   bash launch/lewis_pair.sh simultaneous SPEAKER LISTENER OUT [settings of both runs ...]
#   bash launch/lewis_pair.sh alternating runs/lewis/speaker_sft/final runs/lewis/listener/final runs/lewis/pair run.steps=13
# SPEAKER and LISTENER are the initial models. simultaneous: both runs train at the same time, and after each step
# each run sends its weights to a service that the other run queries. alternating: the speaker and then the listener
# are trained, TURNS times (default: 2), each with the latest version of its partner.
# The prefix speaker: or listener: restricts a setting to one run: speaker:task.options.log=FILE, or, for listeners
# that are used only for evaluation:
# 'speaker:+task.options.held_out_listeners={frozen: http://127.0.0.1:9002}'.
# Environment variables: EXPERIMENTS sets the names of the configs (default: lewis_cpu lewis_listener_cpu), PORTS sets
# the ports of the services (default: 9000 9001), and SERVICE_ARGS sets the arguments of both services. The default
# arguments are for nano models; for larger models use SERVICE_ARGS='--dtype bfloat16 --max-model-len 2048'. On
# several machines or GPUs, start the four commands by hand, each on its machine: docs/lewis.md.
# If one of the four processes ends before both runs are done, the others are stopped within GRACE_S
# seconds (default: 120), and the exit code is 1 (75 if a run stopped on request). The same command resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -d .venv ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi

mode=${1-} speaker=${2-} listener=${3-} out=${4-}
if [[ ! $mode =~ ^(simultaneous|alternating)$ || -z $out ]]; then
    echo "error: MODE=$mode OUT=$out: bash launch/lewis_pair.sh simultaneous|alternating SPEAKER LISTENER OUT [settings]" >&2
    exit 1
fi
shift 4
read -r speaker_recipe listener_recipe <<<"${EXPERIMENTS-lewis_cpu lewis_listener_cpu}"
read -r listener_port speaker_port <<<"${PORTS-9000 9001}"
read -ra service_args <<<"${SERVICE_ARGS---min-pixels 7056 --max-pixels 7100 --max-model-len 512 --kv-cache-mib 64}"
says=() hears=() # settings of the speaker's and of the listener's run
for word in "$@"; do
    case $word in
        speaker:*) says+=("${word#speaker:}") ;;
        listener:*) hears+=("${word#listener:}") ;;
        *) says+=("$word") hears+=("$word") ;;
    esac
done
none="kind: '', model: '', args: []"

if [[ $mode == alternating ]]; then
    for ((turn = 0; turn < ${TURNS-2}; turn++)); do
        python launch/train.py "experiment=$speaker_recipe" "model.path=$speaker" "services.listener.model=$listener" \
            "run.dir=$out/speaker_$turn" "${says[@]}"
        speaker=$out/speaker_$turn/final
        python launch/train.py "experiment=$listener_recipe" "model.path=$listener" "services.speaker.model=$speaker" \
            "run.dir=$out/listener_$turn" "${hears[@]}"
        listener=$out/listener_$turn/final
    done
    exit
fi

declare -A names=() # maps process IDs to names
end() { # stop all processes: runs save their progress, and any process that does not exit in time is killed
    kill "${!names[@]}" 2>/dev/null || true
    for ((tenth = 0; tenth < 10 * GRACE_S; tenth++)); do
        if ! kill -0 "${!names[@]}" 2>/dev/null; then return; fi
        sleep 0.1
    done
    kill -KILL "${!names[@]}" 2>/dev/null || true
    wait
}
GRACE_S=${GRACE_S-120}
trap end EXIT
mkdir -p "$out"
token=$out/services.token # required by both services
(umask 077 && head -c 32 /dev/urandom | base64 >"$token")
# serve KIND MODEL PORT: starts a service that receives weights; if the run is finished, it serves the final weights
serve() {
    local model=$2
    if [[ -f $out/$1/eval.json ]]; then model=$out/$1/final; fi
    python -m "megatron_rl.tasks.lewis.server.${1}_app" --model "$model" --port "$3" --trained --token-file "$token" \
        "${service_args[@]}" >"$out/$1.log" 2>&1 &
    names[$!]="the $1"
    until grep -q '^http://' "$out/$1.log"; do
        if ! kill -0 $! 2>/dev/null; then
            echo "error: OUT=$(realpath "$out"): the $1 did not start: $(tail -n 1 "$out/$1.log"); the same command resumes the runs" >&2
            exit 1
        fi
        sleep 0.5
    done
}
serve listener "$listener" "$listener_port"
serve speaker "$speaker" "$speaker_port"
listener_url=http://127.0.0.1:$listener_port speaker_url=http://127.0.0.1:$speaker_port
python launch/train.py "experiment=$listener_recipe" "model.path=$listener" "services.speaker={$none}" "task.speaker.urls=[$speaker_url]" \
    "task.speaker.token_file=$token" "weight_publish.urls=[$listener_url]" "weight_publish.token_file=$token" "run.dir=$out/listener" "${hears[@]}" >"$out/listener_run.log" 2>&1 &
names[$!]="the listener's run"
python launch/train.py "experiment=$speaker_recipe" "model.path=$speaker" "services.listener={$none}" "task.listener.urls=[$listener_url]" \
    "task.listener.token_file=$token" task.listener.partner_is_training=true "weight_publish.urls=[$speaker_url]" "weight_publish.token_file=$token" "run.dir=$out/speaker" "${says[@]}" &
names[$!]="the speaker's run"
num_runs=2
while ((num_runs)); do
    sleep 0.5
    for process in "${!names[@]}"; do
        if kill -0 "$process" 2>/dev/null; then continue; fi
        code=0 name=${names[$process]}
        wait "$process" || code=$?
        unset "names[$process]"
        if ((code == 0)) && [[ $name == *run ]]; then
            num_runs=$((num_runs - 1))
            continue
        fi
        echo "error: OUT=$(realpath "$out"): $name exited with code $code; its output is above or in a .log file there; the same command resumes the runs" >&2
        exit $((code == 75 ? 75 : 1))
    done
done
