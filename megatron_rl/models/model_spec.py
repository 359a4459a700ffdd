"""What a model is, in our words: its sizes, read once from a Hugging Face config.json, and what tells one model family from another.

Everything outside models/ is handed a ModelSpec and never sees a transformers config.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatron_rl.models.config_fields import Fields
from megatron_rl.models.name_mapping import AttentionHeads, ParamMapping, canonical_name, name_table, nested_name
from megatron_rl.types import Image


@dataclass(slots=True, frozen=True, kw_only=True)
class VisionSpec:
    """Sizes of a vision tower."""

    num_blocks: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    out_hidden_size: int
    """Numbers of a vision token as it enters the language model."""
    in_channels: int
    patch_size: int
    """Pixels along each side of a patch."""
    temporal_patch_size: int
    """Frames that a patch spans; a still picture is repeated so often."""
    spatial_merge_size: int
    """Patches along each side of the square that becomes one vision token."""
    window_size: int = 0
    """Pixels along each side of the windows that most blocks attend within; 0 where every block sees the whole picture."""
    mlp_saved_factor: int
    """Numbers a patch, in units of ffn_size, that autograd keeps of a block's MLP (memory_plan/activations.py)."""
    num_deepstack_layers: int = 0
    """Blocks whose output is merged, too, and added to the pictures' tokens behind as many first decoder layers (policy/deepstack.py)."""
    num_position_embeddings: int = 0
    """Rows of a table of learned positions, the square of its side; 0 where the tower has none."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **own: int) -> "VisionSpec":
        """What every family's vision_config spells alike (SHARED_SIZES), and what is the family's own."""
        return cls(
            num_blocks=config.depth, num_heads=config.num_heads, in_channels=config.in_channels, patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size, spatial_merge_size=config.spatial_merge_size, **own,
        )  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Numbers in a patch as the processor hands it over."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.spatial_merge_size**2


SHARED_SIZES = ("depth", "num_heads", "in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size")
"""The names in vision_config of what VisionSpec.of reads."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelFamily:
    """What the models of one family have in common: a row of models/family.py. Names are those of name_mapping.py, Megatron's side
    first."""

    config_class: type[PreTrainedConfig]
    """transformers' class of the whole config.json."""
    model_class: type[PreTrainedModel]
    """transformers' class of the whole model, whose tensors are those of a checkpoint."""
    text_fields: Fields
    """Fields of the language model in config.json, with the values that are computed (config_fields.py)."""
    vision_fields: Fields
    """The same of vision_config."""
    has_flat_config: bool
    """Whether transformers reads a config.json that has the language model's fields at the top, without text_config."""
    tower_class: type[PreTrainedModel]
    """transformers' class of the vision tower, which is trained as it is."""
    tower_norm_class: type[nn.Module] | None
    """transformers' class of the tower's root mean square norms, of `weight` and `variance_epsilon`; None where it has other norms."""
    has_head_dim: bool
    """Whether the language model's attention has heads of config.head_dim. Where it has not, they are of hidden_size /
    num_attention_heads, and a config that states something else is refused."""
    has_qk_norm: bool
    """Whether each head of queries and keys goes through a norm."""
    vision_sizes: tuple[str, ...]
    """The names in vision_config of what `vision` reads, all positive integers."""
    read_vision_spec: Callable[[PreTrainedConfig], VisionSpec]
    """The sizes in a vision_config."""
    layer_mappings: Callable[[int, AttentionHeads], list[ParamMapping]]
    """The rows of a decoder layer with this global number."""
    megatron_tower_mappings: Callable[[VisionSpec], list[ParamMapping]]
    """The rows of a tower made of Megatron's layers, as other trainers' classic checkpoints may have it (models/megatron_tower.py)."""
    megatron_config: Mapping[str, object]
    """What else Megatron's TransformerConfig gets (policy/transformer.py)."""
    uses_nested_names: bool
    """Whether released checkpoints spell tensors' names the newer way (mapping.nested), which transformers and vLLM then know alone."""
    has_interleaved_mrope: bool
    """Whether the pairs of a head's numbers rotate by frame, row and column in turn (mrope.in_turn), not in blocks."""
    rope_positions: Callable[[Sequence[int], Sequence[Image], int], torch.Tensor]
    """(token_ids, images, image_token_id) -> rotary positions [3, L]: frame, row, column."""
    part_patterns: Mapping[str, tuple[str, ...]]
    """What can be frozen or have its own learning rate (config.PARTS), as patterns over Megatron's parameter names."""
    vision_lora_patterns: Mapping[str, str]
    """Those of lora.targets that lie in the tower, as regular expressions over the names of its modules."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSpec:
    """One model: its family, the sizes of its language model and of its tower, the token ids that stand for pictures."""

    family: ModelFamily
    config: PreTrainedConfig = field(repr=False, compare=False)
    """transformers' own, for building transformers' modules; sizes are read from this record instead."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    """The embeddings are the output layer too."""
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_sections: tuple[int, ...]
    """How many pairs of a head's numbers rotate by frame, by row and by column."""
    vision: VisionSpec
    image_token_id: int
    """The placeholder: one for each vision token of a picture."""
    video_token_id: int
    vision_start_id: int
    vision_end_id: int

    @property
    def heads(self) -> AttentionHeads:
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim)

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor that a checkpoint holds, by canonical name: those of transformers' own model (5.19, built without
        memory). Tied embeddings stand once, as `model.embed_tokens.weight`."""
        with torch.device("meta"):
            model = self.family.model_class(deepcopy(self.config))  # transformers notes its attention in the config that it is given
        shapes = {canonical_name(name): tensor.shape for name, tensor in model.state_dict().items()}
        if self.tie_word_embeddings:
            del shapes["lm_head.weight"]
        return shapes

    def param_mappings(self) -> list[ParamMapping]:
        """The table of this model: every parameter once."""
        return name_table(
            num_layers=self.num_layers, heads=self.heads, tie_word_embeddings=self.tie_word_embeddings, vocab_size=self.vocab_size,
            layer_mappings=self.family.layer_mappings,
            vision_names=sorted(name.removeprefix("visual.") for name in self.shapes() if name.startswith("visual.")),
        )  # fmt: skip

    def build_tower(self) -> PreTrainedModel:
        """A new vision tower of transformers'."""
        return self.family.tower_class(deepcopy(self.config.vision_config))

    def released_name(self, name: str) -> str:
        """The name of a tensor, from its canonical name, in checkpoints that were released of this family."""
        return nested_name(name) if self.family.uses_nested_names else name

    def rope_positions(self, token_ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Rotary positions [3, L] of a context whose placeholders are expanded. Raises ValueError where these are not the images'."""
        return self.family.rope_positions(token_ids, images, self.image_token_id)
