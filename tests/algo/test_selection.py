"""Which rollouts are trained on, against hand-made steps; turn-level credit against hand numbers."""

import math

import pytest

from megatron_rl.algo.advantages import credit, turn_credit
from megatron_rl.algo.selection import select
from megatron_rl.config import DROPS, ENDS
from megatron_rl.types import Context, End, Image, Rollout, Status, Turn


def rollout(
    group: int, reward: float | None, *, end: End = End.DONE, scores: tuple[float, ...] = (0.0,), outcome: float = 0.0, image: bool = True
) -> Rollout:
    context = Context(images=[Image(None, None, (1, 2, 2), "a")] if image else [])
    turns = [Turn(context=0, span=(i, i + 1), text="", score=score) for i, score in enumerate(scores)]
    status = Status.FAILED if reward is None else Status.COMPLETED
    return Rollout(
        task="t", example_id="e", group=group, sample=0, weight_version=0, status=status, end=end,
        reward=reward, outcome=outcome, turns=turns, contexts=[context],
    )  # fmt: skip


STEP = [
    rollout(0, 1.0), rollout(0, 0.0, end=End.MAX_TURNS),  # deviation 1/2
    rollout(1, 1.0), rollout(1, 1.0, end=End.MAX_TOKENS),  # 0
    rollout(2, 3.0), rollout(2, 0.0, image=False),  # 3/2
    rollout(3, 0.5), rollout(3, 0.0), rollout(3, None, end=End.FAULT),  # 1/4
]  # fmt: skip


def chosen(drop: list[str], *, keep_ends: tuple[str, ...] = ("done",), num_groups: int = 9, rank: bool = False) -> tuple[list[int], dict]:
    advantages = credit(STEP, normalize_std=False, std_eps=0.0)
    assert advantages == [0.5, -0.5, 0.0, 0.0, 1.5, -1.5, 0.25, -0.25, None]
    selection = select(STEP, advantages, drop=drop, keep_ends=keep_ends, num_groups=num_groups, rank_by_std=rank)
    kept = [index for index, keep in enumerate(selection.keep) if keep]
    assert selection.num_groups == len({STEP[index].group for index in kept})
    assert sum(selection.dropped.values()) + len(kept) == 8, "all that was credited is kept or counted"
    return kept, dict(selection.dropped)


def test_what_is_dropped_is_counted_under_the_first_reason() -> None:
    assert chosen([]) == ([0, 1, 2, 3, 4, 5, 6, 7], {})
    assert chosen(["zero_std"]) == ([0, 1, 4, 5, 6, 7], {"zero_std": 2})
    assert chosen(["end"]) == ([0, 2, 4, 5, 6, 7], {"end": 2})
    assert chosen(["end"], keep_ends=("done", "max_turns", "max_tokens")) == ([0, 1, 2, 3, 4, 5, 6, 7], {})
    assert chosen(["end", "no_image", "zero_std"]) == ([0, 4, 6, 7], {"zero_std": 2, "end": 1, "no_image": 1})


def test_surplus_groups_are_used_or_ranked_by_deviation() -> None:
    assert chosen([], num_groups=2) == ([0, 1, 2, 3, 4, 5, 6, 7], {})
    assert chosen([], num_groups=2, rank=True) == ([0, 1, 4, 5], {"surplus": 4})
    assert chosen(["end", "no_image"], num_groups=1, rank=True) == ([4], {"end": 2, "no_image": 1, "surplus": 4})
    assert chosen(["zero_std"], num_groups=3, rank=True) == ([0, 1, 4, 5, 6, 7], {"zero_std": 2})


def test_the_settings_name_every_end_and_reason() -> None:
    assert set(ENDS) == {str(end) for end in End} - {"fault"}
    assert select([], [], drop=DROPS, keep_ends=ENDS, num_groups=1, rank_by_std=True).num_groups == 0


def credits(rollouts: list[Rollout], scheme: str, *, discount: float = 1.0, normalize: bool = False) -> list[list[float] | None]:
    advantages = credit(rollouts, normalize_std=normalize, std_eps=0.0)
    every = [True] * len(rollouts)
    return turn_credit(rollouts, advantages, keep=every, scheme=scheme, discount=discount, normalize_std=normalize, std_eps=0.0)


GROUP = [
    rollout(5, 1.5, scores=(0.5, 0.0, 0.0), outcome=1.0),
    rollout(5, 0.5, scores=(0.5,), outcome=0.0),
    rollout(5, 1.0, scores=(-0.1, 0.1), outcome=1.0),
    rollout(5, None, scores=(9.0, 9.0)),
]


def test_broadcast_gives_every_turn_the_episodes_advantage() -> None:
    assert credits(GROUP, "broadcast") == [[0.5] * 3, [-0.5], [0.0] * 2, None]


def test_turn_group_adds_the_turns_own_advantage_to_the_outcomes() -> None:
    # outcomes 1 0 1, mean 2/3. First turns 0.5 0.5 -0.1, mean 0.3. Second turns 0 and 0.1, mean 0.05. A third turn is alone: 0.
    first, second, third, failed = credits(GROUP, "turn_group")
    assert first == pytest.approx([1 / 3 + 0.2, 1 / 3 - 0.05, 1 / 3])
    assert second == pytest.approx([-2 / 3 + 0.2])
    assert third == pytest.approx([1 / 3 - 0.4, 1 / 3 + 0.05])
    assert failed is None


def test_return_to_go_compares_what_is_still_earned() -> None:
    # at discount 1/2: first: 1 + (0.5, 0, 0) = 1.5 1 1; second: 0.5; third: 1 + (-0.1 + 0.05, 0.1) = 0.95 1.1
    first, second, third, failed = credits(GROUP, "return_to_go", discount=0.5)
    mean = (1.5 + 0.5 + 0.95) / 3
    assert first == pytest.approx([1.5 - mean, 1 - 1.05, 0.0])
    assert second == pytest.approx([0.5 - mean])
    assert third == pytest.approx([0.95 - mean, 1.1 - 1.05])
    assert failed is None


def test_turns_are_normalized_by_their_own_deviation() -> None:
    # second turns 1 and 1.1 at discount 1/2: two values are +- 1/sqrt(2) deviations from their mean
    _, _, third, _ = credits(GROUP, "return_to_go", discount=0.5, normalize=True)
    assert third[1] == pytest.approx(math.sqrt(0.5))


@pytest.mark.parametrize("scheme", ["broadcast", "turn_group", "return_to_go"])
def test_what_is_left_out_still_counts_in_its_groups_means(scheme: str) -> None:
    """Two right, two wrong that ran out of turns and are dropped: by hand (1 - 1/2) for the right ones, as if nothing were dropped."""
    right, wrong = rollout(0, 1.0, scores=(0.0,), outcome=1.0), rollout(0, 0.0, scores=(0.0,), outcome=0.0, end=End.MAX_TURNS)
    group = [right, wrong, wrong, right]
    advantages = credit(group, normalize_std=False, std_eps=0.0)
    keep = select(group, advantages, drop=["zero_std", "end"], keep_ends=["done"], num_groups=1, rank_by_std=False).keep
    credited = turn_credit(group, advantages, keep=keep, scheme=scheme, discount=1.0, normalize_std=False, std_eps=0.0)
    assert credited == [[0.5], None, None, [0.5]]
