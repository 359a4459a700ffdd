"""Specification of a model: its family, and its sizes as read from a Hugging Face config.json.

Code outside models/ uses ModelSpec instead of transformers' configs.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatron_rl.models.config_fields import Fields
from megatron_rl.models.delta_net_layout import DeltaNetSpec
from megatron_rl.models.name_mapping import (
    AttentionHeads,
    ParamMapping,
    canonical_name,
    is_expert_tensor,
    name_table,
    nested_name,
    swap_last_dims,
)
from megatron_rl.types import Image


@dataclass(slots=True, frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a vision tower."""

    num_blocks: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    out_hidden_size: int
    """Size of a vision token's embedding in the language model."""
    in_channels: int
    patch_size: int
    """Height and width of a patch in pixels."""
    temporal_patch_size: int
    """Number of frames in a patch; a still image is repeated this many times."""
    spatial_merge_size: int
    """Side length, in patches, of the square that is merged into one vision token."""
    window_size: int = 0
    """Height and width in pixels of the attention windows of most blocks; 0 if every block attends
    to the whole image.
    """
    mlp_saved_factor: int
    """Number of vectors of size ffn_size that autograd stores for each patch in a block's MLP
    (memory_plan/activations.py).
    """
    num_deepstack_layers: int = 0
    """Number of blocks with a DeepStack output. The output of the n-th such block is merged and
    added to the image tokens after the n-th decoder layer (policy/deepstack.py).
    """
    num_position_embeddings: int = 0
    """Number of learned position embeddings, which form a square grid; 0 if there are none."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **own: int) -> "VisionSpec":
        """Build a VisionSpec from the config fields in SHARED_SIZES and the sizes in `own`."""
        return cls(
            num_blocks=config.depth, num_heads=config.num_heads, in_channels=config.in_channels, patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size, spatial_merge_size=config.spatial_merge_size, **own,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Number of values in each patch returned by the processor."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Number of patches that are merged into one vision token."""
        return self.spatial_merge_size**2


EXPERT_MULTIPLE = 8
"""Number of which the sizes of an expert on each rank must be multiples: torch's grouped matrix
product (2.13) requires rows of a multiple of 16 bytes, 8 values in bfloat16.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExpertSpec:
    """Sizes of the experts of a mixture-of-experts language model."""

    num_experts: int
    """Number of experts of a sparse layer."""
    top_k: int
    """Number of experts that compute each token."""
    ffn_size: int
    """Intermediate size of one expert."""
    sparse_layers: tuple[bool, ...]
    """For each decoder layer, True if its MLP consists of experts, False if it is dense."""
    shared_ffn_size: int = 0
    """Intermediate size of the shared expert, which computes every token; 0 if there is none."""


SHARED_SIZES = ("depth", "num_heads", "in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")
"""Names of the vision_config fields that VisionSpec.from_config reads."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelFamily:
    """Properties shared by all models of one family; see models/family.py.

    Parameter names follow name_mapping.py.
    """

    config_class: type[PreTrainedConfig]
    """transformers' config class, which represents the entire config.json."""
    model_class: type[PreTrainedModel]
    """transformers' class of the entire model, which defines the tensors of a checkpoint."""
    text_fields: Fields
    """Supported config.json fields of the language model, with their accepted values
    (config_fields.py).
    """
    vision_fields: Fields
    """Supported fields of vision_config, with their accepted values."""
    has_flat_config: bool
    """True if transformers accepts a config.json with the language model's fields at the top level,
    without text_config.
    """
    tower_class: type[PreTrainedModel]
    """transformers' class of the vision tower."""
    tower_norm_class: type[nn.Module] | None
    """transformers' class of the tower's RMSNorm, with `weight` and `variance_epsilon`; None if the
    tower has other norms.
    """
    tower_mlp_class: type[nn.Module] | None
    """transformers' class of the tower's gated MLP, with the linear layers `gate_proj`, `up_proj`
    and `down_proj`; None if the tower has other MLPs.
    """
    has_head_dim: bool
    """True if attention heads of the language model have the size config.head_dim. If False, the
    heads have the size hidden_size / num_attention_heads, and a config with a different head_dim is
    rejected.
    """
    has_qk_norm: bool
    """True if the language model normalizes queries and keys in each attention head."""
    vision_sizes: tuple[str, ...]
    """Names of the vision_config fields that `read_vision_spec` reads; each must be a positive
    integer.
    """
    read_vision_spec: Callable[[Any], VisionSpec]
    """Function that builds a VisionSpec from a vision_config."""
    layer_mappings: Callable[..., list[ParamMapping]]
    """Function (global layer number, heads) -> name mappings of one decoder layer. A family with
    experts has the keyword is_sparse as well (ExpertSpec.sparse_layers), and a family with gated
    delta nets the keyword delta_net.
    """
    megatron_tower_mappings: Callable[[VisionSpec], list[ParamMapping]]
    """Function that returns the name mappings of a vision tower built from Megatron's layers, as
    found in classic checkpoints of other trainers (models/megatron_tower.py).
    """
    megatron_config: Mapping[str, Any]
    """Additional arguments for Megatron's TransformerConfig (policy/transformer.py)."""
    uses_nested_names: bool
    """True if released checkpoints use the newer tensor names (name_mapping.nested_name). For a
    family with the newer names, transformers and vLLM accept no other names.
    """
    has_interleaved_mrope: bool
    """True if successive rotary pairs of a head cycle through frame, row and column position
    (mrope.interleave_sections). If False, each of the three positions is used by a contiguous block
    of pairs.
    """
    rope_positions: Callable[[Sequence[int], Sequence[Image], int], torch.Tensor]
    """Function (token_ids, images, image_token_id) -> rotary positions [3, L] of a sequence."""
    part_patterns: Mapping[str, tuple[str, ...]]
    """Patterns for Megatron's parameter names, keyed by part of the model (config.PARTS). Each part
    can be frozen or have its own learning rate.
    """
    vision_lora_patterns: Mapping[str, str]
    """Regular expressions for module names of the vision tower, keyed by target (lora.targets)."""
    read_expert_spec: Callable[[Mapping[str, Any]], ExpertSpec] | None = None
    """Function that builds an ExpertSpec from the fields of text_config, and raises ValueError if
    a field is invalid; None if all models of the family are dense.
    """
    has_swapped_experts: bool = False
    """True if the last two dimensions of experts in released checkpoints, and in vLLM's loader, are
    those of transformers' model (5.19) swapped.
    """
    ffn_size_field: str = "intermediate_size"
    """Name of the text_config field with ModelSpec.ffn_size."""
    read_delta_net_spec: Callable[[Mapping[str, Any]], DeltaNetSpec] | None = None
    """Function that builds a DeltaNetSpec from the fields of text_config, and raises ValueError if
    a field is invalid; None if all layers of the family have attention.
    """


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSpec:
    """Family, sizes and special token ids of one model."""

    family: ModelFamily
    config: PreTrainedConfig = field(repr=False, compare=False)
    """transformers' config, used only to build transformers' modules. ModelSpec has fields for all
    sizes.
    """
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Intermediate size of the dense MLPs, or of the shared expert if all layers have one."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    """True if the output layer uses the weights of the embeddings."""
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_sections: tuple[int, ...]
    """Numbers of rotary pairs in an attention head that use the frame, row and column position,
    respectively.
    """
    vision: VisionSpec
    image_token_id: int
    """Id of the image placeholder token. A sequence has one placeholder per vision token."""
    video_token_id: int
    vision_start_id: int
    vision_end_id: int
    experts: ExpertSpec | None = None
    """Sizes of the experts; None for a dense model."""
    delta_net: DeltaNetSpec | None = None
    """Sizes of the gated delta nets; None if all layers have attention."""
    rotary_dim: int
    """Number of channels of an attention head that the rotary embedding rotates, the first ones."""

    def is_sparse(self, layer: int) -> bool:
        """Return True if the MLP of the decoder layer with this global number has experts."""
        return self.experts is not None and self.experts.sparse_layers[layer]

    def is_linear(self, layer: int) -> bool:
        """Return True if the decoder layer with this global number has a gated delta net."""
        return self.delta_net is not None and self.delta_net.linear_layers[layer]

    @property
    def num_attention_layers(self) -> int:
        """Number of decoder layers with attention, all but those with a gated delta net."""
        return sum(not self.is_linear(layer) for layer in range(self.num_layers))

    @property
    def heads(self) -> AttentionHeads:
        """Numbers of query and key/value heads of the language model, and the head size."""
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor of the model, keyed by canonical name.

        The shapes are read from transformers' model (5.19), built on the meta device. Tied
        embeddings are listed once, as `model.embed_tokens.weight`. Experts have the shapes of
        released checkpoints (ModelFamily.has_swapped_experts).
        """
        with torch.device("meta"):
            # transformers modifies the config passed to it (attention implementation).
            model = self.family.model_class(deepcopy(self.config))
        shapes = {canonical_name(name): tensor.shape for name, tensor in model.state_dict().items()}
        if self.family.has_swapped_experts:
            shapes |= {name: swap_last_dims(shape) for name, shape in shapes.items() if is_expert_tensor(name)}
        if self.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes

    def param_mappings(self) -> list[ParamMapping]:
        """Return the name mappings of all parameters of the model."""
        return name_table(
            num_layers=self.num_layers, heads=self.heads, tie_word_embeddings=self.tie_word_embeddings, vocab_size=self.vocab_size,
            layer_mappings=self._layer_mappings,
            vision_names=sorted(name.removeprefix("visual.") for name in self.shapes() if name.startswith("visual.")),
        )  # fmt: skip

    def _layer_mappings(self, layer: int, heads: AttentionHeads) -> list[ParamMapping]:
        options: dict[str, Any] = {} if self.experts is None else {"is_sparse": self.is_sparse(layer)}
        if self.is_linear(layer):
            options["delta_net"] = self.delta_net
        return self.family.layer_mappings(layer, heads, **options)

    def build_tower(self) -> PreTrainedModel:
        """Build transformers' vision tower with newly initialized weights."""
        return self.family.tower_class(deepcopy(self.config.vision_config))

    def released_name(self, name: str) -> str:
        """Convert a canonical tensor name to the name used in the family's released checkpoints."""
        return nested_name(name) if self.family.uses_nested_names else name

    def rope_positions(self, token_ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Return the rotary positions [3, L] of a sequence with expanded image placeholders.

        Raises ValueError if the placeholders do not match the images.
        """
        return self.family.rope_positions(token_ids, images, self.image_token_id)
