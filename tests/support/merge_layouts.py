"""Merges checkpoints of a policy in several parallel layouts. Run under torchrun by
test_checkpoint_merge.py.

    merge_layouts.py MODEL OUT LAYOUT ...

A layout is written as in parallel_layouts.py, with full or lora as the model. The training state of
the first layout of each model is saved in OUT and loaded by its other layouts.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import LoraSettings, MergeSettings, ModelSettings, OptimSettings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.policy.checkpoint_merge import CheckpointMerge
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from tests.support.parallel_layouts import LayoutCase, destroy_layout, make_example, weighted_nll

MERGES = {
    "mean": MergeSettings(method="mean"),
    "ema": MergeSettings(method="ema", alpha=0.3),
    "ties": MergeSettings(method="ties", density=0.1),
    "ties_ema": MergeSettings(method="ties_ema", alpha=0.6, density=0.4),
}
SAVED = "ties_ema"
NUM_CHECKPOINTS = 3
LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention", "mlp", "vision", "projector"])


def make_policy(model: Path, case: LayoutCase) -> Policy:
    layout, (renderer, _) = build_layout(case.parallel_settings(), seed=0), make_example(model)
    lora = LORA if case.model == "lora" else LoraSettings()
    return Policy(
        ModelSettings(path=str(model)), layout,
        training=TrainingSettings(
            parallel=case.parallel_settings(), optim=OptimSettings(lr=0.01, eps=1e-4), num_steps=NUM_CHECKPOINTS, lora=lora
        ),
        special_tokens=renderer.special_tokens, temperature=0.7,
    )  # fmt: skip


def export(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in policy.hf_weights()}


def export_merged(policy: Policy, merge: CheckpointMerge) -> dict[str, torch.Tensor]:
    """Return the weights of a merge, which the iterator must copy before it is exhausted."""
    own, policy.network.merge = policy.network.merge, merge
    found = dict(list(policy.teacher_weights()))
    policy.network.merge = own
    return {name: tensor.cpu() for name, tensor in found.items()}


def same(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == others.keys() and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def run_layout(model: Path, out: Path, text: str, folder: Path) -> None:
    case = LayoutCase.parse(text)
    policy = make_policy(model, case)
    chunks, contexts = policy.network.chunks, make_example(model)[1]
    merges = {name: CheckpointMerge(chunks, settings) for name, settings in MERGES.items()}
    policy.network.merge = merges[SAVED]
    checkpoints = [export(policy)]
    for step in range(NUM_CHECKPOINTS):
        policy.update(policy.pack(contexts, max_tokens=10_000), weighted_nll, step=step)
        for merge in merges.values():
            merge.add()
        checkpoints.append(export(policy))
    merged = {name: export_merged(policy, merge) for name, merge in merges.items()}
    is_kept = same(export(policy), checkpoints[-1])
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    policy.save(folder, background=True).finish()
    if dist.get_rank() == 0:
        torch.save({"checkpoints": checkpoints, "merged": merged, "is_kept": is_kept}, out / f"{text}.pt")
    destroy_layout(policy)


def load_layout(model: Path, out: Path, text: str, folder: Path) -> None:
    case = LayoutCase.parse(text)
    policy = make_policy(model, case)
    policy.network.merge = CheckpointMerge(policy.network.chunks, MERGES[SAVED])
    policy.load(folder, seed=0)
    found = {"merged": export_merged(policy, policy.network.merge), "num": policy.network.merge.num_checkpoints}
    policy.network.merge.add()
    found["next"] = export_merged(policy, policy.network.merge)
    if dist.get_rank() == 0:
        torch.save(found, out / f"{text}.pt")
    destroy_layout(policy)


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(read_world(), timeout_s=240)
    for text in sys.argv[3:]:
        folder = out / LayoutCase.parse(text).model
        run = load_layout if folder.exists() else run_layout
        dist.barrier()
        run(model, out, text, folder)


if __name__ == "__main__":
    main()
