"""The layers of Qwen3.5: gated delta net (arXiv 2412.06464) and attention with an output gate.

Megatron's GatedDeltaNet (megatron-core 0.16.1, ssm/gated_delta_net.py) requires
flash-linear-attention and rejects packed sequences. This module has the same parameters, except
that the rows of in_proj and conv1d are sorted by key head (models/delta_net_layout.py). As in
linear_qkv, tensor-parallel ranks therefore have contiguous rows. These two have names of their own,
`in_proj_by_head` and `conv1d_by_head`, because the shapes of both orders are equal: a checkpoint in
Megatron's order is incomplete instead of misread.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.nn.functional import silu, softplus
from torch.utils.checkpoint import checkpoint

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.attention import SharedPromptParams
from megatron_rl.policy.delta_rule import DeltaPlan, causal_convolution, gated_delta_rule
from megatron_rl.policy.fused import fused_rms_norm


class OutputNorm(nn.Module):
    """RMSNorm of a value head, multiplied by the silu of the output gate.

    The norm is not zero-centered. Each tensor-parallel rank normalizes its own heads; the gradients
    of the weight are summed over the ranks in the backward pass.
    """

    def __init__(self, size: int, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.eps, self.tp_group = config.layernorm_epsilon, tp_group
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the gated output in the dtype of `gate`; `x` [..., E] is in fp32."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return (fused_rms_norm(x.to(gate.dtype), weight, self.eps) * silu(gate.float())).to(gate.dtype)


class GatedDeltaNet(MegatronModule):
    """Gated delta net over packed tokens, with this rank's heads.

    Each of the K key heads of `in_proj_by_head` has rows for a query and a key [D each], values and
    output gates [R * E each], and the learning rates and decays [R each] of its R value heads.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, *,
        in_proj: Callable[..., Any] = ColumnParallelLinear, out_proj: Callable[..., Any] = RowParallelLinear, **_: object,
    ) -> None:  # fmt: skip
        """Create the parameters; `in_proj` and `out_proj` build the linear layers."""
        super().__init__(config=config)
        self.tp_group = tp_group = cast("Any", pg_collection).tp
        sizes = cast("Any", config)
        self.layer_number = layer_number
        self.num_key_heads = sizes.linear_num_key_heads // tp_group.size()
        self.key_dim, self.value_dim = sizes.linear_key_head_dim, sizes.linear_value_head_dim
        self.ratio = sizes.linear_num_value_heads // sizes.linear_num_key_heads
        convolved, values = 2 * self.key_dim + self.ratio * self.value_dim, sizes.linear_num_value_heads * self.value_dim
        self.sections = [self.key_dim, self.key_dim, self.ratio * self.value_dim]
        rows = convolved + self.ratio * (self.value_dim + 2)
        assert config.init_method is not None and config.output_layer_init_method is not None
        options: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": tp_group}
        self.in_proj_by_head = in_proj(
            config.hidden_size, sizes.linear_num_key_heads * rows, init_method=config.init_method, gather_output=False, **options
        )
        channels = self.num_key_heads * convolved
        self.conv1d_by_head = nn.Conv1d(
            channels, channels, sizes.linear_conv_kernel_dim, groups=channels, bias=False, dtype=config.params_dtype
        )  # only holds the weight
        heads = self.num_key_heads * self.ratio
        self.dt_bias, self.A_log = (nn.Parameter(torch.empty(heads, dtype=config.params_dtype)) for _ in range(2))
        self.out_norm = OutputNorm(self.value_dim, config, tp_group)
        self.out_proj = out_proj(
            values, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True, **options
        )
        self.recomputes = config.recompute_granularity == "selective"

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: None = None, *, packed_seq_params: SharedPromptParams, **_: object
    ) -> tuple[torch.Tensor, None]:
        """Return the output [T, 1, H] and, in place of a bias, None.

        Under sequence parallelism, input and output are [T / tp, 1, H].
        """
        mixed_TKX = self.in_proj_by_head(hidden_states)[0][:, 0].unflatten(1, (self.num_key_heads, -1))
        plan = packed_seq_params.delta_plan
        assert plan is not None
        values = self.ratio * self.value_dim
        qkv_TKX, gate_TKX, rate_TKR, step_TKR = mixed_TKX.split([sum(self.sections), values, self.ratio, self.ratio], -1)
        arguments = (qkv_TKX, rate_TKR, step_TKR, plan)
        if self.recomputes and torch.is_grad_enabled():
            out_TKRE = checkpoint(self._mix, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            out_TKRE = self._mix(*arguments)
        normed = self.out_norm(out_TKRE, gate_TKX.unflatten(2, (self.ratio, -1)))
        return self.out_proj(normed.flatten(1)[:, None])[0], None

    def _mix(self, qkv_TKX: torch.Tensor, rate_TKR: torch.Tensor, step_TKR: torch.Tensor, plan: DeltaPlan) -> torch.Tensor:
        """Return the outputs [T, K, R, E] of convolution and gated delta rule."""
        mixed_TX = causal_convolution(qkv_TKX.flatten(1), self.conv1d_by_head.weight[:, 0], plan)
        q_TKD, k_TKD, v_TKX = mixed_TX.unflatten(1, (self.num_key_heads, -1)).split(self.sections, -1)
        A_KR, bias_KR = (x.float().view(self.num_key_heads, -1) for x in (self.A_log, self.dt_bias))
        log_decay_TKR = -A_KR.exp() * softplus(step_TKR.float() + bias_KR)
        return gated_delta_rule(q_TKD, k_TKD, v_TKX.unflatten(2, (self.ratio, -1)), log_decay_TKR, rate_TKR.sigmoid(), plan)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded tensors of the module for a checkpoint."""
        assert metadata is not None
        linears = {"in_proj_by_head": self.in_proj_by_head, "out_proj": self.out_proj}
        own = {name: x for name, x in self.state_dict(keep_vars=True).items() if name.partition(".")[0] not in linears}
        axes = {"conv1d_by_head.weight": 0, "dt_bias": 0, "A_log": 0}
        state = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, linear in linears.items():
            state |= linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state


class GatedSelfAttention(SelfAttention):
    """Megatron's attention with an output gate, multiplied by plain torch.

    Megatron compiles the multiplication, which takes seconds and requires a C++ compiler on a CPU.
    """

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


def with_delta_net(layer: ModuleSpec, linears: Mapping[str, Callable[..., nn.Module]]) -> ModuleSpec:
    """Return the spec of a layer with a gated delta net instead of attention.

    `linears` contains arguments of GatedDeltaNet that replace its linear layers. In checkpoints,
    the norm of the layer's input keeps its name (ParamMapping.checkpoint_key).
    """
    parts = cast("Any", layer.submodules)
    keys = {name: key for name, key in parts.sharded_state_dict_keys_map.items() if not name.startswith("input_layernorm")}
    net = ModuleSpec(GatedDeltaNet, params=dict(linears))
    return replace(layer, submodules=replace(parts, self_attention=net, sharded_state_dict_keys_map=keys))


def delta_net_config(spec: ModelSpec) -> dict[str, Any]:
    """Return Megatron's options for the gated delta nets; none for a model without them."""
    if spec.delta_net is None:
        return {}
    return {
        "linear_conv_kernel_dim": spec.delta_net.kernel_size, "linear_key_head_dim": spec.delta_net.key_head_dim,
        "linear_value_head_dim": spec.delta_net.value_head_dim, "linear_num_key_heads": spec.delta_net.num_key_heads,
        "linear_num_value_heads": spec.delta_net.num_value_heads,
    }  # fmt: skip
