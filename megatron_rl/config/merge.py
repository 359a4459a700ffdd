"""Settings of a teacher that is a merge of the policy's own checkpoints."""

from dataclasses import dataclass, fields

from megatron_rl.config.checks import require, require_choice

METHODS = ("mean", "ema", "ties", "ties_ema")
"""Values of distill.merge.method."""


@dataclass(kw_only=True, slots=True)
class MergeSettings:
    """Settings of the merge of the policy's checkpoints (GTR-Turbo, arXiv 2512.13043)."""

    method: str = ""
    """Merge of the policy's own checkpoints as the teacher, in place of distill.teacher. mean: the
    mean of all checkpoints so far. ema: their exponential moving average. ties: TIES merging (arXiv
    2306.01708) of their changes since the start, with equal weights. ties_ema: TIES merging with
    the weights of ema. Empty merges nothing."""
    every: int = 1
    """Number of steps from one merged checkpoint to the next. The start weights are not merged.
    Until the first checkpoint, the run has no teacher."""
    alpha: float = 0.5
    """Weight of the newest checkpoint in ema and ties_ema; the merge before it has the weight 1 -
    alpha."""
    density: float = 0.2
    """Fraction of the changed entries of the whole model that ties and ties_ema keep of each
    checkpoint, those with the largest magnitudes."""

    def __post_init__(self) -> None:
        require_choice("distill.merge.method", self.method, ("", *METHODS))
        require(self.every >= 1, "distill.merge.every", self.every, "must be at least 1")
        require(0 < self.alpha < 1, "distill.merge.alpha", self.alpha, "must be in (0, 1); alpha=1 would be the newest checkpoint alone")
        require(0 < self.density <= 1, "distill.merge.density", self.density, "must be in (0, 1]")
        for each in fields(MergeSettings) if not self.method else ():
            value, remedy = getattr(self, each.name), f"has no effect without distill.merge.method; use one of {', '.join(METHODS)}"
            require(value == each.default, f"distill.merge.{each.name}", value, remedy)
        remedy = f"has no effect with distill.merge.method={self.method}; leave it out"
        require(self.uses_ema or self.alpha == DEFAULT_ALPHA, "distill.merge.alpha", self.alpha, remedy)
        require(self.uses_ties or self.density == DEFAULT_DENSITY, "distill.merge.density", self.density, remedy)

    @property
    def uses_ties(self) -> bool:
        """True if the checkpoints' changes since the start are trimmed and their signs elected."""
        return self.method in ("ties", "ties_ema")

    @property
    def uses_ema(self) -> bool:
        """True if newer checkpoints have larger weights."""
        return self.method in ("ema", "ties_ema")


DEFAULT_ALPHA, DEFAULT_DENSITY = (each.default for each in fields(MergeSettings) if each.name in ("alpha", "density"))
