"""Scales the logprobs of thoughts in the policy loss (RL4VLM, arXiv 2405.10292, section 4.3)."""

from collections.abc import Sequence

from megatron_rl.types import Rollout


def scale_thought_logprobs(rollouts: Sequence[Rollout], coef: float) -> None:
    """Set `logprob_scale` to `coef` before each turn's action and to 1 from there on.

    A turn's logprob is then coef times that of its thoughts plus that of its action. A turn without
    a marked action (Turn.action_start None) has 1 throughout; observed tokens have 0.
    """
    for rollout in rollouts:
        for context in rollout.sequences:
            context.set_column("logprob_scale", [float(sampled) for sampled in context.loss_mask])
        for turn in rollout.turns:
            if turn.action_start is not None:
                start = turn.token_span[0]
                rollout.sequences[turn.sequence].logprob_scale[start : turn.action_start] = [coef] * (turn.action_start - start)
