"""Checks settings against the model, the algorithm and the number of processes.

The checks run before the rendezvous.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from megatron_rl.algo.algorithms import ALGORITHMS, check_algorithm, needs_old_logprob_forward
from megatron_rl.algo.distill import check_distill, has_merge
from megatron_rl.batching.privileged import fill_template
from megatron_rl.config import CriticSettings, EngineSettings, Settings, require
from megatron_rl.config.task_options import AgentOptions
from megatron_rl.data.questions import QuestionDataset
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.known_models import load_known_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.models.vocabulary import check_same_tokens, count_token_ids
from megatron_rl.policy.lora import check_adapter_targets
from megatron_rl.policy.parallel import check_layout, require_divisible, sizes_cut_by_tp
from megatron_rl.registry import Plugins, has_critic
from megatron_rl.rollout.example_fields import example_fields
from megatron_rl.rollout.task import Task
from megatron_rl.types import Rollout
from megatron_rl.weights.formats.open_checkpoint import check_tokenizer
from megatron_rl_sandbox.mounts import find_exposing_path


def check_settings(settings: Settings, world_size: int, plugins: Plugins = Plugins()) -> None:
    """Raise ValueError if the settings do not fit the model, algorithm or number of processes.

    The error is the same on every rank.
    """
    model, path = read_spec(settings.model.path), Path(settings.model.path)
    check_sizes(settings, model, world_size, plugins)
    check_tokenizer(path, model, key="model.path")
    if has_critic(settings, plugins) and settings.critic.path:
        num_rows, num_token_ids = load_known_spec(settings.critic.path, key="critic.path").vocab_size, count_token_ids(path)
        remedy = f"has vocab_size={num_rows}, but the tokenizer of model.path={path} has ids up to {num_token_ids - 1}; use another critic"
        require(num_token_ids <= num_rows, "critic.path", settings.critic.path, remedy)
    for teacher in settings.distill.teacher_paths:
        check_same_tokens(Path(teacher), path, key=settings.distill.teacher_key(teacher))
    check_sandbox_paths(settings)
    device, has_cuda = settings.engine.device, torch.cuda.is_available()
    require(device != "cuda" or has_cuda, "engine.device", device, "this machine has no usable GPU; use engine.device=auto")


def check_sandbox_paths(settings: Settings) -> None:
    """Raise ValueError if an agent in the sandbox could read the run directory."""
    options = settings.task.options
    if isinstance(options, AgentOptions) and options.sandbox:
        shown = find_exposing_path(settings.run.dir, options.sandbox_paths)
        remedy = f"is below {shown}, which the agent can read; choose another folder, or other task.options.sandbox_paths"
        require(shown is None, "run.dir", settings.run.dir, remedy)


def check_examples(task: Task, splits: tuple[str, ...]) -> None:
    """Raise ValueError if a split has no examples.

    The evaluation split is checked at startup, because the first evaluation may take place hours
    later.
    """
    for split in splits:
        require(len(task.examples(split)) > 0, "task.name", task.name, f"has no examples in split {split}; add at least one")


def check_teacher_sources(task: Task, settings: Settings, plugins: Plugins = Plugins()) -> None:
    """Raise ValueError if the teachers do not fit the data sources of the training data.

    Each listed source must occur in the data. An algorithm that learns from a teacher alone needs a
    teacher for every source.
    """
    distill, algorithms = settings.distill, {**ALGORITHMS, **plugins.algorithms}
    if not distill.listed_sources:
        return
    key = "distill.teachers" if distill.teachers else "distill.server.urls_by_source"
    examples = task.examples("train")
    sources = sorted(examples.sources if isinstance(examples, QuestionDataset) else {example.source for example in examples})
    listed = ", ".join(source or "''" for source in sources)
    for source in distill.listed_sources:
        require(source in sources, key, source, f"is no data source of the training data, which has {listed}")
    if algorithms[settings.algo.name].needs_teacher:
        without = next((source for source in sources if distill.teacher_index(source) < 0), None)
        remedy = f"has no teacher, and algo.name={settings.algo.name} learns from a teacher alone; add it to {key}"
        require(without is None, "data_source", without, remedy)


def check_privileged_prompt(task: Task, settings: Settings) -> None:
    """Raise ValueError if the first training example lacks a field of distill.privileged_prompt."""
    template = settings.distill.privileged_prompt
    if not template:
        return
    example = task.examples("train")[0]
    rollout = Rollout(task=task.name, example_id=example.id, group=0, sample_index=0, **example_fields(example.payload))
    remedy = f"names a field that {example} lacks; use {{question}}, {{answer}} or a field of extra_info"
    require(fill_template(template, rollout) != "", "distill.privileged_prompt", template, remedy)


def check_sizes(settings: Settings, model: ModelSpec, world_size: int, plugins: Plugins = Plugins()) -> None:
    """Raise ValueError if the settings do not fit the model or the number of processes.

    This function checks the settings of the algorithm, parallel layout, frozen modules and engine.
    """
    algorithms = {**ALGORITHMS, **plugins.algorithms}
    check_algorithm(settings.algo, algorithms)
    compares, drop = algorithms[settings.algo.name].needs_group, settings.filter.drop
    remedy = f"algo.name={settings.algo.name} also learns from groups with equal rewards; leave zero_std out"
    size = settings.batch.group_size
    require(size >= 2 or not compares, "batch.group_size", size, "must be at least 2: a group with one rollout has no baseline")
    require(compares or "zero_std" not in drop, "filter.drop", drop, remedy)
    _check_adaptive_kl(settings)
    _check_routing_replay(settings, model)
    if has_critic(settings, plugins):
        _check_critic(settings, model, world_size)
    elif settings.stage == "rl":
        plain = asdict(CriticSettings())
        for key, value in asdict(settings.critic).items():
            remedy = f"algo.name={settings.algo.name} has no critic; choose algo=ppo, or leave it out"
            require(value == plain[key], f"critic.{key}", value, remedy)
    check_distill(settings.distill, needs_teacher=algorithms[settings.algo.name].needs_teacher)
    if settings.distill.teacher_paths:
        _check_teachers(settings, model, world_size)
    text, remedy = settings.distill.privileged_prompt, "is for prompts of stage=rl; leave it out in stage=sft"
    require(settings.stage == "rl" or not text, "distill.privileged_prompt", text, remedy)
    if settings.distill.server.is_used:
        _check_teacher_server(settings)
    if settings.distill.data_fraction:
        _check_data_fraction(settings, plugins)
    if settings.distill.generates_responses:
        _check_responses(settings)
    method, remedy = settings.distill.merge.method, "merges checkpoints of stage=rl; in stage=sft, use distill.teacher"
    require(settings.stage == "rl" or not method, "distill.merge.method", method, remedy)
    if settings.run.epochs == 0:  # otherwise resolve_epochs checks the number of steps
        check_num_steps(settings)
    check_layout(settings.parallel, model, world_size)
    check_adapter_targets(settings.lora, model, key="lora.targets")
    remedy = "with lora.rank the whole base model is frozen; choose the trained layers with lora.targets"
    require(not (settings.model.frozen and settings.lora.rank), "model.frozen", settings.model.frozen, remedy)
    engine: EngineSettings = settings.engine
    is_local = engine.mode == "colocated"
    require(not is_local or world_size % engine.tp == 0, "engine.tp", engine.tp, f"must divide the number of processes ({world_size})")
    tower = {"attention heads of the vision tower": model.vision.num_heads, "rows of each MLP of the vision tower": model.vision.ffn_size}
    require_divisible("engine.tp", engine.tp, {**sizes_cut_by_tp(model), **tower}, model_label="the model")
    if settings.stage == "rl":
        _check_staleness(settings, num_engines=world_size // engine.tp if is_local else engine.num_endpoints)
    longest, length = model.max_positions, engine.max_model_len
    require(length <= longest, "engine.max_model_len", length, f"the model supports at most {longest} (max_position_embeddings)")


def _check_staleness(settings: Settings, *, num_engines: int) -> None:
    """Raise ValueError unless the engines can generate all episodes in flight concurrently.

    If some episodes had to wait in a queue, they would become stale unnecessarily.
    """
    staleness, batch, max_num_seqs = settings.run.max_staleness, settings.batch, settings.engine.max_num_seqs
    num = (staleness + 1) * batch.prompts_per_step * batch.group_size
    remedy = (
        f"{staleness + 1} times batch.prompts_per_step={batch.prompts_per_step} times batch.group_size={batch.group_size} episodes are "
        f"in flight, but {num_engines} engines run engine.max_num_seqs={max_num_seqs} each; set that to {-(-num // num_engines)}"
    )
    require(staleness == 0 or num <= num_engines * max_num_seqs, "run.max_staleness", staleness, remedy)


def _check_routing_replay(settings: Settings, model: ModelSpec) -> None:
    algo, remedy = settings.algo, f"model.path={settings.model.path} has no experts; leave it out"
    has_experts = model.experts is not None
    require(has_experts or algo.routing_replay == "none", "algo.routing_replay", algo.routing_replay, remedy)
    require(has_experts or not settings.engine.return_routed_experts, "engine.return_routed_experts", True, remedy)
    for key, coef in (("router_aux_loss_coef", algo.router_aux_loss_coef), ("router_z_loss_coef", algo.router_z_loss_coef)):
        require(has_experts or coef == 0, f"algo.{key}", coef, remedy)
    num_updates, correction = settings.batch.minibatches * settings.batch.epochs, algo.rollout_correction
    records = algo.routing_replay != "policy" or num_updates == 1 or needs_old_logprob_forward(settings)
    remedy = f"algo.rollout_correction={correction} computes no old logprobs, whose pass would record the experts; use rollout"
    require(records, "algo.routing_replay", algo.routing_replay, remedy)


def _check_adaptive_kl(settings: Settings) -> None:
    algo, batch = settings.algo, settings.batch
    most = batch.prompts_per_step * batch.group_size * settings.filter.max_num_gen_batches
    fits = algo.kl_target == 0 or algo.kl_horizon >= most
    require(fits, "algo.kl_horizon", algo.kl_horizon, f"must be at least {most}, the maximum number of episodes of a step")


def check_num_steps(settings: Settings) -> None:
    """Raise ValueError if the run has too few steps for its other settings."""
    run, warmup = settings.run, settings.critic.warmup_steps
    require(run.steps > warmup, "critic.warmup_steps", warmup, f"leaves no training steps for the policy (run.steps={run.steps})")
    every, remedy = settings.distill.merge.every, f"leaves no step with a teacher (run.steps={run.steps}); merge more often"
    is_used = not settings.distill.merge.method or settings.stage != "rl" or has_merge(settings, step=run.steps - 1)
    require(is_used, "distill.merge.every", every, remedy)
    remedy = "run.require_improvement compares the first with the last 10 steps: use at least 20"
    require(not run.require_improvement or run.steps >= 20, "run.steps", run.steps, remedy)


def _check_critic(settings: Settings, model: ModelSpec, world_size: int) -> None:
    critic, optim = settings.critic, settings.optim
    if critic.path:
        spec = load_known_spec(critic.path, key="critic.path")
        check_same_inputs(spec, model, key="critic.path", path=critic.path)
        check_layout(settings.parallel, spec, world_size, model_label="the critic")
        model = spec
    check_adapter_targets(critic.lora, model, key="critic.lora.targets")
    remedy = f"must be at least optim.min_lr={optim.min_lr}"
    require(critic.lr >= optim.min_lr, "critic.lr", critic.lr, remedy)
    moves = critic.backbone == "shared" and critic.warmup_steps > 0 and optim.weight_decay > 0
    remedy = "would change the shared backbone while critic.warmup_steps train only the head; set it to 0, or critic.backbone=own"
    require(not moves, "optim.weight_decay", optim.weight_decay, remedy)


def _check_teachers(settings: Settings, model: ModelSpec, world_size: int) -> None:
    if settings.stage == "sft":
        remedy = "are chosen by the data source of prompts, which demonstrations do not have; use distill.teacher"
        require(not settings.distill.teachers, "distill.teachers", settings.distill.teachers, remedy)
        where, support = settings.distill.apply_to, settings.distill.support
        require(where == "loss", "distill.apply_to", where, "needs rewards, which stage=sft does not have; use loss")
        require(support != "sampled", "distill.support", support, "needs tokens that the policy samples; in stage=sft, use full or top_k")
    remedy = "needs equally many passes on all ranks, and distill.teachers gives each its own; use distill.teacher"
    require(settings.parallel.ep == 1 or not settings.distill.teachers, "parallel.ep", settings.parallel.ep, remedy)
    for path in settings.distill.teacher_paths:
        key = settings.distill.teacher_key(path)
        spec = load_known_spec(path, key=key)
        check_same_inputs(spec, model, key=key, path=path)
        check_layout(settings.parallel, spec, world_size, model_label="the teacher" if key == "distill.teacher" else key)


def _check_teacher_server(settings: Settings) -> None:
    server, temperature = settings.distill.server, settings.algo.temperature
    urls = server.urls or server.urls_by_source
    require(settings.stage == "rl", "distill.server.urls", urls, "needs tokens that the policy samples; in stage=sft, use distill.teacher")
    remedy = "asks no servers for the teacher's logprobs of recorded rollouts; use distill.teacher"
    require(settings.run.mode != "replay", "run.mode", settings.run.mode, remedy)
    remedy = "servers return logprobs at temperature 1; use 1 with distill.server.urls, or distill.teacher"
    require(temperature == 1, "algo.temperature", temperature, remedy)


def _check_data_fraction(settings: Settings, plugins: Plugins) -> None:
    """Raise ValueError if the run cannot mix demonstrations with its rollouts."""
    batch, fraction, name = settings.batch, settings.distill.data_fraction, settings.algo.name
    num, replay = settings.distill.count_demonstrations(batch.prompts_per_step * batch.group_size), settings.algo.routing_replay
    refused = {
        "is for the rollouts of stage=rl; leave it out in stage=sft": settings.stage != "rl",
        f"algo.name={name} has a critic, and demonstrations have no returns; choose another algorithm": has_critic(settings, plugins),
        "needs conversations; set task.data.demonstrations=[FILE.jsonl]": not settings.task.data.demonstrations,
        "algo.routing_replay=rollout needs experts, which demonstrations do not record; use policy or none": replay == "rollout",
        f"gives a step {num} demonstrations, fewer than batch.minibatches={batch.minibatches}; use more": num < batch.minibatches,
    }
    for remedy, is_refused in refused.items():
        require(not is_refused, "distill.data_fraction", fraction, remedy)


def _check_responses(settings: Settings) -> None:
    """Raise ValueError if the rollout engine cannot respond with the teacher's weights."""
    mode, staleness, replay = settings.engine.mode, settings.run.max_staleness, settings.algo.routing_replay
    refused = {
        f"loads the teacher into the engine of this process, and engine.mode={mode} has none; use colocated": mode != "colocated",
        f"run.max_staleness={staleness} would continue episodes with the teacher's weights; use 0": staleness > 0,
        "run.mode=replay has no engine for the teacher; use loss or reward": settings.run.mode == "replay",
        "agents choose stop strings and temperature of each request; use loss or reward": settings.task.name == "agent",
        "algo.routing_replay=rollout needs experts, which responses do not record; use policy or none": replay == "rollout",
    }
    for remedy, is_refused in refused.items():
        require(not is_refused, "distill.apply_to", settings.distill.apply_to, remedy)


VISION_KEYS: Mapping[str, Callable[[ModelSpec], int]] = {
    "patch_size": lambda spec: spec.vision.patch_size,
    "temporal_patch_size": lambda spec: spec.vision.temporal_patch_size,
    "spatial_merge_size": lambda spec: spec.vision.spatial_merge_size,
    "in_channels": lambda spec: spec.vision.in_channels,
    "image_token_id": lambda spec: spec.image_token_id,
    "video_token_id": lambda spec: spec.video_token_id,
    "vision_start_token_id": lambda spec: spec.vision_start_id,
    "vision_end_token_id": lambda spec: spec.vision_end_id,
    "mrope_interleaved": lambda spec: spec.family.has_interleaved_mrope,
}
"""Maps names of config.json fields to functions that return the field's value from a `ModelSpec`.
Models that read the same batches must agree in all of these fields.
"""


def check_same_inputs(other: ModelSpec, model: ModelSpec, *, key: str, path: str) -> None:
    """Raise ValueError if a critic or teacher (setting `key`) cannot read the policy's batches.

    The model must use the same patches, placeholder tokens and positions as the policy. The
    vocabulary sizes may differ by rows that the tokenizer does not use (Qwen2.5-VL-3B has 128 fewer
    rows than Qwen2.5-VL-7B).
    """
    for name, of in VISION_KEYS.items():
        remedy = f"has {name}={of(other)}, the policy has {of(model)}; use a model of the policy's family: both read the same batches"
        require(of(other) == of(model), key, path, remedy)
