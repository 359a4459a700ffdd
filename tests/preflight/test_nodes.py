"""Differences between nodes are refused, based on the report of each node's first process."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.config import DataSettings, EngineSettings, JudgeSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.preflight.nodes import NodeReport, describe_path, require_same_nodes

FILES = {"model.path": {"m/config.json": "d1", "m/model.safetensors": 100}, "task.data.train": {"a.jsonl": 5}}
FIRST = NodeReport(host="a", node=0, num_processes=8, file_fingerprints=FILES)
SECOND = NodeReport(host="b", node=1, num_processes=8, file_fingerprints=FILES)


def settings_of(**engine: int) -> Settings:
    judge = JudgeSettings(urls=["http://j/v1"], cache="c.sqlite")
    task = TaskSettings(name="vqa", judge=judge, data=DataSettings(train=["a.jsonl"]))
    return Settings(model=ModelSettings(path="m"), run=RunSettings(dir="runs/x"), task=task, engine=EngineSettings(**engine))


def other(key: str, **files: object) -> NodeReport:
    return replace(SECOND, file_fingerprints={**FILES, key: files})


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (
            replace(SECOND, run_dir_error="does not see a file that rank 0 wrote there"),
            "run.dir=runs/x: node 1 (b) does not see a file that rank 0 wrote there; put it in a folder that all nodes share",
        ),
        (
            replace(SECOND, num_processes=6),
            "engine.tp=4: must divide the number of processes on each node, but node 1 (b) has 6; use one of 1, 2",
        ),
        (
            other("model.path", **{"m/config.json": "d2", "m/model.safetensors": 100}),
            "model.path=m: node 1 (b) does not have the same m/config.json as node 0 (a); copy it, or put it in a folder",
        ),
        (
            other("model.path", **{"m/config.json": "d1", "m/model.safetensors": 99}),
            "model.path=m: node 1 (b) does not have the same m/model.safetensors as node 0 (a)",
        ),
        (other("model.path", **FILES["model.path"], more=1), "model.path=m: node 1 (b) does not have the same more as node 0 (a)"),
        (other("task.data.train"), "task.data.train=a.jsonl: node 1 (b) does not have the same a.jsonl as node 0 (a)"),
        (replace(SECOND, sees_judge_cache=True), "task.judge.cache=c.sqlite: is shared by node 0 (a) and node 1 (b), but SQLite"),
    ],
)  # fmt: skip
def test_what_differs_is_named(second: NodeReport, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        require_same_nodes(settings_of(tp=4), [FIRST, second])


def test_nodes_that_are_alike_may_begin() -> None:
    require_same_nodes(settings_of(tp=4), [FIRST, SECOND])
    require_same_nodes(settings_of(tp=4), [FIRST, replace(SECOND, host="a", sees_judge_cache=True)])


def test_a_file_is_told_by_its_size_and_a_shape_by_its_digest(tmp_path: Path) -> None:
    """config.json files of equal length with different contents differ, and so do weight files of
    different lengths. A single file is described by its size. A name without a file has no
    description.
    """
    folders = [tmp_path / name for name in "ab"]
    for folder, text, length in zip(folders, ("1 2", "2 1"), (3, 4), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(text)
        (folder / "model.safetensors").write_bytes(b"x" * length)
    one, two = ({Path(name).name: value for name, value in describe_path(folder).items()} for folder in folders)
    assert one.keys() == two.keys() == {"config.json", "model.safetensors"} and all(one[name] != two[name] for name in one)
    assert list(describe_path(folders[0] / "config.json").values()) == [3] and describe_path(Path("hub/name")) == {}
