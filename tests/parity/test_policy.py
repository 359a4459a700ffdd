"""The policy against Hugging Face, and every layout against one process: fp32, 1e-5."""

from pathlib import Path

import pytest
import torch
from packed import example_pieces, picture, user
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.batch import Piece
from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Sequence

HERE = Path(__file__).parent
LAYOUTS = ["world1_tp1_pp1_sp0", "world2_tp2_pp1_sp0", "world2_tp2_pp1_sp1", "world2_tp1_pp2_sp0", "world2_tp1_pp1_sp0", "world4_tp2_pp2_sp0"]
TEMPERATURE = 0.7


def hf_logits(model: Qwen2_5_VLForConditionalGeneration, renderer: Renderer, sequence: Sequence) -> torch.Tensor:
    """HF's own forward of one sequence: logits [L, vocabulary]."""
    ids = torch.tensor([sequence.token_ids])
    images = {}
    if sequence.images:
        images = {
            "pixel_values": torch.cat([image.patch_PC for image in sequence.images]),
            "image_grid_thw": torch.tensor([image.grid for image in sequence.images]),
            "mm_token_type_ids": (ids == renderer.image_token_id).int(),
        }
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **images).logits[0]


def sampled_distribution(logits: torch.Tensor, banned_ids: list[int]) -> torch.Tensor:
    """log softmax at the sampling temperature over the ids that may be sampled."""
    keep = torch.ones(logits.shape[-1], dtype=torch.bool)
    keep[banned_ids] = False
    return (logits / TEMPERATURE).masked_fill(~keep, float("-inf")).log_softmax(-1)


class HfRun:
    """What HF computes on the same pieces, one sequence at a time, with torch's own autograd."""

    def __init__(self, folder: Path) -> None:
        self.renderer = Renderer(ModelSettings(path=str(folder)))
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self.pieces: list[Piece] = example_pieces(self.renderer)
        logits, logprobs, loss = [], [], 0.0
        for piece in self.pieces:
            rows = [t for t in range(piece.num_tokens - 1) if piece.sequence.loss_mask[t + 1]]
            row_logits = hf_logits(self.model, self.renderer, piece.sequence)[rows]
            distribution = sampled_distribution(row_logits, self.renderer.banned_ids)
            targets = torch.tensor([piece.sequence.token_ids[t + 1] for t in rows])
            logprob = distribution.gather(1, targets[:, None])[:, 0]
            entropy = -(distribution.exp() * distribution.masked_fill(distribution.isinf(), 0.0)).sum(-1)
            loss = loss - (piece.weight * (logprob + 0.3 * entropy)).sum()
            logits.append(row_logits.detach())
            logprobs.append(logprob.detach())
        loss = loss / sum(piece.denominator for piece in self.pieces)
        loss.backward()
        self.logits, self.logprobs, self.loss = torch.cat(logits), torch.cat(logprobs), loss.item()
        # transformers 5 names its modules the newer way; checkpoints, and our stream, the released way.
        rename = {"model.language_model.": "model.", "model.visual.": "visual."}
        self.gradients = {}
        for name, parameter in self.model.named_parameters():
            for newer, released in rename.items():
                name = released + name.removeprefix(newer) if name.startswith(newer) else name
            self.gradients[name] = parameter.grad


@pytest.fixture(scope="module")
def hf(random_model: Path) -> HfRun:
    return HfRun(random_model)


@pytest.fixture(scope="module")
def results(random_model: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("layouts")
    torchrun(1, HERE / "layouts.py", random_model, out, "1,1,0")
    torchrun(2, HERE / "layouts.py", random_model, out, "2,1,0", "2,1,1", "1,2,0", "1,1,0")
    torchrun(4, HERE / "layouts.py", random_model, out, "2,2,0")
    return {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_logprobs_are_those_of_hf(layout: str, results: dict, hf: HfRun) -> None:
    result = results[layout]
    assert 1 < hf.logits.std() < 5
    assert (result["logits"] - hf.logits).abs().max() <= 1e-5
    assert (result["logprobs"][result["mask"]] - hf.logprobs).abs().max() <= 1e-5


@pytest.mark.parametrize("cut", ["one", "each"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_that_of_hf(layout: str, cut: str, results: dict, hf: HfRun) -> None:
    gradients = results[layout][f"gradients_{cut}"]
    assert gradients.keys() == hf.gradients.keys()
    worst = max((relative(gradient, hf.gradients[name]), name) for name, gradient in gradients.items())
    assert worst[0] <= 1e-5, worst


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("step", "bound"), [("step_eps1e-4_one", 1e-5), ("step_eps1e-4_each", 1e-5), ("step_eps1e-8_one", 1e-3)])
def test_the_first_step_is_the_same_at_every_layout(layout: str, step: str, bound: float, results: dict) -> None:
    """Against one process and one micro-batch. At eps 1e-8 Adam divides near-zero gradients by themselves: hence the wider bound."""
    one, other = results[LAYOUTS[0]][step.replace("each", "one")], results[layout][step]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    worst = max((relative(change, one["change"][name]), name) for name, change in other["change"].items())
    assert worst[0] <= bound, worst


def test_swapping_two_images_moves_the_answer(hf: HfRun) -> None:
    first, second = picture(3, 112, 112), picture(4, 112, 112)
    with torch.no_grad():
        straight, swapped = (
            hf_logits(hf.model, hf.renderer, hf.renderer.prompt([user("Which one?", *pictures)]))[-1]
            for pictures in ((first, second), (second, first))
        )
    assert (straight - swapped).abs().max() >= 0.1
