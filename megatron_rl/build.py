"""The parts of a run, each made of its settings on every rank: networks, engines, and the fleet that plays episodes on them."""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.algo.algorithms import needs_reference
from megatron_rl.config import Settings
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import World, default_store, run_on_rank_zero
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.parallel import Layout
from megatron_rl.policy.patches import Patches
from megatron_rl.policy.policy import Policy
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.episode import EpisodeSettings, Timed, untimed
from megatron_rl.rollout.health import ServerSupervisor
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.manager import RolloutManager, Trainer
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.server_api import VllmServer, expected_label, read_engine_token
from megatron_rl.rollout.vllm.weight_sender import WeightSender
from megatron_rl.run.shutdown import StopSignal


@dataclass(slots=True, frozen=True)
class PolicyAndCritic:
    """Policy and critic, which leave the device to the engine together."""

    policy: Policy
    critic: Critic

    def sleep(self) -> None:
        self.critic.sleep()
        self.policy.sleep()

    def wake(self) -> None:
        self.policy.wake()
        self.critic.wake()


@dataclass(slots=True, frozen=True)
class NoOffload:
    """A trainer whose devices no engine needs."""

    def sleep(self) -> None:
        """It stays."""

    def wake(self) -> None:
        """See sleep."""


def build_policy(
    settings: Settings, layout: Layout, renderer: Renderer, *, patches: Patches, num_steps: int, is_rl: bool, has_values: bool = False
) -> Policy:
    """This rank's share of the model with its optimizer, for the stage's steps."""
    shares_trunk = has_values and settings.critic.backbone == "shared"
    return Policy(
        settings.model, layout,
        parallel=settings.parallel, optim=settings.optim, num_steps=num_steps,
        banned_ids=renderer.banned_ids, image_token_id=renderer.image_token_id,
        temperature=settings.algo.temperature if is_rl else 1.0,
        keep_reference=is_rl and needs_reference(settings.algo), bucket_mib=settings.engine.bucket_mib,
        lora=settings.lora, seed=settings.run.seed, critic=settings.critic if shares_trunk else None, patches=patches,
    )  # fmt: skip


def build_critic(settings: Settings, layout: Layout, *, patches: Patches, num_steps: int) -> Critic:
    """This rank's share of a critic with a trunk of its own. Its optimizer is the policy's but for the learning rate."""
    optim = replace(settings.optim, lr=settings.critic.lr, lr_by_module={})
    return Critic(
        settings.critic, layout, model=settings.model, parallel=settings.parallel, optim=optim, num_steps=num_steps,
        seed=settings.run.seed, patches=patches,
    )  # fmt: skip


def build_rollout_manager(
    settings: Settings, task: Task, *,
    trainer: Trainer, renderer: Renderer, world: World, gallery: ImageExchange, stop: StopSignal, tell: Callable[[str], None],
    household: ServerSupervisor | None = None, timed: Callable[[int, int], Timed] = lambda *_: untimed,
) -> RolloutManager:  # fmt: skip
    """This process's engine, or its way to all of them, and its place in the fleet, whose rollouts come together by `gallery`. All ranks
    together. `household`: see build_remote; `timed`: see RolloutManager."""
    size, num = settings.engine.tp, settings.engine.max_num_seqs
    seat = EngineRank(index=world.rank // size, num_engines=world.size // size, max_episodes=num, counter=default_store())
    if settings.engine.mode == "server":
        engine = build_server_engine(settings, renderer, world, gallery=gallery, tell=tell, household=household)
        seat = replace(seat, index=world.rank, num_engines=world.size, max_episodes=max(1, num * len(engine.urls) // world.size))
    else:
        engine = build_colocated_engine(settings, renderer, world)
    return RolloutManager(
        task,
        engine=engine, renderer=renderer, trainer=trainer, gather=gallery.gather_rollouts, share=gallery.broadcast_rollouts,
        episode=episode_settings(settings),
        round_settings=generation_settings(settings),
        seat=seat, grace=stop.within_grace, patience_s=settings.run.outage_timeout_s, tell=tell, timed=timed,
    )  # fmt: skip


def owner_of(settings: Settings, name: str) -> str:
    """Return the name of this run for other runs that ask for the same server. Example: `runs/mine (4711 on node1, 0a1b2c3d)`.

    Only the last two names of the run folder: vLLM 0.32.0 removes absolute paths from its answers (sanitize_message in
    entrypoints/serve/exception_handling/utils.py).
    """
    return f"{'/'.join(Path(settings.run.dir).absolute().parts[-2:])} ({os.getpid()} on {socket.gethostname()}, {name})"


def build_server_engine(
    settings: Settings,
    renderer: Renderer,
    world: World,
    *,
    gallery: ImageExchange,
    tell: Callable[[str], None],
    household: ServerSupervisor | None,
) -> ServerEngine:
    """This process's way to all engines; the main one has them for the run, and gives them their weights. All ranks together. `household`
    is that of servers which the run has started itself, on the main rank: they are nobody else's.

    ValueError: another run has one of them.
    """
    given, name = settings.engine, run_on_rank_zero(lambda: secrets.token_hex(4))
    longest_s, is_own = settings.parallel.timeout_s, run_on_rank_zero(lambda: household is not None)
    servers, sender = [VllmServer(url, token=read_engine_token(given), is_own=is_own, longest_s=longest_s) for url in given.urls], None
    if world.is_main:
        sender = WeightSender(
            servers, wanted=expected_label(settings, renderer), owner=owner_of(settings, name),
            kind="nccl" if world.device.type == "cuda" else "gloo", bucket_bytes=int(given.bucket_mib * 2**20),
            timeout_s=longest_s,
        )  # fmt: skip
    run_on_rank_zero(lambda: sender.lock_servers() if not is_own else None)
    return ServerEngine(
        servers, given, name=name, image_token_id=renderer.image_token_id, stop_ids=renderer.stop_ids, decode=renderer.tokenizer.decode,
        meet=gallery.broadcast_rollouts, sender=sender, household=household, place=world.rank, tell=tell,
    )  # fmt: skip


def build_colocated_engine(settings: Settings, renderer: Renderer, world: World) -> ColocatedEngine:
    """This process's engine: one alone, or a part of one that spans engine.tp neighboring ranks; it has no weights before the trainer's
    are served. All ranks together."""
    group, size, timeout_s = None, settings.engine.tp, settings.parallel.timeout_s
    if size > 1:
        limit = timedelta(seconds=timeout_s)
        groups = [dist.new_group(list(range(first, first + size)), backend="gloo", timeout=limit) for first in range(0, world.size, size)]
        group = groups[world.rank // size]
    return ColocatedEngine(
        settings.model.path, settings.engine, image_token_id=renderer.image_token_id,
        banned_ids=renderer.banned_ids, stop_ids=renderer.stop_ids, group=group, pixels=renderer.final_pixels,
        reads_weights=False, timeout_s=timeout_s,
    )  # fmt: skip


def generation_settings(settings: Settings) -> GenerationSettings:
    """How many episodes a step of training asks for."""
    batch = settings.batch
    return GenerationSettings(
        num_prompts=batch.prompts_per_step, group_size=batch.group_size, max_rounds=settings.filter.max_num_gen_batches,
        max_staleness=settings.run.max_staleness, num_steps=settings.run.steps,
    )  # fmt: skip


def episode_settings(settings: Settings) -> EpisodeSettings:
    """How training plays an episode."""
    task, engine = settings.task, settings.engine
    return EpisodeSettings(
        temperature=settings.algo.temperature, seed=settings.run.seed,
        max_turns=task.max_turns, max_new_tokens=task.max_new_tokens, max_seconds=task.max_seconds,
        environment_s=task.env_timeout_s, errors_end=task.stop_on_tool_error,
        max_context=engine.max_model_len, max_images=engine.max_images, max_pixels=task.max_pixels,
    )  # fmt: skip
