"""Evaluate two models on the same examples and compare them.

    python examples/evaluate_and_compare.py
    python examples/evaluate_and_compare.py runs/quickstart/sft/final runs/examples/own_reward/final

Without arguments, the models are those of the quickstart before and after GRPO. Each evaluation
runs every example `--samples` times. The comparison pairs the evaluations by example and prints the
difference with a 95% interval and a p-value. The commands launch/evaluate.py and launch/compare.py
do the same.
"""

import argparse
import sys
from pathlib import Path

from megatron_rl.cli import cli
from megatron_rl.cli.compare import main as compare

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("models", nargs="*", default=["runs/quickstart/sft/final", "runs/quickstart/grpo/final"], metavar="MODEL")
parser.add_argument("--samples", type=int, default=4, help="episodes per example, sampled at temperature 1")
parser.add_argument("--turns", type=int, default=10, help="maximum number of turns of an episode")
parser.add_argument("--out", type=Path, default=Path("runs/examples/evaluations"), help="folder of the evaluations")


def evaluate(model: str, folder: Path, *, samples: int, turns: int) -> None:
    """Evaluate a model on NumberLine and write the results to the folder."""
    sizes = ["model.min_pixels=19600", "model.max_pixels=20000", f"task.max_turns={turns}"]
    sampling = [f"evaluation.samples={samples}", f"evaluation.temperature={1 if samples > 1 else 0}"]
    sys.argv[1:] = ["evaluate", "task=number_line", f"model.path={model}", f"run.dir={folder}", *sizes, *sampling]
    cli()


if __name__ == "__main__":
    options = parser.parse_args()
    for model in options.models:
        if not Path(model).exists():
            sys.exit(f"error: {model}: no such folder; bash launch/quickstart.sh creates the default models")
    folders = [options.out / model.strip("/").replace("/", "_") for model in options.models]
    for model, folder in zip(options.models, folders, strict=True):
        evaluate(model, folder, samples=options.samples, turns=options.turns)
    sys.exit(compare([str(folder) for folder in folders]))
