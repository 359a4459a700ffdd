r"""Exports the best recorded rollouts of a run as transcripts for SFT (rejection sampling).

    python launch/export.py runs/agent --out runs/best --min-reward 1
    python launch/train.py experiment=numberline_sft_cpu sft.splits=[transcripts] sft.steps=[60] \
        'task.data.demonstrations=[runs/best/transcripts.jsonl]'

The argument is the directory of a run with rollouts.save=all.
"""

import sys

from megatron_rl.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
