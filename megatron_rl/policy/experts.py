"""Experts of a mixture-of-experts model, in Megatron's MoELayer.

Megatron's routing and its all-gather dispatcher are used unchanged. Under tensor parallelism, the
dispatcher gathers the tokens of the sequence-parallel ranks, each rank computes its columns of
every expert, and a reduce-scatter adds up the results. The layer therefore requires sequence
parallelism if tp > 1 (parallel.check_layout).

Under expert parallelism, the dispatcher also gathers the tokens of the data-parallel ranks that
divide the experts among themselves, and each rank computes its own experts for all of these tokens.
The all-to-all dispatcher is not used, because with tensor parallelism it gathers different numbers
of tokens, which gloo cannot do (torch 2.13, ProcessGroupGloo::allgather). These ranks must run the
same number of micro-batches (pipeline.py).

The experts of a layer are two parameters, in the orientation of released checkpoints: the name
mapping, weight sync and checkpoints handle them like any other tensor, and a step needs two grouped
matrix products instead of two per expert. The same code runs on a CPU and on a GPU.
"""

import math
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from torch.nn.functional import grouped_mm, linear, pad, sigmoid

from megatron_rl.config import LoraSettings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.expert_lora import build_expert_adapters
from megatron_rl.policy.fused import swiglu
from megatron_rl.policy.router_losses import LayerLosses
from megatron_rl.weights.stream import MegatronParameter


class GroupedExperts(nn.Module):
    """Gated MLPs of this rank's experts of a layer; E experts with this rank's F columns of each.

    The parameters are `linear_fc1` [E, H, 2, F], with gate before up, and `linear_fc2` [E, F, H].
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection, *, lora: LoraSettings
    ) -> None:
        super().__init__()
        assert config.moe_ffn_hidden_size is not None
        groups = cast("Any", pg_collection)
        self.tp_group, self.ep_group, self.dp_group = groups.expt_tp, groups.ep, groups.expt_dp
        columns = config.moe_ffn_hidden_size // self.tp_group.size()
        self.linear_fc1 = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, 2, columns, dtype=config.params_dtype))
        self.linear_fc2 = nn.Parameter(torch.empty(num_local_experts, columns, config.hidden_size, dtype=config.params_dtype))
        self.adapters = build_expert_adapters(lora, dict(self.named_parameters()), tp=self.tp_group.size())
        if self.ep_group.size() > 1:
            for parameter in self.parameters():
                cast("MegatronParameter", parameter).allreduce = False

    def forward(self, x_MH: torch.Tensor, tokens_per_expert: torch.Tensor, weight_M: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the weighted outputs [M, H], and None in place of a bias.

        Args:
            x_MH: Inputs, grouped by expert.
            tokens_per_expert: Number of rows [E] of each expert.
            weight_M: Weight of each row, computed by the router.
        """
        end_E = tokens_per_expert.to(x_MH.device).cumsum(0).to(torch.int32)
        inner = swiglu(self._multiply("linear_fc1", x_MH, end_E))
        return self._multiply("linear_fc2", (inner * weight_M[:, None]).to(x_MH.dtype), end_E), None

    def _multiply(self, name: str, x: torch.Tensor, end_E: torch.Tensor) -> torch.Tensor:
        """Return the product of the rows of `x` with a weight of their experts, with adapters."""
        output = grouped_mm(x, self.get_parameter(name).flatten(2), offs=end_E)
        return self.adapters[name](output, x, end_E) if name in self.adapters else output

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded tensors of the experts for a checkpoint.

        A checkpoint has one tensor for all experts, so that it can be read with any layout.
        """
        assert not sharded_offsets, "layers are stored under separate keys"
        experts = (0, self.ep_group.rank(), self.ep_group.size())
        tp_rank, tp = self.tp_group.rank(), self.tp_group.size()
        sharded = {"linear_fc1": 3, "linear_fc2": 1, "adapters.linear_fc1.lora_b": 3, "adapters.linear_fc2.lora_a": 2}
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", parameter, experts, *([(sharded[name], tp_rank, tp)] if name in sharded else []),
                replica_id=(0, 0 if name in sharded else tp_rank, self.dp_group.rank()),
            )
            for name, parameter in self.named_parameters()
        }  # fmt: skip


def release_after_passes(model: GPTModel) -> None:
    """Let the layers with experts release the tensors of their dispatcher at the end of each pass.

    Megatron's dispatcher would keep them until the next pass, also while the engine generates. With
    recomputation, the graph of the router's weights also keeps the layer's input and its gradient.
    """
    for layer in model.decoder.layers:
        if layer.is_moe_layer:
            cast("nn.Module", layer.mlp).register_forward_hook(_release)


def _release(layer: nn.Module, *_: object) -> None:
    dispatcher = cast("Any", layer).token_dispatcher
    dispatcher.local_probs = dispatcher.local_map = dispatcher.reversed_local_input_permutation_mapping = None


class PaddedTokenDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's all-gather dispatcher for ranks with different numbers of tokens.

    Each rank pads its tokens to `num_rows`. No expert is chosen for the padding.
    """

    num_rows: int
    """The same number on all ranks, and at least the number of tokens of each (set_num_rows)."""

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the padded tokens [num_rows, H] and router weights [num_rows, E]."""
        hidden_TH, probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        assert len(hidden_TH) <= self.num_rows, "call set_num_rows before the pass"
        rows = (0, 0, 0, self.num_rows - len(hidden_TH))
        self.routing_map = pad(routing_map, rows)
        return pad(hidden_TH, rows), pad(probs, rows)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the outputs without padding, in the shape of the layer's input."""
        return super().combine_postprocess(hidden_states[: math.prod(self.hidden_shape[:-1])])


def pad_token_exchange(model: GPTModel) -> None:
    """Let the layers with experts exchange tokens between ranks with different numbers of them."""
    for layer in model.decoder.layers:
        if layer.is_moe_layer:
            dispatcher = cast("Any", layer.mlp).token_dispatcher
            dispatcher.__class__, dispatcher.num_rows = PaddedTokenDispatcher, 0


def set_num_rows(chunks: nn.Module, num_rows: int) -> None:
    """Set the number of tokens to which each rank pads in all layers with experts.

    The number must stay the same until the backward pass ends, because recomputation exchanges the
    tokens again.
    """
    for module in chunks.modules():
        if isinstance(module, MoELayer):
            cast("PaddedTokenDispatcher", module.token_dispatcher).num_rows = num_rows


class Router(TopKRouter):
    """Megatron's router, with logits computed in fp32 by torch.

    Without Transformer Engine, Megatron's own fp32 product raises NameError (megatron-core 0.16.1,
    transformer/moe/moe_utils.py, RouterGatingLinearFunction).
    """

    losses: LayerLosses | None = None
    """Losses that this pass adds to the update (router_losses.py)."""

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the fp32 logits of all experts."""
        return linear(input.float(), self.weight.float())

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of each token's experts, and True for these experts, as [T, E]."""
        prob_TE, is_used_TE = super().routing(logits, padding_mask)
        if self.losses is not None:
            prob_TE = self.losses.attach(prob_TE, logits.flatten(0, -2), is_used_TE)
        return prob_TE, is_used_TE


class SharedExpert(SharedExpertMLP):
    """Megatron's shared expert, which computes every token, with policy/fused.swiglu.

    Each data-parallel replica has the whole shared expert, also under expert parallelism. Under
    sequence parallelism, each rank has a partial gradient of `gate_weight`, as of a norm.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the output in the shape of the input, multiplied by the sigmoid of the gate."""
        output, _ = self.linear_fc2(swiglu(self.linear_fc1(hidden_states)[0]))
        return output * sigmoid(linear(hidden_states, cast("torch.Tensor", self.gate_weight)))


def sparse_mlp_spec(mlp: ModuleSpec, lora: LoraSettings) -> ModuleSpec:
    """Return the layer spec of a router with experts, which replaces the spec `mlp` of an MLP.

    A shared expert, if the model has one, has the linear layers of the MLP.
    """
    experts, shared = ModuleSpec(GroupedExperts, params={"lora": lora}), ModuleSpec(SharedExpert, submodules=mlp.submodules)
    return ModuleSpec(MoELayer, submodules=MoESubmodules(experts=experts, shared_experts=shared, router=Router))


def expert_config(spec: ModelSpec, ep: int) -> dict[str, Any]:
    """Return Megatron's options for experts with expert-parallel size `ep`; none without experts.

    Megatron's auxiliary losses are off; see router_losses.py.
    """
    if spec.experts is None:
        return {}
    shared = {"moe_shared_expert_intermediate_size": spec.experts.shared_ffn_size, "moe_shared_expert_gate": True}
    return {
        "num_moe_experts": spec.experts.num_experts, "moe_router_topk": spec.experts.top_k, "moe_ffn_hidden_size": spec.experts.ffn_size,
        "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": ep,
        **(shared if spec.experts.shared_ffn_size else {}),
    }  # fmt: skip
