"""Settings that select the rollouts of a step to train on."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice

ENDS = ("done", "max_turns", "max_tokens", "max_images", "max_pixels", "max_seconds", "tool_error")
"""Stop reasons of scored episodes: the values of types.StopReason without the infrastructure
errors."""
DROPS = ("zero_std", "no_image", "stop_reason")
"""Filters that can exclude a rollout from the update, in the order in which they are applied."""


@dataclass(kw_only=True, slots=True)
class FilterSettings:
    """Filters on the rollouts of a step, and the limit on generation batches."""

    drop: list[str] = field(default_factory=list)
    """Filters that exclude rollouts from the update: zero_std (groups with equal advantages),
    no_image, stop_reason (not in keep_stop_reasons). Excluded rollouts still count in the baseline
    of their group."""
    keep_stop_reasons: list[str] = field(default_factory=lambda: ["done"])
    """Stop reasons of the rollouts that drop=[stop_reason] keeps."""
    max_num_gen_batches: int = 1
    """Maximum number of generation batches per step, each of prompts_per_step prompts; a step stops
    early once prompts_per_step groups remain after filtering."""
    prefer_high_std: bool = False
    """Train only on the prompts_per_step groups with the largest spread of advantages if more
    remain; otherwise all remaining groups are trained on."""

    def __post_init__(self) -> None:
        for name in self.drop:
            require_choice("filter.drop", name, DROPS)
        for end in self.keep_stop_reasons:
            require_choice("filter.keep_stop_reasons", end, ENDS)
        require(self.max_num_gen_batches >= 1, "filter.max_num_gen_batches", self.max_num_gen_batches, "must be at least 1")
