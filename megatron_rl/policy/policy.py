"""Policy: logprobs, updates and export of the trained vision-language model.

This module hides Megatron from the training loop: callers pass micro-batches and receive per-token
values, metrics, or weights under Hugging Face names.

Methods of `Policy` that run the model or read its weights are collective: call them on all ranks.
Each rank passes the micro-batches of its own data-parallel rank, and every rank receives the
results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.batching.minibatches import PackItem, RankShares, balance_costs, pack_costs, split_by_cost
from megatron_rl.batching.packing import distinct_images, make_loss_inputs, pack
from megatron_rl.batching.privileged import PrivilegedPrompt
from megatron_rl.config import CriticSettings, LoraSettings, ModelSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.attention import has_varlen_kernel, require_prefix_attention, varlen_attention
from megatron_rl.policy.kernels import uses_transformer_engine
from megatron_rl.policy.load_model import load_model
from megatron_rl.policy.logprobs import TokenDistribution, banned_mask
from megatron_rl.policy.lora import disabled_adapters, merged_weight_fns
from megatron_rl.policy.network import Network, TrainingSettings
from megatron_rl.policy.offload import HostCopy
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, images_of_rank, patch_bytes
from megatron_rl.policy.router_losses import RouterLosses
from megatron_rl.policy.routing_replay import RoutingReplay
from megatron_rl.policy.server_teacher import ServerTeacher
from megatron_rl.policy.teacher import Teacher, compare_with_teacher, teacher_logprobs
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.policy.transformer import HeadConfig
from megatron_rl.types import Image, Loss, LossInputs, LossMetrics, MicroBatch, SpecialTokens, TokenSequence
from megatron_rl.weights.formats.base_digest import compute_base_digest
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import make_peft_config, write_peft
from megatron_rl.weights.formats.safetensors_folder import write_hf_folder
from megatron_rl.weights.stream import HfWeightIterator


class Policy(TrainableModel):
    """Distributed vision-language policy: training, logprobs and export of weights."""

    def __init__(
        self,
        settings: ModelSettings,
        layout: Layout,
        *,
        training: TrainingSettings,
        special_tokens: SpecialTokens,
        temperature: float = 1.0,
        keep_reference: bool = False,
        bucket_mib: float = 256,
        critic: CriticSettings | None = None,
        patches: ImagePatchFn = patch_bytes,
    ) -> None:
        """Load the model at `settings.path` and build its optimizer.

        Args:
            settings: Path and dtype of the model, its frozen parts, and pixel limits for images.
            layout: Parallel layout of the model.
            training: Optimizer, learning-rate schedule, adapters, offloading and
                log_probs_chunk_size.
            special_tokens: Id of the image placeholder, and the ids that are never sampled.
            temperature: Sampling temperature; logits are divided by it.
            keep_reference: Keep a copy of the initial weights on the host for reference logprobs.
                The copy holds the weights from settings.path, even if a checkpoint is loaded
                later. With adapters no copy is made, because the base model is the reference.
            bucket_mib: Size in MiB of the buckets in which weights are exported.
            critic: Settings of a value head on the policy's backbone; None for no value head.
            patches: Function that returns the patches of an image; called for each image shortly
                before its micro-batch runs. The default returns the patches stored in the image
                and fails if they were dropped.
        """
        self.layout, self.settings, self.image_token_id = layout, settings, special_tokens.image_token_id
        self.lora = training.lora
        self.spec = read_spec(settings.path)
        heads = HeadConfig() if critic is None else HeadConfig(value_sizes=critic.head_sizes, normalizes_returns=critic.normalize_returns)
        built = load_model(self.spec, layout, settings.path, dtype=settings.dtype, lora=self.lora, heads=heads, seed=training.seed)
        chunks, bucket_bytes = built.chunks, int(bucket_mib * (1 << 20))
        merged = merged_weight_fns(chunks)
        self.hf_iterator = HfWeightIterator(chunks, built.rows, built.placement, bucket_bytes=bucket_bytes, merged=merged)
        self._digest = ""
        self.adapter_iterator = HfWeightIterator(chunks, built.adapter_rows, built.placement, bucket_bytes=bucket_bytes)
        self.network = Network(
            chunks, layout, training=training, frozen=settings.frozen, head_lr=critic.lr if critic else 0.0, patches=patches
        )  # fmt: skip
        whole = padded_vocab(self.spec.vocab_size, layout.tp)
        first_id, never = layout.tp_rank * whole // layout.tp, [*special_tokens.banned_ids, *range(self.spec.vocab_size, whole)]
        banned_V = banned_mask(never, first_id=first_id, size=whole // layout.tp, device=self.network.device)
        self.distribution = TokenDistribution(banned_V, temperature, first_id, layout.tp_group, training.parallel.log_probs_chunk_size)
        keep = keep_reference and not self.lora.rank
        self._has_values, self._shares_prompts = critic is not None, can_share_prompts(self.network.device, next(chunks.parameters()).dtype)
        self.routing = RoutingReplay(chunks, self.spec, layout) if self.spec.experts else None
        """Records and replays the experts of tokens; None for a dense model."""
        has_router_losses = self.spec.experts is not None and any(training.router_loss_coefs)
        self.router_losses = RouterLosses(chunks, self.spec, layout, training.router_loss_coefs) if has_router_losses else None
        """Adds the losses of the routers to updates; None if there are none."""
        self.teachers: Sequence[Teacher | ServerTeacher] = []
        self.make_teacher: Callable[[], Teacher] | None = None
        """Builds the teacher from the merged checkpoints (distill.merge) or the current weights."""
        self.privileged_prompt: PrivilegedPrompt | None = None
        self.demonstrations: Callable[[int], list[TokenSequence]] | None = None
        """Returns the demonstrations among the rollouts of a step (distill.data_fraction)."""
        self.reference = HostCopy(chunks.parameters()) if keep else None
        if self.reference is not None:
            self.reference.copy_to_host()

    def pack(self, minibatch: Sequence[PackItem], *, max_tokens: int) -> list[MicroBatch]:
        """Shard an update's sequences across data-parallel ranks and pack this rank's share.

        Returns at least one micro-batch.
        """
        return self.pack_local(self.shard_across_dp(minibatch, max_tokens=max_tokens))

    def shard_across_dp(self, minibatch: Sequence[PackItem], *, max_tokens: int) -> RankShares:
        """Assign the sequences of one optimizer update to ranks and micro-batches.

        Returns one list per data-parallel rank, with one list of sequences per micro-batch. The
        result is the same on every rank.
        """
        loads = pack_costs(minibatch, self.image_token_id, share_prompts=self._shares_prompts)
        return [split_by_cost(mine, max_tokens) for mine in balance_costs(loads, self.layout.dp)]

    def pack_local(self, shares: RankShares) -> list[MicroBatch]:
        """Pack the share of this data-parallel rank into micro-batches.

        If several sequences of a micro-batch share a prompt, the prompt is stored and computed
        once. With Transformer Engine the prompt is repeated, because Transformer Engine's attention
        requires whole sequences.
        """
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        how = {"image_token_id": self.image_token_id, "positions": self.spec.rope_positions, "share_prompts": self._shares_prompts}
        return [pack(part, **how, multiple_of=multiple, device=self.network.device) for part in shares[self.layout.dp_rank]]

    def images(self, shares: RankShares) -> dict[int, list[Image]]:
        """Map each global rank to the images that it encodes.

        The result is the same on every rank. Only ranks of the first pipeline stage encode images.
        """
        found: dict[int, list[Image]] = {}
        for dp_rank, parts in enumerate(shares):
            for part in parts:
                images = distinct_images(weighted.sequence for weighted in part)
                for tp_rank, share in enumerate(images_of_rank(images, self.layout.tp)):
                    found.setdefault(self.layout.first_stage_rank(dp_rank, tp_rank), []).extend(share)
        return found

    def logprobs(self, batches: list[MicroBatch], *, weights: str = "current") -> list[torch.Tensor]:
        """Return the logprobs [T] of each micro-batch under the given weights.

        Runs without dropout. Entries where mask_T is False are 0. `weights` is "current",
        "reference" or "teacher"; see teacher_logprobs for the last. Experts are replayed for the
        current weights only (RoutingReplay).
        """
        if weights == "current":
            return self._logprobs(batches)
        with self.routing.disabled() if self.routing else nullcontext():
            return self._logprobs_of_others(batches, weights)

    def _logprobs_of_others(self, batches: list[MicroBatch], weights: str) -> list[torch.Tensor]:
        if weights == "teacher":
            return teacher_logprobs(self.teachers, batches)
        if self.lora.rank:
            with disabled_adapters(self.network.chunks):
                return self._logprobs(batches)
        assert weights == "reference" and self.reference is not None, "the policy was built without keep_reference"
        self.reference.swap()
        try:
            return self._logprobs(batches)
        finally:
            self.reference.swap()

    def logprobs_and_values(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        """Compute logprobs and values of each micro-batch in one forward pass.

        Returns one [2, T] tensor per micro-batch: logprobs, then values.
        """
        return self.network.forward_only(batches, self._logprob_R, self._value_R)

    def _logprobs(self, batches: list[MicroBatch]) -> list[torch.Tensor]:
        return [logprob_1T[0] for logprob_1T in self.network.forward_only(batches, self._logprob_R)]

    def _logprob_R(self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._logprob_and_entropy(batch, rows_R, hidden_RH)[0]

    def update(
        self, batches: list[MicroBatch], loss: Loss, *,
        step: int, value_head_only: bool = False, record: Callable[[MicroBatch, torch.Tensor, LossInputs], None] | None = None,
        check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Run one optimizer update with the given loss; see Network.update.

        Args:
            batches: Micro-batches of this data-parallel rank.
            loss: Loss of one micro-batch, summed over its rows.
            step: Zero-based step of this training stage; it determines the learning rate.
            value_head_only: Train only the value head: the gradient of the value loss is not
                propagated into the backbone. Requires a loss that uses the policy's logprobs for
                metrics only (algo.value.warmup_value_loss).
            record: Called on the last pipeline stage with each micro-batch, its rows_R and its
                LossInputs.
            check: Called with the reduced metrics before any weight changes; see Network.update.

        Returns:
            Metrics of the update; see Network.update.
        """
        has_values = self._has_values

        def on_hidden(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
            # Run the backbone's backward pass with zero gradients, because pipeline stages wait for
            # each other's gradients.
            seen_RH = hidden_RH.detach() + 0.0 * hidden_RH if value_head_only else hidden_RH
            values = self._value_loss_inputs(batch, rows_R, seen_RH) if has_values else None
            logprob_R, entropy_R, *divergence = self._logprob_and_entropy(batch, rows_R, hidden_RH, teachers=self.teachers)
            rows = make_loss_inputs(batch, rows_R, logprob_R, entropy_R, divergence=divergence, values=values)
            if record is not None:
                record(batch, rows_R, rows)
            value, metrics = loss(rows)
            metrics.checks.update(rows.finite_checks())
            return value, metrics

        router_losses = None if value_head_only else self.router_losses
        with router_losses.added_to(batches, self.network.pipeline.visit) if router_losses else nullcontext():
            if self.routing:
                self.routing.clear_statistics()
            metrics = self.network.update(batches, on_hidden, step=step, is_partial=value_head_only, check=check)
        metrics |= router_losses.metrics() if router_losses else {}
        return metrics | (self.routing.differences() if self.routing else {})

    def _logprob_and_entropy(
        self, batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor, *, teachers: Sequence[Teacher | ServerTeacher] = ()
    ) -> tuple[torch.Tensor, ...]:
        compare = compare_with_teacher(teachers, batch)
        found = self.distribution(self.network.chunks[-1].head, hidden_RH, batch.target_T[rows_R], compare)
        lacks = batch.teacher < 0 and any(teacher.has_divergence for teacher in teachers)
        return (*found, 0.0 * found[0], torch.zeros_like(found[0])) if lacks else found  # every loss needs a gradient

    def teach_itself(self) -> None:
        """Use the current weights as the teacher of the next updates."""
        assert self.make_teacher is not None
        self.teachers = [self.make_teacher()]

    def merge_checkpoint(self) -> None:
        """Add the current weights to the merge of checkpoints, and use the merge as the teacher."""
        assert self.network.merge is not None, "the policy has no merge of checkpoints"
        self.network.merge.add()
        self.teachers = [self.make_teacher()] if self.make_teacher is not None else []

    def load(self, folder: Path, *, seed: int) -> None:
        """Restore a training state, and the teacher if checkpoints have been merged."""
        super().load(folder, seed=seed)
        merge = self.network.merge
        if merge is not None and merge.num_checkpoints and self.make_teacher is not None:
            self.teachers = [self.make_teacher()]

    def restart_optimizer(self) -> None:
        """Reset the optimizer's moments; see Network.restart_optimizer."""
        self.network.restart_optimizer()

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, full tensor) for all weights, with adapters merged in.

        A tensor may be a view of the live weights.
        """
        return self.hf_iterator.tensors()

    def teacher_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield copies of the weights of the merge of checkpoints (distill.merge), as `hf_weights`.

        The network contains the merge until the iterator is exhausted. Views of its weights would
        change then, before the receiver loads the last bucket.
        """
        assert self.network.merge is not None, "the policy has no merge of checkpoints"
        with self.network.merge.loaded():
            for name, tensor in self.hf_iterator.tensors():
                yield name, tensor.clone()

    def save_hf(self, out: Path, *, card: str = "") -> None:
        """Write a complete Hugging Face folder to `out`, atomically.

        If writing fails, the previous content of `out` is kept and every rank raises OSError. The
        saved processor contains the pixel limits used in training. `card` is the text of the
        folder's README.md.
        """
        like, pixels = Path(self.settings.path), (self.settings.min_pixels, self.settings.max_pixels)
        named = ((self.spec.released_name(name), tensor) for name, tensor in self.hf_weights())
        write_on_rank_zero(named, lambda stream: write_hf_folder(out, stream, like=like, pixels=pixels, card=card))

    def _base_digest(self) -> str:
        """Return the digest of the adapters' base model, computed on the first call."""
        if not self._digest:
            self._digest = compute_base_digest(open_source(Path(self.settings.path), self.spec, key="model.path"))
        return self._digest

    def save_adapter(self, out: Path) -> None:
        """Write the adapters as a PEFT folder to `out`, with the same guarantees as `save_hf`."""
        lora = self.lora
        config = make_peft_config(
            self.spec, rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets, base=self.settings.path,
            digest=self._base_digest() if dist.get_rank() == 0 else "",
        )  # fmt: skip
        write_on_rank_zero(self.adapter_iterator.tensors(), lambda stream: write_peft(out, stream, config))


def can_share_prompts(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if the attention used by the policy and the critic supports shared prompts.

    Returns False if Transformer Engine's layers are used on this machine for models without
    adapters. Raises RunFailed if torch's variable-length attention kernel is used but its causal
    mask is not bottom-right aligned (see VarlenKernel).
    """
    can = not uses_transformer_engine(LoraSettings())
    if can and has_varlen_kernel(device, dtype):
        require_prefix_attention(varlen_attention, device, dtype)
    return can


def write_on_rank_zero(stream: Iterator[tuple[str, torch.Tensor]], write: Callable[[Iterator[tuple[str, torch.Tensor]]], object]) -> None:
    """On rank 0, call `write` with the stream; on all other ranks, exhaust the stream.

    Producing the tensors is collective, so every rank iterates the stream to its end. If `write`
    raises an OSError on rank 0, every rank raises an OSError with the same message.
    """
    error = [None]
    if dist.get_rank() == 0:
        try:
            write(stream)
        except OSError as reason:
            error = [str(reason)]
    for _ in stream:
        pass
    dist.broadcast_object_list(error, src=0)
    if error[0] is not None:
        raise OSError(error[0])
