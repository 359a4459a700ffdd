"""What a model is, in our words: its sizes, read once from a Hugging Face config.json, and what tells one model family from another.

Everything outside models/ is handed a ModelSpec and never sees a transformers config.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatron_rl.models.mapping import Heads, Row, canonical, table
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
    channels: int
    patch: int
    """Pixels along each side of a patch."""
    temporal_patch: int
    """Frames that a patch spans; a still picture is repeated so often."""
    merge: int
    """Patches along each side of the square that becomes one vision token."""
    window: int = 0
    """Pixels along each side of the windows that most blocks attend within; 0 where every block sees the whole picture."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_numbers(self) -> int:
        """Numbers in a patch as the processor hands it over."""
        return self.channels * self.temporal_patch * self.patch**2

    @property
    def patches_a_token(self) -> int:
        return self.merge**2


@dataclass(slots=True, frozen=True, kw_only=True)
class Family:
    """What the models of one family have in common: a row of models/family.py. Names are those of mapping.py, Megatron's side first."""

    config: type[PreTrainedConfig]
    """transformers' class of the whole config.json."""
    model: type[PreTrainedModel]
    """transformers' class of the whole model, whose tensors are those of a checkpoint."""
    tower: type[PreTrainedModel]
    """transformers' class of the vision tower, which is trained as it is."""
    tower_norm: type[nn.Module]
    """transformers' class of the tower's root mean square norms, of `weight` and `variance_epsilon`."""
    has_head_dim: bool
    """Whether the language model's attention has heads of config.head_dim. Where it has not, they are of hidden_size /
    num_attention_heads, and a config that states something else is refused."""
    vision_sizes: tuple[str, ...]
    """The names in vision_config of what `vision` reads, all positive integers."""
    vision: Callable[[PreTrainedConfig], VisionSpec]
    """The sizes in a vision_config."""
    layer_rows: Callable[[int, Heads], list[Row]]
    """The rows of a decoder layer with this global number."""
    megatron: Mapping[str, object]
    """What Megatron's TransformerConfig gets beyond what policy/transformer.py sets for every family."""
    positions: Callable[[Sequence[int], Sequence[Image], int], torch.Tensor]
    """(token_ids, images, image_token_id) -> rotary positions [3, L]: frame, row, column."""
    parts: Mapping[str, tuple[str, ...]]
    """What can be frozen or have its own learning rate (config.PARTS), as patterns over Megatron's parameter names."""
    vision_lora: Mapping[str, str]
    """Those of lora.targets that lie in the tower, as regular expressions over the names of its modules."""


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSpec:
    """One model: its family, the sizes of its language model and of its tower, the token ids that stand for pictures."""

    family: Family
    config: PreTrainedConfig = field(repr=False, compare=False)
    """transformers' own, for building transformers' modules; sizes are read from this record instead."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    """The embeddings are the output layer too."""
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope_sections: tuple[int, ...]
    """Pairs of a head's numbers that rotate by frame, by row and by column."""
    vision: VisionSpec
    image_token_id: int
    """The placeholder: one for each vision token of a picture."""
    video_token_id: int
    vision_start_id: int
    vision_end_id: int

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every tensor that a checkpoint holds, by canonical name: those of transformers' own model (5.19, built without
        memory). Tied embeddings stand once, as `model.embed_tokens.weight`."""
        with torch.device("meta"):
            model = self.family.model(deepcopy(self.config))  # transformers notes its attention in the config that it is given
        shapes = {canonical(name): tensor.shape for name, tensor in model.state_dict().items()}
        if self.tied:
            del shapes["lm_head.weight"]
        return shapes

    def rows(self) -> list[Row]:
        """The table of this model: every parameter once."""
        return table(
            num_layers=self.num_layers, heads=self.heads, tied=self.tied, layer_rows=self.family.layer_rows,
            vision_names=sorted(name.removeprefix("visual.") for name in self.shapes() if name.startswith("visual.")),
        )  # fmt: skip

    def tower(self) -> PreTrainedModel:
        """A new vision tower of transformers'."""
        return self.family.tower(deepcopy(self.config.vision_config))

    def positions(self, token_ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Rotary positions [3, L] of a context whose placeholders are expanded. Raises ValueError where these are not the images'."""
        return self.family.positions(token_ids, images, self.image_token_id)
