"""Writes pictures of grids, nested squares and circles, with questions about what can be counted.

The kinds are those of VLMs Are Blind (arXiv:2407.06581) that a nano model learns; pictures and
questions are generated here. Each kind and each of its answers are equally frequent.

    train.jsonl           columns question, answer, image
    eval.jsonl            the same distribution, in the columns of VLMs Are Blind, for
                          task.data.benchmark=vlmblind: task, prompt, groundtruth, image
    shift_color.jsonl     other colors than in training
    shift_width.jsonl     thicker lines
    shift_size.jsonl      smaller drawings
    shift_count.jsonl     five rows or five squares; training has at most four
    images/               the pictures

The random numbers of a picture depend on --seed, the split and the index of the picture only.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.config import require
from megatron_rl_tools.commands import run_command
from megatron_rl_tools.data.geometry_scenes import KINDS, SHIFTS, TRAINED, Scene, Style

COUNT_SHIFT = "count"
"""Shift with answers that training does not have."""
SPLITS = ("train", "eval", *(f"shift_{name}" for name in (*SHIFTS, COUNT_SHIFT)))


def make_scenes(split: str, *, num: int, seed: int, kinds: Sequence[str]) -> Iterator[tuple[str, str, Scene]]:
    """Yield the kind, the answer and the scene of each picture of a split.

    Kinds take turns, and so do the answers of a kind.
    """
    shift = split.removeprefix("shift_")
    style: Style = SHIFTS.get(shift, TRAINED)
    answers = {name: KINDS[name].unseen_answers if shift == COUNT_SHIFT else KINDS[name].answers for name in kinds}
    names = [name for name in kinds if answers[name]]
    for index in range(num if names else 0):
        turn, place = divmod(index, len(names))
        name = names[place]
        answer = answers[name][turn % len(answers[name])]
        yield name, answer, KINDS[name].make_scene(answer, style, random.Random(f"{seed} {split} {index}"))


def write_split(folder: Path, split: str, *, num: int, seed: int, side: int, kinds: Sequence[str]) -> None:
    """Write the rows and pictures of one split."""
    with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
        for index, (name, answer, scene) in enumerate(make_scenes(split, num=num, seed=seed, kinds=kinds)):
            image = f"images/{split}_{index:05d}.png"
            scene.draw(side).save(folder / image)
            row = {"question": scene.question, "answer": answer, "image": image}
            if split != "train":
                shift = split.removeprefix("shift_")
                task = KINDS[name].task if shift == split else f"{KINDS[name].task}, {shift}"
                row = {"task": task, "prompt": scene.question, "groundtruth": answer, "image": image}
            file.write(json.dumps(row) + "\n")


def make_dataset(out: Path, *, num_train: int, num_eval: int, seed: int, side: int, kinds: Sequence[str]) -> None:
    """Write all splits into a new folder.

    Raises:
        ValueError: `out` exists, or an argument is invalid.
    """
    for key, value in (("--num-train", num_train), ("--num-eval", num_eval)):
        require(value >= 1, key, value, "must be at least 1")
    require(
        side >= 112 and side % 28 == 0, "--side", side, "must be a multiple of 28 and at least 112, so that lines remain distinguishable"
    )
    for name in kinds:
        require(name in KINDS, "--kinds", name, f"must be one of {', '.join(KINDS)}")
    require(bool(kinds) and len(set(kinds)) == len(kinds), "--kinds", kinds, "must name each kind at most once")
    require(not out.exists(), "--out", out, "exists; choose another folder")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "images").mkdir(parents=True)
    for split in SPLITS:
        write_split(partial, split, num=num_train if split == "train" else num_eval, seed=seed, side=side, kinds=kinds)
    partial.rename(out)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out runs/geometry/data
  %(prog)s --out data/grids --kinds grid --num-train 600 --num-eval 60 --seed 1""",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--num-train", type=int, default=3000, metavar="N", help="training pictures (default %(default)s)")
    parser.add_argument("--num-eval", type=int, default=240, metavar="N", help="pictures of each other split (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), metavar="KIND", help=f"default: {' '.join(KINDS)}")
    parser.add_argument("--side", type=int, default=112, metavar="PIXELS", help="side of a picture (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)

    def made() -> str:
        make_dataset(given.out, num_train=given.num_train, num_eval=given.num_eval, seed=given.seed, side=given.side, kinds=given.kinds)
        return f"{given.num_train} training pictures, and {len(SPLITS) - 1} splits of {given.num_eval} for evaluation, in {given.out}"

    return run_command(made, out=given.out)


if __name__ == "__main__":
    sys.exit(main())
