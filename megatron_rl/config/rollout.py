"""Settings of rollout generation: engine, task, sandbox, judge and data."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_address, require_choice, require_url
from megatron_rl.config.client import ClientSettings
from megatron_rl.config.lewis import ListenerSettings, SpeakerSettings
from megatron_rl.config.tools import ToolSettings


@dataclass(kw_only=True, slots=True)
class EngineSettings:
    """Settings of the vLLM engine that samples the policy's responses."""

    mode: str = "colocated"
    """Location of the engine. colocated: the engine runs in the trainer's processes, and generation
    and training alternate on the same devices. server: separate vLLM servers generate rollouts
    while the trainer trains."""
    urls: list[str] = field(default_factory=list)
    """URLs of the inference servers for mode=server, e.g. http://node2:8000; start each server
    with the command that launch/server_command.py prints."""
    token_file: str = ""
    """File with the access token of the servers in engine.urls; the command printed by
    launch/server_command.py makes the servers read the same file. Not needed for servers that the
    run starts."""
    num_local_servers: int = 0
    """Number of inference servers that the run itself starts when mode=server; 0 starts none. The
    servers run on rank 0's node and use the GPUs after those of the node's ranks."""
    startup_timeout_s: float = 900.0
    """Maximum startup time in seconds of a server that the run starts."""
    tp: int = 1
    """Tensor-parallel size of an engine; with mode=colocated, world_size / tp engines generate in
    parallel."""
    dtype: str = "auto"
    """Data type of the engine's weights, activations and KV cache: float32 or bfloat16; auto is
    bfloat16 on GPUs and float32 on CPUs."""
    device: str = "auto"
    """Device of the engine: auto uses CUDA if available, cuda requires it, cpu never uses it."""
    kv_cache_mib: int = 64
    """Size of the KV cache in MiB per rank when the engine runs on a CPU."""
    return_routed_experts: bool = False
    """Record the experts that the engine uses for each token, for a model with experts;
    algo.routing_replay=rollout sets it."""
    gpu_memory_utilization: float = 0.45
    """Fraction of a GPU's memory that the engine uses for its weights and KV cache."""
    max_model_len: int = 4096
    """Maximum length of a sequence in tokens, including prompts, images and responses; an episode
    that reaches it ends with stop reason max_tokens."""
    max_num_seqs: int = 256
    """Maximum number of responses that an engine generates concurrently; further requests are
    queued."""
    max_images: int = 8
    """Maximum number of images in a sequence; an episode that would exceed it ends with stop reason
    max_images."""
    bucket_mib: float = 256.0
    """Size in MiB of the buckets in which weights are sent from the trainer to the engine; may be
    fractional, e.g. 0.5."""
    health_timeout_s: float = 10.0
    """Timeout in seconds for health checks and request cancellations; a server that exceeds it is
    marked unhealthy, and its requests are re-routed."""
    request_timeout_s: float = 600.0
    """Timeout in seconds for one response from a server; when it expires, the request is sent to
    another server."""
    outage_timeout_s: float = 600.0
    """Time in seconds that a run waits while no server is healthy. After that, the run saves its
    finished work and exits; the same command resumes the run."""

    def __post_init__(self) -> None:
        require_choice("engine.mode", self.mode, ("colocated", "server"))
        for url in self.urls:
            require_url("engine.urls", url)
        remedy = "contains a server twice; list each server once"
        require(len({url.rstrip("/") for url in self.urls}) == len(self.urls), "engine.urls", self.urls, remedy)
        remedy = (
            "is required by engine.mode=server; set the URLs of running servers, or let the run start servers: engine.num_local_servers=2"
        )
        require(self.mode == "colocated" or self.num_endpoints > 0, "engine.urls", self.urls, remedy)
        remedy = "requires engine.mode=server; set this mode, or remove this setting"
        require(not self.urls or self.mode == "server", "engine.urls", self.urls, remedy)
        require(self.num_local_servers == 0 or self.mode == "server", "engine.num_local_servers", self.num_local_servers, remedy)
        require(self.num_local_servers >= 0, "engine.num_local_servers", self.num_local_servers, "must not be negative; 0 starts none")
        remedy = "cannot be combined with engine.urls; set only one of the two"
        require(not (self.num_local_servers and self.urls), "engine.num_local_servers", self.num_local_servers, remedy)
        remedy = "must be empty, because the run creates the token of its own servers; remove this setting"
        require(not (self.num_local_servers and self.token_file), "engine.token_file", self.token_file, remedy)
        require(self.tp >= 1, "engine.tp", self.tp, "must be at least 1")
        require_choice("engine.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        require_choice("engine.device", self.device, ("auto", "cpu", "cuda"))
        share = self.gpu_memory_utilization
        require(0 < share < 1, "engine.gpu_memory_utilization", share, "must be between 0 and 1")
        require(0 < self.bucket_mib < math.inf, "engine.bucket_mib", self.bucket_mib, "must be a positive number")
        for key in ("startup_timeout_s", "health_timeout_s", "request_timeout_s", "outage_timeout_s"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"engine.{key}", value, "must be a positive, finite number of seconds")
        for key in ("kv_cache_mib", "max_model_len", "max_num_seqs", "max_images"):
            require(getattr(self, key) >= 1, f"engine.{key}", getattr(self, key), "must be at least 1")

    @property
    def num_endpoints(self) -> int:
        """Number of inference servers (external or started by the run) if mode=server."""
        return len(self.urls) or self.num_local_servers

    def places(self, *, num_ranks: int) -> list[list[int]]:
        """Return the device indices of each server that the run starts.

        The servers use the devices that follow the devices of the ranks.

        Example: tp=2 and num_local_servers=2 with num_ranks=4 result in [[4, 5], [6, 7]].
        """
        firsts = [num_ranks + number * self.tp for number in range(self.num_local_servers)]
        return [list(range(first, first + self.tp)) for first in firsts]


@dataclass(kw_only=True, slots=True)
class SandboxSettings:
    """Settings of the sandbox in which a task's episodes run code (sandbox/README.md)."""

    url: str = ""
    """URL of a sandbox server (python -m megatron_rl_sandbox serve). The server uses its own
    limits, not the limits in task.sandbox. If empty, each engine starts a local pool of boxes,
    which are isolated Python interpreters."""
    token_file: str = ""
    """File with the access token of the server at task.sandbox.url, required if the server is on
    another machine; not needed for a service that the run starts."""
    size: int = 8
    """Number of concurrent boxes in a pool. An episode that runs code occupies one box; if all are
    occupied, further episodes wait."""
    call_timeout_s: float = 10.0
    """Wall-clock timeout of one call in seconds; if it expires, the state of the box is lost."""
    memory_mib: int = 1024
    """Memory limit of one box in MiB, excluding memory that is shared by all boxes."""
    isolation: str = "auto"
    """Isolation of a box: auto uses every isolation feature that the host supports; none runs the
    policy's code without isolation (only for tests with trusted code)."""
    allow_missing: list[str] = field(default_factory=list)
    """Isolation features that this host may lack, named as in the output of python -m
    megatron_rl_sandbox doctor; a missing feature that is not listed prevents the pool from
    starting."""

    def __post_init__(self) -> None:
        remedy = "has no effect without task.sandbox.url; set the URL of the server"
        require(bool(self.url) or not self.token_file, "task.sandbox.token_file", self.token_file, remedy)
        require_address("task.sandbox.url", self.url)
        require(self.size >= 1, "task.sandbox.size", self.size, "must be at least 1")
        require(self.call_timeout_s > 0, "task.sandbox.call_timeout_s", self.call_timeout_s, "must be positive")
        require(self.memory_mib >= 64, "task.sandbox.memory_mib", self.memory_mib, "must be at least 64")
        require_choice("task.sandbox.isolation", self.isolation, ("auto", "none"))
        for name in self.allow_missing:
            require_choice(
                "task.sandbox.allow_missing", name, ("kernel_memory", "cores", "queues", "crosstalk", "information", "kernel_calls")
            )


@dataclass(kw_only=True, slots=True)
class JudgeSettings(ClientSettings):
    """Settings of the judge, a model on OpenAI-compatible servers that judges answers."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of the judge's servers, e.g. http://judge:18901/v1; each request goes to the least
    busy healthy server. Empty means no judge."""
    token_file: str = ""
    """File with the API key of the judge's servers, used instead of OPENAI_API_KEY; not needed for
    a service that the run starts."""
    model: str = ""
    """Name of the served judge model; if empty, it is queried from the server."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_tokens: int = 512
    """Maximum number of tokens in one response of the judge."""
    cache: str = ""
    """File that caches verdicts across runs; if empty, verdicts are cached for this run only."""
    always_ask: bool = False
    """Send every valid answer to the judge. If false, the judge receives only the answers that
    neither a rule nor the benchmark's scoring can decide."""
    audit_fraction: float = 0.0
    """Fraction of the answers that both the rules and the judge decide, to measure how often they
    agree. The reward does not depend on it."""

    def __post_init__(self) -> None:
        self.check_client("task.judge")
        has_judge, remedy = bool(self.urls or self.cache or self.model), "no judge is configured; set task.judge.urls"
        require(has_judge or not self.always_ask, "task.judge.always_ask", self.always_ask, remedy)
        require(0 <= self.audit_fraction <= 1, "task.judge.audit_fraction", self.audit_fraction, "must be between 0 and 1")
        require(has_judge or not self.audit_fraction, "task.judge.audit_fraction", self.audit_fraction, remedy)
        require(self.max_tokens >= 1, "task.judge.max_tokens", self.max_tokens, "must be at least 1")


@dataclass(kw_only=True, slots=True)
class ColumnSettings:
    """Column names in the user's files, e.g. {question: problem, answer: solution}."""

    question: str = ""
    """Column with the question, as text or chat messages; empty detects common names
    (docs/data.md)."""
    answer: str = ""
    """Column with the ground-truth answer; empty detects common names."""
    images: str = ""
    """Column with the image or images; empty detects common names."""
    id: str = ""
    """Column with the row's identifier (text or a number); empty uses the column id."""
    data_source: str = ""
    """Column with the data source, which selects the rule for comparing answers. If empty, the
    column `data_source` is used."""
    ignored: list[str] = field(default_factory=list)
    """Columns of question and transcript files that are ignored without a warning; a key of the
    column extra_info is written as extra_info.KEY."""


BENCHMARKS = (
    "vstar", "hrbench", "mathverse", "mathvista", "vsi_bench", "tir_bench", "visualprobe", "mathvision", "wemath", "dynamath", "vlmblind",
    "puzzlevqa", "logicvista",
)  # fmt: skip
"""Names of the benchmarks in data/benchmarks/catalog.py."""


@dataclass(kw_only=True, slots=True)
class DataSettings:
    """Question datasets: files, directories or data in the Hugging Face cache (docs/data.md)."""

    train: list[str] = field(default_factory=list)
    """Files with training questions, or data directories of a game."""
    eval: list[str] = field(default_factory=list)
    """Files with held-out questions for evaluation."""
    demonstrations: list[str] = field(default_factory=list)
    """Files with transcripts for supervised fine-tuning."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    images: str = ""
    """Base directory for relative image paths; empty uses the directory of the data file."""
    image_roots: list[str] = field(default_factory=list)
    """Additional directories from which images may be loaded. An image outside the allowed
    directories is never read, even if a row refers to it by an absolute path, by .. or through a
    link."""
    max_eval: int = 0
    """Maximum number of examples in an evaluation, taken from the start of the data; 0 uses all."""
    benchmark: str = ""
    """Published benchmark to which the files in task.data.eval belong: vstar, hrbench, mathverse,
    mathvista, vsi_bench, tir_bench, visualprobe, mathvision, wemath, dynamath, vlmblind, puzzlevqa
    or logicvista. The benchmark determines format, scoring and report (docs/evaluation.md)."""
    shuffle_options: int = 0
    """Random seed for shuffling a benchmark's answer options; 0 keeps the published order."""
    allow_grounding_tokens: bool = False
    """Allow Qwen2-VL's grounding tokens (<|object_ref_start|>, <|box_start|>, <|quad_start|> and
    the matching end tokens) in questions and observations. If false, a blank is inserted into these
    tokens, so that they are tokenized as ordinary text. All other special tokens in data are always
    treated in this way."""
    frames: int = 32
    """Maximum number of images per benchmark question. If a question has more images, e.g. the
    frames of a video, evenly spaced images are selected."""

    def __post_init__(self) -> None:
        for key in ("max_eval", "shuffle_options"):
            require(getattr(self, key) >= 0, f"task.data.{key}", getattr(self, key), "must not be negative")
        require_choice("task.data.benchmark", self.benchmark, ("", *BENCHMARKS))
        require(self.frames >= 1, "task.data.frames", self.frames, "must be at least 1")
        remedy = "requires a published benchmark; set task.data.benchmark"
        require(bool(self.benchmark) or not self.shuffle_options, "task.data.shuffle_options", self.shuffle_options, remedy)


@dataclass(kw_only=True, slots=True)
class TaskSettings:
    """Settings of the task: environment, rules and limits, including sandbox, judge and data."""

    name: str = MISSING
    """Name of the task: number_line, ez_points, points24, blackjack, agent, alfworld, gymnasium,
    lewis_speaker, lewis_listener, visual_python, visual_search, vqa, or a registered task of your
    own."""
    tool_format: str = "pyvision"
    """Prompt and tool-call format of a task with tools: pyvision, codev, deepeyes or functions."""
    reward: str = ""
    """Name of the reward function: accuracy, pyvision, deepeyes, codev or tapo for tasks with
    questions, or the name of a user-defined function. Several names can be joined by +, e.g.
    accuracy+mine; their rewards are summed. Empty uses the task's default, which is accuracy for
    tasks with questions."""
    options: Any = None
    """Task-specific options, defined by the options dataclass of the game (docs/games.md) or of
    your own task (docs/extend.md)."""
    prompt: str = ""
    """Prompt template of task vqa; {question} is replaced by the question and its images. Empty
    uses a template that requests the answer between <answer> and </answer>."""
    system_prompt: str = ""
    """System prompt of task vqa; empty uses the system prompt in the data row. If the row has no
    system prompt either, the chat template's default is used."""
    max_turns: int = 10
    """Maximum number of policy turns in an episode."""
    eval_max_turns: int = 0
    """Maximum number of turns in an evaluation episode; 0 uses task.max_turns."""
    max_new_tokens: int = 512
    """Maximum number of tokens that the policy samples per turn."""
    max_pixels: int = 0
    """Maximum total number of pixels of all images in a sequence, after resizing; 0 sets no limit.
    The number of images is limited by engine.max_images."""
    max_seconds: float = 0.0
    """Wall-clock limit of an episode in seconds, checked between turns; 0 sets no limit."""
    env_timeout_s: float = 1800.0
    """Timeout in seconds for a reset or step of an environment, including waits for tools; if it
    expires, the episode fails. 0 sets no limit."""
    stop_on_tool_error: bool = False
    """End the episode when a tool call fails; false returns the error to the policy, which may
    correct the call."""
    eval_samples: int = 0
    """Number of episodes per evaluation example that are sampled at the training temperature, in
    addition to one greedily decoded episode."""
    tools: ToolSettings = field(default_factory=ToolSettings)
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    listener: ListenerSettings = field(default_factory=ListenerSettings)
    speaker: SpeakerSettings = field(default_factory=SpeakerSettings)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        require_choice("task.tool_format", self.tool_format, ("pyvision", "codev", "deepeyes", "functions"))
        if self.tools.mcp:
            names = [server.name for server in self.tools.mcp]
            require(self.name == "visual_python", "task.tools.mcp", names, "requires task=visual_python; remove this setting")
            remedy = "does not support the tools of task.tools.mcp; use task.tool_format=functions"
            require(self.tool_format == "functions", "task.tool_format", self.tool_format, remedy)
        require(not self.prompt or self.prompt.count("{question}") == 1, "task.prompt", self.prompt, "must contain {question} exactly once")
        for key in ("max_turns", "max_new_tokens"):
            require(getattr(self, key) >= 1, f"task.{key}", getattr(self, key), "must be at least 1")
        for key in ("eval_max_turns", "eval_samples", "max_pixels", "max_seconds", "env_timeout_s"):
            require(getattr(self, key) >= 0, f"task.{key}", getattr(self, key), "must not be negative")

    def require_no_words(self) -> None:
        """Raise ValueError if a prompt is configured for a task with fixed prompts."""
        for key, words in (("prompt", self.prompt), ("system_prompt", self.system_prompt)):
            require(not words, f"task.{key}", words, f"task {self.name} has fixed prompts; remove this setting, or use task=vqa")
