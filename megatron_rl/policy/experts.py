"""Experts of a mixture-of-experts model, in Megatron's MoELayer.

Megatron's routing and its all-gather dispatcher are used unchanged. Under tensor parallelism, the
dispatcher gathers the tokens of the sequence-parallel ranks, each rank computes its columns of
every expert, and a reduce-scatter adds up the results. The layer therefore requires sequence
parallelism if tp > 1 (parallel.check_layout).

The experts of a layer are two parameters, in the orientation of released checkpoints: the name
mapping, weight sync and checkpoints handle them like any other tensor, and a step needs two grouped
matrix products instead of two per expert. The same code runs on a CPU and on a GPU.
"""

from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.nn.functional import grouped_mm, linear

from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.fused import swiglu


class GroupedExperts(nn.Module):
    """Gated MLPs of all experts of a layer; E experts with this rank's F columns of each.

    The parameters are `linear_fc1` [E, H, 2, F], with gate before up, and `linear_fc2` [E, F, H].
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__()
        assert config.moe_ffn_hidden_size is not None
        self.tp_group = cast("Any", pg_collection).expt_tp
        columns = config.moe_ffn_hidden_size // self.tp_group.size()
        self.linear_fc1 = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, 2, columns, dtype=config.params_dtype))
        self.linear_fc2 = nn.Parameter(torch.empty(num_local_experts, columns, config.hidden_size, dtype=config.params_dtype))

    def forward(self, x_MH: torch.Tensor, tokens_per_expert: torch.Tensor, weight_M: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the weighted outputs [M, H], and None in place of a bias.

        Args:
            x_MH: Inputs, grouped by expert.
            tokens_per_expert: Number of rows [E] of each expert.
            weight_M: Weight of each row, computed by the router.
        """
        end_E = tokens_per_expert.to(x_MH.device).cumsum(0).to(torch.int32)
        inner = swiglu(grouped_mm(x_MH, self.linear_fc1.flatten(2), offs=end_E))
        return grouped_mm((inner * weight_M[:, None]).to(x_MH.dtype), self.linear_fc2, offs=end_E), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded tensors of the experts for a checkpoint."""
        assert metadata is not None
        state, axes = self.state_dict(keep_vars=True), {"linear_fc1": 3, "linear_fc2": 1}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, axes, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )


class Router(TopKRouter):
    """Megatron's router, with logits computed in fp32 by torch.

    Without Transformer Engine, Megatron's own fp32 product raises NameError (megatron-core 0.16.1,
    transformer/moe/moe_utils.py, RouterGatingLinearFunction).
    """

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of all experts."""
        return linear(input.float(), self.weight.float())


def sparse_mlp_spec() -> ModuleSpec:
    """Return the layer spec of a router with experts, which replaces that of an MLP."""
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=ModuleSpec(GroupedExperts), router=Router))


def expert_config(spec: ModelSpec) -> dict[str, Any]:
    """Return Megatron's options for the experts; none for a dense model.

    There is no auxiliary loss: the router is trained by the policy loss alone.
    """
    if spec.experts is None:
        return {}
    return {
        "num_moe_experts": spec.experts.num_experts, "moe_router_topk": spec.experts.top_k, "moe_ffn_hidden_size": spec.experts.ffn_size,
        "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
    }  # fmt: skip
