"""Starts the services of a run in a job of their own: those that are marked `elsewhere`; takes what launch/train.py takes.

    python launch/serve.py experiment=vqa_3b_1gpu model.path=3b 'services.judge={kind: vllm, model: 7b, elsewhere: true}'

A run with the same words waits for their addresses, which travel by run.dir. SIGTERM, SIGUSR1 and Ctrl-C end them.
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    cli()
