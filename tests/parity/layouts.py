"""Run under torchrun by test_policy.py: one world walks several layouts and writes what each computes.

usage: layouts.py MODEL OUT TP,PP,SEQUENCE_PARALLEL ...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from packed import example_pieces

from megatron_rl.algo.losses import LossMetrics
from megatron_rl.batch import Piece, pack
from megatron_rl.config import AlgoSettings, ModelSettings, ParallelSettings
from megatron_rl.cpu import megatron_on_cpu
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.train import objective
from megatron_rl.types import Batch
from megatron_rl.world import connect, place


def weighted_nll(logprob_R: torch.Tensor, entropy_R: torch.Tensor, batch: Batch, rows_R: torch.Tensor) -> tuple[torch.Tensor, LossMetrics]:
    """A loss in which every sampled token counts differently, and the entropy too."""
    return -(batch.weight_T[rows_R] * (logprob_R + 0.3 * entropy_R)).sum(), LossMetrics(sums={}, maxima={})


def full_logits(policy: Policy, batch: Batch) -> torch.Tensor | None:
    """Logits [R, vocabulary] on the last stage, None elsewhere."""
    layout: Layout = policy.layout

    def collect(_batch: Batch, _rows_R: torch.Tensor, hidden_RH: torch.Tensor, **_: object) -> torch.Tensor:
        logits_RV = policy.chunks[-1].head(hidden_RH)
        parts = [torch.empty_like(logits_RV) for _ in range(layout.tp)]
        dist.all_gather(parts, logits_RV.contiguous(), group=layout.tp_group)
        return torch.cat(parts, 1)

    with megatron_on_cpu(), torch.no_grad():
        results = policy._run([batch], collect, forward_only=True)
    return results[0] if results else None


def reduce_whole_gradients(*arguments: object, **options: object) -> None:
    """Megatron's reduction, but all-reduced: each rank then holds the whole gradient instead of its optimizer shard's."""
    finalize_model_grads(*arguments, **{**options, "force_all_reduce": True})


def gradients(policy: Policy, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """HF-named gradients of the loss sum divided by the denominators' sum, through Megatron's schedule and reduction."""

    def summed(batch: Batch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        value, _ = weighted_nll(*policy.distribution(policy.chunks[-1].head, hidden_RH, batch.target_T[rows_R]), batch, rows_R)
        return value, torch.tensor(batch.denominator, dtype=torch.int), {}

    for chunk in policy.chunks:
        chunk.config.finalize_model_grads_func = reduce_whole_gradients
    with megatron_on_cpu():
        for chunk in policy.model:
            chunk.zero_grad_buffer()
        policy._run(batches, summed, forward_only=False)
    for chunk in policy.chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    live = policy.export.parameters
    policy.export.parameters = {name: parameter.main_grad for name, parameter in live.items()}
    named = {name: gradient.clone() for name, gradient in policy.hf_weights()}
    policy.export.parameters = live
    return named


def make_policy(model: Path, layout: Layout, renderer: Renderer, *, eps: float) -> Policy:
    return Policy(
        ModelSettings(path=str(model)), layout, parallel=ParallelSettings(logprob_rows=100), optimizer=AlgoSettings(lr=0.1, eps=eps), num_updates=1,
        banned_ids=renderer.banned_ids, image_token_id=renderer.image_token_id, temperature=0.7,
    )  # fmt: skip


def first_step(policy: Policy, pieces: list[Piece], *, max_tokens: int) -> dict[str, object]:
    """One GRPO step: loss, gradient norm and the change of every tensor. lr 0.1 keeps the change far above fp32's rounding of weights."""
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    metrics = policy.update(policy.pack(pieces, max_tokens=max_tokens), objective(AlgoSettings(entropy_coef=0.1)))
    change = {name: tensor - before[name] for name, tensor in policy.hf_weights()}
    return {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "change": change}


def walk(model: Path, out: Path, tp: int, pp: int, sequence_parallel: bool) -> None:
    layout = build_layout(ParallelSettings(tp=tp, pp=pp, sequence_parallel=sequence_parallel), seed=0)
    renderer = Renderer(ModelSettings(path=str(model)))
    policy = make_policy(model, layout, renderer, eps=1e-4)
    pieces = example_pieces(renderer)
    whole = pack(pieces, image_token_id=renderer.image_token_id, multiple_of=tp)  # in order, nothing shared: HF's rows
    result: dict[str, object] = {"logits": full_logits(policy, whole), "logprobs": policy.logprobs([whole])[0], "mask": whole.mask_T}
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        result[f"gradients_{cut}"] = gradients(policy, policy.pack(pieces, max_tokens=max_tokens))
    result["step_eps1e-4_one"] = first_step(policy, pieces, max_tokens=10_000)
    result["step_eps1e-4_each"] = first_step(make_policy(model, layout, renderer, eps=1e-4), pieces, max_tokens=1)
    result["step_eps1e-8_one"] = first_step(make_policy(model, layout, renderer, eps=1e-8), pieces, max_tokens=10_000)
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"world{dist.get_world_size()}_tp{tp}_pp{pp}_sp{int(sequence_parallel)}.pt")
    parallel_state.destroy_model_parallel()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(place(), timeout_s=120)
    for layout in sys.argv[3:]:
        tp, pp, sequence_parallel = (int(part) for part in layout.split(","))
        walk(model, out, tp, pp, bool(sequence_parallel))


if __name__ == "__main__":
    main()
