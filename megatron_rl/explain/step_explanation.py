"""A step explained: read, checked without a model, played back, compared. Every rank calls `explain`; what comes back is on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

from megatron_rl.config import ParallelSettings, require
from megatron_rl.distributed.world import World, long_timeout_group, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.explain.findings import Page
from megatron_rl.explain.recorded_step import Conditions, Looked, Step, read_step, settings_of, weights_of
from megatron_rl.explain.replay_forward import Playback, Played
from megatron_rl.explain.sequence_checks import checked, playable
from megatron_rl.models.hf_config import read_spec
from megatron_rl.models.model_spec import ModelSpec
from megatron_rl.policy.parallel import build_layout, check_layout, leave_layout
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.record import CHECKPOINTS, list_checkpoints
from megatron_rl.weights.formats.checkpoint_source import TensorSource
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import CONFIG as ADAPTER

GB = 1e9
WAIT_S = 86400.0
"""How long ranks wait for the first one, which plays back through Hugging Face's model alone."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    run: Path
    step: int
    weights: str = ""
    """A checkpoint of any format, or an adapter's folder; empty: the run's own of the version that sampled."""
    older: str = ""
    """Other weights, one tensor of which may have stayed; empty: the run's own before these."""
    model: str = ""
    """Config, tokenizer and processor, where they do not lie at the run's model.path."""
    rollouts: int = 4
    with_model: bool = True
    with_engine: bool = False
    whole_gb: float = 16.0
    """Of weights in float32. As much of Hugging Face's model stays in memory; a larger one of the trainer's is played at a layout alone."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Of the layout, by name; what is lacking is the run's."""


def explain(asked: Asked, world: World) -> Page:
    """ValueError, OSError: there is nothing to look at."""
    settings, step, renderer, spec = raise_on_all_ranks(lambda: _read(asked, world))
    page = Page(title=[_title(asked, step)], skipped=step.skipped)
    checks = {"sampled_at": asked.step, "max_staleness": settings.max_staleness}
    page.checks = run_on_rank_zero(lambda: checked(step, renderer, spec, **checks))
    if not asked.with_model:
        return page
    looked, lines = playable(step, spec)
    page.skipped += lines
    version, path, source = raise_on_all_ranks(lambda: _weights(asked, settings, step, spec))
    older = raise_on_all_ranks(lambda: _older(asked, settings, version, spec))
    chosen = _chosen(looked, version, asked.rollouts)
    require(bool(chosen), "--step", asked.step, "none of its contexts can be played back; --no-model looks at the rest")
    page.title.append(f"weights of version {version}: {path}; recorded in {settings.dtype}, played back in float32")
    others = [str(each) for each in step.versions if each != version]
    if others:
        page.skipped.append(f"tokens of versions {', '.join(others)}: --weights names others")
    play = Playback(
        spec=spec, renderer=renderer, source=source, older=older, version=version, step=asked.step, settings=settings, device=world.device,
        patches=partial(renderer.patches, picture_of=attrgetter("pil")),
        gallery={image.key: image for each in step.rollouts.values() for image in each.images}, whole_bytes=int(asked.whole_gb * GB),
    )  # fmt: skip
    try:
        _play(page, play, chosen, parallel=_layout(asked, settings, spec, world), asks=asked.with_engine, world=world)
    finally:
        play.close()
    return page


def _play(
    page: Page, play: Playback, looked: Sequence[Looked], *, parallel: ParallelSettings | None, asks: bool, world: World
) -> None:  # fmt: skip
    """Through Hugging Face and one process on the first rank, then at the layout on all; and an engine's parts are on all."""
    waiting = long_timeout_group(timeout_s=WAIT_S)
    played: Played = run_on_rank_zero(lambda: play.recorded(looked), group=waiting)
    if play.is_whole:
        layout = build_layout(ParallelSettings(), seed=0)
        try:
            played = run_on_rank_zero(lambda: play.alone(played, looked, layout), group=waiting)
        finally:
            leave_layout()
    else:
        page.skipped.append("trainer, one process: its weights are larger than --whole-gb; give a layout, or more")
    if parallel is not None:
        try:
            played = play.at_layout(played, looked, build_layout(parallel, seed=0), is_main=world.is_main, waiting=waiting)
        finally:
            leave_layout()
    if asks:
        played = play.asked(played, looked, world=world, waiting=waiting)
    page.checks += played.checks
    page.compared, page.layers, page.explained = played.compared, played.layers, played.explained


def _read(asked: Asked, world: World) -> tuple[Conditions, Step, Renderer, ModelSpec]:
    require(asked.run.is_dir(), "RUN", asked.run, "no such folder")
    settings = settings_of(asked.run, model=asked.model, num_processes=world.size)
    key = "--model" if asked.model else "model.path"
    spec = read_spec(settings.model.path, key=key)
    renderer = Renderer(settings.model, allow_grounding_tokens=settings.allow_grounding_tokens)
    return settings, read_step(asked.run, asked.step), renderer, spec


def _title(asked: Asked, step: Step) -> str:
    num = sum(sum(each.context.loss_mask) for each in step.contexts)
    counts = f"{len(step.rollouts)} rollouts, {len(step.contexts)} contexts, {num} sampled tokens"
    return f"{asked.run} step {asked.step}: {counts} ({step.path.name})"


def _weights(asked: Asked, settings: Conditions, step: Step, spec: ModelSpec) -> tuple[int, Path, TensorSource]:
    """The newest version of which there are weights; those that are given are of the newest."""
    require(bool(step.versions), "--step", asked.step, "nothing was sampled in it")
    if asked.weights:
        return step.versions[0], Path(asked.weights), _opened(asked.weights, settings, spec, key="--weights")
    missing: list[ValueError] = []
    for version in step.versions:
        try:
            path = weights_of(asked.run, version, settings)
            return version, path, _opened(str(path), settings, spec, key="--weights")
        except ValueError as error:
            missing.append(error)
    raise missing[0]


def _older(asked: Asked, settings: Conditions, version: int, spec: ModelSpec) -> TensorSource | None:
    if asked.older:
        return _opened(asked.older, settings, spec, key="--older")
    if version == 0 or asked.weights:
        return None
    before = [path for path in list_checkpoints(asked.run / CHECKPOINTS) if int(path.name.removeprefix("step_")) < version]
    path = before[-1] if before else Path(settings.model.path)
    return open_source(path, spec, key="--older") if path.is_dir() else None


def _opened(given: str, settings: Conditions, spec: ModelSpec, *, key: str) -> TensorSource:
    if (Path(given) / ADAPTER).is_file():
        return MergedTensors(open_source(Path(settings.model.path), spec, key="model.path"), Path(given), key=key)
    return open_source(Path(given), spec, key=key)


def _chosen(looked: Sequence[Looked], version: int, num: int) -> list[Looked]:
    """Contexts of so many rollouts: first those of which engine and trainer said the most different."""
    fitting = [each for each in looked if version in each.context.weight_versions]
    gaps: dict[int, float] = {}
    for each in fitting:
        pairs = zip(each.context.rollout_logprobs, each.context.old_logprobs, strict=False)
        gaps[each.rollout] = max(gaps.get(each.rollout, 0.0), *(abs(one - other) for one, other in pairs), 0.0)
    taken = sorted(gaps, key=lambda rollout: (-gaps[rollout], rollout))[:num]
    return [each for each in fitting if each.rollout in taken]


def _layout(asked: Asked, settings: Conditions, spec: ModelSpec, world: World) -> ParallelSettings | None:
    """How the processes share the model; None where each has all of it."""
    run, given = settings.parallel, dict(asked.sizes)
    parallel = ParallelSettings(
        tp=given.get("tp", run.tp), pp=given.get("pp", run.pp), vpp=given.get("vpp", run.vpp),
        sequence_parallel=run.sequence_parallel and given.get("tp", run.tp) > 1,
    )  # fmt: skip
    if world.size == 1 and not given:
        return None
    check_layout(parallel, spec, world.size)
    return parallel if parallel.tp * parallel.pp > 1 else None
