"""Peak memory and time for computing logprobs and entropy from hidden states in chunks of rows.

    .venv/bin/python benchmarks/logprob_memory.py

Forward and backward pass are included. Each setting runs in a forked process of its own, so that
its peak memory does not include other settings. The vocabulary has 151,936 tokens, as in
Qwen2.5-VL, and the head is a plain fp32 matrix.
"""

import argparse
import multiprocessing
import resource
import sys
import time

import torch
import torch.distributed as dist

from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.logprobs import TokenDistribution
from megatron_rl.policy.parallel import build_layout

VOCABULARY = 151_936


def measure(rows: int, block: int, hidden: int) -> None:
    """Print one row: the increase in peak memory in MiB, the seconds, and sums of the results.

    The sums must be the same for all chunk sizes.
    """
    connect(read_world(), timeout_s=60)
    layout = build_layout(ParallelSettings(), seed=0)
    torch.manual_seed(0)
    head = torch.nn.Linear(hidden, VOCABULARY, bias=False)
    hidden_RH = torch.randn(rows, hidden, requires_grad=True)
    target_R = torch.randint(0, VOCABULARY, (rows,))
    distribution = TokenDistribution(torch.zeros(VOCABULARY, dtype=torch.bool), 1.0, 0, layout.tp_group, block)
    head.weight.grad = torch.zeros_like(head.weight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    with megatron_on_cpu():
        logprob_R, entropy_R = distribution(head, hidden_RH, target_R)
        (logprob_R + entropy_R).sum().backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sums = f"{logprob_R.sum().item():.3f} | {hidden_RH.grad.norm().item():.6f}"
    print(f"| {block} | {peak // 1024 - before // 1024} | {seconds:.2f} | {sums} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Measure all chunk sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024, help="number of sampled tokens in the micro-batch")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1024, 256, 64], help="values of parallel.log_probs_chunk_size")
    given = parser.parse_args()
    logits = given.rows * VOCABULARY * 4 >> 20
    print(f"{given.rows} rows x {VOCABULARY}: one copy of the logits is {logits} MiB\n")
    print("| chunk size | peak memory increase, MiB | seconds | sum of logprobs | gradient norm |\n|---|---|---|---|---|", flush=True)
    for block in given.blocks:
        process = multiprocessing.get_context("fork").Process(target=measure, args=(given.rows, block, given.hidden))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
