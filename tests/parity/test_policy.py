"""The policy against Hugging Face, and every layout against one process: fp32, 1e-5."""

from pathlib import Path

import pytest
import torch
from packed import example_pieces, picture, user
from peft import PeftModel
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.batch import Piece
from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Context
from tools.data.make_tiny_qwen2_5_vl import make

pytestmark = pytest.mark.timeout(1000)  # the first test waits for the walk of eight processes
HERE = Path(__file__).parent
TEMPERATURE = 0.7
ONE_PROCESS = ["1,1,1,0,none,tied", "1,1,1,0,none,untied"]
EIGHT_PROCESSES = [
    # tp, pp, vpp, sequence parallel, recomputation, model; data parallel: what remains of 8
    "4,2,1,0,none,untied",
    "4,2,2,1,full,tied",
    "4,2,1,1,selective,untied",
    "4,1,1,0,full,tied",
    "4,1,1,1,none,untied",
    "2,2,1,0,selective,tied",
    "2,2,2,1,none,untied",
    "2,2,2,0,full,untied",
    "2,2,1,1,full,tied",
    "2,1,1,1,selective,tied",
    "2,1,1,0,none,untied",
    "1,2,2,0,selective,tied",
    "1,2,1,0,full,untied",
    "1,1,1,0,full,tied",
]
LAYOUTS = ONE_PROCESS + EIGHT_PROCESSES


def hf_logits(model: Qwen2_5_VLForConditionalGeneration, renderer: Renderer, context: Context) -> torch.Tensor:
    """HF's own forward of one context: logits [L, vocabulary]."""
    ids = torch.tensor([context.token_ids])
    images = {}
    if context.images:
        images = {
            "pixel_values": torch.cat([image.patch_PC for image in context.images]),
            "image_grid_thw": torch.tensor([image.grid for image in context.images]),
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

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """With the LoRA adapter of a PEFT folder, its gradients alone."""
        self.renderer = Renderer(ModelSettings(path=str(folder)))
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        if adapter:
            self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        self.pieces: list[Piece] = example_pieces(self.renderer)
        logits, logprobs, loss = [], [], 0.0
        for piece in self.pieces:
            rows = [t for t in range(piece.num_tokens - 1) if piece.context.loss_mask[t + 1]]
            row_logits = hf_logits(self.model, self.renderer, piece.context)[rows]
            distribution = sampled_distribution(row_logits, self.renderer.banned_ids)
            targets = torch.tensor([piece.context.token_ids[t + 1] for t in rows])
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
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four key/value heads, so that tensor parallelism reaches 4; embeddings tied and not."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied"):
        make(folder / name, preset="nano", init="random", seed=1, heads=8, kv_heads=4, tied=name == "tied")
    return folder


@pytest.fixture(scope="module")
def hf(models: Path) -> dict[str, HfRun]:
    return {name: HfRun(models / name) for name in ("tied", "untied")}


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("layouts")
    torchrun(1, HERE / "layouts.py", models, out, *ONE_PROCESS)
    torchrun(8, HERE / "layouts.py", models, out, *EIGHT_PROCESSES, timeout_s=900)
    return {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def model_of(layout: str) -> str:
    return layout.rsplit(",", 1)[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_logprobs_are_those_of_hf(layout: str, results: dict, hf: dict[str, HfRun]) -> None:
    result, truth = results[layout], hf[model_of(layout)]
    assert 1 < truth.logits.std() < 5
    assert (result["logits"] - truth.logits).abs().max() <= 1e-5
    assert (result["logprobs"][result["mask"]] - truth.logprobs).abs().max() <= 1e-5


@pytest.mark.parametrize("cut", ["one", "each"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_that_of_hf(layout: str, cut: str, results: dict, hf: dict[str, HfRun]) -> None:
    gradients, truth = results[layout][f"gradients_{cut}"], hf[model_of(layout)].gradients
    assert gradients.keys() == truth.keys()
    worst = max((relative(gradient, truth[name]), name) for name, gradient in gradients.items())
    assert worst[0] <= 1e-5, worst


@pytest.mark.parametrize("layout", EIGHT_PROCESSES)
@pytest.mark.parametrize(("steps", "bound"), [("first_step", 1e-5), ("three_steps", 1e-3)])
def test_training_is_the_same_at_every_layout(layout: str, steps: str, bound: float, results: dict) -> None:
    """Against one process. The first step has Adam's eps at 1e-4; at 1e-8 Adam divides near-zero gradients by themselves."""
    one, other = results[f"1,1,1,0,none,{model_of(layout)}"][steps], results[layout][steps]
    assert other["loss"] == pytest.approx(one["loss"], rel=bound)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    worst = max((relative(change, one["change"][name]), name) for name, change in other["change"].items())
    assert worst[0] <= bound, worst


@pytest.mark.parametrize("layout", EIGHT_PROCESSES)
def test_copies_of_a_parameter_stay_bitwise_equal(layout: str, results: dict) -> None:
    """Replicated parameters over tensor-parallel ranks, all over data-parallel ranks, tied embeddings over stages; after three steps."""
    digests: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for what, digest in results[layout]["copies"]:
        digests.setdefault(what, set()).add(digest)
        counts[what] = counts.get(what, 0) + 1
    assert {what: found for what, found in digests.items() if len(found) > 1} == {}
    assert min(counts.values()) >= 1
    assert max(counts.values()) > 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_image_is_encoded_twice(layout: str, results: dict) -> None:
    """Each data-parallel rank ran the same micro-batch forward once: its tensor-parallel ranks encoded each distinct image once."""
    result = results[layout]
    totals: dict[int, list[int]] = {}
    for pp_rank, dp_rank, count in result["encoded"]:
        assert pp_rank == 0 or count == 0
        totals.setdefault(dp_rank, []).append(count)
    assert {sum(counts) for counts in totals.values()} == {result["images"]}
    assert result["images"] == 2
    assert all(max(counts) == 1 for counts in totals.values() if sum(count > 0 for count in counts) > 1)


def test_swapping_two_images_moves_the_answer(hf: dict[str, HfRun]) -> None:
    truth = hf["tied"]
    first, second = picture(3, 112, 112), picture(4, 112, 112)
    with torch.no_grad():
        straight, swapped = (
            hf_logits(truth.model, truth.renderer, truth.renderer.prompt([user("Which one?", *pictures)]))[-1]
            for pictures in ((first, second), (second, first))
        )
    assert (straight - swapped).abs().max() >= 0.1
