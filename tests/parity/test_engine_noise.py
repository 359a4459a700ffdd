"""CUDA-style sampling, with one random generator for all requests, tested on a CPU engine; and an
engine that has loaded no weights."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration as HF

from megatron_rl.config import EngineSettings
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.sampler import EngineNoise
from megatron_rl.types import SpecialTokens
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, check_frequencies, generate_all, max_logprob_diff, open_engine, policy_logits
from tests.support.packed_example import make_prompts


@pytest.fixture(scope="module")
def bare(random_model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    with open_engine(random_model, renderer, reads_weights=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def own(bare: ColocatedEngine, hf: HF, renderer: Renderer) -> ColocatedEngine:
    """Return an engine with HF's weights and the noise of a CUDA engine."""
    with pytest.raises(AssertionError, match="load_weights must be called before generate"):
        generate_all(bare, make_prompts(renderer)[:1], [SamplingSettings(max_tokens=1, temperature=1.0, seed=0)])
    bare.load_weights(((name, tensor) for name, tensor in hf.state_dict().items()), version=3)
    core = bare._core
    core._noise = EngineNoise(core._engine.model_executor.driver_worker.worker.model_runner)
    return bare


def test_frequencies_follow_the_probabilities(own: ColocatedEngine, hf: HF, renderer: Renderer) -> None:
    """Frequencies of 3000 first tokens follow HF's probabilities by a chi-squared test."""
    context, num = make_prompts(renderer)[1], 3000
    probability = policy_logits(hf, context.token_ids, context.images, renderer=renderer)[-1].div(2).softmax(-1)
    completions = generate_all(own, [context] * num, [SamplingSettings(max_tokens=1, temperature=2.0, seed=seed) for seed in range(num)])
    assert {each for completion in completions for each in completion.weight_versions} == {3}
    first = Counter(completion.token_ids[0] for completion in completions)
    assert not first.keys() & set(renderer.banned_ids)
    check_frequencies(num * probability, first)


def test_logprobs_are_those_of_the_weights_that_came(own: ColocatedEngine, hf: HF, renderer: Renderer) -> None:
    """Logprobs equal HF's for the loaded weights."""
    contexts = make_prompts(renderer)
    completions = generate_all(own, contexts, [SamplingSettings(max_tokens=12, temperature=0.7, seed=i) for i in range(len(contexts))])
    for context, completion in zip(contexts, completions, strict=True):
        assert max_logprob_diff(hf, context, completion, temperature=0.7, renderer=renderer) < LOGPROB_BOUND


def test_the_first_seed_of_a_round_is_that_of_all(own: ColocatedEngine, renderer: Renderer) -> None:
    """The first seed of a batch determines all its samples.

    The same seeds give the same tokens, whatever ran in between; another first seed gives other
    tokens. Requests of one batch differ.
    """
    contexts = make_prompts(renderer)[:1] * 4

    def played(*seeds: int) -> list[list[int]]:
        samplings = [SamplingSettings(max_tokens=12, temperature=2.0, seed=seed) for seed in seeds]
        return [completion.token_ids for completion in generate_all(own, contexts, samplings)]

    first, other = played(2**62 + 1, 2, 3, 4), played(5, 2, 3, 4)
    assert played(2**62 + 1, 2, 3, 4) == first != other
    assert len(set(map(tuple, first))) == 4


@pytest.mark.known_failure("image-token-sampled")
def test_tokens_without_probability_are_never_drawn() -> None:
    """Tokens with probability 0 are never sampled, in bfloat16 too.

    Logprobs are returned in float32.
    """

    class Runner:
        device = torch.device("cpu")
        sampler = type("Sampler", (), {"topk_topp_sampler": type("Inner", (), {})()})()

    noise = EngineNoise(Runner)
    noise.seed(2**64 - 1)
    logits = torch.randn(2000, 12, dtype=torch.bfloat16).index_fill_(1, torch.tensor([0, 7]), -torch.inf)
    token_R, logprob_RV = Runner.sampler.topk_topp_sampler.forward(logits, {}, None, None)
    assert set(token_R.tolist()) == set(range(12)) - {0, 7} and logprob_RV.dtype == torch.float32
    torch.testing.assert_close(logprob_RV, logits.float().log_softmax(-1))
    with pytest.raises(AssertionError, match="full distribution"):
        noise._forward(logits, {}, torch.tensor([3]), None)


def test_cuda_without_cuda_is_refused(random_model: Path) -> None:
    """engine.device=cuda is rejected on a machine without CUDA."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ValueError, match="engine.device=cuda: .*use auto or cpu"):
        ColocatedEngine(str(random_model), EngineSettings(device="cuda"), special_tokens=SpecialTokens(image_token_id=1), group=None)
