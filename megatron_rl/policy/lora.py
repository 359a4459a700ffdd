"""LoRA adapters (arXiv 2106.09685) on the linear layers of a frozen model, with tensor parallelism.

An adapter adds alpha / rank * B A dropout(x) to the output of its layer. As in PEFT, every Hugging
Face projection has its own A [rank, inputs] and B [outputs, rank]. A Megatron linear layer that
fuses several projections has an A and a B for each projection. The adapters of all projections are
applied at once: the A matrices are concatenated, and the B matrices form a block-diagonal matrix.
The rows of the block-diagonal matrix are in the order of the fused weight's rows. Tensor-parallel
ranks exchange only A's output, [tokens, projections * rank]. Fused projections share one dropout
mask, whereas PEFT draws one mask per projection.

Adapter parameters are named `<linear>.adapter.lora_a.<projection>` and
`<linear>.adapter.lora_b.<projection>`. Parameters of the base model keep their names.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn
from torch.nn.functional import dropout, linear

from megatron_rl.config import LoraSettings, require
from megatron_rl.models.adapter_mapping import adapted_weight_name, is_vision_target, projection_name
from megatron_rl.models.delta_net_layout import interleave_key_heads
from megatron_rl.models.model_spec import EXPERT_MULTIPLE, ModelSpec
from megatron_rl.models.name_mapping import AttentionHeads, Tensors, fuse_halves, fuse_qkv
from megatron_rl.policy.expert_lora import ExpertAdapter
from megatron_rl.policy.parallel import rng_tracker

FuseFn = Callable[[Tensors], torch.Tensor]
ExchangeFn = Callable[[torch.Tensor], torch.Tensor]
RngContext = Callable[[], AbstractContextManager]


def _shared_rng() -> AbstractContextManager:
    """Use the random stream that all tensor-parallel ranks share.

    Recomputation draws the same numbers again (megatron-core 0.16.1, tensor_parallel/random.py).
    """
    return rng_tracker().fork(get_data_parallel_rng_tracker_name())


def _rank_rng() -> AbstractContextManager:
    return rng_tracker().fork()


class LoraAdapter(nn.Module):
    """Adapters of one linear layer; all sizes refer to this rank's shard."""

    def __init__(
        self, lora: LoraSettings, num_inputs: int, num_outputs: dict[str, int], *,
        dtype: torch.dtype, fuse: FuseFn | None = None, exchange: ExchangeFn | None = None, randomness: RngContext = nullcontext,
    ) -> None:  # fmt: skip
        """Create the adapters' parameters without initializing them.

        Args:
            lora: Rank, alpha and dropout of the adapters.
            num_inputs: Number of inputs of the layer.
            num_outputs: Number of outputs of each projection, in the order expected by `fuse`.
            dtype: Data type of the parameters.
            fuse: Function that reorders the rows of all projections to match the fused weight; None
                keeps their order.
            exchange: Collective applied to A's output [..., projections * rank]; None for a
                replicated layer.
            randomness: Context manager that selects the random stream for dropout.
        """
        super().__init__()
        self.scale, self.dropout = lora.alpha / lora.rank, lora.dropout
        self.fuse, self.exchange, self.randomness = fuse, exchange, randomness
        self.enabled = True
        # Built from pairs: a ParameterDict sorts the keys of a dict, but `fuse` needs this order.
        empty = partial(torch.empty, dtype=dtype)
        self.lora_a = nn.ParameterDict([(name, nn.Parameter(empty(lora.rank, num_inputs))) for name in num_outputs])
        self.lora_b = nn.ParameterDict([(name, nn.Parameter(empty(size, lora.rank))) for name, size in num_outputs.items()])

    def forward(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the adapters' output for `x` to the layer's `output`, if adapters are enabled."""
        if not self.enabled:
            return output
        if self.training and self.dropout > 0:
            with self.randomness():
                x = dropout(x, self.dropout)
        low = linear(x, self._stacked_a())
        low = self.exchange(low) if self.exchange else low
        # The scale is part of the matrix product: B's output is as large as the layer's output.
        rows = torch.addmm(output.flatten(0, -2), low.flatten(0, -2), self._fused_b().t(), alpha=self.scale)
        return rows.view_as(output)

    def _stacked_a(self) -> torch.Tensor:
        return torch.cat(list(self.lora_a.values()))

    def _fused_b(self) -> torch.Tensor:
        blocks = list(self.lora_b.values())
        diagonal = torch.block_diag(*blocks)
        return self.fuse(diagonal.split([len(block) for block in blocks])) if self.fuse else diagonal

    @torch.no_grad()
    def merge_into(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the weight with the adapters merged in, as a new tensor.

        The sum is computed in fp32. Disabled adapters are not merged.
        """
        if not self.enabled:
            return weight.clone()
        return (weight.float() + self.scale * (self._fused_b().float() @ self._stacked_a().float())).to(weight.dtype)


class LoraColumnParallelLinear(ColumnParallelLinear):
    """Column-parallel linear layer with adapters.

    B is sharded like the outputs; A is replicated.
    """

    tp_group: dist.ProcessGroup

    def __init__(
        self, input_size: int, output_size: int, *,
        config: TransformerConfig, lora: LoraSettings, num_outputs: dict[str, int], fuse: FuseFn, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(input_size, output_size, config=config, **options)
        assert sum(num_outputs.values()) == self.output_size_per_partition
        if self.sequence_parallel:
            exchange, randomness = partial(gather_from_sequence_parallel_region, group=self.tp_group), _rank_rng
        else:
            exchange, randomness = partial(copy_to_tensor_model_parallel_region, group=self.tp_group), _shared_rng
        self.adapter = LoraAdapter(
            lora, input_size, num_outputs, dtype=config.params_dtype, fuse=fuse, exchange=exchange, randomness=randomness
        )
        for a in self.adapter.lora_a.values():
            a.sequence_parallel = self.sequence_parallel  # Megatron sums the gradients of the ranks' tokens

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output with adapters, and the bias if it has not been added yet."""
        output, bias = super().forward(input_)
        return self.adapter(output, input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded tensors of the base layer and its adapters for a checkpoint."""
        axes = {"weight": 0, "bias": 0, **{f"adapter.lora_b.{name}": 0 for name in self.adapter.lora_b}}
        return _make_sharded_state(self, axes, prefix, sharded_offsets, metadata)


class LoraRowParallelLinear(RowParallelLinear):
    """Row-parallel linear layer with adapters.

    A is sharded like the inputs; B is replicated.
    """

    tp_group: dist.ProcessGroup

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, lora: LoraSettings, name: str, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        reduce = reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else reduce_from_tensor_model_parallel_region
        self.adapter = LoraAdapter(
            lora, self.input_size_per_partition, {name: output_size},
            dtype=config.params_dtype, exchange=partial(reduce, group=self.tp_group), randomness=_rank_rng,
        )  # fmt: skip
        for b in self.adapter.lora_b.values():
            b.sequence_parallel = self.sequence_parallel

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output with adapters, and the bias if it has not been added yet."""
        output, bias = super().forward(input_)
        return self.adapter(output, input_), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Return the sharded tensors of the base layer and its adapters for a checkpoint."""
        axes = {"weight": 1, **{f"adapter.lora_a.{name}": 1 for name in self.adapter.lora_a}}
        return _make_sharded_state(self, axes, prefix, sharded_offsets, metadata)


def _make_sharded_state(
    module: LoraColumnParallelLinear | LoraRowParallelLinear, axes: dict[str, int], prefix: str, offsets: tuple, metadata: dict | None
) -> dict:
    assert metadata is not None
    state = module.state_dict(prefix="", keep_vars=True)
    return make_sharded_tensors_for_checkpoint(state, prefix, axes, offsets, tp_group=module.tp_group, dp_cp_group=metadata["dp_cp_group"])


class LoraLinear(nn.Linear):
    """Linear layer of the vision tower with an adapter, replicated on every tensor-parallel rank.

    The layer shares its base parameters with the linear layer that it replaces.
    """

    def __init__(self, base: nn.Linear, lora: LoraSettings, *, name: str) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.adapter = LoraAdapter(lora, base.in_features, {name: base.out_features}, dtype=base.weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output including the adapter's output."""
        return self.adapter(super().forward(x), x)


def check_adapter_targets(lora: LoraSettings, model: ModelSpec, *, key: str) -> None:
    """Raise ValueError if the settings do not fit adapters on experts, if the targets include them.

    `key` is the setting of the targets.
    """
    if lora.rank and "mlp" in lora.targets and model.experts is not None:
        prefix = key.removesuffix("targets")
        remedy = f"must be a multiple of {EXPERT_MULTIPLE} for adapters on experts; change it, or leave mlp out of {key}"
        require(lora.rank % EXPERT_MULTIPLE == 0, f"{prefix}rank", lora.rank, remedy)
        remedy = f"must be 0 for adapters on experts, as in PEFT; or leave mlp out of {key}"
        require(not lora.dropout, f"{prefix}dropout", lora.dropout, remedy)


def adapt_layers(layer: ModuleSpec, lora: LoraSettings, config: TransformerConfig) -> None:
    """Replace the linear layers that lora.targets selects in a layer spec with LoRA layers.

    `layer`, Megatron's local spec of a decoder layer, is modified in place.
    """
    tp, dim = config.tensor_model_parallel_size, config.kv_channels
    assert dim is not None and config.num_query_groups is not None and config.ffn_hidden_size is not None
    heads = AttentionHeads(config.num_attention_heads // tp, config.num_query_groups // tp, dim)

    def column(num_outputs: dict[str, int], fuse: FuseFn) -> ModuleSpec:
        return ModuleSpec(LoraColumnParallelLinear, params={"lora": lora, "num_outputs": num_outputs, "fuse": fuse})

    def row(name: str) -> ModuleSpec:
        return ModuleSpec(LoraRowParallelLinear, params={"lora": lora, "name": name})

    parts = cast("Any", layer.submodules)
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    if "attention" in lora.targets:
        has_gate = bool(config.attention_output_gate)
        queries, keys = (1 + has_gate) * heads.num_query_heads * dim, heads.num_kv_heads * dim
        fuse = partial(fuse_qkv, heads=heads, has_gate=has_gate)
        attention.linear_qkv = column({"q_proj": queries, "k_proj": keys, "v_proj": keys}, fuse)
        attention.linear_proj = row("o_proj")
    if "mlp" in lora.targets:
        rows = config.ffn_hidden_size // tp
        mlp.linear_fc1, mlp.linear_fc2 = column({"gate_proj": rows, "up_proj": rows}, fuse_halves), row("down_proj")


def adapted_delta_net(lora: LoraSettings, config: TransformerConfig) -> dict[str, Callable[..., nn.Module]]:
    """Return the arguments of GatedDeltaNet that replace its linear layers with LoRA layers.

    The result is empty if lora.targets does not select attention.
    """
    if not lora.rank or "attention" not in lora.targets:
        return {}
    sizes, tp = cast("Any", config), config.tensor_model_parallel_size
    num_keys, num_values = sizes.linear_num_key_heads // tp, sizes.linear_num_value_heads // tp
    values = num_values * sizes.linear_value_head_dim
    outputs = {
        "in_proj_qkv": 2 * num_keys * sizes.linear_key_head_dim + values, "in_proj_z": values,
        "in_proj_b": num_values, "in_proj_a": num_values,
    }  # fmt: skip
    fuse = partial(interleave_key_heads, num_key_heads=num_keys)
    return {
        "in_proj": partial(LoraColumnParallelLinear, lora=lora, num_outputs=outputs, fuse=fuse),
        "out_proj": partial(LoraRowParallelLinear, lora=lora, name="out_proj"),
    }


def adapt_vision(tower: nn.Module, lora: LoraSettings, vision_lora: Mapping[str, str]) -> None:
    """Replace the vision tower's linear layers selected by lora.targets with LoRA layers.

    `vision_lora` maps each target to a regular expression for the names of modules in the vision
    tower.
    """
    for name, module in list(tower.named_modules()):
        if is_vision_target(name, lora.targets, vision_lora):
            assert isinstance(module, nn.Linear)
            tower.set_submodule(name, LoraLinear(module, lora, name=projection_name(name)))


def _adapters(chunks: nn.Module) -> Iterator[tuple[str, LoraAdapter | ExpertAdapter]]:
    return ((name, module) for name, module in chunks.named_modules() if isinstance(module, LoraAdapter | ExpertAdapter))


@contextmanager
def disabled_adapters(chunks: nn.Module) -> Iterator[None]:
    """Disable all adapters inside the `with` block, so that only the base model is evaluated."""
    adapters = [adapter for _, adapter in _adapters(chunks)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def merged_weight_fns(chunks: nn.Module) -> dict[str, Callable[[], torch.Tensor]]:
    """Map the name of each adapted weight to a function that merges its adapters.

    Each function returns this rank's shard of the weight with the adapters merged in.
    """
    named = {adapted_weight_name(name): adapter for name, adapter in _adapters(chunks)}
    return {name: partial(adapter.merge_into, chunks.get_parameter(name)) for name, adapter in named.items()}
