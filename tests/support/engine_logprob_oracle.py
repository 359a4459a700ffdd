"""The oracle for the engine's logprobs: a float32 forward pass in HF without the banned ids,
divided by the temperature.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel as HF

from megatron_rl.config import EngineSettings
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, TokenSequence

LOGPROB_BOUND = 1e-4
"""Maximum absolute difference in float32. Typical values are 3e-6; the largest observed is
1.8e-5.
"""


@contextmanager
def open_engine(model: Path, renderer: Renderer, *, reads_weights: bool = True) -> Iterator[ColocatedEngine]:
    """Start a real engine for a model folder.

    Without the folder's weights, it can generate after the first load_weights.
    """
    engine = ColocatedEngine(
        str(model), EngineSettings(kv_cache_mib=32, max_model_len=1024, dtype="float32"), reads_weights=reads_weights,
        special_tokens=renderer.special_tokens, group=None,
    )  # fmt: skip
    yield engine
    engine.close()


def generate_all(engine: ColocatedEngine, contexts: list[TokenSequence], samplings: list[SamplingSettings]) -> list[Completion]:
    async def main() -> list[Completion]:
        pairs = zip(contexts, samplings, strict=True)
        return await asyncio.gather(*(engine.generate(s.token_ids, s.images, sampling) for s, sampling in pairs))

    return engine.run(main())


@torch.no_grad()
def policy_logits(hf: HF, token_ids: list[int], images: list[Image], *, renderer: Renderer) -> torch.Tensor:
    """Return float64 logits [L, vocabulary] with banned ids at -inf."""
    ids = torch.tensor([token_ids])
    vision = {}
    if images:
        grid = torch.tensor([image.grid for image in images])
        vision = {"pixel_values": torch.cat([image.patch_PC for image in images]), "image_grid_thw": grid}
    kinds = (ids == renderer.image_token_id).int()
    logits = hf(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **vision).logits[0].double()
    return logits.index_fill(1, torch.tensor(renderer.banned_ids), -torch.inf)


def max_logprob_diff(hf: HF, context: TokenSequence, completion: Completion, *, temperature: float, renderer: Renderer) -> float:
    """Return the largest difference between the engine's logprobs and HF's."""
    token_ids = context.token_ids + completion.token_ids
    logits = policy_logits(hf, token_ids, context.images, renderer=renderer) / (temperature or 1.0)
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(token_ids[1:])[:, None])[len(context.token_ids) - 1 :, 0]
    assert len(completion.logprobs) == len(completion.token_ids) == len(expected) > 0
    return (expected - torch.tensor(completion.logprobs, dtype=torch.float64)).abs().max().item()


def check_frequencies(expected: torch.Tensor, counts: Counter[int]) -> None:
    """Check the token counts with a chi-squared test.

    Tokens are grouped in bins with an expected count of about 10. Under the null hypothesis,
    chi-squared exceeds its mean by more than 5 standard deviations with a probability below 1e-4.
    """
    order = expected.argsort(descending=True)
    bins = (expected[order].cumsum(0) / 10).long().unique(return_inverse=True)[1]
    seen = torch.tensor([counts[token] for token in order.tolist()], dtype=torch.float64)
    expected_B, seen_B = (torch.zeros(int(bins[-1]) + 1, dtype=torch.float64).index_add(0, bins, each) for each in (expected[order], seen))
    chi_squared, freedom = ((seen_B - expected_B) ** 2 / expected_B).sum().item(), len(expected_B) - 1
    print(f"chi-squared {chi_squared:.1f} at {freedom} degrees of freedom")
    assert freedom >= 10 and chi_squared < freedom + 5 * (2 * freedom) ** 0.5
