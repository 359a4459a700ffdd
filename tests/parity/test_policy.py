"""The policy against Hugging Face, and every layout against one process: fp32, 1e-5."""

from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from tests.conftest import SUPPORT
from tests.support.hf_run import HfRun, hf_logits, relative
from tests.support.packed import picture, user
from tools.data.make_tiny_qwen2_5_vl import make

pytestmark = pytest.mark.timeout(1000)  # the first test waits for the walk of eight processes
ONE_PROCESS = ["1,1,1,0,none,tied", "1,1,1,0,none,untied"]
FOUR_PROCESSES = [
    # tp, pp, vpp, sequence parallel, recomputation, (MiB of a bucket of exported weights,) model; data parallel: what remains of the world
    "2,1,1,1,selective,tied",
    "2,1,1,1,none,untied",
    "1,2,2,0,none,tied",
    "1,2,1,0,selective,untied",
]
EIGHT_PROCESSES = ["4,2,2,1,selective,tied", "4,2,1,1,full,tied", "4,1,1,0,none,untied", "2,2,2,0,full,0.1,untied", "1,1,1,0,full,tied"]
SEVERAL_PROCESSES = FOUR_PROCESSES + EIGHT_PROCESSES
LAYOUTS = ONE_PROCESS + SEVERAL_PROCESSES


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
    torchrun(1, SUPPORT / "layouts.py", models, out, *ONE_PROCESS)
    torchrun(4, SUPPORT / "layouts.py", models, out, *FOUR_PROCESSES, timeout_s=400)
    torchrun(8, SUPPORT / "layouts.py", models, out, *EIGHT_PROCESSES, timeout_s=900)
    return {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}


def model_of(layout: str) -> str:
    return layout.rsplit(",", 1)[1]


def choices(layout: str | tuple[str, ...]) -> set[frozenset]:
    """What a layout chooses, two at a time; and by which pipelines tied embeddings and sequences go."""
    tp, pp, vpp, sequence, recompute, *_, model = layout.split(",") if isinstance(layout, str) else layout
    names = zip(("tp", "pp", "vpp", "sequence", "recompute", "model"), (tp, pp, vpp, sequence, recompute, model), strict=True)
    triples = {frozenset([("pp", pp), ("vpp", vpp), ("model", model)]), frozenset([("pp", pp), ("vpp", vpp), ("sequence", sequence)])}
    return {frozenset(pair) for pair in combinations(names, 2)} | triples


def test_the_layouts_cover_all_choices_two_at_a_time() -> None:
    every = product("421", "21", "21", "01", ("none", "full", "selective"), ("tied", "untied"))
    possible = [layout for layout in every if not (layout[1:3] == ("1", "2") or (layout[0] == "1" and layout[3] == "1"))]
    chosen = set().union(*map(choices, SEVERAL_PROCESSES))
    assert not set().union(*map(choices, possible)) - chosen and {tuple(layout.split(",")[:2]) for layout in SEVERAL_PROCESSES} == {
        layout[:2] for layout in possible
    }


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


@pytest.mark.parametrize("layout", SEVERAL_PROCESSES)
@pytest.mark.parametrize(("steps", "bound"), [("first_step", 1e-5), ("three_steps", 1e-3)])
def test_training_is_the_same_at_every_layout(layout: str, steps: str, bound: float, results: dict) -> None:
    """Against one process. The first step has Adam's eps at 1e-4; at 1e-8 Adam divides near-zero gradients by themselves."""
    one, other = results[f"1,1,1,0,none,{model_of(layout)}"][steps], results[layout][steps]
    assert other["loss"] == pytest.approx(one["loss"], rel=bound)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=bound)
    worst = max((relative(change, one["change"][name]), name) for name, change in other["change"].items())
    assert worst[0] <= bound, worst


@pytest.mark.parametrize("layout", SEVERAL_PROCESSES)
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
