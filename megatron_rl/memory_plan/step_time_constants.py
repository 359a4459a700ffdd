"""Constants of the step-time model (step_time.py), and the mean episode that it assumes.

No code of this project has been timed on a GPU: every constant is an estimate or an assumption, as
its description states. The nominal specifications of GPUs are in gpu_specs.py. A measured constant
replaces the value here and is listed in MEASURED_CONSTANTS.
"""

import math
from dataclasses import dataclass, fields

import torch

from megatron_rl.config import Settings
from megatron_rl.models.model_spec import ModelSpec

MEASURED_CONSTANTS: frozenset[str] = frozenset()
"""Names of the fields of StepTimeConstants that were measured on a GPU. All others are assumed."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StepTimeConstants:
    """Constants of the step-time model. Each field states its source."""

    training_share: float = 0.40
    """Fraction of the peak FLOP/s in training, with fused elementwise kernels.

    Estimate: 43 to 45% of an H200 at 7B and tp 2.
    """
    prefill_share: float = 0.50
    """Fraction of the peak FLOP/s for the engine's prompts and images.

    Assumption: large products without a backward pass.
    """
    memory_share: float = 0.70
    """Fraction of a GPU's memory bandwidth during decoding.

    Assumption: CUDA graphs, batches of some hundred sequences.
    """
    link_share: float = 0.60
    """Fraction of the bandwidth between GPUs of a node.

    Estimate: 18 of 32 GB/s over PCIe on an L40S; NCCL over NVLink is better.
    """
    network: float = 50e9
    """Bandwidth from a GPU to another node in bytes per second.

    Assumption: one 400 Gb/s network card per GPU.
    """
    network_share: float = 0.70
    """Fraction of the network bandwidth that NCCL reaches. Assumption."""
    host_share: float = 0.60
    """Fraction of PCIe bandwidth between GPU and page-locked memory, with all GPUs of a node
    active. Assumption.
    """
    host_memory: float = 200e9
    """Bandwidth of a node's main memory in bytes per second, for the optimizer on the host.

    Assumption: two sockets with eight channels each.
    """
    decode_floor_s: float = 0.004
    """Seconds of a decode step besides reading memory: scheduler, sampler, launches.

    Assumption, with asynchronous scheduling.
    """
    launch_s: float = 30e-6
    """Seconds of a sum over the ranks of an engine besides the transfer.

    Assumption, over PCIe; NVLink needs less.
    """
    tensor_s: float = 1e-3
    """Seconds per tensor of a weight sync to gather, check and load it.

    Estimate: 1 s for the 729 tensors of 7B, two thirds of it not bandwidth.
    """
    wake_s: float = 1.0
    """Seconds per step for the engine's sleep, wake-up and KV cache.

    Assumption; the goal of 0.3 s has not been measured yet.
    """
    disk: float = 1e9
    """Bandwidth of a node's checkpoint writes in bytes per second.

    Assumption: a shared file system, each node on its own.
    """
    tool_s: float = 0.5
    """Seconds of an environment's response to a turn.

    Assumption: a crop or a short program in the sandbox.
    """
    turns_share: float = 0.4
    """Fraction of task.max_turns in a mean episode. Assumption."""
    reply_share: float = 0.1
    """Fraction of task.max_new_tokens in a mean response.

    Estimate: 2,000 tokens in five turns of 4,096 at most.
    """
    picture_share: float = 0.35
    """Fraction of model.max_pixels in a mean image. Estimate: 0.7 of 2 megapixels."""
    prompt_tokens: float = 500.0
    """Number of text tokens in a prompt. Assumption."""
    spread: float = 0.6
    """Standard deviation of the logarithm of an episode's sampled tokens.

    Assumption: the longest of 128 is 4 times the mean.
    """


DEFAULT_CONSTANTS = StepTimeConstants()


@dataclass(slots=True, frozen=True, kw_only=True)
class EpisodeEstimate:
    """Sizes of the mean episode."""

    num_turns: float
    sampled_tokens: float
    """Number of tokens of all responses."""
    num_images: float
    tokens_per_image: float
    """Number of tokens per image."""
    text_tokens: float
    """Number of text tokens in the prompt."""

    @property
    def prompt_tokens(self) -> float:
        """Number of tokens that a group shares: text and the first image."""
        return self.text_tokens + self.tokens_per_image

    @property
    def total_tokens(self) -> float:
        """Number of tokens at the end of the episode."""
        return self.text_tokens + self.num_images * self.tokens_per_image + self.sampled_tokens


def estimate_mean_episode(model: ModelSpec, settings: Settings, speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> EpisodeEstimate:
    """Return the mean episode, scaled down if it exceeds engine.max_model_len.

    It has one image in the prompt and one in each tool response, at most engine.max_images.
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
    """Return the ratio of the longest of `num_episodes` episodes to their mean.

    Tokens are log-normal; the longest is the quantile at num / (num + 1).
    """
    normal = torch.distributions.Normal(0.0, 1.0)
    quantile = float(normal.icdf(torch.tensor(num_episodes / (num_episodes + 1), dtype=torch.float64)))
    return max(1.0, math.exp(speeds.spread * quantile - speeds.spread**2 / 2))


def sensitivity_ranges(speeds: StepTimeConstants = DEFAULT_CONSTANTS) -> dict[str, tuple[float, float]]:
    """Return half and twice the value of each constant by its name. Fractions are at most 1."""
    values = {field.name: getattr(speeds, field.name) for field in fields(StepTimeConstants)}
    return {name: (value / 2, min(2 * value, 1.0) if name.endswith("_share") else 2 * value) for name, value in values.items()}
