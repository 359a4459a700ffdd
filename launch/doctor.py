r"""Checks everything a run needs before the run starts; takes the arguments of launch/train.py.

    python launch/doctor.py experiment=vqa_3b_1gpu \
        'task.data.train=[mine.jsonl]' 'task.data.eval=[held_out.jsonl]'

Run this command on the machine that will start the run. The command prints a table of results and
one line per problem, in the form "error: key=value: remedy". Exit code 0: the run can start; 1: the
run cannot start.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["doctor", *sys.argv[1:]]))
