"""Explains a step: reads it, checks it without a model, replays it and compares the results.

Every rank calls `explain_step` and gets the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from megatron_rl.config import ParallelSettings, require
from megatron_rl.distributed.world import World, long_timeout_group, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.explain.findings import FindingsPage
from megatron_rl.explain.recorded_step import RecordedSequence, RecordedStep, ReplaySettings, find_weights, read_replay_settings, read_step
from megatron_rl.explain.replay_forward import ForwardReplay, ReplayResult
from megatron_rl.explain.sequence_checks import run_sequence_checks, split_replayable
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import build_layout, check_layout, destroy_layout
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.paths import CHECKPOINTS_FOLDER, list_checkpoints
from megatron_rl.weights.formats.checkpoint_source import TensorSource
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import CONFIG as ADAPTER

GB = 1e9
RANK_TIMEOUT_S = 86400.0
"""Timeout in seconds for ranks that wait for the first rank.

Only the first rank replays with Hugging Face's model.
"""


@dataclass(slots=True, frozen=True, kw_only=True)
class ExplainRequest:
    """A request to explain a step of a run."""

    run: Path
    step: int
    weights: str = ""
    """Path of a checkpoint in any supported format, or of an adapter.

    If empty, the run's checkpoint with the weight version that sampled the step is used.
    """
    older_weights: str = ""
    """Path of older weights, used to find stale tensors.

    If empty, the run's previous checkpoint is used.
    """
    model: str = ""
    """Path of the config, tokenizer and processor if they are not at the run's model.path."""
    num_rollouts: int = 4
    with_model: bool = True
    with_engine: bool = False
    max_model_gb: float = 16.0
    """Maximum size in GB of one model's float32 weights in one process.

    Up to this size, the weights of Hugging Face's model stay in memory. If the trainer's model is
    larger, it is replayed only with a parallel layout.
    """
    parallel_sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of the parallel layout, keyed by name; missing sizes are taken from the run."""


def explain_step(request: ExplainRequest, world: World) -> FindingsPage:
    """Return the findings about a step.

    Raises:
        ValueError: The step, its settings or its weights cannot be used.
        OSError: A file cannot be read.
    """
    settings, step, renderer, spec = raise_on_all_ranks(lambda: _read_inputs(request, world))
    page = FindingsPage(title=[_title(request, step)], skipped=step.skipped)
    checks = {"step_number": request.step, "max_staleness": settings.max_staleness}
    page.checks = run_on_rank_zero(lambda: run_sequence_checks(step, renderer, spec, **checks))
    if not request.with_model:
        return page
    looked, lines = split_replayable(step, spec)
    page.skipped += lines
    version, path, source = raise_on_all_ranks(lambda: _open_weights(request, settings, step, spec))
    older = raise_on_all_ranks(lambda: _open_older_weights(request, settings, version, spec))
    chosen = _select_sequences(looked, version, request.num_rollouts)
    require(bool(chosen), "--step", request.step, "no sequence of this step can be replayed; use --no-model for the other checks")
    page.title.append(f"weights of version {version}: {path}; recorded in {settings.dtype}, replayed in float32")
    others = [str(each) for each in step.weight_versions if each != version]
    if others:
        page.skipped.append(f"tokens of versions {', '.join(others)}: give their weights with --weights")
    play = ForwardReplay(
        spec=spec, renderer=renderer, source=source, older_source=older, version=version, step=request.step, settings=settings,
        device=world.device,
        patches=partial(renderer.patches, load_image=attrgetter("pil")),
        images={image.key: image for each in step.rollouts.values() for image in each.images},
        max_model_bytes=int(request.max_model_gb * GB),
    )  # fmt: skip
    try:
        _run_replay(
            page, play, chosen, parallel=_parallel_settings(request, settings, spec, world), use_engine=request.with_engine, world=world
        )
    finally:
        play.close()
    return page


def _run_replay(
    page: FindingsPage, forward_replay: ForwardReplay, sequences: Sequence[RecordedSequence], *, parallel: ParallelSettings | None,
    use_engine: bool, world: World,
) -> None:  # fmt: skip
    """Replay the step's sequences on the first rank, and then on all ranks together.

    The first rank runs Hugging Face's model and the trainer in one process. Then all ranks together
    run the trainer with its parallel layout. The engine runs last.
    """
    waiting = long_timeout_group(timeout_s=RANK_TIMEOUT_S)
    played: ReplayResult = run_on_rank_zero(lambda: forward_replay.compare_recorded(sequences), group=waiting)
    if forward_replay.fits_one_process:
        layout = build_layout(ParallelSettings(), seed=0)
        try:
            played = run_on_rank_zero(lambda: forward_replay.compare_one_process(played, sequences, layout), group=waiting)
        finally:
            destroy_layout()
    else:
        page.skipped.append("trainer, one process: its weights are larger than --whole-gb; give a parallel layout, or a larger --whole-gb")
    if parallel is not None:
        try:
            played = forward_replay.compare_at_layout(played, sequences, build_layout(parallel, seed=0), group=waiting)
        finally:
            destroy_layout()
    if use_engine:
        played = forward_replay.compare_live_engine(played, sequences, world=world, group=waiting)
    page.checks += played.checks
    page.comparisons, page.layer_differences, page.explanations = played.comparisons, played.layer_differences, played.explanations


def _read_inputs(request: ExplainRequest, world: World) -> tuple[ReplaySettings, RecordedStep, Renderer, ModelSpec]:
    require(request.run.is_dir(), "RUN", request.run, "no such folder")
    settings = read_replay_settings(request.run, model_path=request.model, num_processes=world.size)
    key = "--model" if request.model else "model.path"
    spec = read_spec(settings.model.path, key=key)
    renderer = Renderer(settings.model, allow_grounding_tokens=settings.allow_grounding_tokens)
    return settings, read_step(request.run, request.step), renderer, spec


def _title(request: ExplainRequest, step: RecordedStep) -> str:
    num = sum(sum(each.tokens.loss_mask) for each in step.sequences)
    counts = f"{len(step.rollouts)} rollouts, {len(step.sequences)} sequences, {num} sampled tokens"
    return f"{request.run} step {request.step}: {counts} ({step.path.name})"


def _open_weights(request: ExplainRequest, settings: ReplaySettings, step: RecordedStep, spec: ModelSpec) -> tuple[int, Path, TensorSource]:
    """Return the newest weight version that is available, and the path and source of its weights.

    Weights named in the request count as the newest version.
    """
    require(bool(step.weight_versions), "--step", request.step, "no token was sampled in this step")
    if request.weights:
        return step.weight_versions[0], Path(request.weights), _open_checkpoint(request.weights, settings, spec, key="--weights")
    missing: list[ValueError] = []
    for version in step.weight_versions:
        try:
            path = find_weights(request.run, version, settings)
            return version, path, _open_checkpoint(str(path), settings, spec, key="--weights")
        except ValueError as error:
            missing.append(error)
    raise missing[0]


def _open_older_weights(request: ExplainRequest, settings: ReplaySettings, version: int, spec: ModelSpec) -> TensorSource | None:
    if request.older_weights:
        return _open_checkpoint(request.older_weights, settings, spec, key="--older")
    if version == 0 or request.weights:
        return None
    before = [path for path in list_checkpoints(request.run / CHECKPOINTS_FOLDER) if int(path.name.removeprefix("step_")) < version]
    path = before[-1] if before else Path(settings.model.path)
    return open_source(path, spec, key="--older") if path.is_dir() else None


def _open_checkpoint(checkpoint_path: str, settings: ReplaySettings, spec: ModelSpec, *, key: str) -> TensorSource:
    if (Path(checkpoint_path) / ADAPTER).is_file():
        return MergedTensors(open_source(Path(settings.model.path), spec, key="model.path"), Path(checkpoint_path), key=key)
    return open_source(Path(checkpoint_path), spec, key=key)


def _select_sequences(sequences: Sequence[RecordedSequence], version: int, num_rollouts: int) -> list[RecordedSequence]:
    """Return the sequences of at most `num_rollouts` rollouts.

    Rollouts with the largest difference between engine and trainer logprobs are selected first.
    """
    fitting = [each for each in sequences if version in each.tokens.weight_versions]
    gaps: dict[int, float] = {}
    for each in fitting:
        pairs = zip(each.tokens.rollout_logprobs, each.tokens.old_logprobs, strict=False)
        gaps[each.rollout_index] = max(gaps.get(each.rollout_index, 0.0), *(abs(one - other) for one, other in pairs), 0.0)
    taken = sorted(gaps, key=lambda rollout: (-gaps[rollout], rollout))[:num_rollouts]
    return [each for each in fitting if each.rollout_index in taken]


def _parallel_settings(request: ExplainRequest, settings: ReplaySettings, spec: ModelSpec, world: World) -> ParallelSettings | None:
    """Return the parallel layout of the processes, or None if each process holds the full model."""
    run, given = settings.parallel, dict(request.parallel_sizes)
    parallel = ParallelSettings(
        tp=given.get("tp", run.tp), pp=given.get("pp", run.pp), vpp=given.get("vpp", run.vpp),
        sequence_parallel=(run.sequence_parallel or spec.experts is not None) and given.get("tp", run.tp) > 1,
    )  # fmt: skip
    if world.size == 1 and not given:
        return None
    check_layout(parallel, spec, world.size)
    return parallel if parallel.tp * parallel.pp > 1 else None
