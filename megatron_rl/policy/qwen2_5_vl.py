"""Qwen2.5-VL over processes: Hugging Face's vision tower, its images shared out over tensor-parallel ranks, and Megatron's GPTModel.

The tower is replicated and lives on the first pipeline stage. Each tensor-parallel rank encodes its share of the micro-batch's distinct
images; the embeddings are gathered, so every rank's tower holds a partial gradient, and Megatron reduces it (finalize_model_grads).
"""

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from megatron_rl.policy.attention import VISION_ATTENTION, PackedCoreAttention, SharedPromptParams
from megatron_rl.policy.parallel import Layout
from megatron_rl.types import Batch


class RMSNorm(nn.Module):
    """Root mean square norm that tells Megatron its weight's gradient is partial under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def megatron_config(model: Qwen2_5_VLConfig, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """HF's text config in Megatron's words. Fusions that need a GPU's kernels are off: this spec serves both."""
    text = model.text_config
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.hidden_size // text.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=list(text.rope_parameters["mrope_section"]),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
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
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )


def _layer_specs(num_layers: int) -> TransformerBlockSubmodules:
    layer: ModuleSpec = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)


class Qwen2_5_VL(MegatronModule):
    """This rank's part of the policy. `forward` gives hidden states between stages and vocabulary-parallel logits on the last."""

    def __init__(self, model: Qwen2_5_VLConfig, layout: Layout, dtype: torch.dtype) -> None:
        config = megatron_config(model, layout, dtype)
        super().__init__(config=config)
        text = model.text_config
        self.layout = layout
        self.model_type = ModelType.encoder_or_decoder
        self.pre_process, self.post_process = layout.is_first_stage, layout.is_last_stage
        self.share_embeddings_and_output_weights = text.tie_word_embeddings
        self.language = GPTModel(
            config,
            _layer_specs(text.num_hidden_layers // layout.pp),
            vocab_size=text.vocab_size,
            max_sequence_length=text.max_position_embeddings,
            pre_process=self.pre_process,
            post_process=self.post_process,
            share_embeddings_and_output_weights=text.tie_word_embeddings,
            position_embedding_type="mrope",
            rotary_base=text.rope_parameters["rope_theta"],
            scatter_embedding_sequence_parallel=False,
        )
        self.vision = _vision_tower(model, layout, dtype) if self.pre_process else None
        if self.post_process:
            # The logits' input is gathered and cut to the rows that matter here, not inside the output layer.
            self.language.output_layer.sequence_parallel = False

    def set_input_tensor(self, input_tensor: torch.Tensor | list[torch.Tensor]) -> None:
        self.language.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor:
        """Asked for by Megatron when tied embeddings lie on two pipeline stages."""
        return self.language.shared_embedding_or_output_weight()

    def forward(self, batch: Batch, rows_R: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, 1, H] to the next stage ([T / tp, 1, H] under sequence parallelism), or the logits [R, vocabulary / tp] of rows_R."""
        hidden = self._embed(batch) if self.pre_process else None
        rotary = self.language.rotary_pos_emb(batch.position_3T[:, None], self.config.mrope_section)
        hidden = self.language.decoder(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=_packed(batch.cu_seqlens_S1, batch.prefix_S)
        )
        if not self.post_process:
            return hidden
        if self.layout.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.language.output_layer(hidden[rows_R], weight=weight)
        return logits[:, 0]

    def _embed(self, batch: Batch) -> torch.Tensor:
        """Token embeddings [T, 1, H] with the vision tower's output in the placeholders' places."""
        embedded = self.language.embedding(input_ids=batch.token_T[None], position_ids=None)
        if batch.grid_I3.shape[0]:
            vision_VH = encode_images(self.vision, batch.patch_PC.to(embedded.dtype), batch.grid_I3, self.layout)
            embedded = embedded.index_copy(0, batch.vision_position_V, vision_VH[batch.vision_row_V][:, None].to(embedded.dtype))
        return scatter_to_sequence_parallel_region(embedded) if self.layout.sequence_parallel else embedded


def _vision_tower(model: Qwen2_5_VLConfig, layout: Layout, dtype: torch.dtype) -> Qwen2_5_VisionTransformerPretrainedModel:
    tower = Qwen2_5_VisionTransformerPretrainedModel(model.vision_config).to(dtype)
    tower.config._attn_implementation = VISION_ATTENTION
    for parameter in tower.parameters():
        # Megatron averages these gradients over tensor-parallel ranks after backward; encode_images makes the average the sum.
        parameter.average_gradients_across_tp_domain = True
    return tower


def _packed(cu_seqlens_S1: torch.Tensor, prefix_S: list[int]) -> SharedPromptParams:
    """Rotary embedding reads the `_padded` offsets. It maps position by position, so one segment does, without a loop over sequences."""
    whole = cu_seqlens_S1[[0, -1]]
    return SharedPromptParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens_S1,
        cu_seqlens_kv=cu_seqlens_S1,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        prefix_S=prefix_S,
    )


def share_out(patches_I: list[int], ranks: int) -> list[list[int]]:
    """Deal images to ranks, largest first to the least loaded. Example: share_out([4, 16, 8, 4], 2) == [[1], [2, 0, 3]]."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(patches_I)), key=lambda image: -patches_I[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches_I[image]
    return shares


def encode_images(tower: nn.Module, patch_PC: torch.Tensor, grid_I3: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Embeddings [V, H] of all images in order; each tensor-parallel rank runs the tower on its share only."""
    if layout.tp == 1:
        return tower(patch_PC, grid_thw=grid_I3).pooler_output
    patches_I = grid_I3.prod(1).tolist()
    shares = share_out(patches_I, layout.tp)
    starts = [0]
    for patches in patches_I:
        starts.append(starts[-1] + patches)
    mine = shares[layout.tp_rank]
    if mine:
        patches = torch.cat([patch_PC[starts[image] : starts[image + 1]] for image in mine])
        local = tower(patches, grid_thw=grid_I3[mine]).pooler_output
    else:
        local = patch_PC.new_zeros(0, tower.config.out_hidden_size)
    # The average over ranks that follows the backward divides by tp; each image's gradient exists on one rank only.
    local = _scale_gradient(local, layout.tp)
    longest = max(sum(patches_I[image] for image in share) // 4 for share in shares)
    padded = torch.cat([local, local.new_zeros(longest - local.shape[0], local.shape[1])])
    gathered = gather_from_sequence_parallel_region(padded, tensor_parallel_output_grad=False)
    places = {}
    for rank, share in enumerate(shares):
        offset = rank * longest
        for image in share:
            places[image] = range(offset, offset + patches_I[image] // 4)
            offset += patches_I[image] // 4
    return gathered[[row for image in sorted(places) for row in places[image]]]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, factor: float) -> torch.Tensor:  # noqa: ANN001
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN001
        return gradient * ctx.factor, None


def _scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """The identity whose gradient is multiplied by factor."""
    return _ScaleGradient.apply(x, factor)
