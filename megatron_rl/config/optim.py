"""Settings of the AdamW optimizer, the learning-rate schedule and gradient clipping."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import PARTS


@dataclass(kw_only=True, slots=True)
class OptimSettings:
    """Settings of AdamW, gradient clipping and the learning-rate schedule of a stage."""

    lr: float = 1e-6
    """Peak learning rate of the schedule."""
    lr_by_module: dict[str, float] = field(default_factory=dict)
    """Peak learning rates per module, e.g. {vision: 1e-7}; they override optim.lr for these
    modules, with the same schedule."""
    schedule: str = "constant"
    """Learning-rate schedule after the warmup: constant, linear or cosine. The linear and cosine
    schedules decay towards min_lr; the learning rate of the last step is still above min_lr."""
    warmup_steps: int = 0
    """Number of warmup steps; the learning rate increases during these steps and reaches the peak
    in the last warmup step. All updates of a step use the same learning rate."""
    min_lr: float = 0.0
    """Learning rate towards which the linear and cosine schedules decay."""
    weight_decay: float = 0.0
    """Decoupled weight decay, applied to weight matrices but not to biases and norms."""
    clip_grad: float = 1.0
    """Maximum gradient norm; gradients with a larger norm are scaled down to it."""
    beta1: float = 0.9
    """Exponential decay rate of AdamW's first moment, per update."""
    beta2: float = 0.999
    """Exponential decay rate of AdamW's second moment, per update."""
    eps: float = 1e-8
    """Constant added to the square root of AdamW's second moment."""

    def __post_init__(self) -> None:
        require_choice("optim.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(0 <= self.lr < math.inf, "optim.lr", self.lr, "must be a finite, non-negative number")
        for part, lr in self.lr_by_module.items():
            require_choice("optim.lr_by_module", part, PARTS)
            remedy = f"must be a finite number, at least optim.min_lr={self.min_lr}"
            require(self.min_lr <= lr < math.inf, f"optim.lr_by_module.{part}", lr, remedy)
        require(self.warmup_steps >= 0, "optim.warmup_steps", self.warmup_steps, "must not be negative")
        require(0 <= self.min_lr <= self.lr, "optim.min_lr", self.min_lr, f"must be between 0 and optim.lr={self.lr}")
        remedy = "must be a finite, non-negative number"
        require(0 <= self.weight_decay < math.inf, "optim.weight_decay", self.weight_decay, remedy)
        require(self.clip_grad > 0, "optim.clip_grad", self.clip_grad, "must be positive; a large number disables clipping")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"optim.{name}", value, "must be in [0, 1)")
        require(self.eps > 0, "optim.eps", self.eps, "must be positive")
