"""Settings of the policy: checkpoint, LoRA adapters and parallelism."""

import math
from dataclasses import dataclass, field

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_choice

PARTS = ("vision", "merger", "language")
"""Modules that can be frozen or have their own learning rate: vision (the vision blocks), merger
(the projector) and language (the language model)."""


@dataclass(kw_only=True, slots=True)
class ModelSettings:
    """Model to train, its frozen modules and the image resolution."""

    path: str = MISSING
    """Hugging Face directory with the initial policy (Qwen2-VL, Qwen2.5-VL or Qwen3-VL), tokenizer
    and processor. The KL term uses the initial policy as the reference model."""
    dtype: str = "auto"
    """Data type of the trainer's weights and activations: float32, or bfloat16 with float32 main
    weights in the optimizer; auto is bfloat16 on GPUs and float32 on CPUs."""
    frozen: list[str] = field(default_factory=list)
    """Modules that are not trained: any of vision (the vision blocks), merger (the projector into
    the language model) and language (the language model)."""
    min_pixels: int = 3136
    """Minimum number of pixels of an image: a smaller image is enlarged once, to sides that are
    multiples of 28 (Qwen3-VL: 32)."""
    max_pixels: int = 1003520
    """Maximum number of pixels of an image: a larger image is shrunk once, to sides that are
    multiples of 28 (Qwen3-VL: 32). Sides are rounded down: with 12544 (112 * 112), a
    300 x 300 image is resized to 84 x 84. Set a value slightly above the intended size."""

    def __post_init__(self) -> None:
        require_choice("model.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        for part in self.frozen:
            require_choice("model.frozen", part, PARTS)
        require(set(self.frozen) != set(PARTS), "model.frozen", self.frozen, "leaves no module to train; remove at least one entry")
        remedy = f"must be at least model.min_pixels={self.min_pixels}"
        require(0 < self.min_pixels <= self.max_pixels, "model.max_pixels", self.max_pixels, remedy)


@dataclass(kw_only=True, slots=True)
class LoraSettings:
    """LoRA adapters (arXiv 2106.09685) on a frozen base model, which is the reference model."""

    rank: int = 0
    """Rank of the LoRA adapters; 0 trains the full model without adapters."""
    alpha: float = 32.0
    """LoRA alpha: the output of an adapter is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout probability on the inputs of the adapters; must be 0 in stage=rl."""
    targets: list[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Linear layers with adapters: any of attention (in the language model, gated delta nets
    included), mlp, vision (the vision blocks) and projector (the merger)."""
    path: str = ""
    """PEFT directory with the initial weights of the adapters; its rank, alpha and targets must
    match these settings."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "must not be negative; 0 trains the model without adapters")
        require(self.alpha > 0, "lora.alpha", self.alpha, "must be positive")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "must be in [0, 1)")
        require(len(self.targets) > 0, "lora.targets", self.targets, "must not be empty; use lora.rank=0 to train without adapters")
        for target in self.targets:
            require_choice("lora.targets", target, ("attention", "mlp", "vision", "projector"))
        require(not self.path or self.rank > 0, "lora.path", self.path, "requires lora.rank; set it to the rank of the adapter")


@dataclass(kw_only=True, slots=True)
class ParallelSettings:
    """Parallelism of the trainer; the data-parallel size is world_size / (tp * pp)."""

    tp: int = 1
    """Tensor-parallel size: number of ranks across which each layer of the language model is
    sharded."""
    pp: int = 1
    """Pipeline-parallel size: number of stages over which the language model's layers are split."""
    vpp: int = 1
    """Number of model chunks per pipeline stage; a number above 1 uses the interleaved schedule."""
    ep: int = 1
    """Expert-parallel size: number of data-parallel ranks across which the experts of each layer
    are divided. Requires a model with experts; it must divide the data-parallel size."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel layers along the sequence dimension. This saves
    memory; it requires parallel.tp above 1."""
    recompute: str = "none"
    """Activation recomputation in the backward pass: none, selective (attention), vision (the
    vision blocks), or full (vision blocks and language-model layers)."""
    recompute_num_layers: int = 0
    """With parallel.recompute=full: number of language-model layers on each pipeline stage that are
    recomputed, beginning with the first; 0 recomputes all of them. The other layers need memory
    instead of time."""
    log_probs_chunk_size: int = 2048
    """Number of sampled tokens per chunk when logits are computed; the logits of only one chunk are
    in memory at a time."""
    offload_optimizer: bool = False
    """Keep the optimizer state and fp32 weights in host memory, and run the optimizer step on the
    CPU. Each rank uses an equal share of the node's CPU cores. Offloading the optimizer requires
    GPUs."""
    offload_params: bool = False
    """Move parameters and gradient buffers to host memory while the engine generates rollouts."""
    overlap_grad_reduce: bool = False
    """Overlap the data-parallel gradient reduction with the backward pass. Enable this setting if a
    multi-GPU profile shows that reductions take more than 3% of an update. For a 7B model on 16
    GPUs with one 400 Gb/s link per GPU, reducing 18 GB is estimated to take 0.4 s per update."""
    timeout_s: float = 600.0
    """Timeout of a collective operation in seconds; when it expires, the run ends instead of
    hanging."""
    straggler_timeout_s: float = 14400.0
    """Maximum time in seconds that a rank waits for a slower rank to finish its rollouts or its
    part of a checkpoint; a longer wait ends the run."""

    def __post_init__(self) -> None:
        require(self.tp >= 1, "parallel.tp", self.tp, "must be at least 1")
        require(self.pp >= 1, "parallel.pp", self.pp, "must be at least 1")
        require(self.vpp >= 1, "parallel.vpp", self.vpp, "must be at least 1")
        require(self.ep >= 1, "parallel.ep", self.ep, "must be at least 1")
        require(self.vpp == 1 or self.pp > 1, "parallel.vpp", self.vpp, "requires parallel.pp of at least 2")
        require_choice("parallel.recompute", self.recompute, ("none", "selective", "vision", "full"))
        require(self.recompute_num_layers >= 0, "parallel.recompute_num_layers", self.recompute_num_layers, "must not be negative")
        remedy = "requires parallel.recompute=full and parallel.vpp=1"
        fits = self.recompute == "full" and self.vpp == 1
        require(self.recompute_num_layers == 0 or fits, "parallel.recompute_num_layers", self.recompute_num_layers, remedy)
        require(self.log_probs_chunk_size >= 1, "parallel.log_probs_chunk_size", self.log_probs_chunk_size, "must be at least 1")
        require(
            0 < self.straggler_timeout_s < math.inf,
            "parallel.straggler_timeout_s",
            self.straggler_timeout_s,
            "must be a positive, finite number of seconds",
        )
        require(not self.overlap_grad_reduce or self.pp == 1, "parallel.overlap_grad_reduce", True, "requires parallel.pp=1")
        require(not self.sequence_parallel or self.tp > 1, "parallel.sequence_parallel", True, "requires parallel.tp of at least 2")
