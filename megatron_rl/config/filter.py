"""Which of a step's rollouts are trained on."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice

ENDS = ("done", "max_turns", "max_tokens", "max_images", "max_pixels", "max_seconds", "tool_error")
"""How an episode that is scored can end: the values of types.End but for the faults of ours."""
DROPS = ("zero_std", "no_image", "stop_reason")
"""Why a rollout can be left out of the update, in the order they are looked at."""


@dataclass(kw_only=True, slots=True)
class FilterSettings:
    """Which rollouts are left out of a step's update, and how many more are rolled out instead."""

    drop: list[str] = field(default_factory=list)
    """Rollouts to leave out of the update: zero_std (groups whose members' credit is all equal), no_image, stop_reason (their stop
    reason is not in keep_stop_reasons). They still count in their group's baseline."""
    keep_stop_reasons: list[str] = field(default_factory=lambda: ["done"])
    """Stop reasons of the rollouts that drop=[stop_reason] keeps."""
    max_num_gen_batches: int = 1
    """Rounds of prompts_per_step prompts that a step rolls out at most, until it has prompts_per_step groups left after the drops."""
    prefer_high_std: bool = False
    """Keep of surplus groups those whose credit deviates most; otherwise all are trained on."""

    def __post_init__(self) -> None:
        for name in self.drop:
            require_choice("filter.drop", name, DROPS)
        for end in self.keep_stop_reasons:
            require_choice("filter.keep_stop_reasons", end, ENDS)
        require(self.max_num_gen_batches >= 1, "filter.max_num_gen_batches", self.max_num_gen_batches, "must be at least 1")
