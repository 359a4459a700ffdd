"""Logprobs of requested token ids, in addition to the sampled tokens, against Hugging Face's."""

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration as HF

from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.engine import SamplingSettings
from megatron_rl.rollout.renderer import Renderer
from tests.support.engine_logprob_oracle import LOGPROB_BOUND, generate_all, policy_logits
from tests.support.packed_example import make_prompts


def test_the_asked_logprobs_are_hugging_faces(engine: ColocatedEngine, hf: HF, renderer: Renderer) -> None:
    """Requested logprobs equal HF's, and requesting them does not change the samples.

    One step has token id lists of different lengths and requests without a list; each request
    samples two tokens. One list contains a banned token.
    """
    contexts = make_prompts(renderer)
    lists = [(5, 300, 7), (300,), (), (renderer.banned_ids[0], 9)]
    pairs = [(context, asked) for context in contexts for asked in lists]
    samplings = [
        SamplingSettings(max_tokens=2, temperature=0.7, seed=number, logprob_token_ids=asked) for number, (_, asked) in enumerate(pairs)
    ]
    plain = [SamplingSettings(max_tokens=2, temperature=0.7, seed=number) for number in range(len(pairs))]
    completions = generate_all(engine, [context for context, _ in pairs], samplings)
    alone = generate_all(engine, [context for context, _ in pairs], plain)
    for (context, asked), completion, unasked in zip(pairs, completions, alone, strict=True):
        token_ids = context.token_ids + completion.token_ids
        logits = policy_logits(hf, token_ids, context.images, renderer=renderer) / 0.7
        rows = logits.log_softmax(-1)[len(context.token_ids) - 1 : -1]
        assert completion.token_ids == unasked.token_ids and unasked.requested_logprobs == []
        assert completion.logprobs == pytest.approx(unasked.logprobs, abs=1e-5)
        assert len(completion.requested_logprobs) == (len(completion.token_ids) if asked else 0)
        for row, told in zip(rows, completion.requested_logprobs, strict=bool(asked)):
            torch.testing.assert_close(torch.tensor(told, dtype=torch.float64), row[list(asked)], atol=LOGPROB_BOUND, rtol=0)
