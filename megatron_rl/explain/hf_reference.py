"""Runs Hugging Face's model on recorded sequences, as the reference for all comparisons."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_rl.explain.layer_outputs import LayerOutputs, ProbePoints, first_tensor, record_outputs
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import ImageToPatches
from megatron_rl.explain.streamed_weights import StreamedModel
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.types import Image
from megatron_rl.weights.formats.checkpoint_source import TensorSource


class HfReferenceModel:
    """Float32 reference model that processes one sequence at a time.

    Up to `cache_bytes` of its weights stay in memory.
    """

    def __init__(
        self, spec: ModelSpec, source: TensorSource, *,
        banned_ids: Sequence[int], patches: ImageToPatches, device: torch.device, cache_bytes: int,
    ) -> None:  # fmt: skip
        self.spec, self._patches, self._device = spec, patches, device
        self.weights = StreamedModel(spec, source, cache_bytes=cache_bytes, device=device)
        self.model = self.weights.model
        self.rotary = self.model.model.language_model.rotary_emb
        self.banned_mask = torch.zeros(spec.vocab_size, dtype=torch.bool, device=device)
        self.banned_mask[list(banned_ids)] = True

    @torch.no_grad()
    def compute_logits(
        self, sequence: RecordedSequence, *, images: Sequence[Image] | None = None, position_3L: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits [R, V] at the positions that are followed by a sampled token.

        If `images` or `position_3L` is given, it replaces the sequence's own images or positions.
        """
        shown = sequence.tokens.images if images is None else images
        ids = torch.tensor([sequence.tokens.token_ids], device=self._device)
        given: dict[str, object] = {}
        if shown:
            given = {
                "pixel_values": torch.cat([self._patches(image) for image in shown]).to(self._device),
                "image_grid_thw": torch.tensor([image.grid for image in shown], device=self._device),
                "mm_token_type_ids": (ids == self.spec.image_token_id).int(),
            }
        if position_3L is not None:
            given["position_ids"] = position_3L[:, None].to(self._device)
        keep = torch.tensor(sequence.sampled_rows, device=self._device)
        output = self.model(input_ids=ids, attention_mask=torch.ones_like(ids), logits_to_keep=keep, use_cache=False, **given)
        return output.logits[0].float()

    def compute_logprobs(
        self, sequence: RecordedSequence, logits_RV: torch.Tensor, *, temperature: float, mask_banned: bool = True
    ) -> torch.Tensor:
        """Return the float64 logprobs [R] of the sampled tokens, on the CPU."""
        scaled = logits_RV.double() / temperature
        if mask_banned:
            scaled = scaled.masked_fill(self.banned_mask, -torch.inf)
        target_R = torch.tensor([sequence.tokens.token_ids[row + 1] for row in sequence.sampled_rows], device=logits_RV.device)
        return scaled.log_softmax(-1).gather(1, target_R[:, None])[:, 0].cpu()

    def compute_positions(self, sequence: RecordedSequence) -> torch.Tensor:
        """Return the rotary positions [3, L] as Hugging Face computes them."""
        ids = torch.tensor([sequence.tokens.token_ids])
        if not sequence.tokens.images:
            return torch.arange(ids.shape[1]).expand(3, -1)
        grid, kinds = torch.tensor([image.grid for image in sequence.tokens.images]), (ids == self.spec.image_token_id).int()
        return self.model.model.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid)[0][:, 0]

    def record_layer_outputs(self, sequence: RecordedSequence) -> LayerOutputs:
        """Return the outputs of each layer."""
        language = self.model.model.language_model
        probes = ProbePoints(
            tower=self.model.model.visual, rotary=self.rotary, layers=language.layers, norm=language.norm,
            hidden_rows=lambda value: first_tensor(value)[0], angle_rows=lambda value: value[0][0],
        )  # fmt: skip
        with record_outputs(probes) as passed:
            self.compute_logits(sequence)
        return passed

    @contextmanager
    def override_rope_sections(self, sections: Sequence[int]) -> Iterator[None]:
        """Use these rope sections within the with block."""
        before = self.rotary.mrope_section
        self.rotary.mrope_section = list(sections)
        try:
            yield
        finally:
            self.rotary.mrope_section = before
