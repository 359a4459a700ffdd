"""Experts of a vLLM engine: their memory, and a CPU kernel that works on it.

On a CPU, vLLM 0.32.0 (fused_moe/experts/cpu_moe.py) repacks the experts for its grouped matrix
product, so weights could neither be loaded in place nor read back. `use_unpacked_experts` replaces
the product by torch's. On a GPU, only vLLM's Triton backend keeps the experts as they are loaded;
other backends reorder them, and an update in place would silently be wrong.
"""

from typing import Any

import torch
from torch.nn.functional import grouped_mm, silu

from megatron_rl.rollout.vllm.weight_receiver import EngineTensorLocation, WeightSlice

IN_PLACE_BACKENDS = ("CPU", "TRITON")
"""vLLM's backends that keep the experts in memory as they are loaded."""


def use_unpacked_experts() -> None:
    """Make vLLM's CPU experts compute with the weights as they are loaded.

    Call this function before the engine is built.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    experts: Any = CPUUnquantizedExperts
    experts.process_weights_after_loading = lambda *_: None
    experts.apply = _apply_experts


def _apply_experts(
    _experts: object, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, *_: object, **__: object,
) -> None:  # fmt: skip
    """Write the weighted sum of each token's experts to `output` [T, H].

    Has the leading parameters of vLLM's FusedMoEExpertsModular.apply: w1 is [E, 2F, H], with gate
    before up, and w2 is [E, H, F]; topk_weights and topk_ids are [T, K].
    """
    assert activation.value == "silu", activation
    order_M = topk_ids.flatten().argsort(stable=True)
    end_E = topk_ids.flatten().bincount(minlength=len(w1)).cumsum(0).to(torch.int32)
    row_M = order_M // topk_ids.shape[1]
    gate, up = grouped_mm(hidden_states[row_M], w1.transpose(1, 2), offs=end_E).chunk(2, -1)
    result = grouped_mm(silu(gate) * up, w2.transpose(1, 2), offs=end_E)
    weighted = result * topk_weights.flatten()[order_M, None].to(result.dtype)
    output.zero_().index_add_(0, row_M, weighted.to(output.dtype))


def expert_locations(prefix: str, module: Any, kind: str, param: torch.Tensor) -> dict[str, EngineTensorLocation]:
    """Return the location of gate_up_proj or down_proj of all experts, keyed by engine name.

    The parameter is w13_weight [E, 2F, H] or w2_weight [E, H, F] with this rank's part of F.
    Qwen3.5 has tensors of these shapes; Qwen3-VL's have the last two dimensions swapped. Raises
    RuntimeError if the engine does not keep the weights as they are loaded.
    """
    backend = module.quant_method.unquantized_backend.value
    config = module.moe_config
    if backend not in IN_PLACE_BACKENDS or config.num_local_experts != config.num_experts:
        raise RuntimeError(
            f"weight sync: the engine's experts use the backend {backend} with {config.num_local_experts} of {config.num_experts} experts "
            "on this rank, which cannot be updated in place; start the engine with --moe-backend triton and without expert parallelism"
        )
    stem, rank, tp = prefix.removesuffix("routed_experts"), config.tp_rank, config.tp_size
    is_swapped, is_gate_up = module.is_fused_checkpoint_transposed, kind == "w13_weight"
    view, dim = (param.transpose(1, 2), 2 if is_gate_up else 1) if is_swapped else (param, 1 if is_gate_up else 2)
    parts = view.chunk(2, dim) if is_gate_up else (view,)  # gate before up
    columns = parts[0].shape[dim]
    slices = [WeightSlice(part, dim, columns * (tp * number + rank)) for number, part in enumerate(parts)]
    shape = [size * tp if each == dim else size for each, size in enumerate(view.shape)]
    return {f"{stem}{'gate_up_proj' if is_gate_up else 'down_proj'}": EngineTensorLocation(shape=torch.Size(shape), slices=slices)}
