"""Settings of a standalone evaluation (launch/evaluate.py)."""

from dataclasses import dataclass, field

from megatron_rl.config.checks import require, require_choice
from megatron_rl.config.client import ClientSettings


@dataclass(kw_only=True, slots=True)
class EvaluationSettings(ClientSettings):
    """Settings of launch/evaluate.py; evaluations during training use `task` and `run` instead."""

    split: str = "eval"
    """Data split of the task to evaluate: eval or train."""
    samples: int = 1
    """Number of episodes per example; with several episodes, pass@k is reported for powers of
    two."""
    temperature: float = 0.0
    """Sampling temperature of the policy; 0 decodes greedily."""
    weights: str = ""
    """Weights to evaluate: a checkpoint in any format that launch/convert.py can read, or a PEFT
    adapter for the model in model.path. If empty, the weights in model.path are evaluated."""
    chunk: int = 64
    """Number of examples per chunk; results are saved when all episodes of a chunk are done."""

    urls: list[str] = field(default_factory=list)
    """URLs of OpenAI-compatible endpoints to evaluate instead of starting an engine, e.g.
    http://host:8000/v1. Requests contain model.path as the model name, and the API key is read from
    the environment variable OPENAI_API_KEY."""
    timeout_s: float = 600.0
    """Timeout of one request to an endpoint, in seconds."""
    outage_timeout_s: float = 120.0
    """Maximum time in seconds that a request waits while all endpoints are in backoff after
    failures."""

    def __post_init__(self) -> None:
        require_choice("evaluation.split", self.split, ("eval", "train"))
        require(self.samples >= 1, "evaluation.samples", self.samples, "must be at least 1")
        require(self.temperature >= 0, "evaluation.temperature", self.temperature, "must not be negative; 0 decodes greedily")
        remedy = "all greedy episodes of an example are equal; raise evaluation.temperature, or use 1"
        require(self.samples == 1 or self.temperature > 0, "evaluation.samples", self.samples, remedy)
        self.check_client("evaluation")
        remedy = "an endpoint serves its own weights; remove this setting"
        require(not (self.urls and self.weights), "evaluation.weights", self.weights, remedy)
        require(self.chunk >= 1, "evaluation.chunk", self.chunk, "must be at least 1")
