"""Prints the command that starts a server of vLLM as an engine of a run (engine.mode=server); takes what launch/train.py takes.

    python launch/engine.py experiment=vqa_3b_1gpu model.path=3b engine.mode=server engine.urls=[http://node2:8000] engine.token_file=FILE

One command for each of engine.urls, to be entered on its node; without any, one that listens at 127.0.0.1:8000. It is sent the run's
weights, and answers only requests with the token in the file (head -c 32 /dev/urandom | base64 > FILE).
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "engine")
    cli()
