"""Computes the same policy with LoRA adapters in several parallel layouts. Run under torchrun by
test_lora.py.

    lora_layouts.py MODELS ADAPTER OUT LAYOUT ...

Layouts are written as in parallel_layouts.py.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.batching.minibatches import PackItem
from megatron_rl.batching.packing import pack
from megatron_rl.config import AlgoSettings, LoraSettings, ModelSettings, OptimSettings, ParallelSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.optimizer import grad_buffers
from megatron_rl.policy.optimizer_state import own_optimizers
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.types import MicroBatch
from megatron_rl.weights.stream import is_adapter
from tests.support.parallel_layouts import LayoutCase, compute_gradients, destroy_layout, digest_parameters, full_logits, make_example

LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention", "mlp", "vision", "projector"])


def compute_adapter_gradients(policy: Policy, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    compute_gradients(policy, batches)
    live = policy.adapter_iterator.parameters
    policy.adapter_iterator.parameters = {name: parameter.main_grad for name, parameter in live.items()}
    named = {name: gradient.clone() for name, gradient in policy.adapter_iterator.tensors()}
    policy.adapter_iterator.parameters = live
    return named


def copy_base_parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.network.chunks.named_parameters() if not is_adapter(name)}


def train_steps(policy: Policy, contexts: list[PackItem], *, num_steps: int) -> dict[str, object]:
    """Run GRPO steps with several micro-batches each.

    Return losses, gradient norms, the trained adapters, and whether the base weights are unchanged.
    """
    before = copy_base_parameters(policy)
    loss = make_policy_objective(AlgoSettings(entropy_coef=0.1))
    metrics = [policy.update(policy.pack(contexts, max_tokens=200), loss, step=step) for step in range(num_steps)]
    return {
        "loss": [m["loss"] for m in metrics],
        "grad_norm": [m["grad_norm"] for m in metrics],
        "adapters": {name: tensor.clone() for name, tensor in policy.adapter_iterator.tensors()},
        "base_unchanged": all(torch.equal(tensor, before[name]) for name, tensor in copy_base_parameters(policy).items()),
    }


def count_parameters(policy: Policy) -> dict[str, int]:
    """Return the number of elements on this rank: in adapters, trained parameters, gradient buffers
    and optimizer state.
    """
    states = [state for part in own_optimizers(policy.network.optimizer) for state in part.optimizer.state.values()]
    state = sum(t.numel() for s in states for t in s.values() if t.dim())
    return {
        "adapters": sum(p.numel() for name, p in policy.network.chunks.named_parameters() if is_adapter(name)),
        "trained": sum(p.numel() for p in policy.network.chunks.parameters() if p.requires_grad),
        "gradients": sum(buffer.numel_unpadded for chunk in policy.network.model for buffer in grad_buffers(chunk)),
        "state": state,
    }


def resume_training(trained: Policy, make: Callable[[], Policy], contexts: list[PackItem], folder: Path) -> dict[str, object]:
    """Save the training state in the world's first layout.

    Every layout, including the first, loads it and runs one more step.
    """
    if not folder.exists():
        dist.barrier()
        folder.mkdir(exist_ok=True)
        trained.save(folder, background=False).finish()
        dist.barrier()
    policy = make()
    policy.load(folder, seed=0)
    loaded = {name: tensor.clone() for name, tensor in policy.adapter_iterator.tensors()}
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    keys = sorted(key for key in stored if is_adapter(key) and not key.startswith("optimizer."))
    return {"adapters": loaded, "keys": keys, "step": train_steps(policy, contexts, num_steps=1)}


def run_layout(models: Path, adapter: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    parallel, model = case.parallel_settings(), models / case.model
    renderer, contexts = make_example(model)
    whole = pack(contexts, image_token_id=renderer.image_token_id, positions=read_spec(model).rope_positions, multiple_of=case.tp)

    experts = read_spec(model).experts
    adapters = replace(LORA, rank=8) if experts else LORA  # adapters of experts have no dropout, and a rank of 8
    # Experts with few tokens have gradients near zero, of which AdamW would multiply the rounding
    # errors. Qwen3.5 with experts has a smaller learning rate, with which its layouts differ less
    # (benchmarks/results/experts_2026-11-29.md).
    optim = OptimSettings(lr=1e-2) if experts is None else OptimSettings(lr=1e-3 if experts.shared_ffn_size else 1e-2, eps=1e-6)
    made: list[Policy] = []

    def make(lora: LoraSettings | None, parallel: ParallelSettings = parallel, seed: int = 5) -> Policy:
        layout = build_layout(parallel, seed=3)  # also seeds the generators
        made.append(Policy(
            ModelSettings(path=str(model)), layout,
            training=TrainingSettings(
                parallel=parallel, optim=optim, num_steps=3, lora=lora or LoraSettings(), seed=seed
            ),
            special_tokens=renderer.special_tokens, temperature=0.7, keep_reference=True,
        ))  # fmt: skip
        return made[-1]

    base = make(None)
    result: dict[str, object] = {"mask": whole.mask_T, "base_logprobs": base.logprobs([whole])[0]}
    fresh = make(adapters)
    result["fresh_logprobs"] = fresh.logprobs([whole])[0]
    result["three_steps"] = train_steps(fresh, contexts, num_steps=3)
    result["sizes"] = count_parameters(fresh)
    replicas = [None] * dist.get_world_size()
    dist.all_gather_object(replicas, digest_parameters(fresh))
    result["copies"] = [entry for found in replicas for entry in found]
    result["resumed"] = resume_training(fresh, lambda: make(adapters, seed=9), contexts, out / "state")
    result["fourth_step"] = train_steps(fresh, contexts, num_steps=1)

    loaded = make(replace(adapters, path=str(adapter)))
    result["logits"] = full_logits(loaded, whole)
    result["logprobs"] = loaded.logprobs([whole])[0]
    result["reference_logprobs"] = loaded.logprobs([whole], weights="reference")[0]
    result["gradients"] = compute_adapter_gradients(loaded, loaded.pack(contexts, max_tokens=200))
    result["merged"] = {name: tensor.clone() for name, tensor in loaded.hf_weights()}
    result["again"] = {name: tensor.clone() for name, tensor in loaded.adapter_iterator.tensors()}
    loaded.save_adapter(out / f"adapter {text}")

    dropping = replace(adapters, path=str(adapter), dropout=0.3)
    for name, recompute in () if experts else (("dropped", case.recompute), ("dropped_again", "none"), ("dropped_recomputed", "full")):
        policy = make(dropping, replace(parallel, recompute=recompute))
        result[f"{name}_logprobs"] = policy.logprobs([whole])[0]
        result[f"{name}_gradients"] = compute_adapter_gradients(policy, policy.pack(contexts, max_tokens=200))
    replicas = [None] * dist.get_world_size()
    result["dropped_step"] = train_steps(made[-1], contexts, num_steps=1)
    dist.all_gather_object(replicas, digest_parameters(made[-1]))
    result["dropped_copies"] = [entry for found in replicas for entry in found]
    if fresh.layout.is_last_stage and fresh.layout.tp_rank == 0 and fresh.layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(*made)


def main() -> None:
    models, adapter, out = (Path(argument) for argument in sys.argv[1:4])
    connect(read_world(), timeout_s=240)
    for layout in sys.argv[4:]:
        run_layout(models, adapter, out, layout)


if __name__ == "__main__":
    main()
