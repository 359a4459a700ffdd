"""Distributed Megatron model with its optimizer: forward passes, updates, saving and loading.

The callbacks passed as `on_hidden` compute logprobs, values and losses from the final hidden
states.

`forward_only`, `update`, `save` and `load` are collective: call them on all ranks. Ranks that
differ only in their tensor- or pipeline-parallel rank pass the same micro-batches. Results are
returned on every rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import LoraSettings, OptimSettings, ParallelSettings
from megatron_rl.errors import NonFiniteValue
from megatron_rl.policy.checkpoint_merge import CheckpointMerge
from megatron_rl.policy.loss_metrics import nonfinite_error, read_metrics, reduce_metrics
from megatron_rl.policy.offload import Offload
from megatron_rl.policy.optimizer import build_optimizer, build_schedule, grad_buffers, take_step, wrap_with_grad_buffers
from megatron_rl.policy.optimizer_state import reset_optimizer_state
from megatron_rl.policy.overlap import GradReduceOverlap
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, patch_bytes
from megatron_rl.policy.pipeline import HiddenReader, Pipeline
from megatron_rl.policy.training_state import AsyncSave, TrainingState, load
from megatron_rl.policy.transformer import ModelChunks
from megatron_rl.types import LossMetrics, MicroBatch
from megatron_rl.weights.stream import MegatronParameter

SummedLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, LossMetrics]]
"""Function (batch, rows_R, hidden_RH) -> the loss summed over the rows, and its metrics."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainingSettings:
    """Settings that determine the trainable parameters of a model and their optimization."""

    parallel: ParallelSettings
    """Settings for offloading, overlapped gradient reduction and log_probs_chunk_size."""
    optim: OptimSettings
    """Settings of the optimizer and the learning-rate schedule."""
    num_steps: int
    """Number of steps that the learning-rate schedule spans."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapter settings; if lora.rank is 0, the model is trained without adapters."""
    router_loss_coefs: tuple[float, float] = (0.0, 0.0)
    """Coefficients of the policy's load-balancing loss and z loss of routers (router_losses.py)."""
    seed: int = 0
    """Seed for initializing new adapters and the value head."""


class Network:
    """Model chunks of this rank with gradient buffers, optimizer and learning-rate schedule."""

    @with_megatron_on_cpu
    def __init__(
        self,
        chunks: ModelChunks,
        layout: Layout,
        *,
        training: TrainingSettings,
        frozen: list[str],
        head_lr: float = 0.0,
        patches: ImagePatchFn = patch_bytes,
    ) -> None:
        """Wrap `chunks` with gradient buffers and build the optimizer and its schedule.

        Args:
            chunks: Model chunks of this rank, in the order of the virtual pipeline.
            layout: Parallel layout of the model.
            training: Optimizer, learning-rate schedule, adapters and offloading. With adapters,
                only the adapters and the value head are trained.
            frozen: Parts of the model that are not trained (model.frozen).
            head_lr: Peak learning rate of the value head, if the model has one.
            patches: Function that returns the patches of an image.
        """
        self.chunks, self.layout = chunks, layout
        parallel, optim = training.parallel, training.optim
        self.device = next(chunks.parameters()).device
        self.model = wrap_with_grad_buffers(chunks, frozen, lora=training.lora, overlap=parallel.overlap_grad_reduce)
        offload = parallel.offload_optimizer and self.device.type == "cuda"
        self.optimizer = build_optimizer(optim, self.model, offload=offload, head_lr=head_lr)
        self.schedule = build_schedule(self.optimizer, optim, training.num_steps)
        for chunk in chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self.num_updates = 0
        self.pipeline = Pipeline(chunks, self.model, layout, patches)
        self._overlap = GradReduceOverlap(self.model[0], tp=layout.tp) if parallel.overlap_grad_reduce else None
        self._offload = Offload(self.model) if parallel.offload_params else None
        self.merge: CheckpointMerge | None = None
        """Merge of the model's checkpoints, which is part of the training state."""

    def close(self) -> None:
        """Drop the references to the model, so that its process groups can be destroyed.

        If `close` is not called, the gradient hooks of Megatron-Core 0.16.1 keep the model, all
        process groups and the groups' threads alive forever.
        """
        for wrapped in self.model:
            vars(wrapped).clear()

    def forward_only(self, batches: list[MicroBatch], *on_hidden: HiddenReader) -> list[torch.Tensor]:
        """Compute numbers for each sampled target; see Pipeline.forward_only."""
        return self.pipeline.forward_only(batches, *on_hidden)

    @with_megatron_on_cpu
    def update(
        self, batches: list[MicroBatch], on_hidden: SummedLoss, *,
        step: int, is_partial: bool = False, check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Run one optimizer update on the micro-batches of all data-parallel ranks.

        The update minimizes the sum of losses divided by the sum of denominators. Both sums run
        over all micro-batches of all data-parallel ranks.

        Args:
            batches: Micro-batches of this data-parallel rank.
            on_hidden: Computes the summed loss and the metrics of one micro-batch.
            step: Zero-based step of this training stage; it determines the learning rate.
            is_partial: Set to True if some trained parameters do not affect the loss.
            check: Called with the reduced metrics before any weight changes; the metrics are equal
                on all ranks.

        Returns:
            Metrics by name: `lr`, `grad_norm` (before clipping), `loss`, and the metrics of
            `on_hidden`. Loss terms are divided by the sum of denominators, sums are divided by the
            number of sampled tokens, without those of demonstrations, and maxima are not scaled.

        Raises:
            NonFiniteValue: On every rank. Raised before any weight changes if a checked tensor, the
                loss or a gradient is not finite, and after the update if a weight is not finite.
        """
        collected: list[LossMetrics] = []

        def summed(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            value, metrics = on_hidden(batch, rows_R, hidden_RH)
            metrics.losses["loss"] = value.detach()
            sums = cast("dict[str, torch.Tensor | float]", metrics.sums)
            sums.update({"tokens": 0.0 if batch.is_demonstration else float(rows_R.numel()), "denominator": float(batch.denominator)})
            collected.append(metrics)
            return value, value.new_full((), batch.denominator, dtype=torch.int), {}

        self.schedule.num_steps = step + 1
        self.schedule.step(0)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._overlap:
            self._overlap.require_same_counts(batches, is_partial=is_partial)
        self.pipeline.run(batches, summed, forward_only=False)
        known = read_metrics(collected)
        metrics = reduce_metrics(known if self.layout.tp_rank == 0 else [], error=nonfinite_error(known) or self._gradient_error())
        if check is not None:
            check(metrics)
        grad_norm = take_step(self.optimizer)
        self.num_updates += 1
        self._require_finite_weights()
        return {**metrics, "grad_norm": grad_norm, "lr": self.schedule.get_lr({})}

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        """Return the batch with the patches of this rank's images added; see Pipeline."""
        return self.pipeline.load_image_patches(batch)

    def _gradient_error(self) -> str:
        """Return an error message if a gradient of this rank is not finite, otherwise ''."""
        norms = [buffer.grad_data.norm() for chunk in self.model for buffer in grad_buffers(chunk)]
        if not norms or torch.stack(norms).isfinite().all():
            return ""
        for name, parameter in self.chunks.named_parameters():
            if parameter.requires_grad and not cast("MegatronParameter", parameter).main_grad.isfinite().all():
                return f"the gradient of {name} is not finite"
        return "the gradient norm overflows"

    def _require_finite_weights(self) -> None:
        norms = [parameter.detach().norm() for parameter in self.chunks.parameters() if parameter.requires_grad]
        is_bad = torch.tensor(int(bool(norms) and not torch.stack(norms).isfinite().all()))
        dist.all_reduce(is_bad)
        if is_bad:
            raise NonFiniteValue(f"weights are not finite after update {self.num_updates}: lower optim.lr")

    def sleep(self) -> None:
        """Move parameters to the host and free gradient buffers, if parallel.offload_params is set.

        Offloading frees device memory for the rollout engine. After `sleep`, only `wake` may be
        called.
        """
        if self._offload:
            self._offload.to_host()

    def wake(self) -> None:
        """Move the parameters back to the device and allocate the gradient buffers again."""
        if self._offload:
            self._offload.to_device()

    @with_megatron_on_cpu
    def save(self, folder: Path, *, background: bool) -> AsyncSave:
        """Start writing the training state into `folder`, which must exist.

        Training may continue immediately; see training_state.AsyncSave.
        """
        return AsyncSave(self._state(), folder, background=background)

    @with_megatron_on_cpu
    def load(self, folder: Path, *, seed: int) -> None:
        """Restore a training state; see training_state.load.

        The state may have been saved with any parallel layout.
        """
        self.num_updates = load(self._state(), folder, seed=seed)

    def restart_optimizer(self) -> None:
        """Reset the optimizer's moments and update count."""
        reset_optimizer_state(self.optimizer)
        self.num_updates = 0

    def _state(self) -> TrainingState:
        return TrainingState(self.chunks, self.optimizer, self.layout, self.num_updates, self.merge)
