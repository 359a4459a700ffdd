"""Critics against Hugging Face's hidden states and autograd, and every layout against one process.

The tolerance is 1e-5 in fp32.
"""

import statistics
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

from megatron_rl.config import ModelSettings
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from megatron_rl_tools.convert import merger
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import SUPPORT
from tests.support.critic_layouts import COEF, CRITIC, PAST_RETURNS
from tests.support.hf_reference import compute_logits, relative_error, sampled_log_softmax, write_adapter
from tests.support.packed_example import make_example_items

pytestmark = pytest.mark.timeout(600)
ONE = "1,1,1,0,none,tied"
FOUR_PROCESSES = ["2,2,1,1,selective,tied", "1,2,2,0,full,tied"]
LONG_IN_FOUR = ["2,2,1,1,none,tied", "4,1,1,1,selective,tied", "1,1,1,0,full,tied"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    make_checkpoint(folder, preset="nano", init="random", seed=1, heads=8, kv_heads=4, tied=True)
    return folder


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(model, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def walked(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory, torchrun) -> Path:  # noqa: ANN001
    """Run all layouts and return the folder of their results."""
    out = tmp_path_factory.mktemp("critics")
    torchrun(1, SUPPORT / "critic_layouts.py", model, adapter, out, ONE)
    torchrun(4, SUPPORT / "critic_layouts.py", model, adapter, out, *FOUR_PROCESSES)
    return out


@pytest.fixture(scope="module")
def results(walked: Path) -> dict[str, dict]:
    return {text: torch.load(walked / f"{text}.pt", weights_only=True) for text in (ONE, *FOUR_PROCESSES)}


@pytest.fixture(scope="module")
def adapted(walked: Path) -> dict[str, dict]:
    return {text: torch.load(walked / f"adapters {text}.pt", weights_only=True) for text in (ONE, FOUR_PROCESSES[0])}


class Truth:
    """Reference: the same value head on HF's last hidden states, with both losses through torch's
    autograd."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        """Compute values, losses and gradient norms.

        With the `adapter` of a PEFT folder, only the adapter and the head are trained.
        """
        renderer = Renderer(ModelSettings(path=str(folder)))
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        language_model = model.model.language_model
        if adapter:
            model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
        hidden_size = model.config.text_config.hidden_size
        generator = torch.Generator().manual_seed(5)
        shapes = [(8, hidden_size), (1, 8), (8,), (1,)]
        w1, w2, b1, b2 = (nn.Parameter(0.3 * torch.randn(shape, generator=generator)) for shape in shapes)
        mean, scale = statistics.fmean(PAST_RETURNS), statistics.pstdev(PAST_RETURNS)
        values, value_loss, policy_loss, contexts = [], 0.0, 0.0, make_example_items(renderer)
        self.denominator = sum(weighted.denominator for weighted in contexts)
        kept: list[torch.Tensor] = []
        language_model.norm.register_forward_hook(lambda _module, _given, output: kept.append(output[0]))
        for weighted in contexts:
            logits = compute_logits(model, renderer, weighted.sequence)
            tokens, context = weighted.sequence.token_ids, weighted.sequence
            rows = [t for t in range(len(tokens) - 1) if context.loss_mask[t + 1]]
            value = (nn.functional.silu(kept[-1][rows] @ w1.T + b1) @ w2.T + b2)[:, 0]
            targets = torch.tensor([((7 * tokens[t] + 3 * tokens[t + 1]) % 11) / 2.0 for t in rows])
            target, old = (targets - mean) / scale, (0.5 * targets - mean) / scale
            clipped = old + (value - old).clamp(-CRITIC["cliprange_value"], CRITIC["cliprange_value"])
            value_loss = value_loss + (weighted.weight * 0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2)).sum()
            distribution = sampled_log_softmax(logits[rows], renderer.banned_ids)
            logprob = distribution.gather(1, torch.tensor([tokens[t + 1] for t in rows])[:, None])[:, 0]
            advantage = next(a for a, sampled in zip(context.advantages, context.loss_mask, strict=True) if sampled)
            policy_loss = policy_loss - (weighted.weight * advantage * (logprob - logprob.detach()).exp()).sum()
            values.append((value * scale + mean).detach())
        self.values, self.value_loss = torch.cat(values), value_loss.item() / self.denominator
        self.loss = ((policy_loss + COEF * value_loss) / self.denominator).item()
        head = [w1, w2, b1, b2]
        self.norm_alone = self._norm(torch.autograd.grad(value_loss, head, retain_graph=True))
        trunk = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and "lm_head" not in name]
        self.norm_own = self._norm(torch.autograd.grad(value_loss, [*trunk, *head], retain_graph=True, allow_unused=True))

    def _norm(self, gradients: tuple[torch.Tensor | None, ...]) -> float:
        return sum(float((g / self.denominator).square().sum()) for g in gradients if g is not None) ** 0.5


@pytest.fixture(scope="module")
def truth(model: Path) -> Truth:
    return Truth(model)


def test_values_and_losses_are_those_of_hf(results: dict, truth: Truth) -> None:
    """Values, losses and gradient norms equal HF's, for the shared and the own backbone."""
    one = results[ONE]
    for name in ("values", "own_values"):
        assert relative_error(one[name][one["mask"]], truth.values) <= 1e-5, name
        assert not one[name][~one["mask"]].any()
    assert truth.values.std() > 0.1
    assert one["alone"]["value/loss"] == one["alone"]["loss"] == pytest.approx(truth.value_loss, rel=1e-5)
    assert one["own"]["value/loss"] == pytest.approx(truth.value_loss, rel=1e-5)
    assert one["alone"]["grad_norm"] == pytest.approx(truth.norm_alone, rel=1e-4)
    assert one["own"]["value/grad_norm"] == pytest.approx(truth.norm_own, rel=1e-4)


def test_a_warm_up_moves_the_head_and_not_one_bit_of_the_trunk(results: dict) -> None:
    """The value head's warm-up changes the values and not one bit of the backbone."""
    for text, result in results.items():
        assert result["moved_alone"] == 0.0, text
        assert relative_error(result["values_alone"], result["values"]) > 1e-3, text
        assert result["joint"]["policy/ratio"] == pytest.approx(1.0, abs=1e-5), "the policy is where it was"


@pytest.mark.parametrize("layout", FOUR_PROCESSES)
def test_every_layout_learns_what_one_process_does(layout: str, results: dict) -> None:
    """Values, losses, gradient norms and weight changes of every layout equal those of one
    process."""
    one, other = results[ONE], results[layout]
    assert other["mask"].sum() == one["mask"].sum()
    for name in ("values", "own_values", "values_alone", "values_joint", "own_values_after"):
        assert relative_error(other[name][other["mask"]], one[name][one["mask"]]) <= 1e-5, name
    for update in ("alone", "joint", "own"):
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
            if name in one[update]:
                assert other[update][name] == pytest.approx(one[update][name], rel=1e-5), (update, name)
    worst = max((relative_error(change, one["change"][name]), name) for name, change in other["change"].items())
    assert worst[0] <= 1e-5, worst


@pytest.mark.long
def test_further_layouts_learn_what_one_process_does(results: dict, model: Path, adapter: Path, tmp_path: Path, torchrun) -> None:  # noqa: ANN001
    """Four tensor-parallel and four data-parallel ranks pass the same tests."""
    torchrun(4, SUPPORT / "critic_layouts.py", model, adapter, tmp_path, *LONG_IN_FOUR)
    further = {text: torch.load(tmp_path / f"{text}.pt", weights_only=True) for text in LONG_IN_FOUR}
    test_a_warm_up_moves_the_head_and_not_one_bit_of_the_trunk(further)
    test_logprobs_and_values_of_one_trunk_are_one_pass(further)
    for layout in LONG_IN_FOUR:
        test_every_layout_learns_what_one_process_does(layout, {ONE: results[ONE], **further})


def test_the_head_is_no_part_of_the_exported_policy(results: dict, model: Path) -> None:
    """The exported policy has the tensors of the model folder, without the value head."""
    assert results[ONE]["change"].keys() == HfTensors(model, key="model").specs.keys()


def test_logprobs_and_values_of_one_trunk_are_one_pass(results: dict) -> None:
    """Computing logprobs and values together gives the same bits as two separate calls, in as many
    forward passes as one of the calls."""
    for text, result in results.items():
        (logprobs, one), (values, other), (both, together) = (result[f"read_{name}"] for name in ("logprobs", "values", "both"))
        assert torch.equal(both, torch.stack([logprobs, values])) and not torch.equal(logprobs, values), text
        assert one == other == together >= 1, text


def test_a_critic_with_adapters_learns_as_pefts_does(adapted: dict, model: Path, adapter: Path) -> None:
    """Values, value loss and gradient norm of a critic with adapters equal those of PEFT's
    model."""
    truth = Truth(model, adapter)
    for text, result in adapted.items():
        assert relative_error(result["own_values"][result["mask"]], truth.values) <= 1e-5, text
        first = result["steps"][0]
        assert first["value/loss"] == pytest.approx(truth.value_loss, rel=1e-5)
        assert first["value/grad_norm"] == pytest.approx(truth.norm_own, rel=1e-4)


def test_adapters_and_the_head_alone_are_trained(adapted: dict) -> None:
    """Exactly the adapters and the value head have gradients and move; the base weights do not."""
    for text, result in adapted.items():
        seen: dict[str, set[str]] = {"policy": set(), "critic": set()}
        for rank in result["parameters"]:
            for whose, parameters in rank.items():
                for name, has_gradient, has_moved in parameters:
                    is_head = "value_head." in name
                    assert has_gradient == has_moved == (".lora_" in name or is_head), (text, whose, name)
                    seen[whose] |= {"head" if is_head else "adapter" if has_gradient else "base"}
        assert seen == {"policy": {"adapter", "base"}, "critic": {"adapter", "base", "head"}}


def test_adapters_learn_the_same_at_another_layout(adapted: dict) -> None:
    """Losses, gradient norms, logprobs and values of adapters are equal in both layouts within
    1e-3."""
    one, other = adapted.values()
    for ours, theirs in zip(one["steps"], other["steps"], strict=True):
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3), name
    for name in ("logprobs", "values"):
        numbers = [result["straight"][name][result["mask"]] for result in (one, other)]
        assert relative_error(*numbers) <= 1e-3, name


def test_adapters_go_on_from_a_checkpoint(adapted: dict) -> None:
    """After resuming from a checkpoint, logprobs and values of policy and critic equal those of an
    uninterrupted run, bit for bit. The compared fourth step changes the weights."""
    for text, result in adapted.items():
        straight, resumed = result["straight"], result["resumed"]
        assert straight["metrics"] == resumed["metrics"] and straight["metrics"]["grad_norm"] > 0, text
        assert torch.equal(straight["logprobs"], resumed["logprobs"]) and torch.equal(straight["values"], resumed["values"])
        assert relative_error(result["own_values"], straight["values"]) > 1e-3


def test_the_merger_adds_the_policys_adapter_and_leaves_the_critic_out(
    adapted: dict, walked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Merging a checkpoint adds the policy's adapter to the base weights, and leaves the critic out
    with a message."""
    for number, (text, result) in enumerate(adapted.items()):
        checkpoint, out = walked / f"run {text}" / "checkpoints" / "step_00000003", tmp_path / f"{number}"
        assert merger.main(["--checkpoint", str(checkpoint), "--out", str(out)]) == 0
        assert "not merged: critic/, which belongs to the critic\n" in capsys.readouterr().err
        merged = HfTensors(out)
        assert merged.specs.keys() == result["exported"].keys()
        assert max((merged.read(name) - tensor).abs().max() for name, tensor in result["exported"].items()) <= 1e-6
