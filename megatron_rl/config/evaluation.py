"""An evaluation by itself."""

import math
from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_address, require_choice


@dataclass(kw_only=True, slots=True)
class EvaluationSettings:
    """What launch/evaluate.py plays and with which weights; nothing is trained. A run's own evaluations are set by task and run."""

    split: str = "eval"
    """The task's split that is played: eval, or train."""
    samples: int = 1
    """Episodes an example; above 1 pass@k is told for k = 1, 2, 4 and so on."""
    temperature: float = 0.0
    """Temperature at which the policy's words are sampled; 0 takes the most likely token each time."""
    weights: str = ""
    """A checkpoint of any kind that the converters read, or a PEFT adapter of model.path; empty: the weights in model.path."""
    chunk: int = 64
    """Examples whose episodes are played together, and are kept when all of them are done."""

    urls: list[str] = field(default_factory=list)
    """OpenAI-compatible endpoints that play in the place of our engines, e.g. http://host:8000/v1; model.path is the name that they serve,
    their key is read from OPENAI_API_KEY."""
    timeout_s: float = 600.0
    """Seconds after which a request to one is given up."""
    outage_timeout_s: float = 120.0
    """Seconds that a request waits at most while all endpoints rest after a failure."""
    max_attempts: int = 5
    """Requests that one reply makes at most; after the last its episode is failed, never wrong."""
    concurrency: int = 32
    """Requests under way at the same time, over all endpoints."""

    def __post_init__(self) -> None:
        require_choice("evaluation.split", self.split, ("eval", "train"))
        require(self.samples >= 1, "evaluation.samples", self.samples, "must be at least 1")
        require(self.temperature >= 0, "evaluation.temperature", self.temperature, "must not be negative; 0 is greedy")
        remedy = "greedy episodes of an example are all alike: raise evaluation.temperature, or play one"
        require(self.samples == 1 or self.temperature > 0, "evaluation.samples", self.samples, remedy)
        for url in self.urls:
            require_address("evaluation.urls", url)
        remedy = "an endpoint serves weights of its own; leave this out"
        require(not (self.urls and self.weights), "evaluation.weights", self.weights, remedy)
        require(self.timeout_s > 0, "evaluation.timeout_s", self.timeout_s, "must be positive")
        remedy = "must be a number of seconds; 0 waits for none"
        require(0 <= self.outage_timeout_s < math.inf, "evaluation.outage_timeout_s", self.outage_timeout_s, remedy)
        for key in ("max_attempts", "concurrency"):
            require(getattr(self, key) >= 1, f"evaluation.{key}", getattr(self, key), "must be at least 1")
        require(self.chunk >= 1, "evaluation.chunk", self.chunk, "must be at least 1")
