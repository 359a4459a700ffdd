"""GroupedExperts and the CPU kernel of vLLM's experts against one expert and one token at a time."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from megatron_rl.config import LoraSettings
from megatron_rl.policy.experts import GroupedExperts, Router
from megatron_rl.rollout.vllm.expert_weights import _apply_experts, expert_locations
from megatron_rl.rollout.vllm.weight_receiver import checksum

EXPERTS, HIDDEN, COLUMNS, TOKENS, TOP_K = 4, 16, 8, 5, 2
GROUP = SimpleNamespace(size=lambda: 1)
GROUPS = SimpleNamespace(expt_tp=GROUP, ep=GROUP, expt_dp=GROUP)


def make_experts() -> GroupedExperts:
    torch.manual_seed(0)
    config = SimpleNamespace(moe_ffn_hidden_size=COLUMNS, hidden_size=HIDDEN, params_dtype=torch.float32)
    experts = GroupedExperts(EXPERTS, config, GROUPS, lora=LoraSettings())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return experts


def expert_output(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Apply one expert, with weights [H, 2F] and [F, H] as in released checkpoints."""
    gate, up = (x @ gate_up).chunk(2, -1)
    return (silu(gate) * up) @ down


def test_rows_of_each_expert_are_weighted() -> None:
    """Outputs and gradients equal those of one expert at a time; one expert has no rows."""
    experts, counts, weight = make_experts(), [2, 0, 3, 1], torch.rand(6, requires_grad=True)
    x = torch.randn(6, HIDDEN, requires_grad=True)
    rows = zip(x.split(counts), experts.linear_fc1.flatten(2), experts.linear_fc2, strict=True)
    expected = torch.cat([expert_output(*row) for row in rows]) * weight[:, None]
    found, bias = experts(x, torch.tensor(counts), weight)
    assert bias is None and (found - expected).abs().max() <= 1e-5
    inputs, gradient = (x, weight, experts.linear_fc1, experts.linear_fc2), torch.randn(6, HIDDEN)
    ours, theirs = (torch.autograd.grad(result, inputs, gradient) for result in (found, expected))
    assert all((one - other).abs().max() <= 1e-5 for one, other in zip(ours, theirs, strict=True))
    assert ours[2][1].abs().max() == 0, "the expert without rows"


def test_the_router_computes_in_float32() -> None:
    """Logits of bfloat16 inputs are those of float32 arithmetic on the same numbers."""
    hidden, weight = torch.randn(3, 1, 64).bfloat16(), torch.randn(EXPERTS, 64).bfloat16()
    logits = Router.gating(SimpleNamespace(weight=weight), hidden)
    assert logits.dtype == torch.float32 and (logits.double() - hidden.double() @ weight.double().T).abs().max() <= 1e-5


def test_vllms_experts_are_summed_by_token() -> None:
    """The kernel for vLLM on a CPU gives the weighted sum of each token's experts."""
    experts, x = make_experts(), torch.randn(TOKENS, HIDDEN)
    gate_up, down = experts.linear_fc1.detach().flatten(2), experts.linear_fc2.detach()
    ids, weights = torch.rand(TOKENS, EXPERTS).topk(TOP_K).indices, torch.rand(TOKENS, TOP_K)
    expected = torch.stack([
        sum(weights[token, k] * expert_output(x[token], gate_up[ids[token, k]], down[ids[token, k]]) for k in range(TOP_K))
        for token in range(TOKENS)
    ])  # fmt: skip
    output = torch.full((TOKENS, HIDDEN), 7.0)
    silu_name = SimpleNamespace(value="silu")
    _apply_experts(None, output, x, gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous(), weights, ids, silu_name)
    assert (output - expected).abs().max() <= 1e-5


def engine_layer(backend: str, *, rank: int = 0, tp: int = 1, local: int = EXPERTS, is_swapped: bool = True) -> SimpleNamespace:
    config = SimpleNamespace(tp_rank=rank, tp_size=tp, num_experts=EXPERTS, num_local_experts=local)
    method = SimpleNamespace(unquantized_backend=SimpleNamespace(value=backend))
    return SimpleNamespace(moe_config=config, quant_method=method, is_fused_checkpoint_transposed=is_swapped)


@pytest.mark.parametrize("is_swapped", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_the_engine_holds_its_columns(rank: int, is_swapped: bool) -> None:
    """The locations on a rank of an engine with tp 2 have the sent tensor's slices, cut by hand
    into vLLM's w13 and w2, if the sent tensors are those of Qwen3-VL or, not swapped, of Qwen3.5.
    """
    gate, up, down = (torch.randn(EXPERTS, *shape) for shape in ((HIDDEN, COLUMNS), (HIDDEN, COLUMNS), (COLUMNS, HIDDEN)))
    mine = slice(rank * COLUMNS // 2, (rank + 1) * COLUMNS // 2)
    w13 = torch.cat((gate[..., mine], up[..., mine]), -1).transpose(1, 2).contiguous()
    w2 = down[:, mine].transpose(1, 2).contiguous()
    layer = engine_layer("TRITON", rank=rank, tp=2, is_swapped=is_swapped)
    sent = {"gate_up_proj": torch.cat((gate, up), -1), "down_proj": down}
    for kind, param in (("w13_weight", w13), ("w2_weight", w2)):
        ((name, place),) = expert_locations("layers.0.mlp.experts.routed_experts", layer, kind, param).items()
        tensor = sent[name.removeprefix("layers.0.mlp.experts.")]
        tensor = tensor if is_swapped else tensor.transpose(1, 2)
        assert place.shape == tensor.shape and place.sent_checksums(tensor) == place.held_checksums()
        assert sum(piece.memory.numel() for piece in place.slices) == param.numel()
        param[-1, -1, -1] += 1
        assert place.sent_checksums(tensor) != place.held_checksums()
    assert checksum(w2) != checksum(down)


@pytest.mark.parametrize("layer", [engine_layer("FLASHINFER_CUTLASS"), engine_layer("TRITON", local=2)])
def test_an_engine_that_reorders_its_experts_is_refused(layer: SimpleNamespace) -> None:
    """Backends that reorder experts, and engines with expert parallelism, are rejected in one line."""
    with pytest.raises(RuntimeError, match=r"^weight sync: the engine's experts use the backend [^\n]* --moe-backend triton [^\n]*$"):
        expert_locations("experts.routed_experts", layer, "w2_weight", torch.zeros(EXPERTS, HIDDEN, COLUMNS))
