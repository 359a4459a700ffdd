#!/usr/bin/env bash
# Starts one launcher per node of the current Slurm job. The launchers meet at the first node, on a port derived
# from the job ID.
#   bash launch/slurm/nodes.sh experiment=numberline_grpo_cpu                        one process per GPU of a node, or a single process without GPUs
#   bash launch/slurm/nodes.sh --nproc_per_node=2 experiment=numberline_grpo_cpu     arguments with a dash are passed to the launchers
set -euo pipefail

own=()
while [[ ${1-} == -* ]]; do
    own+=("$1")
    shift
done
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
meet=(--nnodes="$SLURM_JOB_NUM_NODES" --master_addr="$first" --master_port="$((20000 + SLURM_JOB_ID % 10000))")
export OMP_NUM_THREADS="${OMP_NUM_THREADS-1}"
# shellcheck disable=SC2016 # SLURM_NODEID is expanded on each node
exec srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c 'exec python launch/launch.py --node_rank="$SLURM_NODEID" "$@"' spawn \
    "${meet[@]}" --nproc_per_node="${SLURM_GPUS_ON_NODE:-1}" "${own[@]}" launch/train.py "$@"
