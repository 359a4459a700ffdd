#!/usr/bin/env bash
# Inside a Slurm job: one launcher on each of its nodes, which meet at the first one, on a port of the job's own.
#   bash launch/slurm/nodes.sh experiment=numberline_grpo_cpu                        a process for each GPU of a node, else one
#   bash launch/slurm/nodes.sh --nproc_per_node=2 experiment=numberline_grpo_cpu     words with a dash go to the launchers
set -euo pipefail

own=()
while [[ ${1-} == -* ]]; do
    own+=("$1")
    shift
done
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
meet=(--nnodes="$SLURM_JOB_NUM_NODES" --master_addr="$first" --master_port="$((20000 + SLURM_JOB_ID % 10000))")
export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
# shellcheck disable=SC2016 # SLURM_NODEID is what it is on each node
exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c 'exec python launch/spawn.py --node_rank="$SLURM_NODEID" "$@"' spawn \
    "${meet[@]}" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" "${own[@]}" launch/train.py "$@"
