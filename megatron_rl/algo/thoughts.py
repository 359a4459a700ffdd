"""How much a turn's thoughts count beside its action in what the surrogate compares (RL4VLM, arXiv 2405.10292, section 4.3)."""

from collections.abc import Sequence

from megatron_rl.types import Rollout


def weigh_thoughts(rollouts: Sequence[Rollout], coef: float) -> None:
    """Give the sampled tokens before a turn's action the coefficient, and all others 1: a turn's log-probability is then coef times that of
    its thoughts plus that of its action. A turn that names no action has 1 throughout."""
    for rollout in rollouts:
        for context in rollout.contexts:
            context.attach("coefficients", [float(sampled) for sampled in context.loss_mask])
        for turn in rollout.turns:
            if turn.action is not None:
                start = turn.span[0]
                rollout.contexts[turn.context].coefficients[start : turn.action] = [coef] * (turn.action - start)
