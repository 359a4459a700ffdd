"""Settings of the critic, which algorithms with a value function require (algo=ppo)."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import LoraSettings


@dataclass(kw_only=True, slots=True)
class CriticSettings:
    """Settings of the critic: the value head, its backbone, and the value loss."""

    backbone: str = "shared"
    """Backbone of the value head: shared uses the policy's backbone (one forward pass, one loss and
    one optimizer step for policy and critic); own is a separate network."""
    path: str = ""
    """Hugging Face directory with the initial weights of the backbone if critic.backbone=own; empty
    uses model.path. Tokenizer, model family and pixel limits must match the policy's."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """LoRA adapters of the critic if critic.backbone=own, with the same keys as lora; a shared
    backbone uses the policy's adapters."""
    head_sizes: list[int] = field(default_factory=list)
    """Widths of the hidden layers of the value head; an empty list makes the head linear."""
    lr: float = 1e-5
    """Peak learning rate of the separate critic (backbone=own) or of the value head
    (backbone=shared). All other optimizer settings are taken from optim."""
    vf_coef: float = 0.5
    """Coefficient of the value loss when it is added to the policy loss (backbone=shared)."""
    cliprange_value: float = 0.0
    """Clip range of the value loss, in units of the value head's output, e.g. 0.2: predictions are
    clipped to this distance from the predictions at the start of the step. 0 disables clipping."""
    normalize_returns: bool = False
    """Train the value head on returns that are normalized by the running mean and standard
    deviation over all steps so far."""
    warmup_steps: int = 0
    """Number of initial steps that train only the critic (only the value head if backbone=shared).
    After the warmup steps, the AdamW state of a shared backbone is reset."""

    def __post_init__(self) -> None:
        require_choice("critic.backbone", self.backbone, ("shared", "own"))
        is_own, remedy = self.backbone == "own", "requires a critic with its own backbone; set critic.backbone=own"
        require(is_own or not self.path, "critic.path", self.path, remedy)
        require(is_own or not self.lora.rank, "critic.lora.rank", self.lora.rank, f"{remedy}, or use lora.rank for a shared backbone")
        require(not self.lora.dropout, "critic.lora.dropout", self.lora.dropout, "must be 0: values are computed without dropout")
        require(all(size >= 1 for size in self.head_sizes), "critic.head_sizes", self.head_sizes, "must be positive numbers")
        for key, value in (("lr", self.lr), ("vf_coef", self.vf_coef), ("cliprange_value", self.cliprange_value)):
            require(0 <= value < math.inf, f"critic.{key}", value, "must be a finite, non-negative number")
        require(self.warmup_steps >= 0, "critic.warmup_steps", self.warmup_steps, "must not be negative")
