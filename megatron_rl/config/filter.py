"""Settings that select which rollouts of a step are used for training."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice

ENDS = ("done", "env_truncated", "max_turns", "max_tokens", "max_images", "max_pixels", "max_seconds", "tool_error")
"""Stop reasons of scored episodes: all values of types.StopReason except the infrastructure
errors."""
DROPS = ("zero_std", "no_image", "stop_reason")
"""Filters that can exclude a rollout from training, in the order in which they are applied."""


@dataclass(kw_only=True, slots=True)
class FilterSettings:
    """Filters on the rollouts of a step, and the limit on generation batches."""

    drop: list[str] = field(default_factory=list)
    """Filters that exclude rollouts from training: zero_std (all advantages of the group are
    equal), no_image (no image in the rollout), stop_reason (stop reason not in keep_stop_reasons).
    Excluded rollouts still contribute to their group's baseline."""
    keep_stop_reasons: list[str] = field(default_factory=lambda: ["done"])
    """Stop reasons that the filter stop_reason accepts; rollouts with any other stop reason are
    excluded."""
    max_num_gen_batches: int = 1
    """Maximum number of generation batches per step. Each batch contains prompts_per_step prompts.
    A step stops generating once prompts_per_step groups remain after filtering."""
    prefer_high_std: bool = False
    """If more than prompts_per_step groups remain after filtering, train only on the
    prompts_per_step groups with the largest spread of advantages; false trains on all remaining
    groups."""

    def __post_init__(self) -> None:
        for name in self.drop:
            require_choice("filter.drop", name, DROPS)
        for end in self.keep_stop_reasons:
            require_choice("filter.keep_stop_reasons", end, ENDS)
        require(self.max_num_gen_batches >= 1, "filter.max_num_gen_batches", self.max_num_gen_batches, "must be at least 1")
