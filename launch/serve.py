"""Starts the services of a run in a job of their own: those that are marked `external`; takes what launch/train.py takes.

    python launch/serve.py experiment=vqa_3b_1gpu model.path=3b 'services.judge={kind: vllm, model: 7b, external: true}'

A run with the same words waits for their addresses, which travel by run.dir. They end with code 0 when that run is finished, and with code
75 when asked to stop (SIGTERM, SIGUSR1, Ctrl-C). launch/slurm/judge.sbatch is this as a Slurm job.
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    cli()
