"""Properties that differ between ranks, tested without starting the layout: random seeds and banned
token ids."""

import pytest
import torch

from megatron_rl.policy import parallel
from megatron_rl.policy.logprobs import banned_mask


def test_stages_and_replicas_draw_from_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 stages times 64 replicas have distinct seeds.

    Megatron itself distinguishes tensor-parallel ranks (tensor_parallel/random.py).
    """
    seeds: list[int] = []
    monkeypatch.setattr(parallel.tensor_parallel, "model_parallel_cuda_manual_seed", seeds.append)
    for stage in range(16):
        for replica in range(64):
            monkeypatch.setattr(parallel.parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
            monkeypatch.setattr(parallel.parallel_state, "get_data_parallel_rank", lambda replica=replica: replica)
            parallel.seed_generators(7)
    assert len({*seeds}) == len(seeds) == 16 * 64 and min(seeds) == 7


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_bans_its_own_ids(num_ranks: int) -> None:
    """The concatenated masks of all ranks equal the mask of the whole vocabulary.

    Ids beyond the vocabulary are ignored.
    """
    banned, size = [0, 3, 4, 11, 15, 16, 99], 16 // num_ranks
    masks = [banned_mask(banned, first_id=rank * size, size=size, device=torch.device("cpu")) for rank in range(num_ranks)]
    assert torch.cat(masks).tolist() == [token in banned for token in range(16)]
