"""Constants of the step-time model (step_time.py), and the average episode that the model assumes.

Every constant is a measurement, an estimate or an assumption, as its docstring states. The
measurements were made on one H100 (benchmarks/results/h100_2026-11-26.md). The nominal
specifications of GPUs are in gpu_specs.py. After measuring a constant, replace its value in this
module and add its name to MEASURED_CONSTANTS.
"""

import math
from dataclasses import dataclass, fields

import torch

from megatron_rl.config import Settings
from megatron_rl.models.model_spec import ModelSpec

MEASURED_CONSTANTS = frozenset({"training_share", "tensor_s", "wake_s"})
"""Names of the StepTimeConstants fields that were measured on a GPU; all others are assumed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StepTimeConstants:
    """Constants of the step-time model; the docstring of each field states its source."""

    training_share: float = 0.41
    """Fraction of the peak FLOP/s reached in training.

    Measured for a 7B model with adapters: 0.414 on one H100 with micro-batches of 8,192 tokens, and
    0.448 on one H200 with 16,384. All weights of a 3B model with half of its layers: 0.401 on the
    H200 with 16,384 tokens, but 0.267 on the H100 with 8,192, where the host was the limit
    (benchmarks/results/h100_2026-11-27.md, h200_2026-11-27.md).
    """
    prefill_share: float = 0.50
    """Fraction of the peak FLOP/s that the engine reaches for prompts and images.

    Assumption for large matrix products without a backward pass.
    """
    memory_share: float = 0.70
    """Fraction of a GPU's memory bandwidth reached during decoding.

    Assumption for decoding with CUDA graphs and batches of several hundred sequences.
    """
    link_share: float = 0.60
    """Fraction of the nominal bandwidth reached between GPUs of a node.

    Estimate: 18 of 32 GB/s over PCIe on an L40S; NCCL reaches a larger fraction over NVLink.
    """
    network: float = 50e9
    """Bandwidth from a GPU to another node, in bytes/s.

    Assumption: one 400 Gb/s network card per GPU.
    """
    network_share: float = 0.70
    """Fraction of the network bandwidth that NCCL reaches. Assumption, not measured."""
    host_share: float = 0.60
    """Fraction of the PCIe bandwidth reached between a GPU and page-locked host memory. Assumption:
    all GPUs of a node transfer data at the same time.
    """
    host_memory: float = 200e9
    """Bandwidth of a node's host memory in bytes/s, for an optimizer on the host.

    Assumption: two sockets with eight memory channels each.
    """
    decode_floor_s: float = 0.004
    """Fixed seconds per decode step, excluding memory reads: scheduler, sampler, kernel launches.

    Assumption for an engine with asynchronous scheduling.
    """
    launch_s: float = 30e-6
    """Fixed seconds per all-reduce over an engine's ranks, in addition to the transfer time.

    Assumption for PCIe; an all-reduce over NVLink takes less time.
    """
    tensor_s: float = 0.65e-3
    """Seconds to gather, check and load one tensor in a weight sync.

    Measured on one H100: 0.473 s for the 729 tensors of a 7B model.
    """
    wake_s: float = 0.25
    """Seconds per step for the engine to go to sleep, wake up and allocate its KV cache.

    Measured on one H100 with a 7B model.
    """
    disk: float = 1e9
    """Bandwidth of a node for writing checkpoints, in bytes/s.

    Assumption: a shared file system on which nodes do not slow each other down.
    """
    tool_s: float = 0.5
    """Seconds that the environment takes to respond to a turn.

    Assumption: a crop or a short program in the sandbox.
    """
    turns_share: float = 0.4
    """Fraction of task.max_turns used in an average episode. Assumption, not measured."""
    reply_share: float = 0.1
    """Fraction of task.max_new_tokens used in an average response.

    Estimate: the responses of an average episode have 2,000 tokens in five turns, and the limit is
    4,096 tokens per turn.
    """
    picture_share: float = 0.35
    """Average image size as a fraction of model.max_pixels. Estimate: an average image has 0.7
    megapixels, and the limit is 2 megapixels."""
    prompt_tokens: float = 500.0
    """Number of text tokens in a prompt. Assumption, not measured."""
    spread: float = 0.6
    """Standard deviation of the logarithm of the number of tokens sampled per episode.

    Assumption: the longest of 128 episodes has 4 times as many sampled tokens as the average
    episode.
    """


DEFAULT_CONSTANTS = StepTimeConstants()


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeEstimate:
    """Sizes of the average episode."""

    num_turns: float
    sampled_tokens: float
    """Number of tokens in all responses."""
    num_images: float
    tokens_per_image: float
    """Number of tokens per image."""
    text_tokens: float
    """Number of text tokens in the prompt."""

    @property
    def prompt_tokens(self) -> float:
        """Number of prompt tokens that a group shares: the text and the first image."""
        return self.text_tokens + self.tokens_per_image

    @property
    def total_tokens(self) -> float:
        """Number of tokens in the sequence at the end of the episode."""
        return self.text_tokens + self.num_images * self.tokens_per_image + self.sampled_tokens


def estimate_mean_episode(model: ModelSpec, settings: Settings, speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> EpisodeEstimate:
    """Return the sizes of the average episode, scaled down if it exceeds engine.max_model_len.

    The episode has one image in the prompt and one in each tool response, but at most
    engine.max_images images in total.
    """
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
    """Return the ratio of the longest to the mean length of `num_episodes` episodes.

    Lengths in sampled tokens are assumed to be log-normal. The longest length is approximated by
    the quantile at num_episodes / (num_episodes + 1).
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    quantile = float(normal.icdf(torch.tensor(num_episodes / (num_episodes + 1), dtype=torch.float64)))
    return max(1.0, math.exp(speeds.spread * quantile - speeds.spread**2 / 2))


def sensitivity_ranges(speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> dict[str, tuple[float, float]]:
    """Return (value / 2, 2 * value) for each constant, keyed by name; fractions are capped at 1."""
    values = {field.name: getattr(speeds, field.name) for field in fields(StepTimeConstants)}
    return {name: (value / 2, min(2 * value, 1.0) if name.endswith("_share") else 2 * value) for name, value in values.items()}
