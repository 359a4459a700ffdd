"""The constants of the stated model of time (step_time.py), and the mean episode that it reckons with.

No line of this project has run on a GPU: every constant is an estimate or an assumption and says which; what GPUs are sold as is in
gpu_specs.py. One that was measured is replaced here, and its name goes into MEASURED.
"""

import math
from dataclasses import dataclass, fields

import torch

from megatron_rl.config import Settings
from megatron_rl.models.model_spec import ModelSpec

MEASURED_CONSTANTS: frozenset[str] = frozenset()
"""Names of the fields of Speeds that were measured on a GPU; all others are assumed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StepTimeConstants:
    """The constants. Each says what it is of, and where it comes from."""

    training_share: float = 0.40
    """Of the peak FLOP/s in layers of training with fused elementwise kernels. Estimate: 43 to 45% of an H200 at 7B and tp 2."""
    prefill_share: float = 0.50
    """Of the peak FLOP/s in the engine's prompts and pictures. Assumption: large products without a backward pass."""
    memory_share: float = 0.70
    """Of a GPU's memory bandwidth while tokens are decoded. Assumption: CUDA graphs, batches of some hundred sequences."""
    link_share: float = 0.60
    """Of the bandwidth between the GPUs of a node. Estimate: 18 of 32 GB/s over PCIe on an L40S; NCCL over NVLink does better."""
    network: float = 50e9
    """Bytes a second from a GPU to another node. Assumption: a network card of 400 Gb/s for each GPU."""
    network_share: float = 0.70
    """Of it that NCCL reaches. Assumption."""
    host_share: float = 0.60
    """Of PCIe between a GPU and page-locked memory, all GPUs of a node at once. Assumption."""
    host_memory: float = 200e9
    """Bytes a second of a node's main memory, for the optimizer on the host. Assumption: two sockets with eight channels each."""
    decode_floor_s: float = 0.004
    """A decode step apart from reading memory: scheduler, sampler, launches. Assumption, with asynchronous scheduling."""
    launch_s: float = 30e-6
    """A sum over the ranks of an engine, apart from its bytes. Assumption, over PCIe; NVLink needs less."""
    tensor_s: float = 1e-3
    """A tensor of a sync: gathered, checked, loaded. Estimate: 1 s for the 729 tensors of 7B, two thirds of it not bandwidth."""
    wake_s: float = 1.0
    """An engine's sleep, wake and cache, once a step. Assumption; an aim of 0.3 s is not yet measured."""
    disk: float = 1e9
    """Bytes a second of a node's checkpoints. Assumption: a file system that the nodes share, each by itself."""
    tool_s: float = 0.5
    """An environment's answer to a turn. Assumption: a crop or a short program in the sandbox."""
    turns_share: float = 0.4
    """Share of task.max_turns that an episode takes on average. Assumption."""
    reply_share: float = 0.1
    """Share of task.max_new_tokens that a response takes on average. Estimate: 2,000 tokens in five turns of 4,096 at most."""
    picture_share: float = 0.35
    """Share of model.max_pixels that an image has on average. Estimate: 0.7 of 2 megapixels."""
    prompt_tokens: float = 500.0
    """Of text in a prompt. Assumption."""
    spread: float = 0.6
    """Standard deviation of the logarithm of an episode's sampled tokens. Assumption: the longest of 128 is 4 times the mean."""


DEFAULT_CONSTANTS = StepTimeConstants()


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeEstimate:
    """The mean one."""

    num_turns: float
    sampled_tokens: float
    """Tokens of all its replies."""
    num_images: float
    tokens_per_image: float
    """Of one."""
    text_tokens: float
    """Tokens of the prompt."""

    @property
    def prompt_tokens(self) -> float:
        """Tokens that its group shares: text and the first picture."""
        return self.text_tokens + self.tokens_per_image

    @property
    def total_tokens(self) -> float:
        """Tokens at its end."""
        return self.text_tokens + self.num_images * self.tokens_per_image + self.sampled_tokens


def estimate_mean_episode(model: ModelSpec, settings: Settings, speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> EpisodeEstimate:
    """A picture in the prompt and one in each answer of a tool, as many as engine.max_images allows; cut to the context."""
    task, unit = settings.task, (model.vision.patch_size * model.vision.spatial_merge_size) ** 2
    turns = max(1.0, speeds.turns_share * task.max_turns)
    picture = max(1.0, max(settings.model.min_pixels, speeds.picture_share * settings.model.max_pixels) / unit)
    sampled, pictures = turns * max(1.0, speeds.reply_share * task.max_new_tokens), min(turns, settings.engine.max_images)
    cut = min(1.0, settings.engine.max_model_len / (speeds.prompt_tokens + pictures * picture + sampled))
    return EpisodeEstimate(
        num_turns=turns,
        sampled_tokens=cut * sampled,
        num_images=pictures,
        tokens_per_image=cut * picture,
        text_tokens=cut * speeds.prompt_tokens,
    )


def longest_to_mean_ratio(num_episodes: int, speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> float:
    """The longest of `num_episodes` episodes over their mean, whose tokens are log-normal: the quantile at num / (num + 1)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    quantile = float(normal.icdf(torch.tensor(num_episodes / (num_episodes + 1), dtype=torch.float64)))
    return max(1.0, math.exp(speeds.spread * quantile - speeds.spread**2 / 2))


def sensitivity_ranges(speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> dict[str, tuple[float, float]]:
    """{a constant: half of it, twice it}; shares at most 1."""
    values = {field.name: getattr(speeds, field.name) for field in fields(StepTimeConstants)}
    return {name: (value / 2, min(2 * value, 1.0) if name.endswith("_share") else 2 * value) for name, value in values.items()}
