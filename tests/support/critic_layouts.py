"""Computes values and updates of critics with a shared and with a separate backbone in several
parallel layouts. Run in a world by tests/parity/test_critic.py.

    critic_layouts.py MODEL ADAPTER OUT LAYOUT ...

Layouts are written as in parallel_layouts.py. In the first layout the script also runs PPO of a
policy with LoRA adapters, whose critic has its own adapters, with a checkpoint in between.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.algo.algorithms import ALGORITHMS
from megatron_rl.algo.objective import make_policy_objective
from megatron_rl.algo.value import make_value_objective, shared_value_loss, warmup_value_loss
from megatron_rl.batching.packing import pack
from megatron_rl.build import build_critic, build_policy
from megatron_rl.config import AlgoSettings, CriticSettings, LoraSettings, ModelSettings, OptimSettings, RunSettings, Settings
from megatron_rl.distributed.world import connect, read_world
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.network import Network, TrainingSettings
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.patches import patch_bytes
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.trainable_model import TrainableModel
from megatron_rl.run.checkpoint_state import InputDigests
from megatron_rl.run.checkpoints import Checkpoints, list_checkpoints
from megatron_rl.run.history import History
from megatron_rl.training_loop import make_updaters
from megatron_rl.types import MicroBatch
from tests.support.parallel_layouts import LayoutCase, destroy_layout, make_example

CRITIC = {"head_sizes": [8], "normalize_returns": True, "lr": 0.05, "cliprange_value": 0.3}
PAST_RETURNS = [1.0, 3.0, 5.0, 9.0]
COEF = 0.25
LORA = LoraSettings(rank=4, alpha=8.0, targets=["attention", "mlp", "vision", "projector"])


def randomize_head(network: Network) -> None:
    """Fill every layer of the value head with random numbers, because a new head predicts 0 for any
    input.
    """
    head = network.chunks[-1].value_head
    if head is not None:
        generator = torch.Generator().manual_seed(5)
        for parameter in head.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def set_returns(batches: list[MicroBatch]) -> list[MicroBatch]:
    """Set return targets that depend only on the tokens, not on how they are packed."""
    for batch in batches:
        batch.return_T = ((7 * batch.token_T + 3 * batch.target_T) % 11) / 2.0 * batch.mask_T
        batch.old_value_T = 0.5 * batch.return_T
    return batches


def run_layout(model: Path, out: Path, text: str) -> None:
    case = LayoutCase.parse(text)
    layout, (renderer, contexts) = build_layout(case.parallel_settings(), seed=0), make_example(model)
    spec = read_spec(model)
    whole = [pack(contexts, image_token_id=renderer.image_token_id, positions=spec.rope_positions, multiple_of=case.tp)]
    optim, settings = OptimSettings(lr=0.1, eps=1e-3), ModelSettings(path=str(model))
    policy = Policy(
        settings, layout, training=TrainingSettings(parallel=case.parallel_settings(), optim=optim, num_steps=3),
        special_tokens=renderer.special_tokens, temperature=0.7, critic=CriticSettings(**CRITIC),
    )  # fmt: skip
    critic = Critic(
        CriticSettings(backbone="own", **CRITIC),
        layout,
        training=TrainingSettings(parallel=case.parallel_settings(), optim=optim, num_steps=3),
        model=settings,
    )
    for network in (policy.network, critic.network):
        randomize_head(network)
    for each in (policy, critic):
        each.update_return_stats(PAST_RETURNS[:1])
        each.update_return_stats(PAST_RETURNS[1:])
    of_policy, of_values = make_policy_objective(AlgoSettings(name="ppo")), make_value_objective(CriticSettings(**CRITIC), level="tokens")
    result: dict[str, object] = {"mask": whole[0].mask_T, "values": policy.values(whole)[0], "own_values": critic.values(whole)[0]}
    result |= count_forward_passes(policy, whole)
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    batches = set_returns(policy.pack(contexts, max_tokens=1))
    result["alone"] = policy.update(batches, warmup_value_loss(of_policy, of_values), step=0, value_head_only=True)
    result["moved_alone"] = max((tensor - before[name]).abs().max().item() for name, tensor in policy.hf_weights())
    result["values_alone"] = policy.values(whole)[0]
    policy.restart_optimizer()
    result["joint"] = policy.update(batches, shared_value_loss(of_policy, of_values, COEF), step=0)
    result["change"] = {name: tensor - before[name] for name, tensor in policy.hf_weights()}
    result["values_joint"] = policy.values(whole)[0]
    result["own"] = critic.update(batches, of_values, step=0)
    result["own_values_after"] = critic.values(whole)[0]
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    destroy_layout(policy, critic)


def count_forward_passes(policy: Policy, whole: list[MicroBatch]) -> dict[str, object]:
    """Compute logprobs and values, separately and together, and count this rank's forward passes
    through the backbone for each.
    """
    passes: list[int] = []
    hook = policy.network.chunks[0].register_forward_hook(lambda *_: passes.append(1))

    def counted(read: Callable[[list[MicroBatch]], list[torch.Tensor]]) -> tuple[torch.Tensor, int]:
        passes.clear()
        (said,) = read(whole)
        return said, len(passes)

    reads = {"logprobs": policy.logprobs, "values": policy.values, "both": policy.logprobs_and_values}
    found = {f"read_{name}": counted(read) for name, read in reads.items()}
    hook.remove()
    return found


def run_adapters(model: Path, adapter: Path, out: Path, text: str) -> None:
    """Run three steps, save a checkpoint as a run does, and run the fourth step twice: without
    interruption, and with new models resumed from the checkpoint.
    """
    case = LayoutCase.parse(text)
    layout, (renderer, contexts) = build_layout(case.parallel_settings(), seed=0), make_example(model)
    spec = read_spec(model)
    whole = [pack(contexts, image_token_id=renderer.image_token_id, positions=spec.rope_positions, multiple_of=case.tp)]
    settings = Settings(
        model=ModelSettings(path=str(model)), lora=LORA, parallel=case.parallel_settings(), optim=OptimSettings(lr=1e-2, eps=1e-4),
        algo=AlgoSettings(name="ppo", temperature=0.7), run=RunSettings(dir=str(out / f"run {text}"), steps=4),
        critic=CriticSettings(backbone="own", lora=replace(LORA, path=str(adapter)), **CRITIC),
    )  # fmt: skip

    def built(seed: int) -> tuple[Policy, Critic]:
        ours = replace(settings, run=replace(settings.run, seed=seed))
        given = {"patches": patch_bytes, "num_steps": 4}
        return build_policy(ours, layout, renderer, is_rl=True, has_value_head=True, **given), build_critic(ours, layout, **given)

    policy, critic = built(seed=5)
    randomize_head(critic.network)
    critic.update_return_stats(PAST_RETURNS)
    batches, update = set_returns(policy.pack(contexts, max_tokens=200)), make_updaters(settings, policy, critic, ALGORITHMS)
    result: dict[str, object] = {"mask": whole[0].mask_T, "own_values": critic.values(whole)[0]}
    before = {"policy": copy_parameters(policy), "critic": copy_parameters(critic)}
    result["steps"] = [update(batches, step) for step in range(3)]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(
        found, {name: describe_parameters(each, before[name]) for name, each in (("policy", policy), ("critic", critic))}
    )
    result["parameters"] = found
    result["exported"] = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    Checkpoints(settings, policy, critic, resume_from=None, inputs=InputDigests()).save(3, history=History(), metrics={})
    (checkpoint,) = list_checkpoints(out / f"run {text}" / "checkpoints")
    others = built(seed=9)
    Checkpoints(settings, *others, resume_from=checkpoint, inputs=InputDigests()).restore()
    for name, (speaker, valuer) in {"straight": (policy, critic), "resumed": others}.items():
        metrics = make_updaters(settings, speaker, valuer, ALGORITHMS)(batches, 3)
        result[name] = {"metrics": metrics, "logprobs": speaker.logprobs(whole)[0], "values": valuer.values(whole)[0]}
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"adapters {text}.pt")
    destroy_layout(policy, critic, *others)


def copy_parameters(learner: TrainableModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.network.chunks.named_parameters()}


def describe_parameters(learner: TrainableModel, before: dict[str, torch.Tensor]) -> list[tuple[str, bool, bool]]:
    """Return for each of this rank's parameters its name, whether it has a gradient buffer, and
    whether it has changed.
    """
    live = learner.network.chunks.named_parameters()
    return [(name, "main_grad" in parameter.__dict__, not torch.equal(parameter, before[name])) for name, parameter in live]


def main() -> None:
    model, adapter, out, *layouts = sys.argv[1:]
    connect(read_world(), timeout_s=240)
    for layout in layouts:
        run_layout(Path(model), Path(out), layout)
    run_adapters(Path(model), Path(adapter), Path(out), layouts[0])


if __name__ == "__main__":
    main()
