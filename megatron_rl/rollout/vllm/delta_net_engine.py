"""Gated delta nets of a vLLM engine: their memory, and a CPU kernel that works on it.

vLLM 0.32.0 computes gated delta nets on a CPU in bfloat16 only, and packs the weights of the
convolution (mamba/ops/cpu/gdn_attention.py). `use_torch_delta_nets` replaces the computation by
torch's, in fp32 and on the weights as they are loaded. It goes through the tokens one by one, all
sequences of a step at once.

In shapes, T is the number of tokens of a step, B the number of its sequences, N the number of value
heads, D and E the sizes of a key and a value head, X the number of convolved channels and W the
kernel size of the convolution.
"""

from typing import Any

import torch
from torch.nn.functional import silu, softplus

from megatron_rl.rollout.vllm.weight_receiver import EngineTensorLocation, cut_location, join_locations, stacked_locations

FUSED_PARAMETERS = ("in_proj_qkvz.weight", "in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias")
"""Parameters of a gated delta net that consist of several tensors or are sharded by head."""


def use_torch_delta_nets() -> None:
    """Make vLLM's CPU layers compute gated delta nets with torch.

    Call this function before the engine is built.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # vLLM registers the function as a custom operator, which requires this type.
    _run_delta_net.__annotations__["layer_name"] = LayerNameType
    gdn_attention.cpu_gdn_attention_core = _run_delta_net


def _run_delta_net(mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: Any) -> None:
    """Write the outputs of one layer to `core_attn_out` [T, N, E], and update its states.

    Has the parameters of vLLM's cpu_gdn_attention_core: `mixed_qkv` is [T, X], with queries, keys
    and values; `b` and `a` are the inputs [T, N] of the learning rate and of the decay. Without
    metadata, as when vLLM measures its memory, nothing is written.
    """
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata: Any = context.attn_metadata[layer.prefix]
    num_sequences = metadata.num_decodes + metadata.num_prefills
    if not num_sequences:
        return
    offset_B1 = metadata.non_spec_query_start_loc[: num_sequences + 1].long()
    slot_B = metadata.non_spec_state_indices_tensor[:num_sequences].long()
    is_new_B = torch.zeros(num_sequences, dtype=torch.bool)
    if metadata.num_prefills:
        is_new_B[metadata.num_decodes :] = ~metadata.has_initial_state[metadata.num_decodes : num_sequences]
    inputs, outputs = layer.kv_cache
    inputs = inputs.transpose(1, 2) if is_conv_state_dim_first() else inputs
    last_BWX, state_BNED = inputs[slot_B].masked_fill(is_new_B[:, None, None], 0), outputs[slot_B].float()
    state_BNED = state_BNED.masked_fill(is_new_B[:, None, None, None], 0)
    qkv_TX, last_BWX = convolve(mixed_qkv[: int(offset_B1[-1])], layer.conv1d.weight[:, 0], offset_B1, last_BWX)
    inputs[slot_B] = last_BWX.to(inputs.dtype)
    sizes = [size // layer.tp_size for size in (layer.key_dim, layer.key_dim, layer.value_dim)]
    q_TX, k_TX, v_TX = qkv_TX.float().split(sizes, -1)
    ratio = layer.num_v_heads // layer.num_k_heads
    q_TND, k_TND = (normalize_heads(x_TX.unflatten(1, (-1, layer.head_k_dim))).repeat_interleave(ratio, 1) for x_TX in (q_TX, k_TX))
    log_decay_TN = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias.float())
    out_TNE = run_delta_rule(
        q_TND * layer.head_k_dim**-0.5, k_TND, v_TX.unflatten(1, (-1, layer.head_v_dim)), log_decay_TN.exp(), b.float().sigmoid(),
        offset_B1, state_BNED,
    )  # fmt: skip
    outputs[slot_B] = state_BNED.to(outputs.dtype)
    core_attn_out[: len(out_TNE)] = out_TNE.to(core_attn_out.dtype)


def normalize_heads(x_TND: torch.Tensor) -> torch.Tensor:
    """Divide each head by the square root of its squared norm plus 1e-6."""
    return x_TND * torch.rsqrt(x_TND.square().sum(-1, keepdim=True) + 1e-6)


def convolve(
    x_TX: torch.Tensor, weight_XW: torch.Tensor, offset_B1: torch.Tensor, last_BWX: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolved inputs [T, X] after silu, and the last W - 1 inputs of each sequence.

    `last_BWX` contains the W - 1 inputs before the first token of each sequence.
    """
    taps, offsets = last_BWX.shape[1], offset_B1.tolist()
    parts = [part for start, stop, last in zip(offsets, offsets[1:], last_BWX, strict=False) for part in (last, x_TX[start:stop])]
    inputs, ends = torch.cat([part.float() for part in parts]), offset_B1[1:] + taps * torch.arange(1, len(offsets))
    length_B = offset_B1.diff()
    row_T = torch.arange(len(x_TX)) + taps * torch.repeat_interleave(torch.arange(len(length_B)), length_B)
    total = sum(inputs[row_T + tap] * weight_XW[:, tap].float() for tap in range(taps + 1))
    assert isinstance(total, torch.Tensor)
    return silu(total).to(x_TX.dtype), inputs[ends[:, None] + torch.arange(-taps, 0)]


def run_delta_rule(
    q_TND: torch.Tensor, k_TND: torch.Tensor, v_TNE: torch.Tensor, decay_TN: torch.Tensor, rate_TN: torch.Tensor,
    offset_B1: torch.Tensor, state_BNED: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return the outputs [T, N, E] of the gated delta rule, and update `state_BNED` in place."""
    length_B, order_B = offset_B1.diff().sort(descending=True, stable=True)
    start_B, state, out_TNE = offset_B1[:-1][order_B], state_BNED[order_B], torch.empty_like(v_TNE)
    for token in range(int(length_B[0])):
        num = int((length_B > token).sum())
        rows = start_B[:num] + token
        current = state[:num]
        current *= decay_TN[rows][..., None, None]
        change = (v_TNE[rows] - torch.einsum("bned,bnd->bne", current, k_TND[rows])) * rate_TN[rows][..., None]
        current += change[..., None] * k_TND[rows][:, :, None]
        out_TNE[rows] = torch.einsum("bned,bnd->bne", current, q_TND[rows])
    state_BNED[order_B] = state
    return out_TNE


def is_delta_net(module: object) -> bool:
    """Return True for a layer with a gated delta net."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    return isinstance(module, QwenGatedDeltaNetAttention)


def delta_net_locations(prefix: str, module: Any) -> dict[str, EngineTensorLocation]:
    """Return the locations of the tensors that are stored in fused or sharded parameters.

    The locations are keyed by engine name. The parameters are those in FUSED_PARAMETERS; the others
    are stored like those of any linear layer or norm.
    """
    rank, tp = module.tp_rank, module.tp_size
    keys, values = module.key_dim // tp, module.value_dim // tp

    def cut(param: torch.Tensor, sizes: list[int]) -> list[EngineTensorLocation]:
        return stacked_locations(param.data, sizes=sizes, rank=rank, tp=tp)

    *qkv, z = cut(module.in_proj_qkvz.weight, [keys, keys, values, values])
    b, a = cut(module.in_proj_ba.weight, [module.num_v_heads // tp] * 2)
    return {
        f"{prefix}.in_proj_qkv.weight": join_locations(qkv), f"{prefix}.in_proj_z.weight": z,
        f"{prefix}.in_proj_b.weight": b, f"{prefix}.in_proj_a.weight": a,
        f"{prefix}.conv1d.weight": join_locations(cut(module.conv1d.weight, [keys, keys, values])),
        f"{prefix}.A_log": cut_location(module.A_log.data, dim=0, rank=rank, tp=tp),
        f"{prefix}.dt_bias": cut_location(module.dt_bias.data, dim=0, rank=rank, tp=tp),
    }  # fmt: skip
