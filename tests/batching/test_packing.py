"""Tests the packing of sequences into micro-batches against numbers computed by hand."""

from collections.abc import Callable
from functools import partial
from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from megatron_rl.batching import minibatches
from megatron_rl.batching.minibatches import (
    MAX_KV_RATIO,
    PackCost,
    PackItem,
    balance_costs,
    cut_minibatches,
    episode_weight,
    pack_costs,
    split_by_cost,
    token_key,
)
from megatron_rl.batching.packing import gather_column, make_loss_inputs, pack, scatter_to_rollouts, turn_ids
from megatron_rl.config import BatchSettings
from megatron_rl.models.mrope import mrope_positions
from megatron_rl.policy.attention import Segments
from megatron_rl.types import Image, MicroBatch, Rollout, SegmentSource, Status, TokenSequence
from tests.support.packed_example import make_pack_item

PAD = 9
POSITIONS = partial(mrope_positions, image_token_id=PAD)


def image(rows: int, columns: int, key: str) -> Image:
    patches = torch.full((rows * columns, 3), float(ord(key)))
    return Image(pil=Pillow.new("RGB", (1, 1)), patch_PC=patches, grid=(1, rows, columns), key=key, merge=2)


def sequence(prompt: list[int], sampled: list[int], *images: Image) -> TokenSequence:
    made = TokenSequence()
    made.extend(prompt, images=images)
    made.extend(sampled, logprobs=[-0.5] * len(sampled))
    return made


@pytest.mark.known_failure("shifted-logprobs")
def test_pack_shifts_once_and_pads_nothing_between_sequences() -> None:
    contexts = [
        make_pack_item(sequence([5, 6], [7, 8]), advantage=2.0, weight=0.5, denominator=2),
        make_pack_item(sequence([1], [4]), advantage=-1.0, weight=1.0, denominator=1),
    ]
    batch = pack(contexts, image_token_id=PAD, positions=POSITIONS)
    assert batch.token_T.tolist() == [5, 6, 7, 8, 1, 4]
    assert batch.target_T.tolist() == [6, 7, 8, 0, 4, 0]
    assert batch.mask_T.tolist() == [False, True, True, False, True, False]
    assert batch.row_R.tolist() == [1, 2, 4]
    assert batch.weight_T.tolist() == [0, 0.5, 0.5, 0, 1.0, 0]
    assert batch.advantage_T.tolist() == [0, 2.0, 2.0, 0, -1.0, 0]
    assert batch.rollout_logprob_T.tolist() == [0, -0.5, -0.5, 0, -0.5, 0]
    assert batch.position_3T.tolist() == [[0, 1, 2, 3, 0, 1]] * 3
    assert batch.cu_seqlens_S1.tolist() == [0, 4, 6]
    assert batch.denominator == 3


@pytest.mark.known_failure("images-assigned-wrongly")
def test_an_image_of_two_sequences_is_stored_once() -> None:
    shared, other = image(2, 4, "a"), image(4, 2, "b")
    contexts = [
        make_pack_item(sequence([1, PAD, PAD, 2, PAD, PAD], [3], shared, other), advantage=0.0, weight=1.0, denominator=1),
        make_pack_item(sequence([PAD, PAD], [3], shared), advantage=0.0, weight=1.0, denominator=1),
    ]
    batch = pack(contexts, image_token_id=PAD, positions=POSITIONS)
    assert batch.grid_I3.tolist() == [[1, 2, 4], [1, 4, 2]]
    assert [image.key for image in batch.images] == ["a", "b"] and batch.patch_PC is None
    assert batch.vision_position_M.tolist() == [1, 2, 4, 5, 7, 8]
    assert batch.vision_row_M.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("tokens", "multiple", "length"), [(6, 4, 8), (8, 4, 8), (0, 1, 1), (0, 4, 4)])
def test_padding_is_a_sequence_of_its_own_without_weight(tokens: int, multiple: int, length: int) -> None:
    contexts = [make_pack_item(sequence([5] * (tokens - 1), [6]), advantage=1.0, weight=1.0, denominator=1)] if tokens else []
    batch = pack(contexts, image_token_id=PAD, positions=POSITIONS, multiple_of=multiple)
    assert batch.num_tokens == length == batch.cu_seqlens_S1[-1]
    assert batch.mask_T.sum() == bool(tokens) == batch.weight_T.sum() == batch.denominator
    assert batch.num_sequences_S == [1] * bool(tokens) + [0] * (length > tokens)
    assert {t.shape[-1] for t in (batch.target_T, batch.mask_T, batch.weight_T, batch.position_3T, batch.rollout_logprob_T)} == {length}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=40), st.integers(1, 8), st.integers(1, 120), st.booleans())
def test_dealing_and_cutting_keep_every_weighted(shapes: list[tuple[int, int]], ranks: int, max_tokens: int, share: bool) -> None:
    """Splitting over ranks and micro-batches keeps every sequence, and every limit holds. Prompts
    are of three kinds (10, 20 or 30 tokens), with 1 to 50 sampled tokens.
    """
    contexts = [
        make_pack_item(sequence([kind] * (10 * kind), [5] * length), advantage=float(i), weight=1.0, denominator=1)
        for i, (kind, length) in enumerate(shapes)
    ]
    loads = pack_costs(contexts, PAD, share_prompts=share)
    kinds = [load.item.sequence.token_ids[0] for load in loads]
    assert sorted(load.item.sequence.advantages[-1] for load in loads) == [float(i) for i in range(len(contexts))]
    assert len([run for run, _ in groupby(kinds)]) == len(set(kinds)), "equal prompts are neighbors"
    dealt = balance_costs(loads, ranks)
    assert len(dealt) == ranks and [load for part in dealt for load in part] == loads
    mean = sum(load.num_added_tokens for load in loads) / ranks
    assert all(sum(load.num_added_tokens for load in part) <= mean + 80 for part in dealt)
    for part in dealt:
        micro = split_by_cost(part, max_tokens)
        assert micro and [weighted for batch in micro for weighted in batch] == [load.item for load in part]
        packed = partial(pack, image_token_id=PAD, positions=POSITIONS, share_prompts=share)
        assert all(fits(packed(batch), max_tokens) for batch in micro if len(batch) > 1)
        assert len(micro) == count_full(part, packed, max_tokens)
        largest = max((size_of(packed(batch)) for batch in micro if len(batch) > 1), default=0)
        assert not largest or count_full(part, packed, largest - 1) > len(micro), "with a lower limit, there would be more"


def fits(batch: MicroBatch, max_tokens: int) -> bool:
    return size_of(batch) <= max_tokens


def size_of(batch: MicroBatch) -> int:
    """Return the lowest limit that the batch meets."""
    return max(batch.num_tokens, -(-num_keys(batch) // MAX_KV_RATIO))


def count_full(loads: list[PackCost], packed: Callable[[list[PackItem]], MicroBatch], max_tokens: int) -> int:
    """Return the number of micro-batches if each one is filled, by packing, until nothing fits."""
    parts: list[list[PackItem]] = [[]]
    for load in loads:
        if parts[-1] and not fits(packed([*parts[-1], load.item]), max_tokens):
            parts.append([])
        parts[-1].append(load.item)
    return len(parts)


def num_keys(batch: MicroBatch) -> int:
    """Return the number of keys that attention gathers for the batch."""
    return sum(map(len, Segments(batch.offset_S1, batch.prefix_S, device=torch.device("cpu")).key_rows))


def chain(turns: int) -> list[PackItem]:
    """Return one sequence per turn.

    Each continues the previous one with four observed tokens and two sampled tokens.
    """
    past, contexts = [], []
    for turn in range(turns):
        seen, said = [*past, *range(10, 14)], [20 + turn, 21 + turn]
        contexts.append(make_pack_item(sequence(seen, said), advantage=1.0, weight=1.0, denominator=1))
        past = [*seen, *said]
    return contexts


def test_a_chain_of_turns_is_cut_where_its_keys_become_too_many() -> None:
    """50 turns of 6 tokens have 300 tokens, which attend to 6 * (1 + 2 + ... + 50) = 7650 keys."""
    loads = pack_costs(chain(50), PAD, share_prompts=True)
    packed = partial(pack, image_token_id=PAD, positions=POSITIONS, share_prompts=True)
    whole = packed([load.item for load in loads])
    assert (whole.num_tokens, num_keys(whole)) == (300, 7650)
    micro = split_by_cost(loads, 300)
    assert [each for part in micro for each in part] == [load.item for load in loads]
    assert all(fits(packed(part), 300) for part in micro) and 7650 / (MAX_KV_RATIO * 300) < len(micro) <= 2 * 7650 / (MAX_KV_RATIO * 300)
    assert [len(part) for part in split_by_cost(loads[-2:], 10)] == [1, 1], "a long one stands alone"


@pytest.mark.parametrize(("room", "expected"), [(12, [3]), (11, [2, 1]), (9, [2, 1]), (8, [1, 2]), (7, [1, 1, 1])])
def test_keys_are_counted_by_hand(room: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in the docstring of _fill_by_cost has 4 keys, then 2 + 3 more, then 3 more. The
    second and third sequence alone have 3 keys, then 2 + 3 more. The largest of two micro-batches
    has 9 keys if the first two sequences are packed together, and 8 if the last two are.
    """
    texts = [1, 2, 3, 4], [1, 2, 5], [1, 2, 6]
    made = [make_pack_item(sequence(text[:-1], text[-1:]), advantage=1.0, weight=1.0, denominator=1) for text in texts]
    loads = [
        PackCost(made[0], num_tokens_alone=4, num_added_tokens=4),
        PackCost(made[1], num_tokens_alone=3, num_added_tokens=1),
        PackCost(made[2], num_tokens_alone=3, num_added_tokens=1),
    ]
    monkeypatch.setattr(minibatches, "MAX_KV_RATIO", 1)
    assert [len(part) for part in minibatches._fill_by_cost(loads, room)] == expected
    assert [len(part) for part in split_by_cost(loads, room)] == ([1, 2] if len(expected) == 2 else expected)


def test_micro_batches_have_similar_sizes() -> None:
    """16 sequences of 14 tokens with room for 5 each are split into four times four."""
    items = [make_pack_item(sequence([5] * 13, [10 + number]), advantage=1.0, weight=1.0, denominator=1) for number in range(16)]
    loads = pack_costs(items, PAD, share_prompts=False)
    assert [len(part) for part in split_by_cost(loads, 80)] == [4, 4, 4, 4]


def test_a_shared_prompt_is_one_segment() -> None:
    """Two sequences share a prompt with an image, and a third has a prompt that differs only in the
    image.
    """
    first, second = image(2, 2, "a"), image(2, 2, "b")
    contexts = [
        make_pack_item(sequence([PAD, 6], [7], first), advantage=1.0, weight=1.0, denominator=1),
        make_pack_item(sequence([PAD, 6], [8], first), advantage=-1.0, weight=0.5, denominator=2),
        make_pack_item(sequence([PAD, 6], [7], second), advantage=2.0, weight=1.0, denominator=4),
    ]
    batch = pack(contexts, image_token_id=PAD, positions=POSITIONS, share_prompts=True)
    assert batch.token_T.tolist() == [PAD, 6, 7, 6, 8, PAD, 6, 7]
    assert batch.target_T.tolist() == [6, 7, 0, 8, 0, 6, 7, 0]
    assert batch.mask_T.tolist() == [False, True, False, True, False, False, True, False]
    assert batch.weight_T.tolist() == [0, 1, 0, 0.5, 0, 0, 1, 0]
    assert batch.cu_seqlens_S1.tolist() == [0, 1, 3, 5, 8]
    assert batch.prefix_S == [-1, 0, 0, -1]
    assert batch.position_3T[0].tolist() == [0, 1, 2, 1, 2, 0, 1, 2]
    assert (batch.vision_position_M.tolist(), batch.vision_row_M.tolist()) == ([0, 5], [0, 1])
    assert batch.denominator == 7
    rows = make_loss_inputs(batch, batch.mask_T.nonzero()[:, 0], torch.zeros(3), torch.zeros(3))
    assert rows.sequence_R.tolist() == [0, 1, 2]
    assert (rows.advantage_R.tolist(), rows.weight_R.tolist()) == ([1, -1, 2], [1, 0.5, 1])


def test_what_is_shared_is_a_tree() -> None:
    """The first batch is the example in the docstring of pack. The second has a sequence of two
    turns, a sequence that repeats its first turn without having sampled it, and one that diverges
    from both before that turn.
    """
    by_hand = [sequence([5, 6], [7]), sequence([5, 6], [8]), sequence([5, 6, 8, 3], [4])]
    batch = pack([make_pack_item(each) for each in by_hand], image_token_id=PAD, positions=POSITIONS, share_prompts=True)
    assert batch.token_T.tolist() == [5, 6, 7, 6, 8, 3, 4]
    assert batch.target_T.tolist() == [6, 7, 0, 8, 0, 4, 0]
    assert (batch.offset_S1, batch.prefix_S) == ([0, 1, 3, 5, 7], [-1, 0, 0, 2])
    assert batch.num_sequences_S == [3, 1, 2, 1]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 1, 2, 2]

    parent = sequence([5, 6, 1], [7, 8])
    parent.extend([2])
    parent.extend([3], logprobs=[-0.25])
    batch = pack(
        [make_pack_item(each) for each in (parent, sequence([5, 6, 1, 7, 4], [8]), sequence([5, 6, 3], [1]))],
        image_token_id=PAD, positions=POSITIONS, share_prompts=True,
    )  # fmt: skip
    # [5 6] [1 7] [8 2 3] [4 8] [3 1]: the second sequence diverges within the first one's first
    # turn
    assert batch.token_T.tolist() == [5, 6, 1, 7, 8, 2, 3, 4, 8, 3, 1]
    assert batch.target_T.tolist() == [6, 1, 7, 8, 2, 3, 0, 8, 0, 1, 0]
    assert batch.mask_T.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 0, 1, 0]
    assert (batch.offset_S1, batch.prefix_S) == ([0, 2, 4, 7, 9, 11], [-1, 0, 1, 1, 0])
    assert batch.num_sequences_S == [3, 2, 1, 1, 1]
    assert batch.position_3T[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 2, 3]
    rows_R = batch.mask_T.nonzero()[:, 0]
    rows = make_loss_inputs(batch, rows_R, torch.zeros(5), torch.zeros(5))
    assert rows.sequence_R.tolist() == [0, 0, 0, 1, 2] and rows.turn_R.tolist() == [0, 0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from("12xyab"), max_size=7), max_size=7))
def test_a_tree_holds_every_context(trees: list[list[str]]) -> None:
    """Each sequence can be recovered from the batch, and no prompt is packed twice. Digits are
    observed tokens, x and y are sampled tokens (with the same ids), and a and b are images of 1 and
    2 tokens. Oracle: each sequence packed alone.
    """
    rollouts = [rollout(number, 0, (grown(["1", *parts, "x"]), 1.0)) for number, parts in enumerate(trees)]
    for number, each in enumerate(rollouts):
        each.sequences[0].set_column("advantages", [100.0 * number + place for place in range(len(each.sequences[0].token_ids))])
    minibatch = [PackItem(each.sequences[0], origin=(number, 0)) for number, each in enumerate(rollouts)]
    ordered = [load.item for load in pack_costs(minibatch, PAD, share_prompts=True)]
    batch = pack(ordered, image_token_id=PAD, positions=POSITIONS, share_prompts=True)
    rows_S = Segments(batch.offset_S1, batch.prefix_S, device=batch.token_T.device).key_rows
    first_row = {shown.key: sum(each.num_tokens for each in batch.images[:place]) for place, shown in enumerate(batch.images)}
    shown_T = dict(zip(batch.vision_position_M.tolist(), batch.vision_row_M.tolist(), strict=True))
    for number, each in enumerate(ordered):
        context, whole = each.sequence, pack([each], image_token_id=PAD, positions=POSITIONS)
        rows = [rows for rows, start in zip(rows_S, batch.offset_S1[:-1], strict=True) if batch.sequence_T[start] == number][-1]
        assert torch.equal(batch.token_T[rows], whole.token_T) and torch.equal(batch.position_3T[:, rows], whole.position_3T)
        seen = [first_row[image.key] + row for image in context.images for row in range(image.num_tokens)]
        assert [shown_T[row] for row in rows.tolist() if row in shown_T] == seen
        mine = batch.mask_T & (batch.sequence_T == number)
        for column in ("target_T", "advantage_T", "weight_T", "rollout_logprob_T"):
            assert torch.equal(getattr(batch, column)[mine], getattr(whole, column)[whole.mask_T]), "each sampled token once, in order"
    numbers = torch.arange(1.0, batch.num_tokens + 1)
    columns = scatter_to_rollouts(rollouts, [batch], [numbers])
    for (index, number), column in columns.items():
        rollouts[index].sequences[number].set_column("values", column)
    assert torch.equal(gather_column(rollouts, batch, "values"), numbers * batch.mask_T), "there and back again"
    prompts = [text[: each.prompt_length].tolist() for each, text in zip(ordered, token_key(ordered, PAD), strict=True)]
    beginnings = {tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)}
    assert batch.num_tokens <= max(1, len(beginnings) + sum(each.num_tokens - each.prompt_length for each in ordered)), "no prompt twice"


def grown(parts: list[str]) -> TokenSequence:
    made, shown = TokenSequence(), {"a": image(2, 2, "a"), "b": image(2, 4, "b")}
    for part in parts:
        if part in shown:
            made.extend([PAD] * shown[part].num_tokens, images=(shown[part],))
        else:
            made.extend([int(part, 36) % 32], logprobs=[-0.5] if part in "xy" else None)
    return made


def rollout(group: int, sample: int, *turns: tuple[TokenSequence, float]) -> Rollout:
    """Return a rollout with one sequence per turn.

    All sampled tokens of a turn have the same advantage.
    """
    for context, advantage in turns:
        context.set_column("advantages", [advantage * sampled for sampled in context.loss_mask])
    return Rollout(task="t", example_id="e", group=group, sample_index=sample, sequences=[context for context, _ in turns])


def test_minibatches_hold_whole_groups_and_leave_out_what_is_not_trained_on() -> None:
    credits = {(0, 0): (1.0, 2.0), (0, 1): (-1.0, -2.0), (1, 0): (0.5, 0.1), (1, 1): (9.0, 9.0), (2, 0): (0.25, 0.1), (3, 0): (-0.25, 0.1)}
    rollouts = [
        rollout(group, sample, (sequence([1], [2, 2]), first), (sequence([1], [2]), second))
        for (group, sample), (first, second) in credits.items()
    ]
    rollouts[3].filter_reason = "stop_reason"
    rollouts.insert(0, Rollout(task="t", example_id="e", group=0, sample_index=2, status=Status.FAILED, sequences=[sequence([1], [2])]))
    first, second = cut_minibatches(
        rollouts, BatchSettings(prompts_per_step=4, minibatches=2, loss_agg_mode="sequence_mean"), keep_zero_advantage=False
    )
    assert [each.sequence.advantages for each in first[:2]] == [[0, 1, 1], [0, 2]]
    assert [each.sequence.advantages[1] for each in first] == [1.0, 2.0, -1.0, -2.0, 0.5, 0.1]
    assert [each.sequence.advantages[1] for each in second] == [0.25, 0.1, -0.25, 0.1]
    assert {each.weight for each in first} == {1 / 3}, "an episode's mean runs over the tokens of all its turns"
    assert [each.denominator for each in first] == [1, 0, 1, 0, 1, 0]
    assert [each.origin for each in first] == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert [each.origin for each in second] == [(5, 0), (5, 1), (6, 0), (6, 1)]


def test_an_episodes_share_goes_with_its_first_context_that_is_packed() -> None:
    unsampled = TokenSequence()
    unsampled.extend([1, 2])
    alone = Rollout(task="t", example_id="e", group=0, sample_index=0, sequences=[unsampled, sequence([1], [2, 2])])
    ((only,),) = cut_minibatches([alone], BatchSettings(), keep_zero_advantage=True)
    assert (only.denominator, only.origin) == (2, (0, 1))


def test_what_cannot_move_the_policy_counts_in_the_denominator_alone() -> None:
    """Two groups of two rollouts: one with the advantages 1 and -1, one with equal rewards and
    therefore advantages of zero.
    """
    rollouts = [rollout(group, 0, (sequence([1], [2] * 3), credit)) for group, credit in ((0, 1.0), (0, -1.0), (1, 0.0), (1, 0.0))]

    def cut_with(*, with_idle: bool = False, minibatches: int = 1) -> list[list[tuple[float, int]]]:
        cut_up = cut_minibatches(rollouts, BatchSettings(prompts_per_step=2, minibatches=minibatches), keep_zero_advantage=with_idle)
        return [[(each.sequence.advantages[-1], each.denominator) for each in minibatch] for minibatch in cut_up]

    assert cut_with() == [[(1.0, 9), (-1.0, 3)]]
    assert cut_with(with_idle=True) == [[(1.0, 3), (-1.0, 3), (0.0, 3), (0.0, 3)]]
    assert cut_with(minibatches=2) == [[(1.0, 3), (-1.0, 3)], [(0.0, 3), (0.0, 3)]], "a minibatch of nothing else keeps them"


@pytest.mark.parametrize("share", [False, True])
def test_what_is_said_of_a_batch_returns_to_the_tokens_it_is_of(share: bool) -> None:
    """Two rollouts share a prompt with an image, and one of them has a second sequence. The values
    are written back to the tokens they belong to: entry t belongs to token t + 1. Expected values
    are computed by hand.
    """
    shown = image(2, 2, "a")
    first, second = sequence([PAD, 6], [7, 8], shown), sequence([PAD, 6], [4], shown)
    later = sequence([1], [2])
    later.extend([3, 3])
    later.extend([5], logprobs=[-1.0])
    rollouts = [rollout(0, 0, (first, 1.0), (later, 2.0)), rollout(0, 1, (second, -1.0))]
    (minibatch,) = cut_minibatches(rollouts, BatchSettings(), keep_zero_advantage=True)
    ordered = [load.item for load in pack_costs(minibatch, PAD, share_prompts=share)]
    batch = pack(ordered, image_token_id=PAD, positions=POSITIONS, share_prompts=share, multiple_of=4)
    numbers = torch.arange(1.0, batch.num_tokens + 1)
    columns = scatter_to_rollouts(rollouts, [batch], [numbers])
    if share:  # [PAD] [6 7 8] [6 4] [1 2 3 3 5] [0]
        assert batch.origin_S == [SegmentSource(0, 0, 0), SegmentSource(0, 0, 1), SegmentSource(1, 0, 1), SegmentSource(0, 1, 0), None]
        assert columns == {(0, 0): [0, 0, 2, 3], (1, 0): [0, 0, 5], (0, 1): [0, 7, 0, 0, 10]}
    else:  # [PAD 6 7 8] [PAD 6 4] [1 2 3 3 5]
        assert columns == {(0, 0): [0, 0, 2, 3], (1, 0): [0, 0, 6], (0, 1): [0, 8, 0, 0, 11]}
    for (index, number), column in columns.items():
        rollouts[index].sequences[number].set_column("advantages", column)
    batch.advantage_T = gather_column(rollouts, batch, "advantages")
    assert torch.equal(batch.advantage_T, numbers * batch.mask_T), "and back again"


@pytest.mark.parametrize(
    ("aggregation", "fixed_length", "expected"),
    [("token_mean", 0, (1.0, 4)), ("sequence_mean", 0, (0.25, 1)), ("fixed_length", 100, (1.0, 100))],
)
def test_an_episodes_weight_by_hand(aggregation: str, fixed_length: int, expected: tuple[float, int]) -> None:
    settings = BatchSettings(loss_agg_mode=aggregation, loss_scale_factor=fixed_length)
    assert episode_weight(4, settings) == expected
    with pytest.raises(AssertionError, match="must not be packed"):
        episode_weight(0, settings)


@pytest.mark.parametrize(("aggregation", "fixed_length"), [("token_mean", 0), ("sequence_mean", 0), ("fixed_length", 12)])
def test_weights_and_one_division_give_the_mean_of_the_paper(aggregation: str, fixed_length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    settings = BatchSettings(loss_agg_mode=aggregation, loss_scale_factor=fixed_length)
    episodes = [torch.randn(length, generator=generator, dtype=torch.float64) for length in (1, 3, 12, 7)]
    shares = [episode_weight(len(episode), settings) for episode in episodes]
    total = sum(weight * episode.sum().item() for (weight, _), episode in zip(shares, episodes, strict=True))
    textbook = {
        "token_mean": torch.cat(episodes).mean().item(),
        "sequence_mean": sum(episode.mean().item() for episode in episodes) / 4,
        "fixed_length": sum(episode.sum().item() for episode in episodes) / (4 * 12),
    }
    assert total / sum(share for _, share in shares) == pytest.approx(textbook[aggregation], abs=1e-14)


def test_contexts_stay_aligned() -> None:
    made = sequence([5, 6], [7, 8])
    made.extend([3], logprobs=[-0.1], versions=[4])
    assert (made.loss_mask, made.rollout_logprobs) == ([0, 0, 1, 1, 1], [0.0, 0.0, -0.5, -0.5, -0.1])
    assert made.weight_versions == [-1, -1, 0, 0, 4]
    with pytest.raises(AssertionError, match="have no weight version"):
        made.extend([1], versions=[3])
    with pytest.raises(AssertionError, match="2 values for 5 tokens"):
        made.set_column("values", [1.0, 2.0])
    with pytest.raises(AssertionError, match="is not one of"):
        made.set_column("rollout_logprobs", [0.0] * 5)
    with pytest.raises(AssertionError, match="lengths"):
        made.extend([1, 2], logprobs=[-1.0])
    assert np.isfinite(made.rollout_logprobs).all()


def test_a_turn_is_what_is_sampled_between_two_observations() -> None:
    """A sequence with turns of 2 tokens and 1 token, followed by a sequence with a turn of 1 token:
    adjacent turns in the batch keep separate ids and separate turn_mean weights.
    """
    two, one = TokenSequence(), TokenSequence()
    for context, parts in ((two, ([5], [7, 8], [1, 2], [3])), (one, ([6], [4]))):
        for number, tokens in enumerate(parts):
            context.extend(tokens, logprobs=[0.0] * len(tokens) if number % 2 else None)
    weighted_contexts = [PackItem(context, weight_is_per_turn=True, denominator=1) for context in (two, one)]
    batch = pack(weighted_contexts, image_token_id=PAD, positions=POSITIONS)
    rows_R = batch.mask_T.nonzero()[:, 0]
    assert batch.target_T[rows_R].tolist() == [7, 8, 3, 4]
    assert turn_ids(rows_R).tolist() == [0, 0, 1, 2]
    assert batch.weight_T.tolist() == [0.5, 0.5, 0, 0, 1, 0, 1, 0]
    assert turn_ids(rows_R[:0]).tolist() == []
