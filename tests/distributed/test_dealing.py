"""Two ranks with one engine each share 10 groups: each engine starts with 3, and the remaining 4 go
to the engine that has capacity first.
"""

import json
from pathlib import Path

import pytest

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, make_rollout_manager, strip_timings


@pytest.fixture(scope="module")
def alone(random_model: Path) -> str:
    """Return the rollouts that a single engine generates for all groups, as text."""
    return repr(
        strip_timings(
            make_rollout_manager(Renderer(ModelSettings(path=str(random_model)))).run_examples(EXAMPLES, num_samples=2, settings=EPISODE)
        )
    )


def played(random_model: Path, tmp_path: Path, case: str) -> list[dict]:
    done = fork_server.run_world(2, SUPPORT / "load_balancer_world.py", random_model, tmp_path / "out", case, timeout_s=120)
    assert done.returncode == 0 and "ended" not in done.stdout, done.stdout
    return [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(2)]


def test_the_faster_rank_plays_more(random_model: Path, tmp_path: Path, alone: str) -> None:
    """Each group is generated once and completely by one rank, and the faster rank generates more
    groups. Both ranks then have the rollouts that a single engine generates.
    """
    ranks = played(random_model, tmp_path, "slow")
    assert [rank["said"] for rank in ranks] == [alone] * 2
    for slow, fast in zip(*(rank["played"] for rank in ranks), strict=True):
        assert sorted(slow + fast) == [group for group in range(10) for _ in range(2)] and not set(slow) & set(fast)
        assert {0, 2, 4} <= set(slow) and len(set(slow)) < 5 < len(set(fast)), (slow, fast)


def test_what_was_down_is_played_again(random_model: Path, tmp_path: Path, alone: str) -> None:
    """Groups that failed on a rank, whether assigned to it at the start or taken from the remaining
    ones, are discarded and generated again by the rank that they are assigned to next.
    """
    ranks = played(random_model, tmp_path, "down")
    assert [rank["said"] for rank in ranks] == [alone] * 2
    assert [len(rank["played"]) for rank in ranks] == [3, 3] or [len(rank["played"]) for rank in ranks] == [4, 4]
    first, again = ([set(rank["played"][number]) for rank in ranks] for number in (0, 1))
    assert {0, 2, 4} <= first[0] and len(first[0]) <= 5, "no more than its even share"
    assert again[0] | again[1] == first[0]


def test_no_rank_waits_for_one_that_failed(random_model: Path, tmp_path: Path) -> None:
    """The failing rank raises its episode's error. The other rank generates the remaining groups
    and then finds its peer missing.
    """
    done = fork_server.run_world(2, SUPPORT / "load_balancer_world.py", random_model, tmp_path / "out", "fails", timeout_s=120)
    ends = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert len(ends) == 2 and sum("KeyError('a mistake')" in line for line in ends) == 1, done.stdout
    assert not list(tmp_path.glob("out.*"))
