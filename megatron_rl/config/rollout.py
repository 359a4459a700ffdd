"""Where episodes come from: the engine and the task."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_choice


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
class SandboxSettings:
    """Where the code of a task's episodes runs (sandbox/README.md)."""

    url: str = ""
    """A sandbox server, `python -m sandbox serve`; empty: a pool beside each engine."""
    size: int = 8
    """Boxes at once, one an episode that runs code; further episodes wait for one."""
    call_s: float = 10.0
    """Wall time of one call."""
    memory_mib: int = 1024
    """Of one box."""
    isolation: str = "auto"
    """none runs code of the policy without any wall: for tests of trusted code only."""

    def __post_init__(self) -> None:
        require(self.size >= 1, "task.sandbox.size", self.size, "must be at least 1")
        require(self.call_s > 0, "task.sandbox.call_s", self.call_s, "must be positive")
        require(self.memory_mib >= 64, "task.sandbox.memory_mib", self.memory_mib, "must be at least 64")
        require_choice("task.sandbox.isolation", self.isolation, ("auto", "none"))


@dataclass(kw_only=True, slots=True)
class JudgeSettings:
    """A model behind an OpenAI-compatible server that judges answers; its key is read from OPENAI_API_KEY."""

    urls: list[str] = field(default_factory=list)
    """Base addresses, e.g. http://judge:18901/v1; requests go to the healthy ones in turn. Empty: there is no judge."""
    model: str = ""
    """The served model; empty asks the server."""
    temperature: float = 0.0
    max_tokens: int = 512
    timeout_s: float = 60.0
    """Of one request..."""
    tries: int = 5
    """...of which a judgement makes so many at most; then the rollout is failed, never 0."""
    concurrency: int = 32
    cache: str = ""
    """A file that keeps verdicts between runs; empty keeps them for this run."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "task.judge.timeout_s", self.timeout_s, "must be positive")
        for key in ("tries", "concurrency", "max_tokens"):
            require(getattr(self, key) >= 1, f"task.judge.{key}", getattr(self, key), "must be at least 1")


@dataclass(kw_only=True, slots=True)
class DataSettings:
    """The user's questions: JSON lists, JSON lines or Parquet (README, "Your data")."""

    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)
    demonstrations: list[str] = field(default_factory=list)
    """Transcripts for the supervised warm start."""
    images: str = ""
    """The folder that relative image paths start from; empty: the folder of the file that names them."""
    max_eval: int = 0
    """Evaluate on the first so many examples; 0 takes all."""

    def __post_init__(self) -> None:
        require(self.max_eval >= 0, "task.data.max_eval", self.max_eval, "must not be negative")


@dataclass(kw_only=True, slots=True)
class TaskSettings:
    name: str = MISSING
    protocol: str = "pyvision"
    """How a task with tools is spoken: pyvision, codev, deepeyes or functions."""
    reward: str = "accuracy"
    """The rubric of a task with questions: accuracy, pyvision, deepeyes, codev or tapo."""
    max_turns: int = 10
    eval_max_turns: int = 0
    """0: as in training."""
    max_tokens_per_turn: int = 64
    max_pixels: int = 0
    """Of an episode's images together, at their final sizes; 0 sets no limit. Their number is bounded by engine.max_images."""
    max_seconds: float = 0.0
    """Wall time of an episode, looked at between turns; 0 sets no limit."""
    errors_end: bool = False
    """A call that goes wrong ends the episode; otherwise the policy reads the error and may mend it."""
    eval_samples: int = 8
    """Samples of each evaluation example at the training temperature, beside the greedy one."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        require_choice("task.protocol", self.protocol, ("pyvision", "codev", "deepeyes", "functions"))
        require_choice("task.reward", self.reward, ("accuracy", "pyvision", "deepeyes", "codev", "tapo"))
        for key in ("max_turns", "max_tokens_per_turn", "eval_samples"):
            require(getattr(self, key) >= 1, f"task.{key}", getattr(self, key), "must be at least 1")
        for key in ("eval_max_turns", "max_pixels", "max_seconds"):
            require(getattr(self, key) >= 0, f"task.{key}", getattr(self, key), "must not be negative")
