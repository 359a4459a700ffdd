"""Every mistake of mistakes.py ends in its one line and exit code 1, and leaves nothing behind."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.mistakes import MISTAKES
from tests.conftest import SUPPORT
from tests.support import forked

YAMLS = {
    "misspelt": "algo:\n  groop_size: 4\n",
    "wrong": "optim: {lr: fast}\n",
    "broken": "optim:\n  lr: [1\n b: 3\n",
}
QUESTION = '{"question": "How many?", "answer": "4", "images": []}\n'


@pytest.fixture(scope="module")
def broken(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder {tmp} of the table."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("no_tokenizer", "half", "bad_header", "other_model"):
        shutil.copytree(random_model, folder / name)
    (folder / "no_tokenizer" / "tokenizer.json").unlink()
    weights = folder / "half" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with (folder / "bad_header" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 16)
    config = folder / "other_model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "internvl"}))
    (folder / "configs" / "experiment").mkdir(parents=True)
    for name, text in YAMLS.items():
        (folder / "configs" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
    (folder / "good.jsonl").write_text(QUESTION)
    (folder / "half.jsonl").write_text(QUESTION + QUESTION[:20])
    (folder / "table.csv").write_text("question,answer\nHow many?,4\n")
    (folder / "file").touch()
    return folder


@pytest.fixture(scope="module")
def ends(random_model: Path, broken: Path) -> dict[str, tuple[int, str]]:
    """{what was typed: (exit code, standard error)}, all from one process, whose own folder configs/ has the broken files."""
    given = [f"model.path={random_model}", f"run.dir={broken}/run"]
    lines = [[*given, *mistake.replace("{tmp}", str(broken)).split(" ")] for mistake in MISTAKES]
    (broken / "lines.json").write_text(json.dumps(lines))
    shutil.copy(SUPPORT / "mistakes_made.py", broken / "mine.py")
    nobody = {"HOME": str(broken), "NETRC": str(broken / "netrc"), "WANDB_API_KEY": ""}
    process = forked.Process(broken / "mine.py", broken / "lines.json", cwd=broken, environment=nobody)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, output
    said = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return dict(zip(MISTAKES, said, strict=True))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, ends: dict[str, tuple[int, str]], random_model: Path, broken: Path) -> None:
    code, said = ends[mistake]
    expected = MISTAKES[mistake].replace("{tmp}", str(broken)).replace("{model}", str(random_model))
    pattern = ".*".join(map(re.escape, expected.split("...")))
    assert re.fullmatch(f"error: {pattern}\n", said), said
    assert code == 1


def test_nothing_is_left_behind(ends: dict[str, tuple[int, str]], broken: Path) -> None:
    assert len(ends) >= 40
    assert not (broken / "run").exists()
