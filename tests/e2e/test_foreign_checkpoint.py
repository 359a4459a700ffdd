"""Resuming a run directory from an untrusted source ends with one error line.

No code from its checkpoint is executed.
"""

import shutil
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.malicious_checkpoints import EXPLOITS, update_record

TRAIN = ROOT / "launch" / "train.py"
SFT = (
    "task=number_line",
    "stage=sft", "sft.splits=[correct]", "sft.steps=[2]", "sft.batch_size=4", "sft.num_demonstrations=8", "checkpoint.every=1",
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.max_new_tokens=4",
    "task.eval_samples=0",
)  # fmt: skip
STATES = {
    "state nested deeply": '{"step": ' + "[" * 100_000,
    "state of other fields": '{"step": 2, "__reduce__": ["os.mkdir"], "history": {}, "files": {}}',
}


@pytest.fixture(scope="module")
def begun(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of its second step but without its final model."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    result = fork_server.run_world(1, TRAIN, *SFT, f"model.path={random_model}", f"run.dir={folder}", timeout_s=280)
    assert result.returncode == 0, result.stdout[-3000:]
    shutil.rmtree(folder / "final")
    return folder


@pytest.mark.parametrize(
    "where",
    ["metadata", *(pytest.param(each, marks=pytest.mark.long) for each in [*sorted(EXPLOITS.keys() - {"metadata"}), *STATES])],
)
def test_it_is_one_line(where: str, begun: Path, random_model: Path, tmp_path: Path) -> None:
    """The error is one line of fewer than 900 characters that names the checkpoint, without a
    traceback.

    Regression test for security.md, section 4: both ranks of such a run executed code that was
    placed before the metadata.
    """
    run, mark = tmp_path / "run", tmp_path / "ran"
    shutil.copytree(begun, run)
    checkpoint = run / "checkpoints" / "step_00000002"
    if where in STATES:
        (checkpoint / "run" / "state.json").write_text(STATES[where])
    else:
        EXPLOITS[where](checkpoint, mark)
        update_record(checkpoint)
    result = fork_server.run_world(1, TRAIN, *SFT, f"model.path={random_model}", f"run.dir={run}", timeout_s=280)
    assert result.returncode == 1 and "Traceback" not in result.stdout and not mark.exists(), result.stdout[-3000:]
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert str(checkpoint) in said and len(said) < 900
