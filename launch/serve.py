r"""Starts the external services of a run in a separate job; takes the arguments of launch/train.py.

    python launch/serve.py experiment=vqa_3b_1gpu model.path=3b \
        'services.judge={kind: vllm, model: 7b, external: true}'

A run with the same arguments waits for their addresses, which are published in run.dir. The job
ends with code 0 when that run is finished, and with code 75 after a stop signal (SIGTERM, SIGUSR1,
Ctrl-C). launch/slurm/judge.sbatch is the Slurm version.
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    cli()
