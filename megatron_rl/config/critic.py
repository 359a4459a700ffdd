"""The critic of algorithms that need values (algo=ppo): its trunk, its head, its loss."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.model import LoraSettings


@dataclass(kw_only=True, slots=True)
class CriticSettings:
    """What expects the return: a value head on the policy's trunk or on one of its own, of any size, at the policy's layout."""

    backbone: str = "shared"
    """Where the value head stands: on the policy's trunk (shared: one forward pass, one loss, one optimizer step), or on a network of its
    own (own)."""
    path: str = ""
    """A Hugging Face folder that an own trunk starts from; empty: model.path. Of the policy's tokenizer, family and pixel limits."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters of an own trunk, as the policy's; a shared trunk has the policy's (lora)."""
    head_sizes: list[int] = field(default_factory=list)
    """Widths of the value head's hidden layers, between the trunk's and the one value; none: a linear head."""
    lr: float = 1e-5
    """Peak learning rate of an own critic, or of the value head on a shared trunk; all else of the optimizer is optim's."""
    vf_coef: float = 0.5
    """Weight of the value loss beside the policy's, where they are one sum (backbone=shared)."""
    cliprange_value: float = 0.0
    """A value is taught no further than this from where the step found it, e.g. 0.2, in the head's units; 0 is off."""
    normalize_returns: bool = False
    """The head is taught returns less their mean over their deviation, both over all steps so far."""
    warmup_steps: int = 0
    """First steps that train the critic alone: with backbone=shared its head. AdamW of a shared trunk starts anew after them."""

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
