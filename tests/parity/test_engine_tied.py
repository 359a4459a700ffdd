"""An engine with tied embeddings, as in Qwen2.5-VL-3B: one tensor is sent and used as embedding and
output layer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration as HF

from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, generate_all, max_logprob_diff, open_engine
from tests.support.packed_example import make_prompts

HEAD, EMBEDDING = "lm_head.weight", "model.language_model.embed_tokens.weight"


@pytest.fixture
def tied(tied_model: Path, renderer: Renderer) -> Iterator[ColocatedEngine]:
    with open_engine(tied_model, renderer, reads_weights=False) as engine:
        yield engine


@pytest.mark.known_failure("tied-embeddings")
def test_a_tied_model_is_served(tied: ColocatedEngine, tied_model: Path, renderer: Renderer) -> None:
    """Logprobs equal HF's with the checkpoint's weights and with other weights.

    Sending an LM head in addition to the embedding is rejected.
    """
    hf = HF.from_pretrained(tied_model, dtype=torch.float32).eval()
    sequences = make_prompts(renderer)
    samplings = [SamplingSettings(max_tokens=8, temperature=1.0, seed=number) for number in range(len(sequences))]
    for version in (1, 2):
        if version == 2:
            with torch.no_grad():
                hf.get_input_embeddings().weight += 0.02 * torch.randn(hf.get_input_embeddings().weight.shape)
        weights = {name: tensor for name, tensor in hf.state_dict().items() if name != HEAD}
        assert EMBEDDING in weights
        tied.load_weights(iter(weights.items()), version=version)
        for sequence, completion in zip(sequences, generate_all(tied, sequences, samplings), strict=True):
            assert max_logprob_diff(hf, sequence, completion, temperature=1.0, renderer=renderer) <= LOGPROB_BOUND
    with pytest.raises(RuntimeError, match=f"the engine has no parameter for {HEAD}"):
        tied.load_weights(iter({**weights, HEAD: weights[EMBEDDING]}.items()), version=3)
    with pytest.raises(RuntimeError, match=rf"1 tensors were not sent: {EMBEDDING}"):
        tied.load_weights(((name, tensor) for name, tensor in weights.items() if name != EMBEDDING), version=3)
