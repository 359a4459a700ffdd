"""Hugging Face's own model on recorded contexts: what everybody else is held against."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_rl.explain.layer_outputs import Passed, Probes, plain, watched
from megatron_rl.explain.recorded_step import Looked
from megatron_rl.explain.sequence_checks import Patches
from megatron_rl.explain.streamed_weights import Streamed
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource


class Reference:
    """In float32, a context at a time, with the weights of a source, of which up to `held_bytes` stay in memory."""

    def __init__(
        self, spec: ModelSpec, source: TensorSource, *,
        banned_ids: Sequence[int], patches: Patches, device: torch.device, held_bytes: int,
    ) -> None:  # fmt: skip
        self.spec, self._patches, self._device = spec, patches, device
        self.weights = Streamed(spec, source, held_bytes=held_bytes, device=device)
        self.model = self.weights.model
        self.rotary = self.model.model.language_model.rotary_emb
        self.banned = torch.zeros(spec.vocab_size, dtype=torch.bool, device=device)
        self.banned[list(banned_ids)] = True

    @torch.no_grad()
    def logits(self, looked: Looked, *, images: Sequence[Image] | None = None, position_3L: torch.Tensor | None = None) -> torch.Tensor:
        """[R, V] of the rows whose next token was sampled; with other pictures or positions in the place of its own."""
        shown = looked.context.images if images is None else images
        ids = torch.tensor([looked.context.token_ids], device=self._device)
        given: dict[str, object] = {}
        if shown:
            given = {
                "pixel_values": torch.cat([self._patches(image) for image in shown]).to(self._device),
                "image_grid_thw": torch.tensor([image.grid for image in shown], device=self._device),
                "mm_token_type_ids": (ids == self.spec.image_token_id).int(),
            }
        if position_3L is not None:
            given["position_ids"] = position_3L[:, None].to(self._device)
        keep = torch.tensor(looked.rows, device=self._device)
        output = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=keep, use_cache=False, **given)
        return output.logits[0].float()

    def logprobs(self, looked: Looked, logits_RV: torch.Tensor, *, temperature: float, bans: bool = True) -> torch.Tensor:
        """float64 [R] of the sampled tokens, on the host."""
        scaled = logits_RV.double() / temperature
        if bans:
            scaled = scaled.masked_fill(self.banned, -torch.inf)
        target_R = torch.tensor([looked.context.token_ids[row + 1] for row in looked.rows], device=logits_RV.device)
        return scaled.log_softmax(-1).gather(1, target_R[:, None])[:, 0].cpu()

    def positions(self, looked: Looked) -> torch.Tensor:
        """[3, L]: Hugging Face's own count."""
        ids = torch.tensor([looked.context.token_ids])
        if not looked.context.images:
            return torch.arange(ids.shape[1]).expand(3, -1)
        grid, kinds = torch.tensor([image.grid for image in looked.context.images]), (ids == self.spec.image_token_id).int()
        return self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][:, 0]

    def passed(self, looked: Looked) -> Passed:
        """What passes through it, layer by layer."""
        language = self.model.model.language_model
        probes = Probes(
            tower=self.model.model.visual, rotary=self.rotary, layers=language.layers, attention="self_attn", norm=language.norm,
            hidden=lambda value: plain(value)[0], angles=lambda value: value[0][0],
        )  # fmt: skip
        with watched(probes) as passed:
            self.logits(looked)
        return passed

    @contextmanager
    def sections(self, sections: Sequence[int]) -> Iterator[None]:
        """Rotate by these sections inside the block."""
        before = self.rotary.mrope_section
        self.rotary.mrope_section = list(sections)
        try:
            yield
        finally:
            self.rotary.mrope_section = before
