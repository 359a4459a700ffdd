r"""Evaluates a checkpoint on a task's examples; takes the arguments of launch/train.py.

    python launch/evaluate.py task=number_line model.path=runs/quickstart/grpo/final \
        run.dir=runs/evaluations/quickstart
    python launch/evaluate.py task=number_line model.path=3b run.dir=runs/evaluations/3b \
        evaluation.samples=8 evaluation.temperature=1
    python launch/evaluate.py task=number_line model.path=NAME run.dir=runs/evaluations/far \
        evaluation.urls=[http://127.0.0.1:8000/v1]
    python launch/evaluate.py --help evaluation  # help for these settings

Writes evaluation.json (scores and their conditions), examples.jsonl (one line per example) and all
episodes to run.dir. If an evaluation is stopped or killed, the same command resumes it. To compare
evaluations, use launch/compare.py.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
