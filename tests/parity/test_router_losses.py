"""Losses of routers against Hugging Face's model: textbook formulas over its routers' logits."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from megatron_rl.models.name_mapping import canonical_name
from tests.conftest import SUPPORT
from tests.parity import test_qwen3_5_moe
from tests.parity.test_experts import write_model
from tests.parity.test_routing_replay import EXPERTS, TOP_K, GivenExperts, random_experts, routers
from tests.support.hf_reference import HfReference, compute_forward, relative_error, to_released_form
from tests.support.router_loss_layouts import COEFS

pytestmark = pytest.mark.timeout(900)
ALONE, TWO_PROCESSES = ["1,1,1,0,none,moe"], ["2,1,1,1,none,moe", "1,2,1,0,full,moe", "1,1,1,0,none,ep2,moe"]
LONG = {2: ["1,1,1,0,selective,moe"],
        4: ["2,2,1,1,full,moe", "2,1,1,1,none,ep2,moe", "1,2,1,0,full,ep2,moe", "1,1,1,0,full,ep4,moe"]}  # fmt: skip


class RouterOutputs:
    """Collects the logits and the experts of HF's routers, by sparse layer, over all sequences."""

    def __init__(self, hf: HfReference) -> None:
        gates = [layer.mlp.gate for layer in hf.model.model.language_model.layers if hasattr(layer.mlp, "gate")]
        self.logits: list[list[torch.Tensor]] = [[] for _ in gates]
        self.chosen: list[list[torch.Tensor]] = [[] for _ in gates]
        for layer, gate in enumerate(gates):
            gate.forward = lambda hidden, route=gate.forward, layer=layer: self.collect(route, layer, hidden)

    def collect(self, route: Callable, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, chosen = route(hidden)
        self.logits[layer].append(logits.reshape(-1, EXPERTS))
        self.chosen[layer].append(chosen.reshape(-1, TOP_K))
        return logits, weights, chosen


def textbook_losses(outputs: RouterOutputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the load-balancing loss (arXiv 2101.03961, formulas 4 to 6) and the z loss (arXiv
    2202.08906, formula 5): over all tokens of a layer, averaged over layers.
    """
    balance, z = torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    for logits, chosen in zip(map(torch.cat, outputs.logits), map(torch.cat, outputs.chosen), strict=True):
        share = one_hot(chosen, EXPERTS).sum(1).double().mean(0)
        balance = balance + EXPERTS * (share * logits.softmax(-1).mean(0)).sum()
        z = z + logits.exp().sum(-1).log().square().mean()
    return balance / len(outputs.logits), z / len(outputs.logits)


def expected_update(hf: HfReference, outputs: RouterOutputs) -> dict:
    hf.model.zero_grad()
    _, _, loss = compute_forward(hf.model, hf.renderer, hf.contexts)
    balance, z = textbook_losses(outputs)
    (loss + COEFS[0] * balance + COEFS[1] * z).backward()
    kind, parameters = hf.model.config.model_type, hf.model.named_parameters()
    gradients = {canonical_name(name): to_released_form(name, parameter.grad, kind) for name, parameter in parameters}
    return {"router/aux_loss": balance.item(), "router/z_loss": z.item(), "gradients": gradients}


@pytest.fixture(scope="module", params=["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, dict]:
    """The expected update with the routers' own experts and with random ones, which are saved."""
    folder = tmp_path_factory.mktemp("losses")
    hf = test_qwen3_5_moe.write_model(folder) if request.param == "qwen3_5_moe" else write_model(folder, layers=4)
    plain = hf.gradients
    outputs = RouterOutputs(hf)
    own = expected_update(hf, outputs)
    of_hf = [load_balancing_loss_func((torch.cat(logits),), EXPERTS, TOP_K).item() for logits in outputs.logits]
    assert sum(of_hf) / len(routers(hf)) == pytest.approx(own["router/aux_loss"], rel=1e-6), "transformers has the same loss of a layer"
    gate = "model.layers.0.mlp.gate.weight"
    assert relative_error(plain[gate], own["gradients"][gate]) > 0.1, "the losses have a part in the gradient"
    experts = random_experts(hf)
    torch.save(experts, folder / "experts.pt")
    GivenExperts(hf, experts)
    replayed = expected_update(hf, RouterOutputs(hf))
    return folder, own, replayed


def check_layouts(reference: tuple[Path, dict, dict], worlds: dict[int, list[str]], torchrun) -> None:  # noqa: ANN001
    folder, own, replayed = reference
    for world, layouts in worlds.items():
        torchrun(world, SUPPORT / "router_loss_layouts.py", folder, folder, *layouts, timeout_s=600)
        for layout in layouts:
            result = torch.load(folder / f"{layout}.pt", weights_only=True)
            for kind, expected in (("one", own), ("each", own), *((("replayed", replayed),) if replayed else ())):
                found = result[kind]["gradients"]
                worst = max((relative_error(found[name], gradient), name) for name, gradient in expected["gradients"].items())
                assert worst[0] <= 1e-5, (layout, kind, worst)
                for metrics in (result[kind]["metrics"], *([result["updated"]] if kind == "one" else [])):
                    for name in ("router/aux_loss", "router/z_loss"):
                        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), (layout, kind)
            assert "router/aux_loss" not in result["head_only"]


def test_the_losses_of_routers_are_those_of_the_textbook(reference: tuple[Path, dict, dict], torchrun) -> None:  # noqa: ANN001
    """The gradient of every tensor and both losses equal those of the formulas over HF's routers,
    with one process, tensor and sequence parallelism, two stages with recomputation, and divided
    experts; in one micro-batch with shared prompts and in one per sequence; with replayed experts.
    """
    check_layouts(reference, {1: ALONE, 2: TWO_PROCESSES}, torchrun)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_further_layouts(reference: tuple[Path, dict, dict], torchrun) -> None:  # noqa: ANN001
    """Two replicas, several parallelisms at once and four ranks of experts agree too."""
    check_layouts(reference, LONG, torchrun)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_interleaved_pipeline(tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Each of two stages has two parts of a model with eight layers."""
    hf = write_model(tmp_path, layers=8)
    check_layouts((tmp_path, expected_update(hf, RouterOutputs(hf)), {}), {2: ["1,2,2,0,full,moe"]}, torchrun)
