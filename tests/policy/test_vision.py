"""Images shared out over tensor-parallel ranks: every rank has the embeddings that one tower makes of all, whatever is one token."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_rl.policy import vision


class Tower(nn.Module):
    """Adds up the patches of each token."""

    def __init__(self, patches_a_token: int) -> None:
        super().__init__()
        self.patches_a_token, self.config = patches_a_token, SimpleNamespace(out_hidden_size=3)

    def forward(self, patch_PC: torch.Tensor, *, grid_thw: torch.Tensor) -> SimpleNamespace:
        assert len(patch_PC) == grid_thw.prod(1).sum()
        return SimpleNamespace(pooler_output=patch_PC.reshape(-1, self.patches_a_token, 3).sum(1))


def encoded_by(ranks: int, tower: Tower, patch_PC: torch.Tensor, grid_I3: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list:
    """What each rank gets: the ranks run one after another, first to say what they would gather, then with what all have said."""
    said: list[torch.Tensor] = []

    def say(padded: torch.Tensor, **_: object) -> torch.Tensor:
        said.append(padded)
        return padded.repeat(ranks, 1)

    layouts = [SimpleNamespace(tp=ranks, tp_rank=rank) for rank in range(ranks)]
    for gather in (say, lambda padded, **_: torch.cat(said)):
        monkeypatch.setattr(vision, "gather_from_sequence_parallel_region", gather)
        results = [vision.encode_images(tower, patch_PC, grid_I3, layout, patches_a_token=tower.patches_a_token) for layout in layouts]
    return results


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_of_the_images_are_put_together_in_order(ranks: int, merge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grid_I3 = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in ((2, 3), (1, 1), (4, 2), (1, 5))])
    tower, patch_PC = Tower(merge**2), torch.randn(int(grid_I3.prod(1).sum()), 3)
    expected = tower(patch_PC, grid_thw=grid_I3).pooler_output
    results = encoded_by(ranks, tower, patch_PC, grid_I3, monkeypatch)
    assert all(torch.equal(embeddings_VH, expected) for embeddings_VH, _ in results)
    assert sum(count for _, count in results) == 4
