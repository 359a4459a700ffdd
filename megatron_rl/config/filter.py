"""Which of a step's rollouts are trained on."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice

ENDS = ("done", "max_turns", "max_tokens", "max_images", "max_pixels", "max_seconds", "tool_error")
"""How an episode that is scored can end: the values of types.End but for the faults of ours."""
DROPS = ("zero_std", "no_image", "end")
"""Why a rollout can be left out of the update, in the order they are looked at."""


@dataclass(kw_only=True, slots=True)
class SelectSettings:
    """Which rollouts are left out of a step's update, and how many more are rolled out instead."""

    drop: list[str] = field(default_factory=list)
    """Rollouts to leave out of the update: zero_std (groups whose members' credit is all equal), no_image, end (their end is not in
    keep_ends). They still count in their group's baseline."""
    keep_ends: list[str] = field(default_factory=lambda: ["done"])
    """Ends of the episodes that drop=[end] keeps."""
    max_generations: int = 1
    """Rounds of prompts_per_step prompts that a step rolls out at most, until it has prompts_per_step groups left after the drops."""
    rank_by_std: bool = False
    """Keep of surplus groups those whose credit deviates most; otherwise all are trained on."""

    def __post_init__(self) -> None:
        for name in self.drop:
            require_choice("select.drop", name, DROPS)
        for end in self.keep_ends:
            require_choice("select.keep_ends", end, ENDS)
        require(self.max_generations >= 1, "select.max_generations", self.max_generations, "must be at least 1")
