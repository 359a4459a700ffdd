"""Engines in a world of two processes, one engine per rank or one engine over both, compared with
an engine in a single process.
"""

import json
from pathlib import Path

import pytest

from tests.conftest import SUPPORT

SCRIPT = SUPPORT / "engine_world.py"


@pytest.fixture(scope="module")
def alone(torchrun, random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list:  # noqa: ANN001
    """Return [episode][turn] of (token ids, logprobs), decoded greedily in a single process."""
    out = tmp_path_factory.mktemp("alone") / "turns"
    torchrun(1, SCRIPT, random_model, 1, out)
    return json.loads(Path(f"{out}.0.0").read_text())


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_and_tool_delays_change_nothing(tp: int, alone: list, torchrun, random_model: Path, tmp_path: Path) -> None:  # noqa: ANN001
    """Token ids equal those of a single process and logprobs agree within 1e-5, with every rank's
    engine and with delays of tools. The script also corrupts weights sent to one rank and breaks a
    task: every rank raises an error and works again afterwards.
    """
    before = {*Path("/dev/shm").iterdir()}
    torchrun(2, SCRIPT, random_model, tp, tmp_path / "turns")
    left = {path for path in {*Path("/dev/shm").iterdir()} - before if not path.name.startswith("sem.mp-")}
    assert not left, "an engine of two ranks has left its shared memory behind"
    files = sorted(tmp_path.glob("turns.*"))
    assert len(files) == (4 if tp == 1 else 2), "two attempts of each leader"
    assert len(alone) == 12 and all(len(turns) == 3 for turns in alone)
    for file in files:
        for expected, turns in zip(alone, json.loads(file.read_text()), strict=True):
            for (token_ids, logprobs), (own_ids, own_logprobs) in zip(expected, turns, strict=True):
                assert own_ids == token_ids
                assert own_logprobs == pytest.approx(logprobs, abs=1e-5)
