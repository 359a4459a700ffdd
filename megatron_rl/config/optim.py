"""The optimizer of whatever is trained: AdamW, its learning rate over the steps of the stage, gradient clipping."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import PARTS


@dataclass(kw_only=True, slots=True)
class OptimSettings:
    """AdamW, the learning rate over the steps of the stage, and the clipping of gradients."""

    lr: float = 1e-6
    """Peak learning rate of the schedule."""
    lr_by_module: dict[str, float] = field(default_factory=dict)
    """Peak learning rates of single parts in place of lr, e.g. {vision: 1e-7}; the schedule's shape is the same."""
    schedule: str = "constant"
    """Shape after the warm-up: constant, linear or cosine; the last two fall towards min_lr, which the step after the last would have."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises; the last of them has the peak. All updates of a step have the same learning rate."""
    min_lr: float = 0.0
    """Learning rate that linear and cosine schedules fall towards."""
    weight_decay: float = 0.0
    """Decoupled weight decay of weight matrices; biases and norms are never decayed."""
    clip_grad: float = 1.0
    """Largest norm of the gradient; a larger one is scaled down to it."""
    beta1: float = 0.9
    """Decay of AdamW's mean of gradients, per update."""
    beta2: float = 0.999
    """Decay of AdamW's mean of squared gradients, per update."""
    eps: float = 1e-8
    """Added to the root of AdamW's mean of squared gradients."""

    def __post_init__(self) -> None:
        require_choice("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(0 <= self.lr < math.inf, "optim.lr", self.lr, "must be a finite number that is not negative")
        for part, lr in self.lr_by_module.items():
            require_choice("optim.lr_by_module", part, PARTS)
            remedy = f"must be a finite number, at least optim.min_lr={self.min_lr}"
            require(self.min_lr <= lr < math.inf, f"optim.lr_by_module.{part}", lr, remedy)
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "must not be negative")
        require(0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"must lie between 0 and optim.lr={self.lr}")
        remedy = "must be a finite number that is not negative"
        require(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, remedy)
        require(self.clip_grad > 0, "optim.clip_grad", self.clip_grad, "must be positive; a large number switches clipping off")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"optim.{name}", value, "must lie in [0, 1)")
        require(self.eps > 0, "optim.eps", self.eps, "must be positive")
