"""Critics against Hugging Face's hidden states and autograd, and every layout against one process: fp32, 1e-5."""

import statistics
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from tests.conftest import SUPPORT
from tests.support.critic_layouts import COEF, CRITIC, SEEN
from tests.support.hf_run import hf_logits, relative, sampled_distribution
from tests.support.packed import example_contexts
from tools.data.make_tiny_qwen2_5_vl import make

pytestmark = pytest.mark.timeout(600)
ONE = "1,1,1,0,none,tied"
FOUR_PROCESSES = ["2,2,1,1,none,tied", "1,2,2,0,full,tied", "2,1,1,0,none,tied", "4,1,1,1,selective,tied", "1,1,1,0,full,tied"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    make(folder, preset="nano", init="random", seed=1, heads=8, kv_heads=4, tied=True)
    return folder


@pytest.fixture(scope="module")
def results(model: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> dict[str, dict]:  # noqa: ANN001
    out = tmp_path_factory.mktemp("critics")
    torchrun(1, SUPPORT / "critic_layouts.py", model, out, ONE)
    torchrun(4, SUPPORT / "critic_layouts.py", model, out, *FOUR_PROCESSES)
    return {path.stem: torch.load(path, weights_only=True) for path in out.glob("*.pt")}


class Truth:
    """The same head on HF's last hidden states, and one loss of both through torch's own autograd."""

    def __init__(self, folder: Path) -> None:
        renderer = Renderer(ModelSettings(path=str(folder)))
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        hidden_size = model.config.text_config.hidden_size
        generator = torch.Generator().manual_seed(5)
        shapes = [(8, hidden_size), (1, 8), (8,), (1,)]
        w1, w2, b1, b2 = (nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for shape in shapes)
        mean, scale = statistics.fmean(SEEN), statistics.pstdev(SEEN)
        values, value_loss, policy_loss, contexts = [], 0.0, 0.0, example_contexts(renderer)
        self.denominator = sum(weighted.denominator for weighted in contexts)
        kept: list[torch.Tensor] = []
        model.model.language_model.norm.register_forward_hook(lambda _module, _given, output: kept.append(output[0]))
        for weighted in contexts:
            logits = hf_logits(model, renderer, weighted.context)
            tokens, context = weighted.context.token_ids, weighted.context
            rows = [t for t in range(len(tokens) - 1) if context.loss_mask[t + 1]]
            value = (nn.functional.silu(kept[-1][rows] @ w1.T + b1) @ w2.T + b2)[:, 0]
            targets = torch.tensor([((7 * tokens[t] + 3 * tokens[t + 1]) % 11) / 2.0 for t in rows])
            target, old = (targets - mean) / scale, (0.5 * targets - mean) / scale
            clipped = old + (value - old).clamp(-CRITIC["clip"], CRITIC["clip"])
            value_loss = value_loss + (weighted.weight * 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)).sum()
            distribution = sampled_distribution(logits[rows], renderer.banned_ids)
            logprob = distribution.gather(1, torch.tensor([tokens[t + 1] for t in rows])[:, None])[:, 0]
            advantage = next(a for a, sampled in zip(context.advantages, context.loss_mask, strict=True) if sampled)
            policy_loss = policy_loss - (weighted.weight * advantage * (logprob - logprob.detach()).exp()).sum()
            values.append((value * scale + mean).detach())
        self.values, self.value_loss = torch.cat(values), value_loss.item() / self.denominator
        self.loss = ((policy_loss + COEF * value_loss) / self.denominator).item()
        head = [w1, w2, b1, b2]
        self.norm_alone = self._norm(torch.autograd.grad(value_loss, head, retain_graph=True))
        trunk = [parameter for name, parameter in model.named_parameters() if "lm_head" not in name]
        self.norm_own = self._norm(torch.autograd.grad(value_loss, [*trunk, *head], retain_graph=True, allow_unused=True))

    def _norm(self, gradients: tuple[torch.Tensor | None, ...]) -> float:
        return sum(float((g / self.denominator).square().sum()) for g in gradients if g is not None) ** 0.5


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


def test_values_and_losses_are_those_of_hf(results: dict, truth: Truth) -> None:
    one = results[ONE]
    for name in ("values", "own_values"):
        assert relative(one[name][one["mask"]], truth.values) <= 1e-5, name
        assert not one[name][~one["mask"]].any()
    assert truth.values.std() > 0.1
    assert one["alone"]["value/loss"] == one["alone"]["loss"] == pytest.approx(truth.value_loss, rel=1e-5)
    assert one["own"]["value/loss"] == pytest.approx(truth.value_loss, rel=1e-5)
    assert one["alone"]["grad_norm"] == pytest.approx(truth.norm_alone, rel=1e-4)
    assert one["own"]["value/grad_norm"] == pytest.approx(truth.norm_own, rel=1e-4)


def test_a_warm_up_moves_the_head_and_not_one_bit_of_the_trunk(results: dict) -> None:
    for text, result in results.items():
        assert result["moved_alone"] == 0.0, text
        assert relative(result["values_alone"], result["values"]) > 1e-3, text
        assert result["joint"]["policy/ratio"] == pytest.approx(1.0, abs=1e-5), "the policy is where it was"


@pytest.mark.parametrize("layout", FOUR_PROCESSES)
def test_every_layout_learns_what_one_process_does(layout: str, results: dict) -> None:
    one, other = results[ONE], results[layout]
    assert other["mask"].sum() == one["mask"].sum()
    for name in ("values", "own_values", "values_alone", "values_joint", "own_values_after"):
        assert relative(other[name][other["mask"]], one[name][one["mask"]]) <= 1e-5, name
    for update in ("alone", "joint", "own"):
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
            if name in one[update]:
                assert other[update][name] == pytest.approx(one[update][name], rel=1e-5), (update, name)
    worst = max((relative(change, one["change"][name]), name) for name, change in other["change"].items())
    assert worst[0] <= 1e-5, worst


def test_the_head_is_no_part_of_the_exported_policy(results: dict, model: Path) -> None:
    assert results[ONE]["change"].keys() == HfTensors(model, key="model").specs.keys()
