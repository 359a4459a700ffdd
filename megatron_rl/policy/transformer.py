"""Vision-language model on Megatron-Core: a Hugging Face vision tower and Megatron's GPTModel.

A rank holds the whole model, or one or more pipeline chunks of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from megatron_rl.config import LoraSettings
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.mrope import interleave_sections
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.attention import PackedCoreAttention, Segments, SharedPromptParams, to_device
from megatron_rl.policy.deepstack import DeepStack, add_to_layer, split_embeddings
from megatron_rl.policy.delta_rule import plan_chunks
from megatron_rl.policy.experts import expert_config, pad_token_exchange, release_after_passes, sparse_mlp_spec
from megatron_rl.policy.fused import fused_rms_norm, fused_swiglu, fuses_activation, zero_centered_rms_norm
from megatron_rl.policy.gated_delta_net import GatedSelfAttention, delta_net_config, with_delta_net
from megatron_rl.policy.kernels import uses_transformer_engine
from megatron_rl.policy.lora import adapt_layers, adapted_delta_net
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.router_losses import BatchWeights
from megatron_rl.policy.routing_replay import BatchRouting
from megatron_rl.policy.value_head import ValueHead
from megatron_rl.policy.vision import build_vision_tower, encode_images
from megatron_rl.types import MicroBatch
from megatron_rl.weights.stream import MegatronParameter


class RMSNorm(nn.Module):
    """Root mean square norm with a weight in params_dtype; zero-centered in Qwen3.5.

    Under sequence parallelism each rank has a partial gradient of the weight. The attribute
    `sequence_parallel` of the weight makes Megatron sum the partial gradients.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.normalize = zero_centered_rms_norm if config.layernorm_zero_centered_gamma else fused_rms_norm
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        cast("MegatronParameter", self.weight).sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` normalized over its last dimension, in the dtype of `x`."""
        return self.normalize(x, self.weight, self.eps)


class FusedMLP(MLP):
    """Replacement for the forward pass of Megatron's gated MLP, with fused.fused_swiglu.

    The MLP has no biases. On a GPU, ModelChunk changes the class of the decoder's MLPs to this
    class.
    """

    def forward(self, hidden_states: torch.Tensor, per_token_scale: None = None, **_: object) -> tuple[torch.Tensor, None]:
        """Return the MLP's output and, in place of a bias, None."""
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(fused_swiglu(gate_up))[0], None


def megatron_config(spec: ModelSpec, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron's configuration of the language model.

    Fusions that need apex or Transformer Engine are disabled.
    """
    config = TransformerConfig(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.ffn_size,
        num_attention_heads=spec.num_heads,
        num_query_groups=spec.num_kv_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_layernorm=spec.family.has_qk_norm,
        mrope_section=interleave_sections(spec.rope_sections) if spec.family.has_interleaved_mrope else list(spec.rope_sections),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # In an interleaved pipeline the previous and the next stage can be the same process, so
        # that batched sends and receives would be matched with the wrong partner.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        **_recompute(layout.recompute, layout.recompute_num_layers),
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        batch_p2p_sync=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=fuses_activation(),
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **expert_config(spec, layout.ep),
        **delta_net_config(spec),
        **spec.family.megatron_config,
    )
    # TransformerConfig rejects the all-gather dispatcher if micro-batches differ in length. Without
    # expert parallelism, the ranks that exchange tokens always have the same number of them. With
    # it, pad_token_exchange makes the numbers equal.
    config.moe_token_dispatcher_type = "allgather"
    return config


def _recompute(mode: str, num_layers: int) -> dict[str, Any]:
    """Return Megatron's recomputation options for a value of parallel.recompute.

    The value "selective" recomputes attention, and "full" recomputes the first `num_layers` layers
    of the stage, or every layer if `num_layers` is 0. The values "none" and "vision" do not affect
    the decoder.
    """
    if mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if mode == "full" and num_layers:
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": num_layers}
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {}


def _layer_specs(spec: ModelSpec, numbers: Sequence[int], config: TransformerConfig, lora: LoraSettings) -> TransformerBlockSubmodules:
    """Return the specs of the layers with these global numbers."""
    is_sparse = [spec.is_sparse(number) for number in numbers]
    if has_fused_layers(spec, lora):
        from megatron.core.extensions.transformer_engine import TENorm

        te_layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        layers = [_with_experts(te_layer, TENorm, lora) if sparse else te_layer for sparse in is_sparse]
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=cast("Any", TENorm))
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = cast("Any", layer.submodules)
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.attention_output_gate:
        parts.self_attention = replace(parts.self_attention, module=GatedSelfAttention)
    attention = parts.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if lora.rank:
        adapt_layers(layer, lora, config)
    layers = [_with_experts(layer, RMSNorm, lora) if sparse else layer for sparse in is_sparse]
    linears = adapted_delta_net(lora, config)
    layers = [with_delta_net(each, linears) if spec.is_linear(number) else each for number, each in zip(numbers, layers, strict=True)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=cast("Any", RMSNorm))


def _with_experts(layer: ModuleSpec, norm: object, lora: LoraSettings) -> ModuleSpec:
    """Return the spec of a layer with experts instead of an MLP, after a norm of its own.

    In checkpoints, that norm keeps its name (ParamMapping.checkpoint_key).
    """
    parts = cast("Any", layer.submodules)
    keys = {name: key for name, key in parts.sharded_state_dict_keys_map.items() if not name.startswith("pre_mlp_layernorm")}
    submodules = replace(parts, pre_mlp_layernorm=norm, mlp=sparse_mlp_spec(parts.mlp, lora), sharded_state_dict_keys_map=keys)
    return replace(layer, submodules=submodules)


def _layer_numbers(spec: ModelSpec, layout: Layout, number: int) -> range:
    """Return the global numbers of the layers of this rank's chunk `number`."""
    size = spec.num_layers // (layout.pp * layout.vpp)
    first = (number * layout.pp + layout.pp_rank) * size
    return range(first, first + size)


def has_fused_layers(spec: ModelSpec, lora: LoraSettings) -> bool:
    """Return True if the model is built from Transformer Engine's layers.

    Models with gated delta nets always have this project's own layers.
    """
    return spec.delta_net is None and uses_transformer_engine(lora)


@dataclass(slots=True, frozen=True, kw_only=True)
class HeadConfig:
    """Selects the heads on a backbone: language-model head, value head or both."""

    has_lm_head: bool = True
    """True if the model computes logits over the vocabulary."""
    value_sizes: Sequence[int] | None = None
    """Widths of the value head's hidden layers; None if the model has no value head."""
    normalizes_returns: bool = False
    """True if the value head predicts normalized returns; see ValueHead."""


class ModelChunk(MegatronModule):
    """Chunk of the model: the whole model, one pipeline stage, or one of several parts of a stage.

    With an interleaved schedule, a stage has several chunks. `forward` returns the hidden states
    that the next chunk receives. On the last chunk, `forward` returns the hidden states of the
    requested rows, which are the input of `head`.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, lora: LoraSettings, heads: HeadConfig = HeadConfig(), number: int = 0
    ) -> None:
        config = megatron_config(spec, layout, dtype)
        super().__init__(config=config)
        self.spec, self.layout = spec, layout
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process = layout.is_first_stage and number == 0
        self.post_process = layout.is_last_stage and number == layout.vpp - 1
        self.vp_stage = number
        self.num_images_encoded = 0
        self.start_routing: Callable[[MicroBatch], BatchRouting | None] = lambda _: None
        """Returns the experts to replay or record in a pass; set by RoutingReplay."""
        self.start_router_losses: Callable[[MicroBatch], BatchWeights | None] = lambda _: None
        """Returns the tokens of the routers' losses in a pass; set by RouterLosses."""
        self.uses_transformer_engine = has_fused_layers(spec, lora)
        self.share_embeddings_and_output_weights = spec.tie_word_embeddings and heads.has_lm_head
        self.language = GPTModel(
            config,
            cast("Any", _layer_specs(spec, _layer_numbers(spec, layout, number), config, lora)),
            vocab_size=padded_vocab(spec.vocab_size, layout.tp),
            max_sequence_length=spec.max_positions,
            pre_process=self.pre_process,
            post_process=self.post_process,
            share_embeddings_and_output_weights=spec.tie_word_embeddings and heads.has_lm_head,
            position_embedding_type="mrope",
            rotary_percent=spec.rotary_dim / spec.head_dim,
            rotary_base=cast("Any", spec.rope_theta),
            scatter_embedding_sequence_parallel=False,
            vp_stage=number if layout.vpp > 1 else None,
        )
        if fuses_activation() and not self.uses_transformer_engine:
            for layer in self.language.decoder.layers:
                if not layer.is_moe_layer:
                    cast("nn.Module", layer.mlp).__class__ = FusedMLP
        release_after_passes(self.language)
        if layout.ep > 1:
            pad_token_exchange(self.language)
        self.vision = build_vision_tower(spec, layout, dtype, lora=lora) if self.pre_process else None
        for layer in range(spec.vision.num_deepstack_layers if self.pre_process else 0):
            self.language.decoder.layers[layer].register_forward_hook(partial(add_to_layer, layer), with_kwargs=True)
        self.value_head = None
        if self.post_process:
            # `forward` gathers the sequence and selects the requested rows before the output layer.
            self.language.output_layer.sequence_parallel = False
            if not heads.has_lm_head:
                # Megatron-Core 0.16.1 creates the output layer on every last stage, and expects it
                # in checkpoints if post_process is set.
                del self.language.output_layer
                self.language.post_process = False
            if heads.value_sizes is not None:
                self.value_head = ValueHead(spec.hidden_size, heads.value_sizes, dtype=dtype, normalize_returns=heads.normalizes_returns)

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        """Set the hidden states received from the previous chunk; called by Megatron's schedule."""
        self.language.set_input_tensor(cast("Any", input_tensor))

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """Return the weight of the token embeddings.

        Megatron calls this method if the tied embeddings and the output layer are on different
        pipeline stages.
        """
        return self.language.shared_embedding_or_output_weight()

    def forward(self, batch: MicroBatch, rows_R: torch.Tensor) -> torch.Tensor:
        """Return hidden states: [T, 1, H] for the next chunk, or [R, H] on the last chunk.

        The last chunk returns the hidden states of `rows_R`. Under sequence parallelism the hidden
        states for the next chunk are [T / tp, 1, H].
        """
        hidden, stacked = self._embed(batch) if self.pre_process else (None, None)
        angle_T11D = self.language.rotary_pos_emb(batch.position_3T[:, None], self.config.mrope_section)
        packed = self._packed(batch, angle_T11D[:, 0, 0], stacked)
        packed.routing, packed.router_losses = self.start_routing(batch), self.start_router_losses(batch)
        hidden = self.language.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=angle_T11D if self.uses_transformer_engine else None,
            packed_seq_params=packed,
        )
        if not self.post_process:
            return hidden
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[rows_R, 0]

    def head(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute the logits [R, vocabulary / tp] of hidden states; last chunk only."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.language.output_layer(hidden_RH[:, None], weight=weight)
        return logits[:, 0]

    def _embed(self, batch: MicroBatch) -> tuple[torch.Tensor, DeepStack | None]:
        """Return the first layer's input [T, 1, H] and the DeepStack features, if any.

        The input consists of token embeddings, with image embeddings at the placeholder positions.
        Under sequence parallelism the input is [T / tp, 1, H].
        """
        assert self.vision is not None
        embedded = self.language.embedding(input_ids=batch.token_T[None], position_ids=None)
        is_trained = any(parameter.requires_grad for parameter in self.vision.parameters())
        if batch.grid_I3.shape[0]:
            assert batch.patch_PC is not None
            patch_PC = batch.patch_PC.to(embedded, non_blocking=True)
            # With recomputation, autograd would keep the inputs of a frozen tower's blocks.
            with torch.set_grad_enabled(is_trained and torch.is_grad_enabled()):
                vision_VH, encoded = encode_images(self.vision, patch_PC, batch.grid_I3, self.layout, sizes=self.spec.vision)
            self.num_images_encoded += encoded
            if self.spec.vision.num_deepstack_layers:
                embedded = nn.functional.pad(embedded, (0, vision_VH.shape[1] - embedded.shape[2]))
            embedded = embedded.index_copy(0, batch.vision_position_M, vision_VH[batch.vision_row_M][:, None].to(embedded.dtype))
        if torch.is_grad_enabled() and not embedded.requires_grad:
            # Needed if embeddings are frozen: tensor-parallel ranks without an image must still
            # take part in the all-reduces of the backward pass. Also, Megatron's recomputation is
            # reentrant: if a layer's input requires no gradient, no gradients of the layer's
            # weights are computed.
            embedded.requires_grad_()
        if self.layout.sequence_parallel:
            embedded = scatter_to_sequence_parallel_region(embedded)
        return split_embeddings(embedded, self.spec.hidden_size, is_trained=is_trained)

    def _packed(self, batch: MicroBatch, angle_TD: torch.Tensor, stacked: DeepStack | None) -> SharedPromptParams:
        """Return the micro-batch's segment boundaries and rotary angles for the attention layers.

        PackedCoreAttention reads `segments` and `cos_sin`. Transformer Engine's attention and
        Megatron's rotary embedding read the offsets on the device.
        """
        segments = Segments(batch.offset_S1, batch.prefix_S, device=batch.token_T.device)
        if not self.uses_transformer_engine:
            plan = None
            if self.spec.delta_net is not None:
                plan = plan_chunks(batch.offset_S1, batch.prefix_S, self.spec.delta_net.kernel_size)
                plan = plan.to(partial(to_device, device=batch.token_T.device))
            angles = angle_TD.cos(), angle_TD.sin()
            return SharedPromptParams(qkv_format="sbhd", segments=segments, cos_sin=angles, stacked=stacked, delta_plan=plan)
        offsets, longest = batch.cu_seqlens_S1, segments.max_length
        return SharedPromptParams(
            qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, cu_seqlens_q_padded=offsets, cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest, max_seqlen_kv=longest, stacked=stacked,
        )  # fmt: skip


class ModelChunks(nn.ModuleList):
    """Model chunks of this rank, in the order of the virtual pipeline."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[ModelChunk]: ...

        def __getitem__(self, idx: int) -> ModelChunk: ...


def build_chunks(
    spec: ModelSpec, layout: Layout, dtype: torch.dtype, *, lora: LoraSettings, heads: HeadConfig = HeadConfig()
) -> ModelChunks:
    """Build the `layout.vpp` model chunks of this rank."""
    return ModelChunks(ModelChunk(spec, layout, dtype, lora=lora, heads=heads, number=number) for number in range(layout.vpp))
