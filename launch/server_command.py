r"""Prints the command that starts a vLLM server for a run; takes the arguments of launch/train.py.

    python launch/server_command.py experiment=vqa_3b_1gpu model.path=3b engine.mode=server \
        engine.urls=[http://node2:8000] engine.token_file=FILE

For each URL in engine.urls, the script prints one command to run on the node of that URL. Without
engine.urls, the command is for 127.0.0.1:8000. The server receives the run's weights and accepts
only requests with the token in engine.token_file (to create one: head -c 32 /dev/urandom | base64 >
FILE).
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["server-command", *sys.argv[1:]]))
