"""Copies the small files of a run, with the rollouts of some steps, for the documentation site.

.venv/bin/python benchmarks/thin_run.py runs/colors_rl benchmarks/recorded_runs/vqa_grpo_cpu --every 10
"""

import argparse
import shutil
from pathlib import Path

from megatron_rl.observe.recorder import ROLLOUTS_FOLDER, image_file_name
from megatron_rl.observe.rollout_store import image_keys_of_step, list_step_files, step_number

FILES = ("config.yaml", "metrics.jsonl", "eval.json", "final/tokenizer.json")


def thin_run(run: Path, out: Path, *, every: int) -> None:
    """Copy the files of a run to a new folder, with every `every`-th step and its images."""
    (out / ROLLOUTS_FOLDER / "images").mkdir(parents=True)
    for name in FILES:
        shutil.copy(run / name, out / Path(name).name)
    for path in list_step_files(run / ROLLOUTS_FOLDER):
        if step_number(path) % every == 0:
            shutil.copy(path, out / ROLLOUTS_FOLDER)
            for key in image_keys_of_step(path):
                shutil.copy(run / ROLLOUTS_FOLDER / image_file_name(key), out / ROLLOUTS_FOLDER / image_file_name(key))


def main() -> None:
    """Copy a run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path, help="folder that does not exist yet")
    parser.add_argument("--every", type=int, default=10, help="number of steps from one copied step to the next (default 10)")
    given = parser.parse_args()
    thin_run(given.run, given.out, every=given.every)


if __name__ == "__main__":
    main()
