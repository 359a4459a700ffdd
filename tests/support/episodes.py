"""Episodes for the tests of credit and selection: real contexts, tokens without meaning, scores handed in."""

from collections.abc import Mapping, Sequence

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.config import AlgoSettings
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.types import Image, Rollout, Status, StopReason, TokenSequence, Turn

PICTURE = Image(None, None, (1, 2, 2), "a", merge=2)


def episode(
    group: int, reward: float | None = None, *,
    outcome: float | None = None, scores: Sequence[float | None] | None = None, gains: Sequence[float] | None = None,
    lengths: Sequence[int] = (1,), contexts: Sequence[int] | None = None, end: StopReason = StopReason.DONE, image: bool = False, sample:
    int = 0, states: Sequence[str] = (),
) -> Rollout:  # fmt: skip
    """One that has a turn for each of `gains` (or `scores`, or `lengths`), of which turn k samples lengths[k] tokens in context number
    contexts[k].

    Without gains a turn's gain is its score, and without scores 0. Without a reward, it is the outcome and the gains; without an
    outcome, the reward less the gains; without either the episode failed. Every turn is preceded and followed by an observed token.
    """
    num_turns = len(next(given for given in (gains, scores, lengths) if given is not None))
    lengths = list(lengths) + [1] * (num_turns - len(lengths))
    contexts = [0] * num_turns if contexts is None else contexts
    scores = [None] * num_turns if scores is None else scores
    gains = [score or 0.0 for score in scores] if gains is None else gains
    if reward is None and outcome is not None:
        reward = outcome + sum(gains)
    if reward is not None and outcome is None:
        outcome = reward - sum(gains)
    made = Rollout(
        task="t", example_id=f"e{group}", group=group, sample_index=sample, reward=reward, outcome_reward=outcome or 0.0, stop_reason=end,
        status=Status.FAILED if reward is None else Status.COMPLETED,
        sequences=[TokenSequence(images=[PICTURE] if image else []) for _ in range(max(contexts, default=0) + 1)],
    )  # fmt: skip
    for number, (place, length, score, gain) in enumerate(zip(contexts, lengths, scores, gains, strict=True)):
        context = made.sequences[place]
        context.extend([1])
        start = len(context.token_ids)
        context.extend([2] * length, logprobs=[-1.0] * length)
        made.turns.append(
            Turn(sequence=place, token_span=(start, start + length), text=f"turn {number}", step_score=score, reward_delta=gain)
        )
        context.extend([3])
    for turn, state in zip(made.turns, states, strict=False):
        turn.state = state
    return made


def outcome_of(
    *turns: Turn, payload: Mapping[str, object] | None = None, end: StopReason = StopReason.DONE, images: Sequence[Image] = ()
) -> RewardInput:
    """What a rubric sees of an episode of these turns."""
    rollout = Rollout(task="t", example_id="e0", group=0, sample_index=0, turns=list(turns), stop_reason=end)
    return RewardInput(payload=payload or {}, rollout=rollout, prompt_images=list(images))


def penalize(rollout: Rollout, *per_token: float) -> Rollout:
    """Let old and reference logprobs differ by these numbers, over the sampled tokens of all its contexts in order."""
    numbers = iter(per_token)
    for context in rollout.sequences:
        column = [next(numbers) if sampled else 7.0 for sampled in context.loss_mask]
        context.set_column("old_logprobs", [number - 3.0 for number in column])
        context.set_column("reference_logprobs", [-3.0] * len(column))
    assert next(numbers, None) is None, "more numbers than sampled tokens"
    return rollout


def token_credits(rollout: Rollout) -> list[float]:
    """What its sampled tokens are credited with, in order; all others have exactly 0."""
    pairs = [pair for context in rollout.sequences for pair in zip(context.advantages, context.loss_mask, strict=True)]
    assert all(value == 0.0 for value, sampled in pairs if not sampled)
    return [value for value, sampled in pairs if sampled]


def turn_credits(rollout: Rollout) -> list[float] | None:
    """What its turns are credited with: one number for all tokens of a turn. None where no credit was written."""
    if not any(context.advantages for context in rollout.sequences):
        return None
    assert len(token_credits(rollout)) == sum(stop - start for start, stop in (turn.token_span for turn in rollout.turns))
    values = []
    for turn in rollout.turns:
        (value,) = set(rollout.sequences[turn.sequence].advantages[slice(*turn.token_span)])
        values.append(value)
    return values


def credits(rollouts: Sequence[Rollout], scheme: str, *, norm_adv_by_std: bool = False, **given: float | bool) -> list[list[float] | None]:
    """Return the credit of every turn by algo.turn_credit=scheme; None where none was written."""
    ALGORITHMS["grpo"].advantage_fn(rollouts, AlgoSettings(turn_credit=scheme, norm_adv_by_std=norm_adv_by_std, **given))
    return [turn_credits(rollout) for rollout in rollouts]
