"""The policy's verbs: logprobs, update, hf_weights, save, load. All of Megatron lies behind them.

Every rank calls every verb together, each with the micro-batches of its own data-parallel rank (the same ones on all its tensor- and
pipeline-parallel peers). What comes back is on every rank.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from transformers import Qwen2_5_VLTextConfig

from megatron_rl.algo.losses import LossMetrics
from megatron_rl.batch import Piece, balance, cut, loads_of, pack
from megatron_rl.config import LoraSettings, ModelSettings, OptimizerSettings, ParallelSettings
from megatron_rl.cpu import on_cpu_too
from megatron_rl.models.hf_config import read_config, rows_of
from megatron_rl.policy.logprobs import Distribution, banned_mask
from megatron_rl.policy.lora import adapters_off, merged_weights
from megatron_rl.policy.offload import Offload
from megatron_rl.policy.optimizer import build_optimizer, build_schedule, with_gradients
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.training_state import Save, TrainingState, load
from megatron_rl.policy.transformer import build_chunks, uses_transformer_engine
from megatron_rl.types import Batch, Context
from megatron_rl.weights.formats.open import open_source
from megatron_rl.weights.formats.peft import adapter_table, load_peft, peft_config, start_adapters, write_peft
from megatron_rl.weights.formats.write_hf import write_hf_folder
from megatron_rl.weights.stream import Export, Placement, load_hf

Loss = Callable[[torch.Tensor, torch.Tensor, Batch, torch.Tensor], tuple[torch.Tensor, LossMetrics]]
"""(logprob_R, entropy_R, batch, rows_R) -> the summed loss and its metrics; rows_R are the entries of the batch with a sampled target."""


class Policy:
    """A Qwen2.5-VL over processes with its optimizer."""

    @on_cpu_too
    def __init__(
        self,
        settings: ModelSettings,
        layout: Layout,
        *,
        parallel: ParallelSettings,
        optimizer: OptimizerSettings,
        num_updates: int,
        lora: LoraSettings | None = None,
        seed: int = 0,
        banned_ids: list[int],
        image_token_id: int,
        temperature: float = 1.0,
        keep_reference: bool = False,
        bucket_mib: int = 256,
    ) -> None:
        """Without `lora` the model itself is trained. `seed` is that of new adapters."""
        self.layout, self.settings, self.image_token_id = layout, settings, image_token_id
        self.lora = lora or LoraSettings()
        text = self._load(seed=seed, bucket_bytes=bucket_mib << 20)
        self.device = next(self.chunks.parameters()).device
        vocabulary = text.vocab_size // layout.tp
        first_id = layout.tp_rank * vocabulary
        banned_V = banned_mask(banned_ids, first_id=first_id, size=vocabulary, device=self.device)
        self.distribution = Distribution(banned_V, temperature, first_id, layout.tp_group, parallel.logprob_rows)
        self.model = with_gradients(self.chunks, settings.frozen, lora=self.lora)
        self.optimizer = build_optimizer(optimizer, self.model, offload=parallel.offload_optimizer and self.device.type == "cuda")
        self.schedule = build_schedule(self.optimizer, optimizer, num_updates)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
        self.offload = Offload(self.model) if parallel.offload_parameters else None
        keep = keep_reference and not self.lora.rank
        self.reference = [parameter.detach().to("cpu", copy=True) for parameter in self.chunks.parameters()] if keep else None

    def _load(self, *, seed: int, bucket_bytes: int) -> Qwen2_5_VLTextConfig:
        """The chunks with their weights and adapters, and how these leave again."""
        settings, layout, lora = self.settings, self.layout, self.lora
        config = read_config(settings.path)
        text, dtype = config.text_config, getattr(torch, settings.dtype)
        self.chunks = build_chunks(config, layout, dtype, lora=lora)
        if torch.cuda.is_available():  # parameters are made on the CPU everywhere (use_cpu_initialization)
            self.chunks.cuda()
        rows = rows_of(config)
        placement = Placement(
            layout.tp_rank, layout.tp_group, layout.pp_rank, layout.pp_group, chunks=layout.vpp,
            layers_per_chunk=text.num_hidden_layers // (layout.pp * layout.vpp), fused_norms=uses_transformer_engine(lora),
        )  # fmt: skip
        load_hf(self.chunks, rows, placement, open_source(Path(settings.path), config, key="model.path").read)
        targets = lora.targets if lora.rank else []
        vision_names = [row.mcore.removeprefix("vision.") for row in rows if row.mcore.startswith("vision.")]
        adapter_rows = adapter_table(targets=targets, num_layers=text.num_hidden_layers, vision_names=vision_names)
        if lora.path:
            load_peft(self.chunks, adapter_rows, placement, Path(lora.path), rank=lora.rank, alpha=lora.alpha)
        else:
            start_adapters(self.chunks, adapter_rows, placement, seed=seed)
        self.export = Export(self.chunks, rows, placement, bucket_bytes=bucket_bytes, merged=merged_weights(self.chunks))
        self.adapters = Export(self.chunks, adapter_rows, placement, bucket_bytes=bucket_bytes)
        return text

    def pack(self, pieces: list[Piece], *, max_tokens: int, restore: Callable[[Context], None] | None = None) -> list[Batch]:
        """Deal one optimizer step's pieces to data-parallel ranks and pack this rank's into micro-batches; at least one.

        `restore` gives a context's images their patches, if they came without: only what this rank trains on is worth the memory.

        On a CPU a prompt is computed once for all contexts of a micro-batch that begin with it; a GPU's kernels take whole contexts.
        """
        share = self.device.type == "cpu"
        mine = balance(loads_of(pieces, self.image_token_id, share_prompts=share), self.layout.dp)[self.layout.dp_rank]
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        if restore:
            for dealt in mine:
                restore(dealt.piece.context)
        return [
            pack(part, image_token_id=self.image_token_id, multiple_of=multiple, share_prompts=share, device=self.device)
            for part in cut(mine, max_tokens)
        ]

    @on_cpu_too
    def logprobs(self, batches: list[Batch], *, weights: str = "current") -> list[torch.Tensor]:
        """Logprob of each target [T] under the current or the reference weights; 0 where mask_T is False. Without dropout."""
        if weights == "current":
            return self._logprobs(batches)
        if self.lora.rank:
            with adapters_off(self.chunks):
                return self._logprobs(batches)
        assert weights == "reference" and self.reference is not None, "the policy was built without keep_reference"
        parameters = list(self.chunks.parameters())
        with torch.no_grad():
            current = [parameter.to("cpu", copy=True) for parameter in parameters]
            _copy_into(parameters, self.reference)
            try:
                return self._logprobs(batches)
            finally:
                _copy_into(parameters, current)

    def _logprobs(self, batches: list[Batch]) -> list[torch.Tensor]:
        def collect(batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor, **_: object) -> torch.Tensor:
            logprob_R, _entropy = self.distribution(self.chunks[-1].head, hidden_RH, batch.target_T[rows_R])
            return torch.zeros_like(batch.weight_T).index_copy(0, rows_R, logprob_R)

        with torch.no_grad():
            results = self._run(batches, collect, forward_only=True)
        if self.layout.pp > 1:
            if not results:
                results = [torch.zeros_like(batch.weight_T) for batch in batches]
            for result in results:
                dist.broadcast(result, src=self.layout.last_stage_rank, group=self.layout.pp_group)
        return results

    @on_cpu_too
    def update(self, batches: list[Batch], loss: Loss) -> dict[str, float]:
        """One optimizer step on these micro-batches of every data-parallel rank together: sum of losses / sum of denominators.

        Returns the loss, the gradient norm before clipping, and the loss's metrics: sums divided by the number of sampled tokens, maxima.
        """
        collected: list[LossMetrics] = []

        def summed(batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            value, metrics = loss(*self.distribution(self.chunks[-1].head, hidden_RH, batch.target_T[rows_R]), batch, rows_R)
            metrics.sums.update({"loss": value.detach(), "tokens": float(rows_R.numel()), "denominator": float(batch.denominator)})
            collected.append(metrics)
            return value, torch.tensor(batch.denominator, dtype=torch.int, device=value.device), {}

        self.schedule.step(1)
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(batches, summed, forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        assert succeeded, "the optimizer skipped a step"
        return {**_reduce(collected if self.layout.tp_rank == 0 else []), "grad_norm": float(grad_norm), "lr": self.schedule.get_lr({})}

    def _run(self, batches: list[Batch], on_hidden: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; on_hidden runs on the last stage only and gets the hidden states of rows_R.

        An interleaved pipeline takes micro-batches by the pipeline's size; what is lacking runs empty, and its result is left out.
        """
        lacking = -len(batches) % self.layout.pp if self.layout.vpp > 1 else 0
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        padded = batches + [pack([], image_token_id=self.image_token_id, multiple_of=multiple, device=self.device)] * lacking

        def forward_step(iterator: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(iterator)
            rows_R = batch.mask_T.nonzero()[:, 0]
            return model(batch, rows_R), partial(on_hidden, batch, rows_R)

        self.chunks.train(not forward_only)
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(padded) for _ in self.model],
            model=self.model,
            num_microbatches=len(padded),
            seq_length=max(batch.num_tokens for batch in padded),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[: len(batches)]

    def sleep(self) -> None:
        """Leave the device to the engine, where parallel.offload_parameters says so; only `wake` may follow."""
        if self.offload:
            self.offload.leave()

    def wake(self) -> None:
        """Take the device back."""
        if self.offload:
            self.offload.come_back()

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (hf_name, full tensor), adapters merged in; a tensor may be a view of the live weights."""
        return self.export.tensors()

    @on_cpu_too
    def save(self, folder: Path, *, optimizer: str, background: bool) -> Save:
        """Begin to write the training state into `folder`, which exists; see training_state.Save. The policy may be trained on at once."""
        return Save(self._training_state(), folder, optimizer=optimizer, background=background)

    @on_cpu_too
    def load(self, folder: Path, *, seed: int) -> None:
        """Go on from a training state, written at whatever layout; see training_state.load. The reference stays that of settings.path."""
        load(self._training_state(), folder, seed=seed)

    def _training_state(self) -> TrainingState:
        return TrainingState(self.chunks, self.optimizer, self.schedule, self.layout)

    def save_hf(self, out: Path) -> None:
        """Write a complete Hugging Face folder at `out`: this one, or what was there before and an OSError on every rank."""
        _write_on_main(self.hf_weights(), lambda stream: write_hf_folder(out, stream, like=Path(self.settings.path)))

    def save_adapter(self, out: Path) -> None:
        """Write the adapters as a PEFT folder at `out`, under the same promise as `save`."""
        lora = self.lora
        config = peft_config(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=lora.targets, base=self.settings.path)
        _write_on_main(self.adapters.tensors(), lambda stream: write_peft(out, stream, config))


def _write_on_main(stream: Iterator[tuple[str, torch.Tensor]], write: Callable[[Iterator[tuple[str, torch.Tensor]]], None]) -> None:
    """Hand rank 0's stream to `write`; every rank takes part in it to its end, and raises the OSError that rank 0 met."""
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


def _copy_into(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _reduce(collected: list[LossMetrics]) -> dict[str, float]:
    """Add sums and take maxima over micro-batches and all ranks (tensor-parallel copies hand in nothing)."""
    mine: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for metrics in collected:
        for name, value in metrics.sums.items():
            mine[0][name] = mine[0].get(name, 0.0) + float(value)
        for name, value in metrics.maxima.items():
            mine[1][name] = max(mine[1].get(name, float("-inf")), float(value))
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for theirs_sums, theirs_maxima in gathered:
        for name, value in theirs_sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in theirs_maxima.items():
            maxima[name] = max(maxima.get(name, float("-inf")), value)
    tokens, denominator = sums.pop("tokens"), sums.pop("denominator")
    loss = sums.pop("loss")
    means = {name: value / max(tokens, 1.0) for name, value in sums.items()}
    return {"loss": loss / max(denominator, 1.0), "tokens": tokens, **means, **maxima}
