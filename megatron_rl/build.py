"""Builds models, rollout engines and the trainer context from a run's settings.

All functions in this module are called on every rank.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch.distributed as dist

from megatron_rl.algo.algorithms import ALGORITHMS, Algorithm, needs_reference
from megatron_rl.algo.divergences import make_divergence
from megatron_rl.algo.rollout_correction import mismatch_warnings
from megatron_rl.batching.privileged import PrivilegedPrompt
from megatron_rl.config import DistillSettings, Settings
from megatron_rl.data.data_digests import check_same_data, data_digests
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import World, all_gather_object, default_store, long_timeout_group, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.observe.judge_stats import JudgeStats
from megatron_rl.policy.checkpoint_merge import CheckpointMerge
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.divergence import TeacherTerm
from megatron_rl.policy.kernels import transformer_engine_error
from megatron_rl.policy.network import TrainingSettings
from megatron_rl.policy.parallel import Layout, build_layout, destroy_layout
from megatron_rl.policy.patches import ImagePatchFn
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.server_teacher import ServerTeacher
from megatron_rl.policy.teacher import Teacher, TeacherModel, load_teacher_model
from megatron_rl.registry import Plugins, has_critic
from megatron_rl.rollout.colocated import ColocatedEngine
from megatron_rl.rollout.episode import EpisodeSettings
from megatron_rl.rollout.health import ServerControl, ServerSupervisor
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.manager import Offloadable, RankCollectives, RolloutManager, RunCallbacks
from megatron_rl.rollout.renderer import Renderer, max_inline_pixels
from megatron_rl.rollout.scheduler import GenerationSettings
from megatron_rl.rollout.server_engine import ServerEngine
from megatron_rl.rollout.task import Task
from megatron_rl.rollout.vllm.server_api import VllmServer, expected_engine_fingerprint, read_engine_token
from megatron_rl.rollout.vllm.teacher_client import TeacherClients
from megatron_rl.rollout.vllm.weight_sender import WeightSender
from megatron_rl.run.checkpoint_state import CheckpointState, InputDigests
from megatron_rl.run.checkpoints import Checkpoints, find_checkpoint
from megatron_rl.run.directory import ResumeState
from megatron_rl.run.record import Run
from megatron_rl.run.shutdown import StopSignal
from megatron_rl.weights.formats.model_digests import check_same_model, model_digests
from megatron_rl_sandbox.token import read_token


@dataclass(slots=True, frozen=True)
class PolicyAndCritic:
    """Offloads the policy and the critic together to host memory."""

    policy: Policy
    critic: Critic

    def sleep(self) -> None:
        """Offload the critic and the policy to free device memory for the rollout engine."""
        self.critic.sleep()
        self.policy.sleep()

    def wake(self) -> None:
        """Move the policy and the critic back to the device."""
        self.policy.wake()
        self.critic.wake()


@dataclass(slots=True, frozen=True)
class NoOffload:
    """No-op implementation of offloading, used if no rollout engine shares the trainer's device."""

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""


def build_policy(
    settings: Settings,
    layout: Layout,
    renderer: Renderer,
    *,
    patches: ImagePatchFn,
    num_steps: int,
    is_rl: bool,
    has_value_head: bool = False,
) -> Policy:
    """Build this rank's shard of the policy, with an optimizer schedule of `num_steps` steps."""
    shares_trunk = has_value_head and settings.critic.backbone == "shared"
    return Policy(
        settings.model, layout,
        training=TrainingSettings(
            parallel=settings.parallel, optim=settings.optim, num_steps=num_steps, lora=settings.lora, seed=settings.run.seed,
            router_loss_coefs=(settings.algo.router_aux_loss_coef, settings.algo.router_z_loss_coef),
        ),
        special_tokens=renderer.special_tokens,
        temperature=settings.algo.temperature if is_rl else 1.0,
        keep_reference=is_rl and needs_reference(settings.algo), bucket_mib=settings.engine.bucket_mib,
        critic=settings.critic if shares_trunk else None, patches=patches,
    )  # fmt: skip


def build_critic(settings: Settings, layout: Layout, *, patches: ImagePatchFn, num_steps: int) -> Critic:
    """Build this rank's shard of a critic with its own backbone.

    The critic uses the policy's optimizer settings, except for the learning rate.
    """
    optim = replace(settings.optim, lr=settings.critic.lr, lr_by_module={})
    return Critic(
        settings.critic, layout, model=settings.model, patches=patches,
        training=TrainingSettings(
            parallel=settings.parallel, optim=optim, num_steps=num_steps, lora=settings.critic.lora, seed=settings.run.seed
        ),
    )  # fmt: skip


def build_teachers(settings: Settings, layout: Layout, policy: Policy, *, patches: ImagePatchFn) -> list[Teacher]:
    """Build this rank's shards of the teachers in distill.teacher_paths."""
    distill, found = settings.distill, []
    for path in distill.teacher_paths:
        model = load_teacher_model(path, layout, dtype=settings.model.dtype, patches=patches, key=distill.teacher_key(path))
        found.append(Teacher(model, layout, policy=policy.distribution, term=make_teacher_term(distill)))
    return found


def make_teacher_term(distill: DistillSettings) -> TeacherTerm | None:
    """Return the divergence that a teacher adds to an update; None if it adds none."""
    if not distill.has_divergence:
        return None
    return TeacherTerm(divergence=make_divergence(distill), top_k=distill.top_k if distill.support == "top_k" else 0)


def merge_checkpoints_as_teacher(settings: Settings, layout: Layout, policy: Policy) -> None:
    """Let the merge of the policy's checkpoints become its teacher (distill.merge).

    A teacher that generates responses does so in the rollout engine (Policy.teacher_weights).
    """
    network = policy.network
    merge = network.merge = CheckpointMerge(network.chunks, settings.distill.merge)
    if settings.distill.generates_responses:
        return
    model = TeacherModel(chunks=network.chunks, pipeline=network.pipeline, vocab_size=policy.spec.vocab_size, loaded=merge.loaded)
    term = make_teacher_term(settings.distill)
    policy.make_teacher = lambda: Teacher(model, layout, policy=policy.distribution, term=term)


def use_policy_as_teacher(settings: Settings, layout: Layout, policy: Policy) -> None:
    """Let the policy's weights at the start of each step be its teacher (Policy.teach_itself)."""
    network, term = policy.network, make_teacher_term(settings.distill)
    model = TeacherModel(chunks=network.chunks, pipeline=network.pipeline, vocab_size=policy.spec.vocab_size, loaded=nullcontext)
    policy.make_teacher = lambda: Teacher(model, layout, policy=policy.distribution, term=term)


def build_privileged_prompt(distill: DistillSettings, renderer: Renderer) -> PrivilegedPrompt:
    """Build the function that adds information for the teacher to prompts.

    Special tokens in the information, which comes from the data, are encoded as ordinary text.
    """
    encode = partial(renderer.tokenizer.encode, add_special_tokens=False, split_special_tokens=True)
    return PrivilegedPrompt(distill.privileged_prompt, encode, renderer.end_id)


def build_rollout_manager(
    settings: Settings, task: Task, *,
    trainer: Offloadable, renderer: Renderer, world: World, image_exchange: ImageExchange, callbacks: RunCallbacks,
    supervisor: ServerSupervisor | None = None,
) -> RolloutManager:  # fmt: skip
    """Build the rollout manager with a colocated engine or a client for inference servers.

    All ranks must call this function together.

    Args:
        settings: Settings of the run.
        task: Task of the episodes.
        trainer: Trainer that is offloaded while a colocated engine uses the device.
        renderer: Renders prompts and observations.
        world: Rank and device of this process, and the number of processes in the run.
        image_exchange: Gathers the rollouts of all ranks.
        callbacks: Functions of the run that the rollout manager calls.
        supervisor: See `build_server_engine`.
    """
    size, num = settings.engine.tp, settings.engine.max_num_seqs
    engine_rank = EngineRank(index=world.rank // size, num_engines=world.size // size, max_episodes=num, counter=default_store())
    if settings.engine.mode == "server":
        engine = build_server_engine(settings, renderer, world, image_exchange=image_exchange, log=callbacks.log, supervisor=supervisor)
        engine_rank = replace(
            engine_rank, index=world.rank, num_engines=world.size, max_episodes=max(1, num * len(engine.urls) // world.size)
        )
    else:
        engine = build_colocated_engine(settings, renderer, world)
    manager = RolloutManager(
        task,
        engine=engine, renderer=renderer, trainer=trainer,
        collectives=RankCollectives(
            gather_rollouts=image_exchange.gather_rollouts, all_gather=image_exchange.all_gather, is_local=image_exchange.is_local
        ),
        episode_settings=episode_settings(settings),
        generation_settings=generation_settings(settings),
        engine_rank=engine_rank, callbacks=callbacks,
    )  # fmt: skip
    if settings.stage == "rl" and settings.distill.server.is_used:
        manager.teacher = build_teacher_client(settings.distill, renderer)
    return manager


def build_teacher_client(distill: DistillSettings, renderer: Renderer) -> TeacherClients:
    """Build the clients of the teachers' servers.

    Raises ValueError if the token file cannot be read.
    """
    server = distill.server
    try:
        token = read_token(server.token_file) if server.token_file else ""
    except ValueError as error:
        raise ValueError(f"distill.server.token_file={error}") from error
    top_k = distill.top_k if distill.has_divergence else 0
    extend = build_privileged_prompt(distill, renderer).extend_sequence if distill.privileged_prompt else None
    return TeacherClients(server, image_token_id=renderer.image_token_id, token=token, top_k=top_k, extend=extend)


def make_owner_name(settings: Settings, run_name: str) -> str:
    """Return the owner name of this run, which its servers report to other runs.

    The name consists of run directory, process ID, host and `run_name`. Example: `runs/mine (4711
    on node1, 0a1b2c3d)`. Only the last two components of the directory's path are included, because
    vLLM 0.32.0 removes absolute paths from responses (sanitize_message in
    entrypoints/serve/exception_handling/utils.py).
    """
    return f"{'/'.join(Path(settings.run.dir).absolute().parts[-2:])} ({os.getpid()} on {socket.gethostname()}, {run_name})"


def build_server_engine(
    settings: Settings,
    renderer: Renderer,
    world: World,
    *,
    image_exchange: ImageExchange,
    log: Callable[[str], None],
    supervisor: ServerSupervisor | None,
) -> ServerEngine:
    """Build this process's client for all inference servers.

    All ranks must call this function together. Rank 0 locks the servers for this run and sends
    weights to them.

    Args:
        settings: Settings of the run.
        renderer: Provides the image token id, the stop token ids and the tokenizer.
        world: Rank and device of this process, and the number of processes in the run.
        image_exchange: Gathers data across ranks.
        log: Receives one line of text per event.
        supervisor: Supervisor of the servers that this run started itself; set on rank 0 only.
            These servers need no lock, because no other run uses them. None if the run started no
            servers.

    Raises:
        ValueError: Another run has locked one of the servers.
    """
    given, name = settings.engine, run_on_rank_zero(lambda: secrets.token_hex(4))
    longest_s, is_own = settings.parallel.timeout_s, run_on_rank_zero(lambda: supervisor is not None)
    servers, sender = [VllmServer(url, token=read_engine_token(given), is_own=is_own, max_timeout_s=longest_s) for url in given.urls], None
    if world.is_main:
        sender = WeightSender(
            servers, expected=expected_engine_fingerprint(settings, renderer), owner=make_owner_name(settings, name),
            kind="nccl" if world.device.type == "cuda" else "gloo", device=world.device,
            bucket_bytes=int(given.bucket_mib * 2**20), timeout_s=longest_s,
        )  # fmt: skip
    run_on_rank_zero(lambda: sender.lock_servers() if sender is not None and not is_own else None)
    return ServerEngine(
        servers, given, name=name, special_tokens=renderer.special_tokens,
        decode_tokens=renderer.tokenizer.decode,
        all_gather=image_exchange.all_gather, control=ServerControl(sender=sender, supervisor=supervisor), first_server=world.rank, log=log,
    )  # fmt: skip


def build_colocated_engine(settings: Settings, renderer: Renderer, world: World) -> ColocatedEngine:
    """Build this process's engine, or its shard of an engine that spans engine.tp adjacent ranks.

    All ranks must call this function together. The engine has no weights until the
    first weight sync.
    """
    group, size, timeout_s = None, settings.engine.tp, settings.parallel.timeout_s
    if size > 1:
        limit = timedelta(seconds=timeout_s)
        groups = [dist.new_group(list(range(first, first + size)), backend="gloo", timeout=limit) for first in range(0, world.size, size)]
        group = cast(dist.ProcessGroup, groups[world.rank // size])  # this rank is a member
    return ColocatedEngine(
        settings.model.path, settings.engine, special_tokens=renderer.special_tokens, group=group, pixels=renderer.final_pixels,
        reads_weights=False, timeout_s=timeout_s,
    )  # fmt: skip


def generation_settings(settings: Settings) -> GenerationSettings:
    """Return the settings that determine how many episodes a training step generates."""
    batch = settings.batch
    return GenerationSettings(
        num_prompts=batch.prompts_per_step, group_size=batch.group_size, max_num_gen_batches=settings.filter.max_num_gen_batches,
        max_staleness=settings.run.max_staleness, num_steps=settings.run.steps,
        outage_timeout_s=settings.run.outage_timeout_s,
    )  # fmt: skip


def episode_settings(settings: Settings) -> EpisodeSettings:
    """Return the limits and sampling settings for training episodes."""
    task, engine = settings.task, settings.engine
    return EpisodeSettings(
        temperature=settings.algo.temperature, seed=settings.run.seed,
        max_turns=task.max_turns, max_new_tokens=task.max_new_tokens, max_seconds=task.max_seconds,
        env_timeout_s=task.env_timeout_s, stop_on_tool_error=task.stop_on_tool_error,
        keeps_final_state=settings.algo.bootstrap_truncated,
        max_sequence_tokens=engine.max_model_len, max_images=engine.max_images, max_pixels=task.max_pixels,
    )  # fmt: skip


@dataclass(slots=True, frozen=True, kw_only=True)
class StageSettings:
    """Settings of a training stage that determine which components it needs."""

    num_steps: int
    """Number of optimizer steps of the stage."""
    is_rl: bool
    """True for RL; False for supervised fine-tuning."""
    is_replay: bool
    """True for RL on recorded rollouts, which have already been judged."""


@dataclass(slots=True, kw_only=True)
class TrainerContext:
    """Components of a training stage, built on every rank."""

    world: World
    task: Task
    algorithms: Mapping[str, Algorithm]
    renderer: Renderer
    policy: Policy
    critic: Critic | None
    """Critic with its own backbone; None without a critic or with a shared backbone."""
    run: Run
    checkpoints: Checkpoints
    stop: StopSignal
    image_exchange: ImageExchange
    closing: ExitStack
    """Exit stack that closes all components in reverse order of creation."""
    supervisor: ServerSupervisor | None = None
    """Supervisor of the inference servers that the run started itself; set on rank 0 only."""
    rollout_manager: RolloutManager | None = None
    """Rollout manager; None until `build_rollout_manager` is called."""

    def build_rollout_manager(self, settings: Settings) -> RolloutManager:
        """Build and start the rollout manager and its engines.

        The trainer is offloaded first, because vLLM allocates its share of the GPU memory at
        startup.
        """
        with self.run.step_timer("start"):
            own = PolicyAndCritic(self.policy, self.critic) if self.critic else self.policy
            trainer = NoOffload() if settings.engine.mode == "server" else own
            trainer.sleep()
            rollout_manager = self.rollout_manager = build_rollout_manager(
                settings, self.task,
                trainer=trainer, renderer=self.renderer, world=self.world, image_exchange=self.image_exchange, supervisor=self.supervisor,
                callbacks=RunCallbacks(
                    run_with_grace=self.stop.run_with_grace, log=self.run.log, make_timer=self.run.trace.episode_tracer,
                    report_episodes=self.run.log_episodes,
                ),
            )  # fmt: skip
            self.closing.push(lambda failure, *_: rollout_manager.close(all_ranks=failure is None))
            rollout_manager.start()
        return rollout_manager

    def save_progress(self) -> None:
        """Save a checkpoint of the completed steps, from which the next attempt can resume."""
        run = self.run
        with run.step_timer("checkpoint"), self.rollout_manager.offloaded() if self.rollout_manager else nullcontext():
            self.checkpoints.save(run.num_done, history=run.history, metrics=run.metrics)


def build_context(
    settings: Settings, *, resume_state: ResumeState, task: Task, plugins: Plugins, world: World, stop: StopSignal, closing: ExitStack,
    stage: StageSettings,
) -> TrainerContext:  # fmt: skip
    """Build all components of a training stage except the rollout engines.

    All ranks must call this function together. The function determines the
    checkpoint to resume from.

    Raises:
        ValueError: The model or the data have changed since the checkpoint was written, or the chat
            template does not fit the task.
    """
    group = long_timeout_group(timeout_s=settings.parallel.straggler_timeout_s)
    checkpoint, state = find_checkpoint(settings, group=group)
    inputs = run_on_rank_zero(lambda: digest_inputs(settings, state if checkpoint else None), group=group)
    started = resume_state.describe_start(Path(settings.run.dir), checkpoint)
    if started and world.is_main:
        print(started, flush=True)
    layout = build_layout(settings.parallel, seed=settings.run.seed)
    closing.callback(destroy_layout)
    renderer = raise_on_all_ranks(lambda: build_renderer(settings, appends_to_sequence=stage.is_rl and task.appends_to_sequence))
    algorithms, has_values = {**ALGORITHMS, **plugins.algorithms}, has_critic(settings, plugins)
    image_exchange = ImageExchange(patch_size=renderer.patch_size, group=group)
    patches = partial(renderer.patches, load_image=image_exchange.image)
    policy = build_policy(
        settings, layout, renderer, patches=patches, num_steps=stage.num_steps, is_rl=stage.is_rl, has_value_head=has_values
    )  # fmt: skip
    closing.callback(policy.close)
    has_trunk = has_values and settings.critic.backbone == "own"
    critic = build_critic(settings, layout, patches=patches, num_steps=stage.num_steps) if has_trunk else None
    if critic is not None:
        closing.callback(critic.close)
    if settings.distill.teacher_paths:
        policy.teachers = build_teachers(settings, layout, policy, patches=patches)
    elif settings.distill.server.is_used and (term := make_teacher_term(settings.distill)):
        policy.teachers = [ServerTeacher(policy=policy.distribution, term=term)]
    elif settings.distill.is_self:
        use_policy_as_teacher(settings, layout, policy)
    elif settings.distill.merge.method:
        merge_checkpoints_as_teacher(settings, layout, policy)
    if settings.distill.privileged_prompt and settings.distill.is_local:
        policy.privileged_prompt = build_privileged_prompt(settings.distill, renderer)
    record = Run(settings, world, num_steps=stage.num_steps, first_step=state.step, history=state.history)
    closing.callback(record.close)
    if task.judge is not None and not stage.is_replay:
        record.judge_stats = JudgeStats(task.judge, gather=all_gather_object if world.size > 1 else lambda counts: [counts])
    for line in (transformer_engine_error(), *mismatch_warnings(settings)):
        if line:
            record.log(line)
    checkpoints = Checkpoints(settings, policy, critic, resume_from=checkpoint, inputs=inputs, group=group)
    return TrainerContext(
        world=world, task=task, algorithms=algorithms, renderer=renderer, policy=policy, critic=critic, run=record,
        checkpoints=checkpoints, stop=stop, image_exchange=image_exchange, closing=closing,
    )  # fmt: skip


def digest_inputs(settings: Settings, state: CheckpointState | None) -> InputDigests:
    """Return the digests of the model files and the data.

    Raises:
        ValueError: The digests differ from the digests in `state`, which is the state of the
            checkpoint to resume from.
    """
    found = InputDigests(model=model_digests(Path(settings.model.path)), data=data_digests(settings.task.data))
    if state is not None:
        check_same_model(state.inputs.model, found.model, key="model.path", folder=settings.model.path)
        check_same_data(state.inputs.data, found.data)
    return found


def build_renderer(settings: Settings, *, appends_to_sequence: bool) -> Renderer:
    """Load the processor and the chat template.

    Raises:
        ValueError: The processor or the template does not fit the model or the task's episodes.
    """
    allowed = settings.task.data.allow_grounding_tokens
    renderer = Renderer(settings.model, max_inline_pixels=max_inline_pixels(settings.engine), allow_grounding_tokens=allowed)
    if appends_to_sequence:
        renderer.require_continuation()
    return renderer
