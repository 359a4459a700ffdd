"""Looks at everything that a run needs before it is started, on the machine where it will run; takes what launch/train.py takes.

    python launch/doctor.py experiment=vqa_3b_1gpu 'task.data.train=[mine.jsonl]' 'task.data.eval=[held_out.jsonl]'

Prints a table, and a line for each problem: `error: key=value: remedy`. Exit code 0: a run can start; 1: it cannot.
"""

import sys

from megatron_rl.cli import cli

if __name__ == "__main__":
    sys.argv.insert(1, "doctor")
    cli()
