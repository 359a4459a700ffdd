"""Computes the same policy in several parallel layouts. Run under torchrun by test_policy.py.

    parallel_layouts.py MODELS OUT LAYOUT ...

A layout is written as 4,2,2,1,full,tied: tp, pp, vpp, sequence parallelism, recomputation, model;
or as 4,2,2,1,full,0.1,tied with the bucket size of exported weights in MiB. The layout
1,1,1,0,none,ep2,moe has the expert-parallel size 2.
"""

import gc
import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import make_loss_inputs, pack
from megatron_rl.compat.megatron_cpu import megatron_on_cpu
from megatron_rl.config import AlgoSettings, EngineSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.name_mapping import padded_vocab
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.padding import PADDED_KEYS
from megatron_rl.policy.parallel import Layout, build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Loss, LossInputs, LossMetrics, MicroBatch
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from tests.support.memory_footprint import measure_footprint
from tests.support.packed_example import make_example_items


@dataclass(frozen=True)
class LayoutCase:
    """One parallel layout of one model. The data-parallel size follows from the world size."""

    tp: int
    pp: int
    vpp: int
    sequence_parallel: bool
    recompute: str
    ep: int
    bucket_mib: float
    model: str

    @classmethod
    def parse(cls, text: str) -> "LayoutCase":
        tp, pp, vpp, sequence_parallel, recompute, *options, model = text.split(",")
        ep = next((int(option.removeprefix("ep")) for option in options if option.startswith("ep")), 1)
        bucket_mib = next((float(option) for option in options if not option.startswith("ep")), EngineSettings().bucket_mib)
        return cls(int(tp), int(pp), int(vpp), bool(int(sequence_parallel)), recompute, ep, bucket_mib, model)

    def parallel_settings(self) -> ParallelSettings:
        """Return the parallel settings.

        Logits are computed for 100 rows at a time; the example has more than 300.
        """
        return ParallelSettings(
            tp=self.tp,
            pp=self.pp,
            vpp=self.vpp,
            ep=self.ep,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            log_probs_chunk_size=100,
        )


def weighted_nll(rows: LossInputs) -> tuple[torch.Tensor, LossMetrics]:
    """Return a loss in which every sampled token and its entropy has a different weight."""
    return -(rows.weight_R * (rows.logprob_R + 0.3 * rows.entropy_R)).sum(), LossMetrics(sums={}, maxima={})


def full_logits(policy: Policy, batch: MicroBatch) -> torch.Tensor | None:
    """Return logits [R, vocabulary] on the last stage, and None on other stages."""
    layout: Layout = policy.layout

    def collect(_batch: MicroBatch, _rows_R: torch.Tensor, hidden_RH: torch.Tensor, **_: object) -> torch.Tensor:
        logits_RV = policy.network.chunks[-1].head(hidden_RH)
        parts = [torch.empty_like(logits_RV) for _ in range(layout.tp)]
        dist.all_gather(parts, logits_RV.contiguous(), group=layout.tp_group)
        return torch.cat(parts, 1)[:, : policy.spec.vocab_size]

    with megatron_on_cpu(), torch.no_grad():
        results = policy.network.pipeline.run([batch], collect, forward_only=True)
    return results[0] if results else None


def reduce_whole_gradients(*arguments: object, **options: object) -> None:
    """Reduce gradients as Megatron does, but with an all-reduce, so that each rank has the whole
    gradient instead of its optimizer shard.
    """
    finalize_model_grads(*arguments, **{**options, "force_all_reduce": True})


def compute_gradients(policy: Policy, batches: list[MicroBatch], loss: Loss = weighted_nll) -> dict[str, torch.Tensor]:
    """Return HF-named gradients of the loss sum divided by the sum of the denominators, computed by
    Megatron's schedule. Frozen modules have zero gradients.
    """

    def summed(batch: MicroBatch, rows_R: torch.Tensor, hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict]:
        logprob_R, entropy_R, *divergence = policy._logprob_and_entropy(batch, rows_R, hidden_RH, teachers=policy.teachers)
        value, _ = loss(make_loss_inputs(batch, rows_R, logprob_R, entropy_R, divergence=divergence))
        return value, value.new_full((), batch.denominator, dtype=torch.int), {}

    for chunk in policy.network.chunks:
        chunk.config.finalize_model_grads_func = reduce_whole_gradients
    with megatron_on_cpu():
        for chunk in policy.network.model:
            chunk.zero_grad_buffer()
        policy.network.pipeline.run(batches, summed, forward_only=False)
    for chunk in policy.network.chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    live = policy.hf_iterator.parameters
    policy.hf_iterator.parameters = {name: p.main_grad if p.requires_grad else torch.zeros_like(p) for name, p in live.items()}
    named = {name: gradient.cpu().clone() for name, gradient in policy.hf_weights()}
    policy.hf_iterator.parameters = live
    return named


def make_policy(model: Path, renderer: Renderer, layout: Layout, case: LayoutCase, *, lr: float, eps: float) -> Policy:
    return Policy(
        ModelSettings(path=str(model), dtype="float32"), layout,
        training=TrainingSettings(parallel=case.parallel_settings(), optim=OptimSettings(lr=lr, eps=eps), num_steps=3),
        special_tokens=renderer.special_tokens, temperature=0.7, bucket_mib=case.bucket_mib,
    )  # fmt: skip


def train_steps(policy: Policy, contexts: list[PackItem], *, num_steps: int, max_tokens: int, initial: HfTensors) -> dict[str, object]:
    """Run GRPO steps with micro-batches of at most `max_tokens` tokens (1: one per sequence).

    Return losses, gradient norms and the change of every tensor from `initial`. The learning rate
    keeps the changes far above the fp32 rounding of the weights.
    """
    loss = make_policy_objective(AlgoSettings(entropy_coef=0.1))
    metrics = [policy.update(policy.pack(contexts, max_tokens=max_tokens), loss, step=step) for step in range(num_steps)]
    change = {name: tensor.cpu() - initial.read(name) for name, tensor in policy.hf_weights()}
    return {"loss": [m["loss"] for m in metrics], "grad_norm": [m["grad_norm"] for m in metrics], "change": change}


def digest_parameters(policy: Policy) -> list[tuple[str, str]]:
    """Return (name, digest) of every parameter of this rank.

    Entries with the same name must be copies of each other.
    """
    placement, found = policy.hf_iterator.placement, []
    for name, parameter in policy.network.chunks.named_parameters():
        chunk, local = name.split(".", 1)
        layer = local.split(".")[3] if ".layers." in local and local.startswith("language") else ""
        place = f"pp{placement.pp_rank} chunk{chunk}" if layer or "final_layernorm" in local else ""
        tied = policy.network.chunks[0].share_embeddings_and_output_weights
        what = local.replace("embedding.word_embeddings", "output_layer") if tied else local
        cut = f"tp{placement.tp_rank}" if parameter.tensor_model_parallel else ""
        cut += f" ep{placement.ep_rank}" if ".mlp.experts." in local else ""
        found.append((f"{what} {place} {cut}", hashlib.sha256(parameter.detach().cpu().numpy().tobytes()).hexdigest()))
    return found


def padding_extrema(policy: Policy) -> list[list[float]]:
    """Return, for each tensor whose rows on this rank include vocabulary padding, the largest
    absolute value and gradient in the padding.
    """
    rows = padded_vocab(policy.spec.vocab_size, policy.layout.tp) // policy.layout.tp
    own = policy.spec.vocab_size - policy.layout.tp_rank * rows
    tables = [p for name, p in policy.network.chunks.named_parameters() if name.split(".", 1)[1] in PADDED_KEYS and own < rows]
    return [[tensor[own:].abs().max().item() for tensor in (table.detach(), table.main_grad)] for table in tables]


@cache
def make_example(model: Path) -> tuple[Renderer, list[PackItem]]:
    """Return the renderer and the example sequences of a model, which all layouts share."""
    renderer = Renderer(ModelSettings(path=str(model)))
    return renderer, make_example_items(renderer)


def run_layout(models: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    model, layout = models / case.model, build_layout(case.parallel_settings(), seed=0)
    renderer, contexts = make_example(model)
    stored = HfTensors(model)
    spec = read_spec(model)
    eps = 1e-3 if spec.experts and spec.delta_net else 1e-4  # see test_training_is_the_same_at_every_layout
    policy = make_policy(model, renderer, layout, case, lr=0.1, eps=eps)
    whole = pack(
        contexts, image_token_id=renderer.image_token_id, positions=spec.rope_positions, multiple_of=case.tp,
        device=policy.network.device,
    )  # fmt: skip  # in order, no shared prompts
    logits = full_logits(policy, whole)
    result: dict[str, object] = {
        "logits": None if logits is None else logits.cpu(), "mask": whole.mask_T.cpu(), "sent": {}, "padding": [],
    }  # fmt: skip
    if case.model == "odd":
        result["sent"] = {name: tensor.cpu().clone() for name, tensor in policy.hf_weights()}
    encoded = [None] * dist.get_world_size()
    dist.all_gather_object(encoded, (layout.pp_rank, layout.dp_rank, policy.network.chunks[0].num_images_encoded))
    result["encoded"], result["images"] = encoded, whole.grid_I3.shape[0]
    result["logprobs"] = policy.logprobs([whole])[0].cpu()
    for cut, max_tokens in (("one", 10_000), ("each", 1)):
        result[f"gradients_{cut}"] = compute_gradients(policy, policy.pack(contexts, max_tokens=max_tokens))
    result["first_step"] = train_steps(policy, contexts, num_steps=1, max_tokens=1, initial=stored)
    first, policy = policy, make_policy(model, renderer, layout, case, lr=1e-3, eps=1e-8)
    result["three_steps"] = train_steps(policy, contexts, num_steps=3, max_tokens=400, initial=stored)
    replicas, held = [None] * dist.get_world_size(), [None] * dist.get_world_size()
    dist.all_gather_object(replicas, digest_parameters(policy))
    result["copies"] = [entry for found in replicas for entry in found]
    dist.all_gather_object(held, (layout.tp_rank, layout.pp_rank, layout.dp_rank, asdict(measure_footprint(policy.network))))
    result["held"] = held
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, padding_extrema(policy))
    result["padding"] = [each for mine in found for each in mine]
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(first, policy)


def destroy_layout(*learners: TrainableModel) -> None:
    """Destroy the layout's process groups.

    Megatron only drops its references, and the gradient hooks of a model that is not closed keep
    its groups. A sequence of many layouts would accumulate thousands of threads.
    """
    dist.barrier()
    for learner in learners:
        learner.close()
    for group in parallel_state._global_process_group_list:
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    gc.collect()


def main(run: Callable[[Path, Path, str], None] = run_layout) -> None:
    """Run each layout of the command line, with the folder of models and that of the results."""
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=240)
    for layout in sys.argv[3:]:
        run(models, out, layout)


if __name__ == "__main__":
    main()
