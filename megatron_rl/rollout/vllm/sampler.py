"""Sampling in vLLM with banned ids and, on CPUs, noise that depends only on seed and position.

vLLM implements seeds with one random generator per request. On a CPU, such generators fail when a
prompt is computed in two parts (vllm 0.32.0, v1/worker/gpu_model_runner.py::_bookkeeping_sync: "CPU
Generator does not use offset"), and sampling requires one call per request and step. This module
computes the noise as a hash of (seed, position), so the noise does not depend on how requests are
batched, split or preempted.

On CUDA, one generator per request would cost one kernel launch per request and step
(v1/sample/ops/topk_topp_sampler.py::random_sample). All requests of an engine therefore share one
generator. A request that arrives while the engine is idle seeds the generator with the request's
seed. Rollouts are reproducible only if requests start and end in the same order, which is not
guaranteed for episodes with tools or judges.
"""

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SEED_KEY, NUM_SAMPLED_KEY = "megatron_rl_seed", "megatron_rl_first"
"""Keys in SamplingParams.extra_args for the seed of a turn, and for the number of the turn's tokens
that earlier requests have sampled (0 if the key is missing).
"""
BANNED_IDS_KEY = "megatron_rl_banned_ids"
"""Key of the banned ids in VllmConfig.additional_config."""


def mix_seeds(seed_R: np.ndarray, position_R: np.ndarray) -> np.ndarray:
    """Return a 63-bit hash of each (seed, position) pair.

    Uses the finalizer of SplitMix64 (Steele, Lea, Flood 2014). The inputs are uint64 [R], the
    output is int64 [R].
    """
    x_R = _finalize(seed_R) + position_R * np.uint64(0x9E3779B97F4A7C15)
    return (_finalize(x_R) >> np.uint64(1)).astype(np.int64)


def _finalize(x_R: np.ndarray) -> np.ndarray:
    x_R = (x_R ^ (x_R >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_R = (x_R ^ (x_R >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_R ^ (x_R >> np.uint64(31))


def make_logits_processor() -> "type[LogitsProcessor]":
    """Return a logits-processor class for LLM(logits_processors=...).

    The class sets the logits of banned ids to -inf (vLLM's logit_bias is limited to -100) and keeps
    track of the seed and position of each row.
    """
    from vllm.v1.sample.logits_processor import (
        LogitsProcessor,
        process_dict_updates,  # pyright: ignore[reportPrivateImportUsage]  the package's __all__ omits it
    )

    class BanAndSeed(LogitsProcessor):
        def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
            additional = cast("dict[str, Any]", vllm_config.additional_config)
            self._banned = torch.tensor(additional[BANNED_IDS_KEY], dtype=torch.int64, device=device)
            self._rows: dict[int, tuple[int, int, list[int]]] = {}

        @classmethod
        def validate_params(cls, params: "SamplingParams") -> None:
            """Raise ValueError if a request has no seed.

            A server accepts requests from any client, and a request without a seed would make the
            step fail for all requests.
            """
            if SEED_KEY not in (params.extra_args or {}):
                raise ValueError(f"extra_args: {SEED_KEY} is missing")

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: "BatchUpdate | None") -> None:
            process_dict_updates(self._rows, batch_update, self._row)

        def _row(self, params: "SamplingParams", prompt_ids: list[int] | None, output_ids: list[int]) -> tuple[int, int, list[int]]:
            own = params.extra_args
            assert own is not None, "validate_params has checked it"
            return own[SEED_KEY] % (1 << 64), own.get(NUM_SAMPLED_KEY, 0), output_ids

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return logits.index_fill_(1, self._banned, -math.inf)

        def noise_seeds(self, count: int) -> torch.Tensor:
            """Return the noise seeds of the first `count` rows as an int64 tensor [R]."""
            rows = [self._rows[i] for i in range(count)]
            seed_R = np.array([seed for seed, _, _ in rows], dtype=np.uint64)
            position_R = np.array([first + len(output_ids) for _, first, output_ids in rows], dtype=np.uint64)
            return torch.from_numpy(mix_seeds(seed_R, position_R))

    return BanAndSeed


class EngineNoise:
    """Random generator on the engine's device, shared by all requests of the engine."""

    def __init__(self, runner: "GPUModelRunner") -> None:
        self._generator = torch.Generator(device=runner.device)
        runner.sampler.topk_topp_sampler.forward = self._forward

    def seed(self, number: int) -> None:
        """Seed the generator."""
        self._generator.manual_seed(number % (1 << 63))

    def _forward(self, logits: torch.Tensor, generators: object, k: object, p: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample a token from softmax(logits) for each row; return the tokens and the logprobs.

        The sampled token minimizes E / p, where p is the probability of the token and E is an
        exponentially distributed random number.
        """
        assert not generators and k is None and p is None, "only sampling from the full distribution is supported"
        logprob_RV = logits.log_softmax(dim=-1, dtype=torch.float32)
        time_RV = torch.empty_like(logprob_RV).exponential_(generator=self._generator)
        return (logprob_RV.exp() / time_RV).argmax(dim=-1), logprob_RV


def use_seeded_noise(runner: "GPUModelRunner") -> None:
    """Make a CPU model runner compute its noise from seeds and positions (BanAndSeed.noise_seeds).

    Replaces v1/sample/ops/topk_topp_sampler.py::forward_cpu.
    """
    own: Any
    (own,) = (each for each in runner.input_batch.logitsprocs.all if type(each).__name__ == "BanAndSeed")

    def forward(logits: torch.Tensor, generators: object, k: object, p: object) -> tuple[torch.Tensor, torch.Tensor]:
        assert not generators and k is None and p is None, "only sampling from the full distribution is supported"
        seeds_R = own.noise_seeds(logits.shape[0])
        return torch.ops._C.fused_gumbel_argmax(logits, seeds_R), logits.log_softmax(dim=-1)

    runner.sampler.topk_topp_sampler.forward = forward
