"""The policy's verbs: logprobs, update, hf_weights, save. All of Megatron lies behind them.

Every rank calls every verb together, each with the micro-batches of its own data-parallel rank (the same ones on all its tensor- and
pipeline-parallel peers). What comes back is on every rank.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from transformers import Qwen2_5_VLConfig

from megatron_rl.algo.losses import LossMetrics
from megatron_rl.batch import Piece, balance, cut, loads_of, pack
from megatron_rl.config import ModelSettings, OptimizerSettings
from megatron_rl.cpu import on_cpu_too
from megatron_rl.policy.logprobs import banned_mask, vocab_parallel_logprobs
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.qwen2_5_vl import Qwen2_5_VL
from megatron_rl.types import Batch
from megatron_rl.weights.mapping import Heads, table
from megatron_rl.weights.stream import Export, Shards, load_hf
from megatron_rl.weights.tensors import HfTensors, write_hf_folder

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
        optimizer: OptimizerSettings,
        num_updates: int,
        banned_ids: list[int],
        image_token_id: int,
        temperature: float = 1.0,
        keep_reference: bool = False,
        bucket_mib: int = 256,
    ) -> None:
        self.layout, self.settings, self.temperature, self.image_token_id = layout, settings, temperature, image_token_id
        config = Qwen2_5_VLConfig.from_pretrained(settings.path)
        text = config.text_config
        model = Qwen2_5_VL(config, layout, getattr(torch, settings.dtype))
        if torch.cuda.is_available():  # parameters are made on the CPU everywhere (use_cpu_initialization)
            model.cuda()
        heads = Heads(text.num_attention_heads, text.num_key_value_heads, text.hidden_size // text.num_attention_heads)
        source = HfTensors(settings.path)
        vision_names = sorted(name.removeprefix("visual.") for name in source.names() if name.startswith("visual."))
        rows = table(num_layers=text.num_hidden_layers, heads=heads, tied=text.tie_word_embeddings, vision_names=vision_names)
        shards = Shards(layout.tp_rank, layout.tp_group, layout.pp_rank, layout.pp_group, text.num_hidden_layers // layout.pp)
        load_hf(model, rows, shards, source)
        vocabulary = text.vocab_size // layout.tp
        self.first_id = layout.tp_rank * vocabulary
        self.device = next(model.parameters()).device
        self.banned_V = banned_mask(banned_ids, first_id=self.first_id, size=vocabulary, device=self.device)
        self.model = DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
        model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(_optimizer_config(optimizer, model.config.params_dtype), [self.model])
        self.schedule = _schedule(self.optimizer, optimizer, num_updates)
        model.config.grad_scale_func = self.optimizer.scale_loss
        self.export = Export(model, rows, shards, bucket_bytes=bucket_mib << 20)
        self.reference = [parameter.detach().to("cpu", copy=True) for parameter in model.parameters()] if keep_reference else None

    def pack(self, pieces: list[Piece], *, max_tokens: int) -> list[Batch]:
        """Deal one optimizer step's pieces to data-parallel ranks and pack this rank's into micro-batches; at least one.

        On a CPU a prompt is computed once for all sequences of a micro-batch that begin with it; a GPU's kernels take whole sequences.
        """
        share = self.device.type == "cpu"
        mine = balance(loads_of(pieces, self.image_token_id, share_prompts=share), self.layout.dp)[self.layout.dp_rank]
        multiple = self.layout.tp if self.layout.sequence_parallel else 1
        return [
            pack(part, image_token_id=self.image_token_id, multiple_of=multiple, share_prompts=share, device=self.device)
            for part in cut(mine, max_tokens)
        ]

    @on_cpu_too
    def logprobs(self, batches: list[Batch], *, weights: str = "current") -> list[torch.Tensor]:
        """Logprob of each target [T] under the current or the reference weights; 0 where mask_T is False."""
        if weights == "current":
            return self._logprobs(batches)
        assert weights == "reference" and self.reference is not None, "the policy was built without keep_reference"
        parameters = list(self.model.parameters())
        with torch.no_grad():
            current = [parameter.to("cpu", copy=True) for parameter in parameters]
            _copy_into(parameters, self.reference)
            try:
                return self._logprobs(batches)
            finally:
                _copy_into(parameters, current)

    def _logprobs(self, batches: list[Batch]) -> list[torch.Tensor]:
        def collect(batch: Batch, rows_R: torch.Tensor, logits_RV: torch.Tensor, **_: object) -> torch.Tensor:
            logprob_R, _entropy = self._distribution(logits_RV, batch, rows_R)
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

        def summed(batch: Batch, rows_R: torch.Tensor, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
            value, metrics = loss(*self._distribution(logits_RV, batch, rows_R), batch, rows_R)
            metrics.sums.update({"loss": value.detach(), "tokens": float(rows_R.numel()), "denominator": float(batch.denominator)})
            collected.append(metrics)
            return value, torch.tensor(batch.denominator, dtype=torch.int, device=value.device), {}

        self.schedule.step(1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(batches, summed, forward_only=False)
        succeeded, grad_norm, _ = self.optimizer.step()
        assert succeeded, "the optimizer skipped a step"
        return {**_reduce(collected if self.layout.tp_rank == 0 else []), "grad_norm": float(grad_norm), "lr": self.optimizer.param_groups[0]["lr"]}

    def _run(self, batches: list[Batch], on_logits: Callable, *, forward_only: bool) -> list:
        """Megatron's schedule over the micro-batches; on_logits runs on the last stage only."""

        def forward_step(iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
            batch = next(iterator)
            rows_R = batch.mask_T.nonzero()[:, 0]
            return model(batch, rows_R), partial(on_logits, batch, rows_R)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=max(batch.num_tokens for batch in batches),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _distribution(self, logits_RV: torch.Tensor, batch: Batch, rows_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return vocab_parallel_logprobs(
            logits_RV, batch.target_T[rows_R],
            banned_V=self.banned_V, temperature=self.temperature, first_id=self.first_id, group=self.layout.tp_group,
        )  # fmt: skip

    def hf_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream (hf_name, full tensor); a tensor may be a view of the live weights."""
        return self.export.tensors()

    def save(self, out: Path) -> None:
        """Write a complete Hugging Face folder at `out`: this one or what was there before. Where the disk is full every rank raises OSError."""
        stream, error = self.hf_weights(), [None]
        if dist.get_rank() == 0:
            try:
                write_hf_folder(out, stream, like=Path(self.settings.path))
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


def _optimizer_config(settings: OptimizerSettings, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def _schedule(optimizer: object, settings: OptimizerSettings, num_updates: int) -> OptimizerParamScheduler:
    """Stepped before each update: update number warmup_steps is the first at full lr, the last one has min_lr (unless constant)."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=max(num_updates, settings.warmup_steps + 1),
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


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
