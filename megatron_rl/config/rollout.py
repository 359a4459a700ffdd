"""Where episodes come from: the engine and the task."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megatron_rl.config.checks import require, require_address, require_choice
from megatron_rl.config.lewis import ListenerSettings, SpeakerSettings


@dataclass(kw_only=True, slots=True)
class EngineSettings:
    """The vLLM engine that samples the policy's replies."""

    mode: str = "colocated"
    """Where it computes: local in the trainer's processes, on their devices in turn; remote on servers of vLLM, while the trainer works."""
    urls: list[str] = field(default_factory=list)
    """Addresses of the servers of kind=remote, e.g. http://node2:8000; started with the command that launch/engine.py prints."""
    token_file: str = ""
    """File with the token of the servers at `urls`, which the command of launch/engine.py has them read, too; that of servers that the run
    starts is known."""
    num_local_servers: int = 0
    """Servers of kind=remote that the run starts itself, beside rank 0, on the GPUs behind those of its node's ranks; 0 starts none."""
    startup_timeout_s: float = 900.0
    """Seconds until a server that the run starts must answer."""
    tp: int = 1
    """Ranks an engine spans; world / tp engines roll out side by side."""
    dtype: str = "float32"
    """Number type of the engine's weights, activations and cache: float32 or bfloat16."""
    device: str = "auto"
    """Where the engine runs: auto takes CUDA where there is one, cuda refuses to start without it, cpu never uses it."""
    kv_cache_mib: int = 64
    """Memory for keys and values on a CPU, in MiB for each rank."""
    gpu_memory_utilization: float = 0.45
    """Share of a GPU's memory for the engine's weights and cache."""
    max_model_len: int = 1024
    """Tokens in one context at most, prompts, pictures and replies together; an episode that reaches it ends (max_tokens)."""
    max_num_seqs: int = 256
    """Replies that an engine samples at the same time at most; further ones wait."""
    max_images: int = 8
    """Images in one context at most; an episode that would show more ends."""
    bucket_mib: float = 256.0
    """Size of the buckets, in MiB, in which the trainer's weights travel to the engine; 0.5 is half a MiB."""
    health_timeout_s: float = 10.0
    """Seconds in which a remote engine must say that it lives, and give up what it has when it is told to; else others have its work."""
    request_timeout_s: float = 600.0
    """Seconds that a remote engine may take for one reply; then another one is asked."""
    outage_timeout_s: float = 600.0
    """Seconds for which a run waits while no remote engine is well; then it keeps what is done and ends, and the same command goes on."""

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
        """Of kind=remote, whoever starts them."""
        return len(self.urls) or self.num_local_servers

    def places(self, *, num_ranks: int) -> list[list[int]]:
        """Of each server that the run starts, beside so many ranks of its node: its devices, in their order."""
        firsts = [num_ranks + number * self.tp for number in range(self.num_local_servers)]
        return [list(range(first, first + self.tp)) for first in firsts]


@dataclass(kw_only=True, slots=True)
class SandboxSettings:
    """Where the code of a task's episodes runs (sandbox/README.md)."""

    url: str = ""
    """Address of a sandbox server (python -m sandbox serve), which has limits of its own; empty opens a pool beside each engine."""
    token_file: str = ""
    """File with the token of the server at `url`, which asks for one beyond its own machine; that of a service of the run is known."""
    size: int = 8
    """Boxes of a pool at once, one an episode that runs code; further episodes wait for one."""
    call_timeout_s: float = 10.0
    """Wall time of one call in seconds; past it the box's state is lost."""
    memory_mib: int = 1024
    """Memory of one box in MiB, above what all boxes share."""
    isolation: str = "auto"
    """Walls around a box: auto takes all that the host offers, none runs the policy's code without any (tests of trusted code only)."""
    allow_missing: list[str] = field(default_factory=list)
    """Walls that this host leaves open, by their names in python -m sandbox doctor, for a pool to start there all the same."""

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
    """A model behind an OpenAI-compatible server that judges answers; its key is read from OPENAI_API_KEY, or from `token_file`."""

    urls: list[str] = field(default_factory=list)
    """Base addresses, e.g. http://judge:18901/v1; requests go to the healthy ones in turn. Empty: there is no judge."""
    token_file: str = ""
    """File with their key, in the place of OPENAI_API_KEY; that of a service of the run is known."""
    model: str = ""
    """Name of the served model; empty asks the server for it."""
    temperature: float = 0.0
    """Sampling temperature of the judge's replies."""
    max_tokens: int = 512
    """Tokens of one reply of the judge at most."""
    timeout_s: float = 60.0
    """Seconds after which a request is given up."""
    outage_timeout_s: float = 60.0
    """Seconds that a request waits at most while all servers rest after a failure; no rest is longer unless the server asks for it."""
    max_attempts: int = 5
    """Requests that one judgement makes at most; after the last the rollout is failed, never 0."""
    concurrency: int = 32
    """Requests of one judge under way at the same time, over all its servers."""
    cache: str = ""
    """A file that keeps verdicts between runs; empty keeps them for this run."""
    always_ask: bool = False
    """Ask about every answer that is not void, instead of only those that the rules leave open; rules and published scores decide none."""

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
    """Columns of the user's questions by the names that they have in the files: {question: problem, answer: solution}."""

    question: str = ""
    """Column of the words, or messages, of a question; empty recognises the usual ones (docs/data.md)."""
    answer: str = ""
    """Column of the right answer; empty recognises the usual ones."""
    images: str = ""
    """Column of the picture or pictures; empty recognises the usual ones."""
    id: str = ""
    """Column of a row's name or number; empty takes id."""
    data_source: str = ""
    """Column that tells which rule compares answers; empty takes data_source."""
    ignored: list[str] = field(default_factory=list)
    """Columns, of transcripts too, that are meant not to be read: no warning names them. Keys of extra_info as extra_info.KEY."""


BENCHMARKS = (
    "vstar", "hrbench", "mathverse", "mathvista", "vsi_bench", "tir_bench", "visualprobe", "mathvision", "wemath", "dynamath", "vlmblind",
)  # fmt: skip
"""Those of data/benchmarks/catalog.py."""


@dataclass(kw_only=True, slots=True)
class DataSettings:
    """The user's questions: files, folders or data sets in the cache of Hugging Face (docs/data.md)."""

    train: list[str] = field(default_factory=list)
    """Files of the questions to train on, or folders of the games."""
    eval: list[str] = field(default_factory=list)
    """Files of the held-out questions that evaluations ask."""
    demonstrations: list[str] = field(default_factory=list)
    """Files of transcripts for the supervised warm start."""
    columns: ColumnSettings = field(default_factory=ColumnSettings)
    images: str = ""
    """The folder that relative image paths start from; empty: the folder of the file that names them."""
    image_roots: list[str] = field(default_factory=list)
    """Further folders below which rows may name pictures, by absolute paths, by .. or through links; nothing else of the disk is read."""
    max_eval: int = 0
    """Evaluate on the first so many examples; 0 takes all."""
    benchmark: str = ""
    """The published benchmark that task.data.eval holds the files of, which are then read, scored and told as it has them
    (docs/evaluation.md): vstar, hrbench, mathverse, mathvista, vsi_bench, tir_bench, visualprobe, mathvision, wemath, dynamath or
    vlmblind."""
    shuffle_options: int = 0
    """Seed of the order in which a benchmark's options are shown; 0 shows them as they were published."""
    allow_grounding_tokens: bool = False
    """Let questions and observations hold the tokens that Qwen2-VL marks objects and boxes with (<|object_ref_start|>, <|box_start|>,
    <|quad_start|> and their ends). Otherwise these names, as all special tokens in data, are kept from being tokens by a blank."""
    frames: int = 32
    """Pictures that a benchmark's question shows at most, spread evenly: of videos these are frames."""

    def __post_init__(self) -> None:
        for key in ("max_eval", "shuffle_options"):
            require(getattr(self, key) >= 0, f"task.data.{key}", getattr(self, key), "must not be negative")
        require_choice("task.data.benchmark", self.benchmark, ("", *BENCHMARKS))
        require(self.frames >= 1, "task.data.frames", self.frames, "must be at least 1")
        remedy = "is for a published benchmark; name it in task.data.benchmark"
        require(bool(self.benchmark) or not self.shuffle_options, "task.data.shuffle_options", self.shuffle_options, remedy)


@dataclass(kw_only=True, slots=True)
class TaskSettings:
    """What is played, by which rules, and what it needs: sandbox, judge, data."""

    name: str = MISSING
    """Which task is played: number_line, ez_points, points24, blackjack, alfworld, lewis_speaker, lewis_listener, visual_python,
    visual_search, vqa, or your own."""
    tool_format: str = "pyvision"
    """How a task with tools is spoken: pyvision, codev, deepeyes or functions."""
    reward: str = ""
    """What is rewarded: of a task with questions accuracy, pyvision, deepeyes, codev or tapo; a function of your own; or one and the other,
    as accuracy+mine. Empty is the task's own way, with questions accuracy."""
    options: Any = None
    """Settings that a task alone has: a game (docs/games.md), or one of your own, as its dataclass says (docs/extend.md)."""
    prompt: str = ""
    """What task vqa asks, with {question} where question and pictures stand; empty asks for the answer between <answer> and </answer>."""
    system_prompt: str = ""
    """What the system says first in task vqa; empty takes that of the data's rows, and else what the chat template says by itself."""
    max_turns: int = 10
    """Replies of the policy in one episode at most."""
    eval_max_turns: int = 0
    """Replies in one episode of an evaluation at most; 0 takes task.max_turns."""
    max_new_tokens: int = 64
    """Tokens that the policy samples in one reply at most."""
    max_pixels: int = 0
    """Pixels of all images of one context together, at their final sizes; 0 sets no limit. Their number is bounded by engine.max_images."""
    max_seconds: float = 0.0
    """Wall time of an episode in seconds, looked at between turns; 0 sets no limit."""
    env_timeout_s: float = 1800.0
    """Seconds that an environment may take to begin, or to answer one reply, waits for tools included; one that takes longer hangs, and
    its episode fails. 0 sets no limit."""
    stop_on_tool_error: bool = False
    """Whether a call that goes wrong ends the episode; otherwise the policy reads the error and may mend it."""
    eval_samples: int = 8
    """Samples of each evaluation example at the training temperature, beside the greedy one."""
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
        """For a task whose words are its own."""
        for key, words in (("prompt", self.prompt), ("system_prompt", self.system_prompt)):
            require(not words, f"task.{key}", words, f"task {self.name} has words of its own; leave it out, or use task=vqa")
