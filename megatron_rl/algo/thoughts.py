"""How much a turn's thoughts count beside its action in what the surrogate compares (RL4VLM, arXiv 2405.10292, section 4.3)."""

from collections.abc import Sequence

from megatron_rl.types import Rollout


def scale_thought_logprobs(rollouts: Sequence[Rollout], coef: float) -> None:
    """Give the sampled tokens before a turn's action the coefficient, and all others 1: a turn's log-probability is then coef times that of
    its thoughts plus that of its action. A turn that names no action has 1 throughout."""
    for rollout in rollouts:
        for context in rollout.sequences:
            context.set_column("logprob_scale", [float(sampled) for sampled in context.loss_mask])
        for turn in rollout.turns:
            if turn.action_start is not None:
                start = turn.token_span[0]
                rollout.sequences[turn.sequence].logprob_scale[start : turn.action_start] = [coef] * (turn.action_start - start)
