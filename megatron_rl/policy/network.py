"""A Megatron model over processes with its optimizer: read and update. It knows neither vocabulary nor values: `on_hidden` does.

Every rank calls every verb together, each with the micro-batches of its own data-parallel rank (the same ones on all its tensor- and
pipeline-parallel peers). What comes back is on every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from megatron_rl.batching.packing import empty_batch
from megatron_rl.compat.megatron_cpu import with_megatron_on_cpu
from megatron_rl.config import LoraSettings, OptimSettings, ParallelSettings
from megatron_rl.errors import NonFiniteValue
from megatron_rl.policy.loss_metrics import nonfinite_error, read_metrics, reduce_metrics
from megatron_rl.policy.offload import Offload
from megatron_rl.policy.optimizer import build_optimizer, build_schedule, take_step, wrap_with_grad_buffers
from megatron_rl.policy.optimizer_state import reset_optimizer_state
from megatron_rl.policy.overlap import GradReduceOverlap
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import ImagePatchFn, attach_patches, patch_bytes, prefetch
from megatron_rl.policy.training_state import AsyncSave, TrainingState, load
from megatron_rl.types import LossMetrics, MicroBatch

HiddenReader = Callable[[MicroBatch, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, rows_R, hidden_RH) -> a number for each of the rows: the entries of the batch whose target was sampled."""
SummedLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, LossMetrics]]
"""(batch, rows_R, hidden_RH) -> the loss summed over the rows, and its metrics."""


class Network:
    """This rank's chunks with gradient buffers, optimizer, learning rate and the number of updates so far."""

    @with_megatron_on_cpu
    def __init__(
        self,
        chunks: nn.ModuleList,
        layout: Layout,
        *,
        frozen: list[str],
        lora: LoraSettings,
        parallel: ParallelSettings,
        optim: OptimSettings,
        num_steps: int,
        head_lr: float = 0.0,
        patches: ImagePatchFn = patch_bytes,
    ) -> None:
        """`num_steps` is what the learning rate's schedule spans; `head_lr` the peak of a value head's, if there is one."""
        self.chunks, self.layout, self._patches = chunks, layout, patches
        self.device = next(chunks.parameters()).device
        self.model = wrap_with_grad_buffers(chunks, frozen, lora=lora, overlap=parallel.overlap_grad_reduce)
        offload = parallel.offload_optimizer and self.device.type == "cuda"
        self.optimizer = build_optimizer(optim, self.model, offload=offload, head_lr=head_lr)
        self.schedule = build_schedule(self.optimizer, optim, num_steps)
        for chunk in chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self.num_updates = 0
        self._overlap = GradReduceOverlap(self.model[0], tp=layout.tp) if parallel.overlap_grad_reduce else None
        self._offload = Offload(self.model) if parallel.offload_params else None

    def close(self) -> None:
        """Let go of the model. Megatron 0.16.1's hooks on gradients hold it for ever, and with it every process group and its thread."""
        for wrapped in self.model:
            vars(wrapped).clear()

    @with_megatron_on_cpu
    @torch.no_grad()
    def forward_only(self, batches: list[MicroBatch], *on_hidden: HiddenReader) -> list[torch.Tensor]:
        """What each of `on_hidden` says of every row, in one forward pass: a line of [N, T] for each of them, of each batch; 0 where mask_T
        is False. Without gradient and dropout."""

        def scattered(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor, **_: object) -> torch.Tensor:
            said_NR = torch.stack([say(batch, rows_R, hidden_RH) for say in on_hidden])
            return nothing(batch).index_copy(1, rows_R, said_NR)

        def nothing(batch: MicroBatch) -> torch.Tensor:
            return batch.weight_T.new_zeros(len(on_hidden), batch.num_tokens)

        results = self._run_schedule(batches, scattered, forward_only=True)
        if self.layout.pp > 1:
            results = results or list(map(nothing, batches))
            for result in results:
                dist.broadcast(result, src=self.layout.last_stage_rank, group=self.layout.pp_group)
        return results

    @with_megatron_on_cpu
    def update(
        self, batches: list[MicroBatch], on_hidden: SummedLoss, *,
        step: int, is_partial: bool = False, check: Callable[[Mapping[str, float]], None] | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """One optimizer update on these micro-batches of every data-parallel rank together: sum of losses / sum of denominators.

        `step` is the stage's, from 0: it decides the learning rate. is_partial: the loss leaves out some of what is trained. Returns the
        loss, the gradient norm before clipping, and the loss's metrics: its parts divided by the denominator, sums by the number of sampled
        tokens, maxima. `check` gets these metrics before any weight changes, on every rank the same. NonFiniteValue on every rank, before
        any weight has changed: a number of a micro-batch or the gradient is no number; after the update: a weight is none.
        """
        collected: list[LossMetrics] = []

        def summed(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            value, metrics = on_hidden(batch, rows_R, hidden_RH)
            metrics.losses["loss"] = value.detach()
            metrics.sums.update({"tokens": float(rows_R.numel()), "denominator": float(batch.denominator)})
            collected.append(metrics)
            return value, value.new_full((), batch.denominator, dtype=torch.int), {}

        self.schedule.num_steps = step + 1
        self.schedule.step(0)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._overlap:
            self._overlap.require_same_counts(batches, is_partial=is_partial)
        self._run_schedule(batches, summed, forward_only=False)
        known = read_metrics(collected)
        metrics = reduce_metrics(known if self.layout.tp_rank == 0 else [], error=nonfinite_error(known) or self._gradient_error())
        if check is not None:
            check(metrics)
        grad_norm = take_step(self.optimizer)
        self.num_updates += 1
        self._require_finite_weights()
        return {**metrics, "grad_norm": grad_norm, "lr": self.schedule.get_lr({})}

    def _run_schedule(self, batches: list[MicroBatch], on_hidden: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; on_hidden runs on the last stage only and gets the hidden states of rows_R.

        An interleaved pipeline takes micro-batches by the pipeline's size; what is lacking runs empty, and its result is left out.
        """
        lacking = -len(batches) % self.layout.pp if self.layout.vpp > 1 else 0
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        padded = batches + [empty_batch(multiple, device=self.device) for _ in range(lacking)]

        def forward_step(iterator: Iterator[MicroBatch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(iterator)
            rows_R = batch.mask_T.nonzero()[:, 0]
            return model(batch, rows_R), partial(on_hidden, batch, rows_R)

        def coming(chunk: nn.Module) -> Iterator[MicroBatch]:
            sees = chunk.pre_process and any(batch.images for batch in padded)
            return prefetch(self.load_image_patches, padded) if sees else iter(padded)

        self.chunks.train(not forward_only)
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[coming(chunk) for chunk in self.chunks],
            model=self.model,
            num_microbatches=len(padded),
            seq_length=max(batch.num_tokens for batch in padded),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(batches)]

    def load_image_patches(self, batch: MicroBatch) -> MicroBatch:
        """The batch with the patches of the images that this rank encodes: none, but on a pipeline's first stage."""
        if not self.chunks[0].pre_process:
            return batch
        return attach_patches(batch, self._patches, self.layout, like=next(self.chunks.parameters()))

    def _gradient_error(self) -> str:
        """The first parameter of this rank whose gradient is not finite, or ''."""
        buffers = [buffer.grad_data.norm() for chunk in self.model for buffer in chunk.buffers]
        if not buffers or torch.stack(buffers).isfinite().all():
            return ""
        for name, parameter in self.chunks.named_parameters():
            if parameter.requires_grad and not parameter.main_grad.isfinite().all():
                return f"the gradient of {name} is not finite"
        return "the gradient is too large for its norm"

    def _require_finite_weights(self) -> None:
        norms = [parameter.detach().norm() for parameter in self.chunks.parameters() if parameter.requires_grad]
        is_bad = torch.tensor(int(bool(norms) and not torch.stack(norms).isfinite().all()))
        dist.all_reduce(is_bad)
        if is_bad:
            raise NonFiniteValue(f"weights are not finite after update {self.num_updates}: lower optim.lr")

    def sleep(self) -> None:
        """Leave the device to the engine, where parallel.offload_params says so; only `wake` may follow."""
        if self._offload:
            self._offload.to_host()

    def wake(self) -> None:
        """Take the device back."""
        if self._offload:
            self._offload.to_device()

    @with_megatron_on_cpu
    def save(self, folder: Path, *, background: bool) -> AsyncSave:
        """Begin to write the training state into `folder`, which exists; see training_state.Save. Training may go on at once."""
        return AsyncSave(self._state(), folder, background=background)

    @with_megatron_on_cpu
    def load(self, folder: Path, *, seed: int) -> None:
        """Go on from a training state, written at whatever layout; see training_state.load."""
        self.num_updates = load(self._state(), folder, seed=seed)

    def restart_optimizer(self) -> None:
        """Forget the moments, and the number of updates that made them."""
        reset_optimizer_state(self.optimizer)
        self.num_updates = 0

    def _state(self) -> TrainingState:
        return TrainingState(self.chunks, self.optimizer, self.layout, self.num_updates)
