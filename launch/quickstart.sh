#!/usr/bin/env bash
# Trains a small policy on two CPU cores. Stages: installation, tiny checkpoint, SFT, GRPO, and a table that
# compares the results before and after training.
#   bash launch/quickstart.sh                 skips finished stages in runs/quickstart and resumes a stopped one
#   bash launch/quickstart.sh run.seed=1      arguments are settings of the GRPO run; run.overwrite=true moves an existing run to a backup
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

RUNS=runs/quickstart
MODEL=$RUNS/nano
started=$SECONDS

say() { echo "quickstart: $*"; }

train() { python launch/launch.py --standalone --local-addr 127.0.0.1 --nproc_per_node "$processes" launch/train.py "$@"; }

# percent STAGE KEY: prints a fraction in the stage's eval.json as a percentage, NN.N
percent() { python -c 'import json, sys; print(f"{100 * json.load(open(sys.argv[1]))[sys.argv[2]]:.1f}")' "$RUNS/$1/eval.json" "$2"; }

bash launch/install.sh
export PATH="$PWD/.venv/bin:$PATH"
processes=$(python -c 'import torch; print(min(2, torch.cuda.device_count()) or 2)') # one per GPU if there are any
unset PYTHONDONTWRITEBYTECODE # compile once, because many short processes import the same 2 GB of packages
export OMP_NUM_THREADS=1 # one process per core

if [[ -f $MODEL/config.json ]]; then
    say "1/3 tiny checkpoint: $MODEL already exists"
else
    say "1/3 tiny checkpoint"
    mkdir -p "$RUNS"
    rm -rf "$MODEL.partial"
    python tools/data/make_tiny_qwen2_5_vl.py --out "$MODEL.partial" --preset nano
    mv "$MODEL.partial" "$MODEL"
fi

say "2/3 supervised warm start"
train stage=sft experiment=numberline_sft_cpu

say "3/3 GRPO"
train experiment=numberline_grpo_cpu run.require_improvement=true "$@"

curve=$(python -m megatron_rl.observe.plot "$RUNS/grpo")
sft_greedy=$(percent sft greedy_success)
sft_sampled=$(percent sft sampled_success)
grpo_greedy=$(percent grpo greedy_success)
grpo_sampled=$(percent grpo sampled_success)
echo
echo "NumberLine, all 30 initial states weighted by their probability; success is a return above 0 (uniform random: 28%)"
printf '%-12s %14s %18s\n' "" "greedy" "temperature 1"
printf '%-12s %13s%% %17s%%\n' "after SFT" "$sft_greedy" "$sft_sampled" "after GRPO" "$grpo_greedy" "$grpo_sampled"
echo
echo "reward curve: $curve"
echo "checkpoint:   $RUNS/grpo/final"
echo "total time:   $((SECONDS - started)) s"
echo "after SFT: $sft_greedy%"
echo "after GRPO: $grpo_greedy%"
