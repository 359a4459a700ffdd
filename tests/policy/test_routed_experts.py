"""Experts recorded by the engine: their format, their way into micro-batches, and what is
refused.
"""

import numpy as np
import pytest
import torch

from megatron_rl.batching.minibatches import PackItem, pack_costs
from megatron_rl.batching.packing import pack
from megatron_rl.errors import RunFailed
from megatron_rl.policy.routed_experts import RoutingFormat, gather_routed_experts, require_routed_experts
from megatron_rl.types import Rollout, TokenSequence

FORMAT = RoutingFormat(num_layers=2, top_k=2, num_experts=8)
IMAGE_ID = 99


def row(token: int) -> bytes:
    """Return experts that name their token: the first expert of the first layer."""
    return bytes([token % 8, (token + 1) % 8, 3, 7])


def make_rollout(tokens: list[int], num_sampled: int, *, index: int = 0) -> Rollout:
    context = TokenSequence()
    context.extend(tokens[:-num_sampled])
    context.extend(tokens[-num_sampled:], logprobs=[-1.0] * num_sampled)
    context.routed_experts = [row(token) for token in tokens[:-1]]
    return Rollout(task="t", example_id="e7", group=0, sample_index=index, sequences=[context])


def pack_all(rollouts: list[Rollout], *, share_prompts: bool, multiple_of: int = 1) -> tuple:
    items = [PackItem(rollout.sequences[0], origin=(number, 0)) for number, rollout in enumerate(rollouts)]
    ordered = [load.item for load in pack_costs(items, IMAGE_ID, share_prompts=share_prompts)]
    batch = pack(
        ordered, image_token_id=IMAGE_ID, positions=lambda ids, _: torch.arange(len(ids)).expand(3, -1), share_prompts=share_prompts,
        multiple_of=multiple_of,
    )  # fmt: skip
    return batch, gather_routed_experts(rollouts, batch, FORMAT)


def test_each_token_of_a_micro_batch_has_its_experts() -> None:
    """Rows follow the tokens into shared prompts and their branches; the last token of a sequence
    and the padding have no experts.
    """
    rollouts = [make_rollout([1, 2, 3, 4], 2), make_rollout([1, 2, 5, 6, 7], 3, index=1), make_rollout([4, 1], 1, index=2)]
    batch, experts = pack_all(rollouts, share_prompts=True, multiple_of=4)
    assert batch.num_tokens == 12 and experts.shape == (12, 2, 2) and experts.dtype == torch.uint8
    assert batch.token_T.tolist().count(1) == 2, "the prompts [1 2] share their first token"
    ends = {
        last - 1
        for last, origin in zip(batch.offset_S1[1:], batch.origin_S, strict=True)
        if origin is None or origin.start or origin.rollout == 2
    }
    for place, token in enumerate(batch.token_T.tolist()):
        known = bytes(experts[place].flatten().tolist())
        assert known == (bytes(4) if place in ends or token == 0 else row(token))


def test_prompts_with_other_experts_are_not_shared() -> None:
    """A prompt is shared up to the first token with other experts."""
    rollouts = [make_rollout([1, 2, 3, 4, 5], 1, index=index) for index in range(2)]
    assert pack_all(rollouts, share_prompts=True)[0].num_tokens == 7
    rollouts[1].sequences[0].routed_experts[2] = bytes([0, 1, 2, 3])
    batch, experts = pack_all(rollouts, share_prompts=True)
    assert batch.token_T.tolist() == [1, 2, 3, 4, 5, 3, 4, 5] and experts[5].flatten().tolist() == [0, 1, 2, 3]
    rollouts[1].sequences[0].routed_experts = []
    assert pack_all(rollouts, share_prompts=True)[0].num_tokens == 10


def test_a_row_is_read_as_written() -> None:
    """Experts are one byte each, or two little-endian bytes if there are more than 256."""
    assert FORMAT.decode([b"\x05\x00\x03\x07"], "r").tolist() == [[[5, 0], [3, 7]]]
    assert FORMAT.decode([], "r").shape == (0, 2, 2)
    wide = RoutingFormat(num_layers=1, top_k=2, num_experts=300)
    assert wide.decode([b"\x01\x01\x02\x00"], "r").tolist() == [[[257, 2]]] and wide.dtype == np.int16


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (b"\x01\x02\x03", "r: routed_experts has a row of 3 bytes, but 2 sparse layers and 2 experts per token have 4; "),
        (b"\x01\x02\x03\x08", "r: routed_experts has expert 8, but the model has experts 0 to 7"),
        (b"\x01\x02\x03\x03", "r: routed_experts has the same expert twice for a token"),
    ],
)
def test_invalid_experts_are_refused(wrong: bytes, line: str) -> None:
    with pytest.raises(RunFailed) as refused:
        FORMAT.decode([row(1), wrong], "r")
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_missing_experts_are_refused() -> None:
    """Experts of all tokens before the last sampled one are required, if the rollout is
    trained on.
    """
    good, bad = make_rollout([1, 2, 3, 4], 2), make_rollout([1, 2, 3, 4], 2, index=3)
    require_routed_experts([good])
    good.sequences[0].extend([8, 8])
    require_routed_experts([good])
    bad.sequences[0].routed_experts.pop()
    with pytest.raises(
        RunFailed, match=r"^algo.routing_replay=rollout: sequence 0 of rollout 3 of example e7 has the experts of 2 of 3 tok[^\n]*$"
    ):
        require_routed_experts([good, bad])
    bad.filter_reason = "zero_std"
    require_routed_experts([good, bad])
