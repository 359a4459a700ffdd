"""Scales the logprobs of thought tokens in the policy loss (RL4VLM, arXiv 2405.10292, sec. 4.3)."""

from collections.abc import Sequence

from megatron_rl.types import Rollout


def scale_thought_logprobs(rollouts: Sequence[Rollout], coef: float) -> None:
    """Set `logprob_scale` to `coef` for thought tokens and to 1 for action tokens.

    The logprob of a turn is then coef * (logprob of the thoughts) + (logprob of the action). All
    tokens of a turn without a marked action (Turn.action_start is None) have scale 1. Observed
    tokens have scale 0.
    """
    for rollout in rollouts:
        for context in rollout.sequences:
            context.set_column("logprob_scale", [float(sampled) for sampled in context.loss_mask])
        for turn in rollout.turns:
            if turn.action_start is not None:
                start = turn.token_span[0]
                rollout.sequences[turn.sequence].logprob_scale[start : turn.action_start] = [coef] * (turn.action_start - start)
