"""Creates rollouts for tests of advantages and filtering, with real sequences, meaningless tokens
and given scores.
"""

from collections.abc import Mapping, Sequence

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.config import AlgoSettings
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.types import Image, Rollout, Status, StopReason, TokenSequence, Turn

IMAGE = Image(None, None, (1, 2, 2), "a", merge=2)


def make_rollout(
    group: int, reward: float | None = None, *,
    outcome_reward: float | None = None, step_scores: Sequence[float | None] | None = None, reward_deltas: Sequence[float] | None = None,
    lengths: Sequence[int] = (1,), turn_sequences: Sequence[int] | None = None, stop_reason: StopReason = StopReason.DONE,
    has_image: bool = False,
) -> Rollout:  # fmt: skip
    """Create a rollout with a turn for each of `reward_deltas` (or `step_scores`, or `lengths`).
    Turn k samples lengths[k] tokens in sequence turn_sequences[k].

    Without reward deltas, a turn's delta is its score, or 0 if it has none. Without a reward, it is
    the sum of the outcome reward and the deltas. Without an outcome reward, it is the reward minus
    the deltas. Without both, the rollout has failed. Every turn has an observed token before and
    after it.
    """
    num_turns = len(next(given for given in (reward_deltas, step_scores, lengths) if given is not None))
    lengths = list(lengths) + [1] * (num_turns - len(lengths))
    turn_sequences = [0] * num_turns if turn_sequences is None else turn_sequences
    step_scores = [None] * num_turns if step_scores is None else step_scores
    reward_deltas = [score or 0.0 for score in step_scores] if reward_deltas is None else reward_deltas
    if reward is None and outcome_reward is not None:
        reward = outcome_reward + sum(reward_deltas)
    if reward is not None and outcome_reward is None:
        outcome_reward = reward - sum(reward_deltas)
    made = Rollout(
        task="t", example_id=f"e{group}", group=group, sample_index=0, reward=reward, outcome_reward=outcome_reward or 0.0,
        stop_reason=stop_reason,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        sequences=[TokenSequence(images=[IMAGE] if has_image else []) for _ in range(max(turn_sequences, default=0) + 1)],
    )  # fmt: skip
    for number, (place, length, score, gain) in enumerate(zip(turn_sequences, lengths, step_scores, reward_deltas, strict=True)):
        context = made.sequences[place]
        context.extend([1])
        start = len(context.token_ids)
        context.extend([2] * length, logprobs=[-1.0] * length)
        made.turns.append(
            Turn(sequence=place, token_span=(start, start + length), text=f"turn {number}", step_score=score, reward_delta=gain)
        )
        context.extend([3])
    return made


def set_states(rollout: Rollout, *states: str) -> Rollout:
    """Set the states of the first turns and return the rollout."""
    for turn, state in zip(rollout.turns, states, strict=False):
        turn.state = state
    return rollout


def make_reward_input(
    *turns: Turn, payload: Mapping[str, object] | None = None, stop_reason: StopReason = StopReason.DONE, images: Sequence[Image] = ()
) -> RewardInput:
    """Return the input of a rubric for a rollout with these turns."""
    rollout = Rollout(task="t", example_id="e0", group=0, sample_index=0, turns=list(turns), stop_reason=stop_reason)
    return RewardInput(payload=payload or {}, rollout=rollout, prompt_images=list(images))


def set_kl_logprobs(rollout: Rollout, *per_token: float) -> Rollout:
    """Set old and reference logprobs that differ by these numbers, in the order of the sampled
    tokens of all sequences.
    """
    numbers = iter(per_token)
    for context in rollout.sequences:
        column = [next(numbers) if sampled else 7.0 for sampled in context.loss_mask]
        context.set_column("old_logprobs", [number - 3.0 for number in column])
        context.set_column("reference_logprobs", [-3.0] * len(column))
    assert next(numbers, None) is None, "more numbers than sampled tokens"
    return rollout


def collect_token_advantages(rollout: Rollout) -> list[float]:
    """Return the advantages of the sampled tokens in order.

    All other tokens must have an advantage of exactly 0.
    """
    pairs = [pair for context in rollout.sequences for pair in zip(context.advantages, context.loss_mask, strict=True)]
    assert all(value == 0.0 for value, sampled in pairs if not sampled)
    return [value for value, sampled in pairs if sampled]


def collect_turn_advantages(rollout: Rollout) -> list[float] | None:
    """Return one advantage per turn, which all tokens of a turn must share, or None if no
    advantages were set.
    """
    if not any(context.advantages for context in rollout.sequences):
        return None
    assert len(collect_token_advantages(rollout)) == sum(stop - start for start, stop in (turn.token_span for turn in rollout.turns))
    values = []
    for turn in rollout.turns:
        (value,) = set(rollout.sequences[turn.sequence].advantages[slice(*turn.token_span)])
        values.append(value)
    return values


def compute_turn_advantages(
    rollouts: Sequence[Rollout], turn_credit: str, *, norm_adv_by_std: bool = False, **given: float | bool
) -> list[list[float] | None]:
    """Return the advantages of every turn under algo.turn_credit=`turn_credit`, or None for a
    rollout without advantages.
    """
    ALGORITHMS["grpo"].advantage_fn(rollouts, AlgoSettings(turn_credit=turn_credit, norm_adv_by_std=norm_adv_by_std, **given))
    return [collect_turn_advantages(rollout) for rollout in rollouts]
