"""Forward pass of the trainer's network on recorded sequences, with any parallel layout.

The forward pass needs no optimizer and uses the model chunks, attention and token distribution of
policy/. Pipeline stages run one after the other, so every layer can be recorded. Every rank must
call every method.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from megatron_rl.batching.minibatches import PackItem, pack_costs, split_by_cost
from megatron_rl.batching.packing import pack, scatter_to_rollouts
from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import LoraSettings
from megatron_rl.distributed.world import all_gather_object
from megatron_rl.explain.layer_outputs import LayerOutputs, ProbePoints, first_tensor, is_vision_output, record_outputs
from megatron_rl.explain.recorded_step import RecordedSequence
from megatron_rl.explain.sequence_checks import ImageToPatches
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.logprobs import TokenDistribution, banned_mask
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import attach_patches
from megatron_rl.policy.policy import can_share_prompts
from megatron_rl.policy.transformer import ModelChunk, build_chunks, has_fused_layers
from megatron_rl.types import MicroBatch, Rollout
from megatron_rl.weights.formats.checkpoint_source import TensorSource
from megatron_rl.weights.stream import HfWeightIterator, ShardLocation, load_hf

LOGIT_CHUNK_ROWS = 2048
"""Number of rows of logits to keep in memory at a time."""
BUCKET_BYTES = 256 << 20
MAX_TOKENS = 8192
"""Maximum number of tokens in a packed micro-batch."""


class TrainerForward:
    """This rank's chunks of the network in float32, with weights read from a source."""

    @with_megatron_on_cpu
    def __init__(
        self, spec: ModelSpec, layout: Layout, source: TensorSource, *,
        banned_ids: Sequence[int], temperature: float, patches: ImageToPatches, device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self.layout, self._patches, self._device = spec, layout, patches, device
        self.chunks = build_chunks(spec, layout, torch.float32, lora=LoraSettings()).to(device).eval()
        rows, per_chunk = spec.param_mappings(), spec.num_layers // (layout.pp * layout.vpp)
        placement = ShardLocation(
            layout.tp_rank, layout.tp_group, layout.pp_rank, layout.pp_group, chunks=layout.vpp, layers_per_chunk=per_chunk,
            fused_norms=has_fused_layers(spec, LoraSettings()),
        )  # fmt: skip
        load_hf(self.chunks, rows, placement, source.read)
        self.export = HfWeightIterator(self.chunks, rows, placement, bucket_bytes=BUCKET_BYTES)
        whole = padded_vocab(spec.vocab_size, layout.tp)
        first, never = layout.tp_rank * whole // layout.tp, [*banned_ids, *range(spec.vocab_size, whole)]
        banned_V = banned_mask(never, first_id=first, size=whole // layout.tp, device=device)
        self.distribution = TokenDistribution(banned_V, temperature, first, layout.tp_group, LOGIT_CHUNK_ROWS)

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield pairs of a Hugging Face tensor name and a tensor."""
        return self.export.tensors()

    def compute_logprobs(self, sequences: Sequence[RecordedSequence], *, packed: bool) -> list[torch.Tensor]:
        """Return the logprobs [R] of each sequence's sampled tokens, on every rank.

        Sequences run one by one, or in micro-batches if `packed` is True. Micro-batches are packed
        as in an update, with common prefixes computed once.
        """
        rollouts = [Rollout("", "", 0, 0, sequences=[each.tokens]) for each in sequences]
        weighted = [PackItem(each.tokens, origin=(number, 0)) for number, each in enumerate(sequences)]
        shares = packed and can_share_prompts(self._device, torch.float32)
        parts = [[each] for each in weighted]
        if packed:
            parts = split_by_cost(pack_costs(weighted, self.spec.image_token_id, share_prompts=shares), MAX_TOKENS)
        batches = [self._pack_sequences(part, shares) for part in parts]
        columns = scatter_to_rollouts(rollouts, batches, [self._forward_logprobs(batch).cpu() for batch in batches])
        return [torch.tensor([columns[number, 0][row + 1] for row in each.sampled_rows]) for number, each in enumerate(sequences)]

    def record_layer_outputs(self, sequence: RecordedSequence) -> LayerOutputs:
        """Return the outputs of all model chunks on all pipeline stages.

        The vision tower is left out if tensor-parallel ranks split the images among themselves.
        """
        mine: LayerOutputs = {}
        with ExitStack() as closing:
            parts = [
                closing.enter_context(record_outputs(self.make_probe_points(number, chunk)))
                for number, chunk in enumerate(self._model_chunks())
            ]
            self._forward_logprobs(self._pack_sequences([PackItem(sequence.tokens)], False))
        for part in parts:
            mine |= part
        everyones = all_gather_object(mine if self.layout.tp_rank == 0 and self.layout.dp_rank == 0 else {})
        length = len(sequence.tokens.token_ids)
        return {name: tensor if is_vision_output(name) else tensor[:length] for each in everyones for name, tensor in each.items()}

    def _model_chunks(self) -> Iterable[ModelChunk]:
        return cast(Iterable[ModelChunk], self.chunks)  # a ModuleList does not state what it contains

    def _pack_sequences(self, weighted: Sequence[PackItem], shares: bool) -> MicroBatch:
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        how = {"image_token_id": self.spec.image_token_id, "positions": self.spec.rope_positions, "share_prompts": shares}
        return pack(weighted, **how, multiple_of=multiple, device=self._device)

    @with_megatron_on_cpu
    @torch.no_grad()
    def _forward_logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the logprob of each target as a tensor [T]; other positions are 0."""
        rows_R, logprob_T = batch.row_R, batch.weight_T.new_zeros(batch.num_tokens)
        peers, place = dist.get_process_group_ranks(self.layout.pp_group), self.layout.pp_rank
        for chunk in self._model_chunks():
            if chunk.pre_process:
                batch = attach_patches(batch, self._patches, self.layout, like=next(chunk.parameters()))
            else:
                chunk.set_input_tensor(self._receive_hidden(batch, peers[place - 1]))
            hidden = chunk(batch, rows_R)
            if chunk.post_process:
                logprob_T[rows_R] = self.distribution(chunk.head, hidden, batch.target_T[rows_R])[0]
            elif self.layout.pp > 1:
                dist.send(hidden.contiguous(), peers[(place + 1) % len(peers)], group=self.layout.pp_group)
        if self.layout.pp > 1:
            dist.broadcast(logprob_T, src=self.layout.last_stage_rank, group=self.layout.pp_group)
        return logprob_T

    def _receive_hidden(self, batch: MicroBatch, source: int) -> torch.Tensor:
        cut = self.layout.tp if self.layout.sequence_parallel else 1
        hidden = torch.empty(batch.num_tokens // cut, 1, self.spec.hidden_size, device=self._device)
        dist.recv(hidden, source, group=self.layout.pp_group)
        return hidden

    def make_probe_points(self, chunk_index: int, chunk: ModelChunk) -> ProbePoints:
        """Return the modules of a chunk at which outputs are recorded."""
        per_chunk = self.spec.num_layers // (self.layout.pp * self.layout.vpp)
        return ProbePoints(
            tower=chunk.vision if self.layout.tp == 1 else None,
            rotary=chunk.language.rotary_pos_emb,
            layers=chunk.language.decoder.layers,
            first_layer=per_chunk * (chunk_index * self.layout.pp + self.layout.pp_rank),
            norm=cast(nn.Module, chunk.language.decoder.final_layernorm) if chunk.post_process else None,
            hidden_rows=partial(gather_sequence, layout=self.layout), angle_rows=lambda value: first_tensor(value)[:, 0, 0].cos(),
        )  # fmt: skip


def gather_sequence(value: object, *, layout: Layout) -> torch.Tensor:
    """Return the hidden states [T, H] of the full sequence.

    With sequence parallelism, the parts of all tensor-parallel ranks are gathered.
    """
    part = first_tensor(value)[:, 0]
    if not layout.sequence_parallel:
        return part
    everyones = [torch.empty_like(part) for _ in range(layout.tp)]
    dist.all_gather(everyones, part.contiguous(), group=layout.tp_group)
    return torch.cat(everyones)
