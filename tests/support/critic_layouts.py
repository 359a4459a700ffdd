"""Run in a world by tests/parity/test_critic.py: what critics on the policy's trunk and on one of their own compute at several layouts.

usage: critic_layouts.py MODEL OUT LAYOUT ...     (layouts as in layouts.py)
"""

import sys
from pathlib import Path

import torch

from megatron_rl.algo.objective import objective
from megatron_rl.algo.value import head_alone, joint, value_objective
from megatron_rl.batch import pack
from megatron_rl.config import AlgoSettings, CriticSettings, ModelSettings, OptimSettings
from megatron_rl.models.hf_config import read_spec
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.network import Network
from megatron_rl.policy.parallel import build_layout
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Batch
from megatron_rl.world import connect, place
from tests.support.layouts import Case, forget_layout
from tests.support.packed import example_contexts

CRITIC = {"head_sizes": [8], "normalize_returns": True, "lr": 0.05, "clip": 0.3}
SEEN = [1.0, 3.0, 5.0, 9.0]
COEF = 0.25


def fill_head(network: Network) -> None:
    """Numbers in every layer: a new head says 0, whatever it is shown."""
    head = network.chunks[-1].value_head
    if head is not None:
        generator = torch.Generator().manual_seed(5)
        for parameter in head.parameters():
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def told(batches: list[Batch]) -> list[Batch]:
    """With targets that depend on the tokens alone, not on how they were cut."""
    for batch in batches:
        batch.return_T = ((7 * batch.token_T + 3 * batch.target_T) % 11) / 2.0 * batch.mask_T
        batch.old_value_T = 0.5 * batch.return_T
    return batches


def walk(model: Path, out: Path, text: str) -> None:
    case = Case.parse(text)
    layout, renderer = build_layout(case.settings(), seed=0), Renderer(ModelSettings(path=str(model)))
    contexts, spec = example_contexts(renderer), read_spec(model)
    whole = [pack(contexts, image_token_id=renderer.image_token_id, positions=spec.positions, multiple_of=case.tp)]
    optim, settings = OptimSettings(lr=0.1, eps=1e-4), ModelSettings(path=str(model))
    policy = Policy(
        settings, layout, parallel=case.settings(), optim=optim, num_steps=3, banned_ids=renderer.banned_ids,
        image_token_id=renderer.image_token_id, temperature=0.7, critic=CriticSettings(**CRITIC),
    )  # fmt: skip
    critic = Critic(CriticSettings(trunk="own", **CRITIC), layout, model=settings, parallel=case.settings(), optim=optim, num_steps=3)
    for network in (policy.network, critic.network):
        fill_head(network)
    for each in (policy, critic):
        each.see(SEEN[:1])
        each.see(SEEN[1:])
    of_policy, of_values = objective(AlgoSettings(name="ppo")), value_objective(CriticSettings(**CRITIC), over="tokens")
    result: dict[str, object] = {"mask": whole[0].mask_T, "values": policy.values(whole)[0], "own_values": critic.values(whole)[0]}
    before = {name: tensor.clone() for name, tensor in policy.hf_weights()}
    batches = told(policy.pack(contexts, max_tokens=1))
    result["alone"] = policy.update(batches, head_alone(of_policy, of_values), step=0, head_alone=True)
    result["moved_alone"] = max((tensor - before[name]).abs().max().item() for name, tensor in policy.hf_weights())
    result["values_alone"] = policy.values(whole)[0]
    policy.restart_optimizer()
    result["joint"] = policy.update(batches, joint(of_policy, of_values, COEF), step=0)
    result["change"] = {name: tensor - before[name] for name, tensor in policy.hf_weights()}
    result["values_joint"] = policy.values(whole)[0]
    result["own"] = critic.update(batches, of_values, step=0)
    result["own_values_after"] = critic.values(whole)[0]
    if layout.is_last_stage and layout.tp_rank == 0 and layout.dp_rank == 0:
        torch.save(result, out / f"{text}.pt")
    forget_layout()


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    connect(place(), timeout_s=240)
    for layout in sys.argv[3:]:
        walk(model, out, layout)


if __name__ == "__main__":
    main()
