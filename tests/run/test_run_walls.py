"""Tests run directories with untrusted content: whatever a file contains, a one-line error names
the file, or the run counts as failed.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.io.jsonl import read_json
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.run.checkpoints import read_state
from megatron_rl.run.directory import ENDED, read_resume_state
from megatron_rl.run.status import read_status
from tests.run.test_directory import leave, settings_of
from tests.support import bombs
from tests.support.reader_cost import is_cheap, measure_reads

DEEP = '{"a": ' + "[" * bombs.DEEP + "]" * bombs.DEEP + "}\n"
READS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "metrics.jsonl": ("metrics.jsonl line 1", lambda folder: read_metrics(folder / "metrics.jsonl")),
    ENDED: ("ended.json: cannot be read", read_status),
    "run/state.json": ("damaged", read_state),
    "rollouts/step_00000001.jsonl": ("line 1", lambda folder: read_recorded(folder / "rollouts" / "step_00000001.jsonl")),
}
WRONG = {
    "deep": DEEP,
    "a list": "[1, 2]\n",
    "text": '"NaN"\n',
    "other keys": '{"state": {}, "step": [1], "history": 3}\n',
    "null": "null\n",
}


@pytest.mark.parametrize("file", READS)
@pytest.mark.parametrize("content", WRONG)
def test_a_file_that_holds_something_else_is_one_line(file: str, content: str, tmp_path: Path) -> None:
    said, reads = READS[file]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(WRONG[content])
    with pytest.raises(ValueError, match=said) as refused:
        reads(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 600


def test_settings_that_stand_for_more_text_than_a_memory_holds(tmp_path: Path) -> None:
    """Ten lines of YAML aliases, which YAML accepts, would make an error message of 10**9 words.
    The control expands a hundredth of them with plain YAML.
    """
    path = tmp_path / "config.yaml"
    bombs.yaml_of_aliases(path)
    _, own, control = measure_reads(("settings", path), ("settings", path), ("by yaml", path))  # the first read imports the modules
    assert is_cheap(own) and "alias" in own.error
    assert control is None or control.mb > 30
    leave(tmp_path, "steps")
    bombs.yaml_of_aliases(path)
    standing = read_resume_state(tmp_path, settings_of(tmp_path))
    assert "cannot be read" in standing.refusal and len(standing.refusal) < 400


@pytest.mark.parametrize("text", ["[" * 5000, "- 1\n", "!!python/object/apply:os.mkdir [ran]\n", "a: &x [*x]\n", "x" * 300_000])
def test_settings_that_are_none(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave(tmp_path, "steps")
    (tmp_path / "config.yaml").write_text(text)
    assert "cannot be read" in read_resume_state(tmp_path, settings_of(tmp_path)).refusal
    assert not (tmp_path / "ran").exists()


def test_a_line_without_an_end(tmp_path: Path) -> None:
    """A metrics.jsonl of 10 GiB of zeros is refused without reading it whole, which would exhaust
    the memory.
    """
    bombs.write_sparse_file(tmp_path / "metrics.jsonl", 10 << 30)
    own, control = measure_reads(("lines", tmp_path / "metrics.jsonl"), ("by bytes", tmp_path / "metrics.jsonl"))
    assert "has more than" in own.error and own.mb <= 200
    assert control is None or "MemoryError" in control.error


@pytest.mark.parametrize(("depth", "is_read"), [(60, True), (70, False)])
def test_json_is_flat(depth: int, is_read: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"a": json.loads("[" * depth + "]" * depth)}))
    if is_read:
        assert read_json(path) == json.loads(path.read_text())
    else:
        with pytest.raises(ValueError, match="nested deeper than 64"):
            read_json(path)
