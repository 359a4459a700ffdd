"""The easy-VQA data set as training files. Oracles: the package itself, read directly, and colors
measured in its images. Skipped without a package index.
"""

import asyncio
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config import DataSettings, TaskSettings
from megatron_rl.data.questions import load_questions
from megatron_rl.tasks.vqa import VqaTask
from megatron_rl.types import Turn
from megatron_rl_tools.data import make_easy_vqa as tool
from megatron_rl_tools.data.make_easy_vqa import main, read_rows
from tests.support.rollout_factory import make_reward_input


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        content = tool.download_package()
    except ValueError as error:
        pytest.skip(f"easy-vqa was not fetched, so its builder was NOT tested: {error}")
    path = tmp_path_factory.mktemp("wheel") / "easy_vqa.whl"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def everything(wheel: Path) -> dict[str, list[dict]]:
    return {split: list(read_rows(wheel.read_bytes(), split, num=None, seed=0)) for split in ("train", "eval")}


@pytest.fixture(scope="module")
def built(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build 300 training and 100 evaluation questions, as Parquet and as JSON lines."""
    out = tmp_path_factory.mktemp("built") / "deep" / "out"
    for form in ("parquet", "jsonl"):
        assert main(["--out", str(out), "--wheel", str(wheel), "--num", "300", "--num-eval", "100", "--format", form]) == 0
    return out


def test_all_of_it_is_the_package(wheel: Path, everything: dict[str, list[dict]]) -> None:
    with zipfile.ZipFile(wheel) as package:
        for split, name, count in (("train", "train", 38_575), ("eval", "test", 9_673)):
            listed = json.loads(package.read(f"easy_vqa/data/{name}/questions.json"))
            rows = everything[split]
            assert len(rows) == len(listed) == count
            assert sorted(row["extra_info"]["index"] for row in rows) == list(range(count))
            for row in rows[:200]:
                question, answer, image = listed[row["extra_info"]["index"]]
                assert (row["extra_info"]["question"], row["reward_model"]["ground_truth"]) == (question, answer)
                assert row["images"][0]["bytes"] == package.read(f"easy_vqa/data/{name}/images/{image}.png")


def test_both_formats_hold_the_same_questions(built: Path) -> None:
    for split, count in (("train", 300), ("eval", 100)):
        read = [load_questions([str(built / f"{split}.{form}")], images_root="", name=split) for form in ("parquet", "jsonl")]
        assert len(read[0]) == len(read[1]) == count
        for one, other in zip(*read, strict=True):
            pictures = [example.payload["images"][0].open() for example in (one, other)]
            assert np.array_equal(*map(np.asarray, pictures)) and pictures[0].size == (64, 64)
            assert {key: one.payload[key] for key in one.payload if key != "images"} == {
                key: other.payload[key] for key in other.payload if key != "images"
            }


def test_the_picture_shows_what_the_answer_says(built: Path) -> None:
    """For questions about colors, the answer names the channel that dominates in the pixel that
    differs most from the background.
    """
    shown: dict[str, set[tuple[int, ...]]] = {}
    for example in load_questions([str(built / "train.parquet")], images_root="", name="train"):
        answer = example.payload["answer"]
        if answer in ("red", "blue", "green"):
            pixels = np.asarray(example.payload["images"][0].open()).reshape(-1, 3).astype(int)
            shape = pixels[np.abs(pixels - np.median(pixels, axis=0)).sum(axis=1).argmax()]
            shown.setdefault(answer, set()).add(int(shape.argmax()))
    assert shown == {"red": {0}, "green": {1}, "blue": {2}}


def test_gold_answers_earn_full_marks(built: Path) -> None:
    paths = {split: [str(built / f"{split}.parquet")] for split in ("train", "eval")}
    task = VqaTask(TaskSettings(name="vqa", data=DataSettings(**paths)))

    async def scores() -> list[float]:
        return [
            (await task.rubric.score(make_reward_input(Turn(0, (0, 1), *task.gold_replies(example)), payload=example.payload))).reward
            for example in task.examples("eval")
        ]

    assert asyncio.run(scores()) == [1.0] * 100


def test_splits_share_no_picture_and_seeds_differ(wheel: Path, everything: dict[str, list[dict]]) -> None:
    content, train, held_out = wheel.read_bytes(), everything["train"], everything["eval"]
    assert not {row["images"][0]["bytes"] for row in train} & {row["images"][0]["bytes"] for row in held_out}
    assert list(read_rows(content, "train", num=50, seed=0)) == train[:50] != list(read_rows(content, "train", num=50, seed=1))


def test_the_same_arguments_write_the_same_bytes(wheel: Path, built: Path, tmp_path: Path) -> None:
    assert main(["--out", str(tmp_path), "--wheel", str(wheel), "--num", "300", "--num-eval", "100"]) == 0
    assert all((tmp_path / name).read_bytes() == (built / name).read_bytes() for name in ("train.parquet", "eval.parquet"))


def test_another_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forged = io.BytesIO()
    with zipfile.ZipFile(forged, "w") as package:
        package.writestr("easy_vqa/data/train/questions.json", "[]")
    (tmp_path / "forged.whl").write_bytes(forged.getvalue())
    assert main(["--out", str(tmp_path / "out"), "--wheel", str(tmp_path / "forged.whl")]) == 1
    assert "not the expected package" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_there_stays(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "eval.parquet").write_text("mine")
    assert main(["--out", str(tmp_path), "--wheel", str(wheel)]) == 1
    assert capsys.readouterr().err == f"error: --out={tmp_path}: already contains eval.parquet; choose another folder\n"
    assert (tmp_path / "eval.parquet").read_text() == "mine" and not (tmp_path / "train.parquet").exists()


def test_without_an_index_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "easy-vqa==1.0: download failed (ERROR: No matching distribution" in capsys.readouterr().err
