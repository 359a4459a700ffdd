"""The settings of a run. These dataclasses are the schema: yaml and the command line only pick values.

`Settings` is built once at the door (launch/) and passed inward as plain dataclasses; rooms receive the part they need.
Each check names the dotted key, the value and the remedy, because the user reads exactly that line.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise the ValueError that the user reads. Example: `parallel.tp=3: must divide the 4 attention heads; use 1, 2 or 4`."""
    if not condition:
        raise ValueError(f"{key}={value}: {remedy}")


def require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    require(value in choices, key, value, f"choose one of {', '.join(choices)}")


PARTS = ("vision", "merger", "language")
"""What can be frozen or have its own learning rate: the vision tower's blocks, its merger (projector), the language model."""


@dataclass(kw_only=True, slots=True)
class ModelSettings:
    path: str = MISSING
    """A Hugging Face Qwen2.5-VL folder: the policy's start, the reference of the KL term, the tokenizer and the processor."""
    dtype: str = "float32"
    frozen: list[str] = field(default_factory=list)
    """Parts that are not trained: any of vision (the tower), merger (its projector into the language model), language."""
    min_pixels: int = 3136
    max_pixels: int = 1003520
    """Every image, first prompt or later observation, is resized once to lie between these (sides are multiples of 28; leave the upper
    limit a little slack, because it is met by rounding down: 300 x 300 under 12544 = 112 * 112 becomes 84 x 84)."""

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
    """0 trains the model itself."""
    alpha: float = 32.0
    """Adapters count alpha / rank."""
    dropout: float = 0.0
    targets: list[str] = field(default_factory=lambda: ["attention", "mlp"])
    """Linear layers that get one: any of attention and mlp (of the language model), vision (the tower's blocks), projector (its merger)."""
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
    pp: int = 1
    vpp: int = 1
    """Model chunks a pipeline stage holds; above 1 the schedule is interleaved."""
    sequence_parallel: bool = False
    recompute: str = "none"
    """Activations computed again in the backward pass: none, selective (attention), or full (every layer, and the vision blocks)."""
    logprob_rows: int = 2048
    """Rows whose logits exist at a time; a row is one sampled token."""
    offload_optimizer: bool = False
    """Keep the optimizer's state and fp32 weights on the host (a GPU only; on a CPU they are there)."""
    offload_parameters: bool = False
    """Move parameters and gradient buffers to the host while the engine rolls out."""
    timeout_s: float = 600.0
    """A collective that waits longer ends the run instead of hanging it."""

    def __post_init__(self) -> None:
        require(self.tp >= 1, "parallel.tp", self.tp, "must be at least 1")
        require(self.pp >= 1, "parallel.pp", self.pp, "must be at least 1")
        require(self.vpp >= 1, "parallel.vpp", self.vpp, "must be at least 1")
        require(self.vpp == 1 or self.pp > 1, "parallel.vpp", self.vpp, "needs parallel.pp of at least 2")
        require_choice("parallel.recompute", self.recompute, ("none", "selective", "full"))
        require(self.logprob_rows >= 1, "parallel.logprob_rows", self.logprob_rows, "must be at least 1")
        require(not self.sequence_parallel or self.tp > 1, "parallel.sequence_parallel", True, "needs parallel.tp of at least 2")


@dataclass(kw_only=True, slots=True)
class EngineSettings:
    tp: int = 1
    """Ranks an engine spans; world / tp engines roll out side by side."""
    dtype: str = "float32"
    device: str = "auto"
    """auto takes CUDA where there is one; cuda refuses to start without it; cpu never uses it."""
    kv_cache_mib: int = 64
    """Memory for keys and values on a CPU."""
    gpu_memory_utilization: float = 0.45
    """Share of a GPU's memory for the engine's weights and cache."""
    max_model_len: int = 1024
    max_num_seqs: int = 256
    max_images: int = 8
    """Images in one context at most."""
    bucket_mib: int = 256
    """Weights travel to the engine in buckets of this size."""

    def __post_init__(self) -> None:
        require(self.tp >= 1, "engine.tp", self.tp, "must be at least 1")
        require_choice("engine.dtype", self.dtype, ("float32", "bfloat16"))
        require_choice("engine.device", self.device, ("auto", "cpu", "cuda"))
        share = self.gpu_memory_utilization
        require(0 < share < 1, "engine.gpu_memory_utilization", share, "must lie between 0 and 1")
        for key in ("kv_cache_mib", "max_model_len", "max_num_seqs", "max_images", "bucket_mib"):
            require(getattr(self, key) >= 1, f"engine.{key}", getattr(self, key), "must be at least 1")


@dataclass(kw_only=True, slots=True)
class OptimizerSettings:
    lr: float = 1e-6
    part_lr: dict[str, float] = field(default_factory=dict)
    """Peak learning rates of single parts in place of lr, e.g. {vision: 1e-7}; the schedule's shape is the same."""
    schedule: str = "constant"
    """constant, linear or cosine, after the warm-up; the last two fall to min_lr at the last step."""
    warmup_steps: int = 0
    min_lr: float = 0.0
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def check_optimizer(self, room: str) -> None:
        """Called by the settings that are optimizers' (`algo`, `sft`), so that the key in the message is the one to change."""
        require_choice(f"{room}.schedule", self.schedule, ("constant", "linear", "cosine"))
        require(self.lr >= 0, f"{room}.lr", self.lr, "must not be negative")
        for part, lr in self.part_lr.items():
            require_choice(f"{room}.part_lr", part, PARTS)
            require(lr >= self.min_lr, f"{room}.part_lr.{part}", lr, f"must be at least {room}.min_lr={self.min_lr}")
        require(self.warmup_steps >= 0, f"{room}.warmup_steps", self.warmup_steps, "must not be negative")
        require(0 <= self.min_lr <= self.lr, f"{room}.min_lr", self.min_lr, f"must lie between 0 and {room}.lr={self.lr}")
        require(self.clip_grad > 0, f"{room}.clip_grad", self.clip_grad, "must be positive; a large number switches clipping off")


@dataclass(kw_only=True, slots=True)
class AlgoSettings(OptimizerSettings):
    """GRPO (arXiv 2402.03300) with the corrections of DAPO (2503.14476) and Dr. GRPO (2503.20783) as switches."""

    group_size: int = 8
    prompts_per_step: int = 32
    minibatches: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 8192
    """Tokens of one packed micro-batch at most (a longer single sequence is a micro-batch of its own)."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); Dr. GRPO does not."""
    std_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.2
    """DAPO's clip-higher: a value above clip_low."""
    dual_clip: float = 0.0
    """Bound on ratio * |advantage| for negative advantages (arXiv 1912.09729), e.g. 3; 0 is off."""
    aggregation: str = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO) or fixed_length (Dr. GRPO: divide by episodes * fixed_length)."""
    fixed_length: int = 0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    temperature: float = 1.0
    """Of the policy as a distribution: sampling and training use the same one."""

    def __post_init__(self) -> None:
        self.check_optimizer("algo")
        for key in ("prompts_per_step", "minibatches", "epochs", "micro_batch_tokens"):
            require(getattr(self, key) >= 1, f"algo.{key}", getattr(self, key), "must be at least 1")
        require(self.group_size >= 2, "algo.group_size", self.group_size, "must be at least 2: a group of one has no baseline")
        remedy = f"must divide by algo.minibatches={self.minibatches}: minibatches are cut by groups"
        require(self.prompts_per_step % self.minibatches == 0, "algo.prompts_per_step", self.prompts_per_step, remedy)
        require_choice("algo.aggregation", self.aggregation, ("token_mean", "sequence_mean", "fixed_length"))
        fits, remedy = (self.aggregation == "fixed_length") == (self.fixed_length > 0), "goes with algo.aggregation=fixed_length, and only with it"
        require(fits, "algo.fixed_length", self.fixed_length, remedy)
        require_choice("algo.kl_estimator", self.kl_estimator, ("k1", "k2", "k3"))
        require(self.temperature > 0, "algo.temperature", self.temperature, "must be positive: greedy sampling has no gradient")
        require(self.dual_clip == 0 or self.dual_clip > 1, "algo.dual_clip", self.dual_clip, "must be above 1, or 0 to switch it off")
        require(0 <= self.clip_low < 1, "algo.clip_low", self.clip_low, "must lie in [0, 1)")
        require(self.clip_high >= 0, "algo.clip_high", self.clip_high, "must not be negative")


@dataclass(kw_only=True, slots=True)
class SftSettings(OptimizerSettings):
    """The supervised warm start: stages one after the other, each with its own demonstrations."""

    batch_size: int = 64
    num_demonstrations: int = 1200
    """Drawn once a stage; batches go round them in order."""
    micro_batch_tokens: int = 8192
    splits: list[str] = field(default_factory=lambda: ["correct", "biased"])
    """The task's demonstration splits, in order..."""
    steps: list[int] = field(default_factory=lambda: [250, 60])
    """...and the optimizer steps of each."""

    def __post_init__(self) -> None:
        self.check_optimizer("sft")
        require(self.batch_size >= 1, "sft.batch_size", self.batch_size, "must be at least 1")
        require(len(self.splits) == len(self.steps), "sft.steps", self.steps, f"needs one number for each of sft.splits={self.splits}")


@dataclass(kw_only=True, slots=True)
class TaskSettings:
    name: str = MISSING
    max_turns: int = 10
    max_tokens_per_turn: int = 64
    eval_samples: int = 8
    """Temperature-1 samples of each evaluation example, beside the greedy one."""

    def __post_init__(self) -> None:
        for key in ("max_turns", "max_tokens_per_turn", "eval_samples"):
            require(getattr(self, key) >= 1, f"task.{key}", getattr(self, key), "must be at least 1")


@dataclass(kw_only=True, slots=True)
class RunSettings:
    dir: str = MISSING
    """The run folder: resolved config, metrics, recorded rollouts, final checkpoint."""
    seed: int = 0
    steps: int = 40
    eval_every: int = 0
    """Evaluate every so many steps; 0 evaluates once, at the end."""
    max_failed: float = 0.1
    """The run stops when a larger fraction of a step's rollouts failed through our own fault."""
    require_improvement: bool = False
    """End with an error unless the mean return of the last 10 steps is above that of the first 10."""
    record_best: int = 1
    record_worst: int = 1
    """Rollouts a step to keep as jsonl and png."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "run.steps", self.steps, "must be at least 1")
        remedy = "run.require_improvement compares the first with the last 10 steps: use at least 20"
        require(not self.require_improvement or self.steps >= 20, "run.steps", self.steps, remedy)


@dataclass(kw_only=True, slots=True)
class CheckpointSettings:
    """Complete training states under run.dir/checkpoints: weights, optimizer, schedule, generators, the run's own memory."""

    every: int = 0
    """Steps between checkpoints; 0 writes none."""
    keep_last: int = 2
    keep_best: int = 1
    """Of those with an evaluation, the best so many are kept besides the last."""
    background: bool = True
    """Write while training goes on; the folder appears when it is complete."""
    optimizer: str = "fully_reshardable"
    """fully_reshardable: resumes at any layout; dp_reshardable: faster to write, only the data-parallel size may change."""
    resume: bool = True
    """Continue from the newest complete checkpoint of run.dir, if there is one."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "must not be negative; 0 writes none")
        require(self.keep_last >= 1, "checkpoint.keep_last", self.keep_last, "must be at least 1")
        require(self.keep_best >= 0, "checkpoint.keep_best", self.keep_best, "must not be negative")
        require_choice("checkpoint.optimizer", self.optimizer, ("fully_reshardable", "dp_reshardable"))


@dataclass(kw_only=True, slots=True)
class WandbSettings:
    mode: str = "disabled"
    project: str = "megatron-rl"

    def __post_init__(self) -> None:
        require_choice("wandb.mode", self.mode, ("disabled", "offline", "online"))


@dataclass(kw_only=True, slots=True)
class Settings:
    stage: str = "grpo"
    """grpo, or sft for the supervised warm start."""
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: LoraSettings = field(default_factory=LoraSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    algo: AlgoSettings = field(default_factory=AlgoSettings)
    sft: SftSettings = field(default_factory=SftSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    run: RunSettings = field(default_factory=RunSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    wandb: WandbSettings = field(default_factory=WandbSettings)

    def __post_init__(self) -> None:
        require_choice("stage", self.stage, ("grpo", "sft"))
