"""Images distributed over tensor-parallel ranks: every rank gets the embeddings that one vision
tower computes for all images.

Also tests that patches are embedded by a matrix product, with the result of Hugging Face's
convolution.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl.config import LoraSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy import patches, vision
from megatron_rl.types import Image


class Tower(nn.Module):
    """A stand-in vision tower that adds up the patches of each token."""

    def __init__(self, patches_a_token: int) -> None:
        super().__init__()
        self.patches_a_token, self.config = patches_a_token, SimpleNamespace(out_hidden_size=3)

    @property
    def sizes(self) -> SimpleNamespace:
        """Return the fields of VisionSpec that the code under test reads."""
        merge = round(self.patches_a_token**0.5)
        return SimpleNamespace(
            spatial_merge_size=merge,
            window_size=0,
            num_position_embeddings=0,
            num_deepstack_layers=0,
            out_hidden_size=3,
            patches_per_token=self.patches_a_token,
        )

    def forward(self, patch_PC: torch.Tensor, *, position_ids: torch.Tensor | None = None, **_: object) -> SimpleNamespace:
        assert position_ids is None or len(position_ids) == len(patch_PC)
        return SimpleNamespace(pooler_output=patch_PC.reshape(-1, self.patches_a_token, 3).sum(1))


def encoded_by(ranks: int, tower: Tower, patch_PC: torch.Tensor, grid_I3: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> list:
    """Return the result of each rank.

    The ranks run one after another: first to record what each would gather, then with the recorded
    tensors.
    """
    said: list[torch.Tensor] = []

    def say(padded: torch.Tensor, **_: object) -> torch.Tensor:
        said.append(padded)
        return padded.repeat(ranks, 1)

    layouts = [SimpleNamespace(tp=ranks, tp_rank=rank) for rank in range(ranks)]
    for gather in (say, lambda padded, **_: torch.cat(said)):
        monkeypatch.setattr(vision, "gather_from_sequence_parallel_region", gather)
        results = [
            vision.encode_images(tower, own_PC, grid_I3, layout, sizes=tower.sizes)
            for layout, own_PC in zip(layouts, own_patches(ranks, patch_PC, grid_I3), strict=True)
        ]
    return results


def own_patches(ranks: int, patch_PC: torch.Tensor, grid_I3: torch.Tensor) -> list[torch.Tensor]:
    """Return for each rank the patches of the images that it encodes."""
    images = [
        Image(None, part, tuple(grid), str(number), merge=1)
        for number, (part, grid) in enumerate(zip(patch_PC.split(grid_I3.prod(1).tolist()), grid_I3.tolist(), strict=True))
    ]
    return [torch.cat([patch_PC[:0], *(image.patch_PC for image in share)]) for share in patches.images_of_rank(images, ranks)]


@pytest.mark.parametrize("merge", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shares_of_the_images_are_put_together_in_order(ranks: int, merge: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings on every rank equal those of one vision tower, and each image is encoded once."""
    grid_I3 = torch.tensor([[1, rows * merge, columns * merge] for rows, columns in ((2, 3), (1, 1), (4, 2), (1, 5))])
    tower, patch_PC = Tower(merge**2), torch.randn(int(grid_I3.prod(1).sum()), 3)
    expected = tower(patch_PC).pooler_output
    results = encoded_by(ranks, tower, patch_PC, grid_I3, monkeypatch)
    assert all(torch.equal(embeddings_VH, expected) for embeddings_VH, _ in results)
    assert sum(count for _, count in results) == 4


class Watch(TorchDispatchMode):
    """Records the name of every operation that runs, in forward and backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.ran.add(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.known_failure("slow-patch-embedding")
def test_patches_are_embedded_by_a_product(random_model: Path) -> None:
    """Embeddings and gradients equal those of Hugging Face's convolution, and no convolution runs
    in forward or backward."""
    spec = read_spec(random_model)
    torch.manual_seed(0)
    theirs = spec.build_tower()
    ours = vision.build_vision_tower(spec, SimpleNamespace(recompute="none"), torch.float32, lora=LoraSettings())
    ours.load_state_dict(theirs.state_dict())
    patch_PC = torch.randn(24, theirs.patch_embed.proj.weight[0].numel())
    seen = []
    for tower in (theirs, ours):
        with Watch() as watch:
            embedded = tower.patch_embed(patch_PC)
            (embedded * torch.arange(embedded.shape[1])).sum().backward()
        gradient = tower.patch_embed.proj.weight.grad
        tower.zero_grad()
        seen.append((embedded, gradient, any("conv" in name for name in watch.ran)))
    (one, one_gradient, convolved), (other, other_gradient, still_convolved) = seen
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other_gradient, one_gradient, rtol=1e-5, atol=1e-5 * float(one_gradient.abs().max()))
    assert convolved and not still_convolved
    with Watch() as watch:
        vision.encode_patches(ours, patch_PC, [[1, 4, 6]], spec.vision).sum().backward()
    assert watch.ran and not any("conv" in name for name in watch.ran)
