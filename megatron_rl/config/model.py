"""The policy: its checkpoint, its adapters, its layout over ranks."""

import math
from dataclasses import dataclass, field

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_choice

PARTS = ("vision", "merger", "language")
"""What can be frozen or have its own learning rate: the vision tower's blocks, its merger (projector), the language model."""


@dataclass(kw_only=True, slots=True)
class ModelSettings:
    """Which model is trained, which of its parts, and how it sees pictures."""

    path: str = MISSING
    """A Hugging Face folder (Qwen2-VL, 2.5 or 3): the policy's start, the reference of the KL term, the tokenizer and the processor."""
    dtype: str = "float32"
    """Number type of the trainer's weights and activations: float32, or bfloat16 with float32 main weights in the optimizer."""
    frozen: list[str] = field(default_factory=list)
    """Parts that are not trained: any of vision (the tower), merger (its projector into the language model), language."""
    min_pixels: int = 3136
    """Fewest pixels of an image as the model sees it: a smaller one is enlarged once, to sides that are multiples of 28 (Qwen3-VL: 32)."""
    max_pixels: int = 1003520
    """Most pixels of an image as the model sees it: a larger one is shrunk once, to sides that are multiples of 28 (Qwen3-VL: 32). Leave it
    a little slack, because it is met by rounding down: 300 x 300 under 12544 = 112 * 112 becomes 84 x 84."""

    def __post_init__(self) -> None:
        require_choice("model.dtype", self.dtype, ("float32", "bfloat16"))
        for part in self.frozen:
            require_choice("model.frozen", part, PARTS)
        require(set(self.frozen) != set(PARTS), "model.frozen", self.frozen, "leaves nothing to train; take one part out")
        remedy = f"must be at least model.min_pixels={self.min_pixels}"
        require(0 < self.min_pixels <= self.max_pixels, "model.max_pixels", self.max_pixels, remedy)


@dataclass(kw_only=True, slots=True)
class LoraSettings:
    """Low-rank adapters (arXiv 2106.09685) on a frozen base; the reference policy is the base with the adapters off."""

    rank: int = 0
    """Rank of the adapters; 0 trains the model itself, without any."""
    alpha: float = 32.0
    """What an adapter computes is scaled by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped while it is trained; stage=sft only."""
    targets: list[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Linear layers with adapters: any of attention and mlp (of the language model), vision (the tower's blocks), projector (merger)."""
    path: str = ""
    """A PEFT folder to start from; its rank, alpha and targets must be those stated here."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "must not be negative; 0 trains the model itself")
        require(self.alpha > 0, "lora.alpha", self.alpha, "must be positive")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "must lie in [0, 1)")
        require(len(self.targets) > 0, "lora.targets", self.targets, "names no layer; use lora.rank=0 to train without adapters")
        for target in self.targets:
            require_choice("lora.targets", target, ("attention", "mlp", "vision", "projector"))
        require(not self.path or self.rank > 0, "lora.path", self.path, "needs lora.rank, that of the adapter")


@dataclass(kw_only=True, slots=True)
class ParallelSettings:
    """The trainer's layout; the data-parallel size is what remains: world / (tp * pp)."""

    tp: int = 1
    """Tensor-parallel size: ranks that share every layer of the language model."""
    pp: int = 1
    """Pipeline-parallel size: stages that the language model's layers are dealt to."""
    vpp: int = 1
    """Model chunks a pipeline stage holds; above 1 the schedule is interleaved."""
    sequence_parallel: bool = False
    """Cut activations between the tensor-parallel layers along the tokens, too; saves memory where parallel.tp is above 1."""
    recompute: str = "none"
    """Activations computed again in the backward pass: none, selective (attention), vision (the tower's blocks), full (every layer too)."""
    log_probs_chunk_size: int = 2048
    """Rows whose logits exist at a time; a row is one sampled token."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and fp32 weights on the host, where its step takes this rank's share of the node's cores (a GPU only; on a
    CPU they are there)."""
    offload_params: bool = False
    """Move parameters and gradient buffers to the host while the engine rolls out."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks while the backward pass goes on. Off until a profile of several GPUs shows more than 3% of
    an update in reductions: a 7B model's 18 GB over 16 links of 400 Gb/s are estimated at 0.4 s an update."""
    timeout_s: float = 600.0
    """A collective that waits longer ends the run instead of hanging it."""
    straggler_timeout_s: float = 14400.0
    """How much longer one rank may roll out, or write its part of a checkpoint, than another; a longer wait ends the run."""

    def __post_init__(self) -> None:
        require(self.tp >= 1, "parallel.tp", self.tp, "must be at least 1")
        require(self.pp >= 1, "parallel.pp", self.pp, "must be at least 1")
        require(self.vpp >= 1, "parallel.vpp", self.vpp, "must be at least 1")
        require(self.vpp == 1 or self.pp > 1, "parallel.vpp", self.vpp, "needs parallel.pp of at least 2")
        require_choice("parallel.recompute", self.recompute, ("none", "selective", "vision", "full"))
        require(self.log_probs_chunk_size >= 1, "parallel.log_probs_chunk_size", self.log_probs_chunk_size, "must be at least 1")
        require(
            0 < self.straggler_timeout_s < math.inf, "parallel.straggler_timeout_s", self.straggler_timeout_s, "must be a number of seconds"
        )
        require(not self.overlap_grad_reduce or self.pp == 1, "parallel.overlap_grad_reduce", True, "needs parallel.pp=1")
        require(not self.sequence_parallel or self.tp > 1, "parallel.sequence_parallel", True, "needs parallel.tp of at least 2")
