"""Settings of the critic, which algorithms with a value function need (algo=ppo)."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import LoraSettings


@dataclass(kw_only=True, slots=True)
class CriticSettings:
    """Settings of the value head, its backbone (the policy's or its own) and its loss."""

    backbone: str = "shared"
    """Backbone of the value head: the policy's (shared: one forward pass, one loss, one optimizer
    step), or a separate network (own)."""
    path: str = ""
    """Hugging Face directory from which an own backbone is initialized; empty uses model.path. Its
    tokenizer, model family and pixel limits must be the policy's."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """LoRA adapters of an own backbone, with the same keys as lora; a shared backbone has the
    policy's adapters."""
    head_sizes: list[int] = field(default_factory=list)
    """Widths of the value head's hidden layers; an empty list is a linear head."""
    lr: float = 1e-5
    """Peak learning rate of an own critic, or of the value head on a shared backbone. All other
    optimizer settings are those of optim."""
    vf_coef: float = 0.5
    """Weight of the value loss in the sum of policy and value loss (backbone=shared)."""
    cliprange_value: float = 0.0
    """Clip range of the value loss: values are trained only up to this distance from their value at
    the start of the step, in the head's units, e.g. 0.2; 0 disables it."""
    normalize_returns: bool = False
    """Train the head on returns normalized by their running mean and standard deviation over all
    steps so far."""
    warmup_steps: int = 0
    """Number of first steps that train only the critic (only its head if backbone=shared). A shared
    backbone's AdamW state is reset after them."""

    def __post_init__(self) -> None:
        require_choice("critic.backbone", self.backbone, ("shared", "own"))
        is_own, remedy = self.backbone == "own", "is of a network of its own; set critic.backbone=own"
        require(is_own or not self.path, "critic.path", self.path, remedy)
        require(is_own or not self.lora.rank, "critic.lora.rank", self.lora.rank, f"{remedy}, or lora.rank for both")
        require(not self.lora.dropout, "critic.lora.dropout", self.lora.dropout, "must be 0: values are read without it")
        require(all(size >= 1 for size in self.head_sizes), "critic.head_sizes", self.head_sizes, "must be positive numbers")
        for key, value in (("lr", self.lr), ("vf_coef", self.vf_coef), ("cliprange_value", self.cliprange_value)):
            require(0 <= value < math.inf, f"critic.{key}", value, "must be a finite number that is not negative")
        require(self.warmup_steps >= 0, "critic.warmup_steps", self.warmup_steps, "must not be negative")
