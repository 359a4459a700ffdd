"""Packing against hand numbers, rotary positions against Hugging Face."""

from itertools import groupby

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

from megatron_rl.batch import Piece, balance, cut, cut_minibatches, loads_of, mrope_positions, pack
from megatron_rl.config import AlgoSettings
from megatron_rl.types import Context, Image, Rollout, Turn

PAD = 9


def image(rows: int, columns: int, key: str) -> Image:
    patches = torch.full((rows * columns, 3), float(ord(key)))
    return Image(picture=Pillow.new("RGB", (1, 1)), patch_PC=patches, grid=(1, rows, columns), key=key)


def sequence(prompt: list[int], sampled: list[int], *images: Image) -> Context:
    made = Context()
    made.extend(prompt, images=images)
    made.extend(sampled, logprobs=[-0.5] * len(sampled))
    return made


def test_pack_shifts_once_and_pads_nothing_between_sequences() -> None:
    pieces = [
        Piece.uniform(sequence([5, 6], [7, 8]), advantage=2.0, weight=0.5, denominator=2),
        Piece.uniform(sequence([1], [4]), advantage=-1.0, weight=1.0, denominator=1),
    ]
    batch = pack(pieces, image_token_id=PAD)
    assert batch.token_T.tolist() == [5, 6, 7, 8, 1, 4]
    assert batch.target_T.tolist() == [6, 7, 8, 0, 4, 0]
    assert batch.mask_T.tolist() == [False, True, True, False, True, False]
    assert batch.weight_T.tolist() == [0, 0.5, 0.5, 0, 1.0, 0]
    assert batch.advantage_T.tolist() == [0, 2.0, 2.0, 0, -1.0, 0]
    assert batch.engine_logprob_T.tolist() == [0, -0.5, -0.5, 0, -0.5, 0]
    assert batch.position_3T.tolist() == [[0, 1, 2, 3, 0, 1]] * 3
    assert batch.cu_seqlens_S1.tolist() == [0, 4, 6]
    assert batch.denominator == 3


def test_an_image_of_two_sequences_is_stored_once() -> None:
    shared, other = image(2, 4, "a"), image(4, 2, "b")
    pieces = [
        Piece.uniform(sequence([1, PAD, PAD, 2, PAD, PAD], [3], shared, other), advantage=0.0, weight=1.0, denominator=1),
        Piece.uniform(sequence([PAD, PAD], [3], shared), advantage=0.0, weight=1.0, denominator=1),
    ]
    batch = pack(pieces, image_token_id=PAD)
    assert batch.grid_I3.tolist() == [[1, 2, 4], [1, 4, 2]]
    assert batch.patch_PC[:, 0].tolist() == [ord("a")] * 8 + [ord("b")] * 8
    assert batch.vision_position_V.tolist() == [1, 2, 4, 5, 7, 8]
    assert batch.vision_row_V.tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(("tokens", "multiple", "length"), [(6, 4, 8), (8, 4, 8), (0, 1, 1), (0, 4, 4)])
def test_padding_is_a_sequence_of_its_own_without_weight(tokens: int, multiple: int, length: int) -> None:
    pieces = [Piece.uniform(sequence([5] * (tokens - 1), [6]), advantage=1.0, weight=1.0, denominator=1)] if tokens else []
    batch = pack(pieces, image_token_id=PAD, multiple_of=multiple)
    assert batch.num_tokens == length == batch.cu_seqlens_S1[-1]
    assert batch.mask_T.sum() == bool(tokens) == batch.weight_T.sum() == batch.denominator
    assert {t.shape[-1] for t in (batch.target_T, batch.mask_T, batch.weight_T, batch.position_3T, batch.engine_logprob_T)} == {length}


def test_placeholders_must_match_the_images() -> None:
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [image(2, 4, "a")], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, 2], [image(2, 2, "a")], PAD)
    with pytest.raises(ValueError, match="placeholders"):
        mrope_positions([1, PAD, 2], [], PAD)


HF_CONFIG = Qwen2_5_VLConfig(
    text_config={"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
                 "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
    vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16},
    image_token_id=PAD,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 7), st.tuples(st.integers(1, 4), st.integers(1, 4))), min_size=1, max_size=12))
def test_positions_are_those_of_hf(parts: list[int | tuple[int, int]]) -> None:
    """Any interleaving of text runs and images (rows x columns of merged patches, a separator token after each)."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [1] * part
        else:
            tokens += [PAD] * (part[0] * part[1]) + [2]
            images.append(image(2 * part[0], 2 * part[1], "a"))
    ids = torch.tensor([tokens])
    expected, _ = Qwen2_5_VLModel.get_rope_index(
        _WithConfig, ids, mm_token_type_ids=(ids == PAD).int(), image_grid_thw=torch.tensor([i.grid for i in images]) if images else None
    )
    assert mrope_positions(tokens, images, PAD).tolist() == expected[:, 0].tolist()


class _WithConfig:
    """What get_rope_index needs of its model."""

    config = HF_CONFIG
    get_vision_position_ids = staticmethod(lambda *args, **kwargs: Qwen2_5_VLModel.get_vision_position_ids(None, *args, **kwargs))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 50)), max_size=40), st.integers(1, 8), st.integers(1, 120), st.booleans())
def test_dealing_and_cutting_keep_every_piece(shapes: list[tuple[int, int]], ranks: int, max_tokens: int, share: bool) -> None:
    """Prompts of one of three kinds (10, 20 or 30 tokens) with 1 to 50 sampled tokens."""
    pieces = [
        Piece.uniform(sequence([kind] * (10 * kind), [5] * length), advantage=float(i), weight=1.0, denominator=1)
        for i, (kind, length) in enumerate(shapes)
    ]
    loads = loads_of(pieces, PAD, share_prompts=share)
    kinds = [load.piece.context.token_ids[0] for load in loads]
    assert sorted(load.piece.advantages[-1] for load in loads) == [float(i) for i in range(len(pieces))]
    assert len([run for run, _ in groupby(kinds)]) == len(set(kinds)), "equal prompts are neighbors"
    dealt = balance(loads, ranks)
    assert len(dealt) == ranks and [load for part in dealt for load in part] == loads
    mean = sum(load.next for load in loads) / ranks
    assert all(sum(load.next for load in part) <= mean + 80 for part in dealt)
    for part in dealt:
        micro = cut(part, max_tokens)
        assert micro and [piece for batch in micro for piece in batch] == [load.piece for load in part]
        for batch in micro:
            packed = pack(batch, image_token_id=PAD, share_prompts=share)
            assert len(batch) <= 1 or packed.num_tokens <= max_tokens


def test_a_shared_prompt_is_one_segment() -> None:
    """The docstring's example, with an image in the prompt and one sequence whose prompt differs only in the image."""
    first, second = image(2, 2, "a"), image(2, 2, "b")
    pieces = [
        Piece.uniform(sequence([PAD, 6], [7], first), advantage=1.0, weight=1.0, denominator=1),
        Piece.uniform(sequence([PAD, 6], [8], first), advantage=-1.0, weight=0.5, denominator=2),
        Piece.uniform(sequence([PAD, 6], [7], second), advantage=2.0, weight=1.0, denominator=4),
    ]
    batch = pack(pieces, image_token_id=PAD, share_prompts=True)
    assert batch.token_T.tolist() == [PAD, 6, 7, 6, 8, PAD, 6, 7]
    assert batch.target_T.tolist() == [6, 7, 0, 8, 0, 6, 7, 0]
    assert batch.mask_T.tolist() == [False, True, False, True, False, False, True, False]
    assert batch.weight_T.tolist() == [0, 1, 0, 0.5, 0, 0, 1, 0]
    assert batch.cu_seqlens_S1.tolist() == [0, 1, 3, 5, 6, 8]
    assert batch.prefix_S == [-1, 0, 0, -1, 3]
    assert batch.position_3T[0].tolist() == [0, 1, 2, 1, 2, 0, 1, 2]
    assert (batch.vision_position_V.tolist(), batch.vision_row_V.tolist()) == ([0, 5], [0, 1])
    assert batch.denominator == 7


def test_minibatches_hold_whole_groups_and_leave_out_what_has_no_credit() -> None:
    rollouts = []
    for group, sample in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)):
        two_turns = [sequence([1], [2, 2]), sequence([1], [2])]
        turns = [Turn(context=0, span=(1, 3), text=""), Turn(context=1, span=(1, 2), text="")]
        rollouts.append(Rollout(task="t", example_id="e", group=group, sample=sample, weight_version=0, contexts=two_turns, turns=turns))
    algo = AlgoSettings(prompts_per_step=4, minibatches=2, aggregation="sequence_mean")
    advantages = [[1.0, 2.0], [-1.0, -2.0], [0.5, 0.1], None, [0.25, 0.1], [-0.25, 0.1]]
    first, second = cut_minibatches(rollouts, advantages, algo)
    assert [piece.advantages for piece in first[:2]] == [[0, 1, 1], [0, 2]]
    assert [piece.advantages[1] for piece in first] == [1.0, 2.0, -1.0, -2.0, 0.5, 0.1]
    assert [piece.advantages[1] for piece in second] == [0.25, 0.1, -0.25, 0.1]
    assert {piece.weight for piece in first} == {1 / 3}, "an episode's mean runs over the tokens of all its turns"
    assert [piece.denominator for piece in first] == [1, 0, 1, 0, 1, 0]


def test_what_cannot_move_the_policy_counts_in_the_denominator_alone() -> None:
    """Two groups of two: one with advantages 1 and -1, one whose rewards were equal."""
    rollouts = []
    for group in (0, 0, 1, 1):
        turns = [Turn(context=0, span=(1, 4), text="")]
        rollouts.append(
            Rollout(task="t", example_id="e", group=group, sample=0, weight_version=0, contexts=[sequence([1], [2] * 3)], turns=turns)
        )
    advantages = [[1.0], [-1.0], [0.0], [0.0]]

    def cut_with(**settings: float) -> list[list[tuple[float, int]]]:
        minibatches = cut_minibatches(rollouts, advantages, AlgoSettings(prompts_per_step=2, **settings))
        return [[(piece.advantages[-1], piece.denominator) for piece in pieces] for pieces in minibatches]

    assert cut_with() == [[(1.0, 9), (-1.0, 3)]]
    assert cut_with(kl_coef=0.1) == cut_with(entropy_coef=0.1) == [[(1.0, 3), (-1.0, 3), (0.0, 3), (0.0, 3)]]
    assert cut_with(minibatches=2) == [[(1.0, 3), (-1.0, 3)], [(0.0, 3), (0.0, 3)]], "a minibatch of nothing else keeps them"


def test_sequences_stay_aligned() -> None:
    made = sequence([5, 6], [7, 8])
    assert (made.loss_mask, made.engine_logprobs) == ([0, 0, 1, 1], [0.0, 0.0, -0.5, -0.5])
    with pytest.raises(AssertionError, match="lengths"):
        made.extend([1, 2], logprobs=[-1.0])
    assert np.isfinite(made.engine_logprobs).all()
