"""Tests runs that start two servers themselves and lose one of them at seeded moments: no step is
lost, and the training results do not change.
"""

import itertools
import json
import signal
from pathlib import Path

import pytest

from megatron_rl.io.jsonl import read_lines
from tests.conftest import SUPPORT
from tests.remote.test_remote_run import RUN, assert_alike, steps_of
from tests.support.engine_kills_run import METHODS, PHASES, draw_kills

SCRIPT = SUPPORT / "engine_kills_run.py"
SEED, LONG_SEED, STALE_SEED = 165, 1, 351
"""The first kill of SEED happens in a transfer, and the second is an exit with code 0 during
generation.
"""


def kills_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "kills.jsonl").read_text().splitlines()]


def test_moments_are_of_all_kinds() -> None:
    """The moments include all pairs of phase and method and both servers, and depend only on the
    seed.
    """
    chosen = draw_kills(LONG_SEED, 20)
    assert {(kill.phase, kill.method) for kill in chosen} == set(itertools.product(PHASES, METHODS))
    assert {kill.server for kill in chosen} == {0, 1} and chosen == draw_kills(LONG_SEED, 20) != draw_kills(LONG_SEED + 1, 20)


@pytest.mark.known_failure("dead-engines")
@pytest.mark.timeout(900)
def test_a_killed_engine_changes_nothing(colocated: Path, random_model: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """A run of three steps loses a server twice. The server of the first loss has been restarted
    and has received the current weights before the second loss. Oracle: a colocated run.
    """
    folder = tmp_path / "run"
    said = torchrun(1, SCRIPT, random_model, folder, SEED, 2, timeout_s=880)
    kills = kills_of(folder)
    assert [kill["version"] for kill in kills] == [1, 2] and kills[0]["down_s"] > 0, kills
    assert [(kill["phase"], kill["method"]) for kill in kills] == [("transfer", "killed"), ("generation", "ended")]
    assert f": exited with code {128 + signal.SIGKILL}; restarting in 0 s; " in said, said[-6000:]
    assert said.count("\nengine http://127.0.0.1:") >= 2, "each is told; the run may end before the second server has shut down"
    assert_alike(folder, colocated)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_killed_engine_loses_nothing_that_goes_on(random_model: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """With run.max_staleness=1 and episodes in progress across steps, no episode fails. Every
    prompt is trained on once, each reward counts once, and every token has the logprob of its
    weight version.
    """
    words = ("run.max_staleness=1", "run.steps=5")
    torchrun(1, RUN, random_model, tmp_path / "whole", *words, timeout_s=800)
    said = torchrun(1, SCRIPT, random_model, tmp_path / "run", STALE_SEED, 2, *words, timeout_s=900)
    kills = kills_of(tmp_path / "run")
    print("\n".join(map(json.dumps, kills)))
    assert [(kill["phase"], kill["method"]) for kill in kills] == [("generation", "killed"), ("generation", "core killed")], kills
    assert kills[0]["down_s"] > 0 and said.count("restarting in ") >= 1, said[-6000:]
    steps = steps_of(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(5)) and max(
        step["rollout_mismatch/logprob_abs_diff_max"] for step in steps
    ) <= 1e-4
    assert not any(step["rollout/failed"] or step["rollout/filtered_stale"] for step in steps)
    assert max(step["rollout/staleness_max"] for step in steps) == 1
    lines = [read_lines(folder / "prompts.jsonl") for folder in (tmp_path / "run", tmp_path / "whole")]
    seen = [{line["id"]: line["episodes"] for line in each} for each in lines]
    assert seen[0] == seen[1] and sum(seen[0].values()) == 5 * 3 * 4


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_twenty_killed_engines_change_nothing(random_model: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Servers are killed, stopped, and exit with code 0, during generation, pause and transfer.
    Each server is back before the next loss. Oracle: a colocated run.
    """
    words = ("run.steps=22", "engine.health_timeout_s=5")
    torchrun(1, RUN, random_model, tmp_path / "colocated", *words, timeout_s=1200)
    said = torchrun(1, SCRIPT, random_model, tmp_path / "run", LONG_SEED, 20, *words, timeout_s=5000)
    kills = kills_of(tmp_path / "run")
    print(said)
    print("\n".join(map(json.dumps, kills)))
    assert len(kills) == 20 and all(kill["down_s"] > 0 for kill in kills[:-1]), kills
    assert said.count("restarting in ") >= 20
    assert_alike(tmp_path / "run", tmp_path / "colocated", num_steps=22)
