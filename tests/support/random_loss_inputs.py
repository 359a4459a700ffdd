"""Creates the inputs of a loss for a micro-batch in float64, so that errors can be distinguished
from rounding.
"""

from collections.abc import Sequence

import torch

from megatron_rl.types import LossInputs


def make_tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_loss_inputs(
    log_ratio: Sequence[float], advantage: Sequence[float], *,
    segments: Sequence[int] | None = None, turns: Sequence[int] | None = None, old: Sequence[float] | None = None,
    dtype: torch.dtype = torch.float64, **given: Sequence[float],
) -> LossInputs:  # fmt: skip
    """Return rows whose logprob (a leaf with gradient) is old + log_ratio.

    Without old logprobs, they are -1, -2, -3, ... Other columns are given by name.
    """
    size = len(log_ratio)

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype)

    old_R = column(range(-1, -size - 1, -1) if old is None else old)
    columns = {f"{name}_R": column(values) for name, values in given.items()}
    columns.setdefault("rollout_logprob_R", old_R.clone())
    columns.setdefault("weight_R", torch.ones(size, dtype=dtype))
    columns.setdefault("entropy_R", torch.ones(size, dtype=dtype))
    columns.setdefault("ref_logprob_R", None)
    return LossInputs(
        **columns | {"entropy_R": columns["entropy_R"].requires_grad_()},
        logprob_R=(old_R + column(log_ratio)).requires_grad_(), old_logprob_R=old_R, advantage_R=column(advantage),
        sequence_R=torch.tensor([0] * size if segments is None else list(segments)),
        turn_R=torch.tensor([0] * size if turns is None else list(turns)),
    )  # fmt: skip


def make_random_loss_inputs(seed: int, lengths: Sequence[int], *, log_ratio_std: float = 0.7) -> LossInputs:
    """Return segments of these lengths, each with one advantage.

    Their numbers have gaps, as with shared prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    size, lengths_S = sum(lengths), torch.tensor(lengths, dtype=torch.long)

    def normal(scale: float, count: int = size) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    old_R = -normal(1.0).abs()
    return LossInputs(
        logprob_R=(old_R + normal(log_ratio_std)).requires_grad_(),
        entropy_R=normal(1.0).abs().requires_grad_(),
        old_logprob_R=old_R,
        rollout_logprob_R=old_R + normal(0.5),
        ref_logprob_R=old_R + normal(0.5),
        advantage_R=normal(1.0, len(lengths)).repeat_interleave(lengths_S),
        weight_R=normal(1.0).abs(),
        sequence_R=(1 + 2 * torch.arange(len(lengths))).repeat_interleave(lengths_S),
        turn_R=torch.arange(len(lengths)).repeat_interleave(lengths_S),
    )


def to_floats(rows: LossInputs) -> dict[str, list[float]]:
    """Return the columns as lists of floats, keyed by their names without the suffix."""
    columns = ("logprob", "entropy", "old_logprob", "rollout_logprob", "ref_logprob", "advantage", "weight", "sequence")
    return {name: getattr(rows, f"{name}_R").tolist() for name in columns}
