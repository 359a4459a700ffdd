"""Padding of a vocabulary that tensor parallelism does not divide, against rows computed by
hand."""

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_rl.config import ParallelSettings
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.name_mapping import ParamMapping, padded_vocab
from megatron_rl.policy.padding import PADDED_KEYS, add_padding, strip_padding
from megatron_rl.policy.parallel import check_layout


@pytest.mark.parametrize(("size", "tp", "expected"), [(11, 1, 11), (11, 2, 12), (11, 4, 12), (12, 4, 12), (9, 4, 12), (151936, 8, 151936)])
def test_the_padded_size(size: int, tp: int, expected: int) -> None:
    """The vocabulary is padded to the next multiple of the tensor-parallel size."""
    assert padded_vocab(size, tp) == expected


def test_rows_there_and_back() -> None:
    """Nine rows over four ranks become three rows per rank, with zeros only on the last rank.

    Converting the shards back gives the original rows.
    """
    row, rows = ParamMapping(PADDED_KEYS[0], ("embed",), "first", shard_dim=0, vocab_rows=9), torch.arange(1.0, 19.0).view(9, 2)
    shards = [row.to_mcore((rows,), rank, 4) for rank in range(4)]
    assert [shard[:, 0].tolist() for shard in shards] == [[1, 3, 5], [7, 9, 11], [13, 15, 17], [0, 0, 0]]
    assert torch.equal(row.to_hf(shards)[0], rows) and torch.equal(row.to_hf([rows])[0], rows)
    assert torch.equal(row.to_mcore((rows,), 0, 1), rows)


def test_a_matrix_that_is_no_vocabulary_is_never_padded() -> None:
    """A weight that is not indexed by token id is never padded; sharding it unevenly raises."""
    with pytest.raises(AssertionError, match="is not divisible by tensor parallel size 4"):
        ParamMapping("fc2", ("down",), "layer:0", shard_dim=0).to_mcore((torch.zeros(9, 2),), 0, 4)


def test_a_checkpoint_has_none_of_it() -> None:
    """A checkpoint contains no padding.

    Eleven rows over two ranks are six and five on disk, and six and six in memory.
    """
    for rank, held in ((0, 6), (1, 5)):
        data = torch.arange(12.0).view(6, 2) + 100 * rank
        part = ShardedTensor.from_rank_offsets(PADDED_KEYS[0], data, (0, rank, 2), allow_shape_mismatch=True)
        (written,) = strip_padding({"it": part}, 11).values()
        assert (written.global_shape, written.local_shape, written.global_offset) == ((11, 2), (held, 2), (6 * rank, 0))
        assert torch.equal(written.data, data[:held]) and written.data.data_ptr() == data.data_ptr()
        again = add_padding({PADDED_KEYS[0]: written.data, "other": data}, 6)
        assert torch.equal(again[PADDED_KEYS[0]][:held], data[:held]) and not again[PADDED_KEYS[0]][held:].any() and again["other"] is data
        assert strip_padding({"it": part}, 12)["it"] is part


def test_no_layout_is_refused_for_its_vocabulary() -> None:
    """No layout is rejected because of the vocabulary size; the head count still restricts it.

    The 7B model has 28 heads and four key/value heads.
    """

    model = replace(load_known_spec("Qwen/Qwen2.5-VL-7B-Instruct"), vocab_size=152067)
    check_layout(ParallelSettings(tp=4), model, 4)
    with pytest.raises(ValueError, match=r"^parallel.tp=8: does not divide the model's 28 attention heads; use one of 1, 2, 4$"):
        check_layout(ParallelSettings(tp=8), model, 8)
