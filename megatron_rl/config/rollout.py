"""Settings of rollout generation: engine, task, sandbox, judge and data."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_address, require_choice
from megatron_rl.config.lewis import ListenerSettings, SpeakerSettings


@dataclass(kw_only=True, slots=True)
class EngineSettings:
    """Settings of the vLLM engine that samples the policy's responses."""

    mode: str = "colocated"
    """Location of the engine: colocated runs in the trainer's processes and shares their devices in
    turn; server runs on separate vLLM servers, in parallel with training."""
    urls: list[str] = field(default_factory=list)
    """URLs of the inference servers with mode=server, e.g. http://node2:8000; start them with the
    command that launch/server_command.py prints."""
    token_file: str = ""
    """File with the token of the servers at `urls`; the command from
    launch/server_command.py makes the servers read the same file. Not needed for servers that the
    run starts."""
    num_local_servers: int = 0
    """Number of inference servers that the run starts itself with mode=server, on the GPUs after
    those of the ranks on rank 0's node; 0 starts none."""
    startup_timeout_s: float = 900.0
    """Timeout in seconds until a server that the run starts responds."""
    tp: int = 1
    """Tensor-parallel size of an engine; colocated, world_size / tp engines generate in
    parallel."""
    dtype: str = "float32"
    """Data type of the engine's weights, activations and KV cache: float32 or bfloat16."""
    device: str = "auto"
    """Device of the engine: auto uses CUDA if available, cuda requires it, cpu never uses it."""
    kv_cache_mib: int = 64
    """Size of the KV cache on a CPU, in MiB per rank."""
    gpu_memory_utilization: float = 0.45
    """Fraction of a GPU's memory for the engine's weights and KV cache."""
    max_model_len: int = 1024
    """Maximum length of a sequence in tokens, including prompts, images and responses; an episode
    that reaches it ends with max_tokens."""
    max_num_seqs: int = 256
    """Maximum number of responses that an engine samples concurrently; further requests are
    queued."""
    max_images: int = 8
    """Maximum number of images in a sequence; an episode that would exceed it ends with
    max_images."""
    bucket_mib: float = 256.0
    """Size in MiB of the buckets in which the trainer's weights are sent to the engine; may be
    fractional, e.g. 0.5."""
    health_timeout_s: float = 10.0
    """Timeout in seconds of health checks and cancellations of a server; one that exceeds it is
    marked unhealthy, and its requests are re-routed."""
    request_timeout_s: float = 600.0
    """Timeout in seconds of one response from a server; when it expires, the request goes to
    another server."""
    outage_timeout_s: float = 600.0
    """Time in seconds that a run waits while no server is healthy. Then it keeps the finished work
    and exits; the same command resumes it."""

    def __post_init__(self) -> None:
        require_choice("engine.mode", self.mode, ("colocated", "server"))
        for url in self.urls:
            require_address("engine.urls", url)
            require(url.startswith(("http://", "https://")), "engine.urls", url, "is no address; give http://HOST:PORT")
        remedy = "names an engine twice; name each once"
        require(len({url.rstrip("/") for url in self.urls}) == len(self.urls), "engine.urls", self.urls, remedy)
        remedy = "is needed by engine.mode=server; name its servers, or have the run start some: engine.num_local_servers=2"
        require(self.mode == "colocated" or self.num_endpoints > 0, "engine.urls", self.urls, remedy)
        remedy = "are asked by engine.mode=server alone; choose it, or leave them out"
        require(not self.urls or self.mode == "server", "engine.urls", self.urls, remedy)
        require(self.num_local_servers == 0 or self.mode == "server", "engine.num_local_servers", self.num_local_servers, remedy)
        require(self.num_local_servers >= 0, "engine.num_local_servers", self.num_local_servers, "must not be negative; 0 starts none")
        remedy = "are started by the run, and engine.urls names others; give one of both"
        require(not (self.num_local_servers and self.urls), "engine.num_local_servers", self.num_local_servers, remedy)
        remedy = "the run makes the token of its own servers; leave it out"
        require(not (self.num_local_servers and self.token_file), "engine.token_file", self.token_file, remedy)
        require(self.tp >= 1, "engine.tp", self.tp, "must be at least 1")
        require_choice("engine.dtype", self.dtype, ("float32", "bfloat16"))
        require_choice("engine.device", self.device, ("auto", "cpu", "cuda"))
        share = self.gpu_memory_utilization
        require(0 < share < 1, "engine.gpu_memory_utilization", share, "must lie between 0 and 1")
        require(0 < self.bucket_mib < math.inf, "engine.bucket_mib", self.bucket_mib, "must be a positive number")
        for key in ("startup_timeout_s", "health_timeout_s", "request_timeout_s", "outage_timeout_s"):
            value = getattr(self, key)
            require(0 < value < math.inf, f"engine.{key}", value, "must be a number of seconds")
        for key in ("kv_cache_mib", "max_model_len", "max_num_seqs", "max_images"):
            require(getattr(self, key) >= 1, f"engine.{key}", getattr(self, key), "must be at least 1")

    @property
    def num_endpoints(self) -> int:
        """Number of inference servers with mode=server, external or started by the run."""
        return len(self.urls) or self.num_local_servers

    def places(self, *, num_ranks: int) -> list[list[int]]:
        """Return the devices of each server that the run starts; they follow those of the ranks.

        Example: tp=2 and num_local_servers=2 with num_ranks=4 give [[4, 5], [6, 7]].
        """
        firsts = [num_ranks + number * self.tp for number in range(self.num_local_servers)]
        return [list(range(first, first + self.tp)) for first in firsts]


@dataclass(kw_only=True, slots=True)
class SandboxSettings:
    """Settings of the sandbox in which a task's episodes run code (sandbox/README.md)."""

    url: str = ""
    """URL of a sandbox server (python -m sandbox serve), which has its own limits; empty opens a
    local pool for each engine."""
    token_file: str = ""
    """File with the token of the server at `url`, required if it is on another machine; not needed
    for a service that the run starts."""
    size: int = 8
    """Number of concurrent boxes in a pool; an episode that runs code uses one, and further
    episodes wait."""
    call_timeout_s: float = 10.0
    """Wall-clock timeout of one call in seconds; when it expires, the state of the box is lost."""
    memory_mib: int = 1024
    """Memory limit of one box in MiB, on top of the memory that all boxes share."""
    isolation: str = "auto"
    """Isolation of a box: auto uses everything that the host supports, none runs the policy's code
    without isolation (for tests of trusted code only)."""
    allow_missing: list[str] = field(default_factory=list)
    """Isolation features that may be missing on this host, by their names in python -m sandbox
    doctor; otherwise a missing one prevents the pool from starting."""

    def __post_init__(self) -> None:
        remedy = "is for a server: give its address, task.sandbox.url, too"
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
class JudgeSettings:
    """Model behind an OpenAI-compatible server that judges answers."""

    urls: list[str] = field(default_factory=list)
    """Base URLs of the judge, e.g. http://judge:18901/v1; requests go to the least busy healthy
    one. Empty means no judge."""
    token_file: str = ""
    """File with the API key of the servers, instead of OPENAI_API_KEY; not needed for a service
    that the run starts."""
    model: str = ""
    """Name of the served model; empty queries it from the server."""
    temperature: float = 0.0
    """Sampling temperature of the judge."""
    max_tokens: int = 512
    """Maximum number of tokens in one response of the judge."""
    timeout_s: float = 60.0
    """Timeout of one request, in seconds."""
    outage_timeout_s: float = 60.0
    """Maximum time in seconds that a request waits while all servers are in backoff after failures;
    also the maximum backoff unless the server requests a longer one."""
    max_attempts: int = 5
    """Maximum number of requests for one verdict; after the last, the rollout counts as failed and
    gets no reward."""
    concurrency: int = 32
    """Maximum number of concurrent requests of one judge, over all its servers."""
    cache: str = ""
    """File that caches verdicts across runs; empty caches them for this run only."""
    always_ask: bool = False
    """Send every valid answer to the judge, also those that rules or published scores could decide;
    false sends only the undecided ones."""

    def __post_init__(self) -> None:
        for url in self.urls:
            require_address("task.judge.urls", url)
        has_judge = bool(self.urls or self.cache or self.model)
        require(has_judge or not self.always_ask, "task.judge.always_ask", self.always_ask, "there is no judge; give task.judge.urls")
        require(self.timeout_s > 0, "task.judge.timeout_s", self.timeout_s, "must be positive")
        require(
            0 <= self.outage_timeout_s < math.inf,
            "task.judge.outage_timeout_s",
            self.outage_timeout_s,
            "must be a number of seconds; 0 waits for none",
        )
        for key in ("max_attempts", "concurrency", "max_tokens"):
            require(getattr(self, key) >= 1, f"task.judge.{key}", getattr(self, key), "must be at least 1")


@dataclass(kw_only=True, slots=True)
class ColumnSettings:
    """Column names in the user's files, e.g. {question: problem, answer: solution}."""

    question: str = ""
    """Column of the question, as text or messages; empty detects the usual names (docs/data.md)."""
    answer: str = ""
    """Column of the ground-truth answer; empty detects the usual names."""
    images: str = ""
    """Column of the image or images; empty detects the usual names."""
    id: str = ""
    """Column of the row's identifier, a name or a number; empty uses id."""
    data_source: str = ""
    """Column that selects the rule for comparing answers; empty uses data_source."""
    ignored: list[str] = field(default_factory=list)
    """Columns of questions and transcripts that are deliberately unused and cause no warning; keys
    of extra_info are written extra_info.KEY."""


BENCHMARKS = (
    "vstar", "hrbench", "mathverse", "mathvista", "vsi_bench", "tir_bench", "visualprobe", "mathvision", "wemath", "dynamath", "vlmblind",
)  # fmt: skip
"""Names of the benchmarks in data/benchmarks/catalog.py."""


@dataclass(kw_only=True, slots=True)
class DataSettings:
    """Question datasets: files, directories or data in the Hugging Face cache (docs/data.md)."""

    train: list[str] = field(default_factory=list)
    """Files of training questions, or directories of the games."""
    eval: list[str] = field(default_factory=list)
    """Files of held-out questions for evaluations."""
    demonstrations: list[str] = field(default_factory=list)
    """Files of transcripts for supervised fine-tuning."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    images: str = ""
    """Base directory of relative image paths; empty uses the directory of the file that contains
    the path."""
    image_roots: list[str] = field(default_factory=list)
    """Additional directories from which rows may load images, by absolute paths, by .. or through
    links; images outside are not read."""
    max_eval: int = 0
    """Number of examples in an evaluation, from the first on; 0 uses all."""
    benchmark: str = ""
    """Published benchmark to which the files in task.data.eval belong; sets format, scoring and
    report (docs/evaluation.md): vstar, hrbench, mathverse, mathvista, vsi_bench, tir_bench,
    visualprobe, mathvision, wemath, dynamath or vlmblind."""
    shuffle_options: int = 0
    """Seed of the order of a benchmark's answer options; 0 keeps the published order."""
    allow_grounding_tokens: bool = False
    """Allow Qwen2-VL's grounding tokens (<|object_ref_start|>, <|box_start|>, <|quad_start|> and
    their ends) in questions and observations. Otherwise a blank is inserted, as in all special
    tokens in data, so that they are not tokenized as such."""
    frames: int = 32
    """Maximum number of images of a benchmark question, sampled evenly; for videos these are
    frames."""

    def __post_init__(self) -> None:
        for key in ("max_eval", "shuffle_options"):
            require(getattr(self, key) >= 0, f"task.data.{key}", getattr(self, key), "must not be negative")
        require_choice("task.data.benchmark", self.benchmark, ("", *BENCHMARKS))
        require(self.frames >= 1, "task.data.frames", self.frames, "must be at least 1")
        remedy = "is for a published benchmark; name it in task.data.benchmark"
        require(bool(self.benchmark) or not self.shuffle_options, "task.data.shuffle_options", self.shuffle_options, remedy)


@dataclass(kw_only=True, slots=True)
class TaskSettings:
    """Settings of the task: environment, rules and limits, with its sandbox, judge and data."""

    name: str = MISSING
    """Name of the task: number_line, ez_points, points24, blackjack, alfworld, lewis_speaker,
    lewis_listener, visual_python, visual_search, vqa, or your own."""
    tool_format: str = "pyvision"
    """Prompt and tool-call format of a task with tools: pyvision, codev, deepeyes or functions."""
    reward: str = ""
    """Reward: accuracy, pyvision, deepeyes, codev or tapo for a task with questions, a function of
    your own, or both joined as accuracy+mine. Empty uses the task's default, which is accuracy for
    questions."""
    options: Any = None
    """Task-specific options: of a game (docs/games.md), or of your own task, as its dataclass
    defines them (docs/extend.md)."""
    prompt: str = ""
    """Prompt template of task vqa, with {question} at the position of question and images; empty
    requests the answer between <answer> and </answer>."""
    system_prompt: str = ""
    """System prompt of task vqa; empty uses that of the data's row, or else the default of the chat
    template."""
    max_turns: int = 10
    """Maximum number of turns of the policy in an episode."""
    eval_max_turns: int = 0
    """Maximum number of turns in an evaluation episode; 0 uses task.max_turns."""
    max_new_tokens: int = 64
    """Maximum number of tokens that the policy samples in a turn."""
    max_pixels: int = 0
    """Maximum total number of pixels of the images in a sequence, after resizing; 0 sets no limit.
    The number of images is limited by engine.max_images."""
    max_seconds: float = 0.0
    """Wall-clock limit of an episode in seconds, checked between turns; 0 sets no limit."""
    env_timeout_s: float = 1800.0
    """Timeout in seconds of an environment's reset or step, including waits for tools; when it
    expires, the episode fails. 0 sets no limit."""
    stop_on_tool_error: bool = False
    """End the episode when a tool call fails; otherwise the policy reads the error and may correct
    the call."""
    eval_samples: int = 8
    """Number of samples per evaluation example at the training temperature, in addition to the
    greedy one."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    listener: ListenerSettings = field(default_factory=ListenerSettings)
    speaker: SpeakerSettings = field(default_factory=SpeakerSettings)
    data: DataSettings = field(default_factory=DataSettings)

    def __post_init__(self) -> None:
        require_choice("task.tool_format", self.tool_format, ("pyvision", "codev", "deepeyes", "functions"))
        require(not self.prompt or self.prompt.count("{question}") == 1, "task.prompt", self.prompt, "must hold {question} once")
        for key in ("max_turns", "max_new_tokens", "eval_samples"):
            require(getattr(self, key) >= 1, f"task.{key}", getattr(self, key), "must be at least 1")
        for key in ("eval_max_turns", "max_pixels", "max_seconds", "env_timeout_s"):
            require(getattr(self, key) >= 0, f"task.{key}", getattr(self, key), "must not be negative")

    def require_no_words(self) -> None:
        """Raise ValueError if prompt or system_prompt is set, for a task with fixed prompts."""
        for key, words in (("prompt", self.prompt), ("system_prompt", self.system_prompt)):
            require(not words, f"task.{key}", words, f"task {self.name} has words of its own; leave it out, or use task=vqa")
