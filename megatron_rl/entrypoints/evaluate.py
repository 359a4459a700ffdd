"""Entry point for evaluation: runs a task's episodes on engines or an endpoint, without a trainer.

Results are saved chunk by chunk, so a stopped or killed evaluation resumes. Episodes have the same
seeds as the evaluations within a run, so the same weights give the same metrics.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from megatron_rl.build import NoOffload, build_rollout_manager, episode_settings
from megatron_rl.config import ParallelSettings, Settings, require
from megatron_rl.data.benchmarks.catalog import compute_official_interval
from megatron_rl.distributed.hang_watchdog import HangWatchdog
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import (
    World,
    connect,
    disconnect,
    long_timeout_group,
    raise_on_all_ranks,
    read_world,
    run_on_rank_zero,
    trim_malloc,
)
from megatron_rl.entrypoints.train import run_in_own_thread
from megatron_rl.errors import GracefulStop
from megatron_rl.evaluation.endpoint_policy import EndpointRolloutRunner
from megatron_rl.evaluation.evaluation_report import collect_example_results, compute_success_statistics, describe_conditions, print_report
from megatron_rl.evaluation.in_run import compute_eval_scores
from megatron_rl.evaluation.results_directory import (
    EVALUATION_FILE,
    EXAMPLES_FILE,
    PROMPT_FILE,
    chunk_path,
    load_chunk,
    locked_results_directory,
    save_chunk,
    without_images,
)
from megatron_rl.io.bounded_files import read_text
from megatron_rl.io.jsonl import MAX_LINE_BYTES, write_bytes_atomically, write_lines_atomically
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.preflight.prompts import report_column_warnings
from megatron_rl.preflight.run_checks import check_run
from megatron_rl.preflight.settings import check_examples
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rollout.manager import RolloutManager
from megatron_rl.rollout.renderer import Renderer, max_inline_pixels
from megatron_rl.rollout.task import Task
from megatron_rl.run.record import explain_write_errors
from megatron_rl.run.shutdown import CLOSE_TIMEOUT_S, StopSignal
from megatron_rl.services.service_launcher import enabled_services, resolve_addresses, run_services
from megatron_rl.types import Example, Rollout, TokenSequence
from megatron_rl.weights.formats.checkpoint_source import TensorSource, iterate_tensors
from megatron_rl.weights.formats.merge_lora import MergedTensors
from megatron_rl.weights.formats.open_checkpoint import open_source
from megatron_rl.weights.formats.peft import CONFIG as ADAPTER

TABLE_WIDTH = 140
"""Width in columns of the printed report if stdout is not a terminal."""


@dataclass(slots=True, frozen=True)
class EvaluationGenerator:
    """Generates the rollouts of an evaluation, with our engines or an endpoint."""

    generate: Callable[[Sequence[Example], int], list[Rollout]]
    """(examples, group number of the first) -> rollouts of these examples."""
    render_prompt: Callable[[Rollout], str]
    """Returns the text that the policy received before its first response in this rollout."""


def run_evaluation(settings: Settings, plugins: Plugins = Plugins()) -> dict[str, float] | None:
    """Run the evaluation of evaluation.* and write its results to run.dir.

    Returns:
        The scores, on every rank; None if the evaluation was asked to stop. The same command then
        resumes it.
    """
    remedy = "are for a run; name servers that you started in engine.urls, or evaluate with engine.mode=colocated"
    require(not settings.engine.num_local_servers, "engine.num_local_servers", settings.engine.num_local_servers, remedy)
    world = read_world()
    waits = settings.parallel
    settings = replace(
        settings, parallel=ParallelSettings(timeout_s=waits.timeout_s, straggler_timeout_s=waits.straggler_timeout_s)
    )  # no model is sharded here
    with StopSignal(grace_s=settings.run.grace_s, close_timeout_s=max(CLOSE_TIMEOUT_S, settings.parallel.timeout_s)) as stop:
        return run_in_own_thread(lambda: _evaluate_on_ranks(settings, plugins, world=world, stop=stop))


def _evaluate_on_ranks(settings: Settings, plugins: Plugins, *, world: World, stop: StopSignal) -> dict[str, float] | None:
    folder, timeout_s = Path(settings.run.dir), settings.parallel.timeout_s
    trim_malloc()
    watch = HangWatchdog(world, folder=folder, timeout_s=timeout_s)
    with ExitStack() as closing:
        connect(world, timeout_s=timeout_s)
        closing.callback(disconnect)
        with watch:
            task, source = raise_on_all_ranks(lambda: _load_task_and_weights(settings, plugins, world=world))
            closing.enter_context(locked_results_directory(settings))
            try:
                if enabled_services(settings.services):
                    urls = closing.enter_context(run_services(settings, world, raise_if_stopped=stop.check_start))
                    task = build_task(resolve_addresses(settings.task, urls, run=folder), plugins)
                examples = task.examples(settings.evaluation.split)
                run_on_rank_zero(lambda: report_column_warnings({settings.evaluation.split: examples}, log=partial(print, file=sys.stderr)))
                player = cache(lambda: _make_generator(settings, task, source, world=world, stop=stop, closing=closing))
                rollouts = list(_generate_or_load(settings, examples, player, world=world, stop=stop))
            except GracefulStop:
                return None
            scores = compute_eval_scores(task, examples, rollouts, max_failed=settings.run.max_failed_fraction)
            return run_on_rank_zero(lambda: _write_results(settings, task, examples, rollouts, scores))


def _load_task_and_weights(settings: Settings, plugins: Plugins, *, world: World) -> tuple[Task, TensorSource | None]:
    """Return the checked task and weights, before anything is started.

    Weights are None for an endpoint.
    """
    splits = (settings.evaluation.split,)
    if not settings.evaluation.urls:
        return check_run(settings, plugins, world=world, needed=0, splits=splits), open_evaluated_weights(settings)
    require(world.size == 1, "evaluation.urls", settings.evaluation.urls, f"one process is enough; torchrun started {world.size}")
    task = build_task(settings.task, plugins)
    check_examples(task, splits)
    return task, None


def open_evaluated_weights(settings: Settings) -> TensorSource:
    """Open the weights to evaluate.

    Raises:
        ValueError: They are not exactly the weights of the model.
    """
    path, given = Path(settings.model.path), settings.evaluation.weights
    spec = read_spec(settings.model.path)
    if given and (Path(given) / ADAPTER).is_file():
        return MergedTensors(open_source(path, spec, key="model.path"), Path(given), key="evaluation.weights")
    return open_source(Path(given or path), spec, key="evaluation.weights" if given else "model.path")


def _make_generator(
    settings: Settings, task: Task, source: TensorSource | None, *, world: World, stop: StopSignal, closing: ExitStack
) -> EvaluationGenerator:
    given = settings.evaluation
    episode = replace(episode_settings(settings), temperature=given.temperature).at_step(-1)
    episode = replace(episode, max_turns=settings.task.eval_max_turns or settings.task.max_turns)
    if source is None:
        player = EndpointRolloutRunner(task, given, settings.model, episode)
        closing.callback(player.close)
        return EvaluationGenerator(
            lambda examples, first: player.run_examples(examples, samples=given.samples, first_group=first), lambda _: player.prompt_text
        )
    fleet = _start_rollout_manager(settings, task, source, world=world, stop=stop, closing=closing)

    def prompt(rollout: Rollout) -> str:
        if not rollout.sequences:
            return ""
        stop = rollout.turns[0].token_span[0] if rollout.turns else None
        first = rollout.sequences[0]
        return fleet.renderer.describe_sequence(TokenSequence(token_ids=first.token_ids[:stop], images=first.images))

    return EvaluationGenerator(
        lambda examples, first: fleet.run_examples(examples, num_samples=given.samples, settings=episode, first_group=first), prompt
    )  # fmt: skip


def _start_rollout_manager(
    settings: Settings, task: Task, source: TensorSource, *, world: World, stop: StopSignal, closing: ExitStack
) -> RolloutManager:
    allowed = settings.task.data.allow_grounding_tokens
    renderer = Renderer(settings.model, max_inline_pixels=max_inline_pixels(settings.engine), allow_grounding_tokens=allowed)
    gallery = ImageExchange(patch_size=renderer.patch_size, group=long_timeout_group(timeout_s=settings.parallel.straggler_timeout_s))

    def tell(line: str) -> None:
        if world.is_main:
            print(line, flush=True)

    fleet = build_rollout_manager(
        settings, task, trainer=NoOffload(), renderer=renderer, world=world, image_exchange=gallery, stop_signal=stop, log=tell
    )
    closing.push(lambda failure, *_: fleet.close(all_ranks=failure is None))
    fleet.start()
    fleet.update_weights(iterate_tensors(source), version=0)
    return fleet


def _generate_or_load(
    settings: Settings, examples: Sequence[Example], make_generator: Callable[[], EvaluationGenerator], *, world: World, stop: StopSignal
) -> Iterator[Rollout]:  # fmt: skip
    """Yield the rollouts of all examples without images; load the chunks that are already saved.

    All ranks call this together. A chunk with infrastructure errors is saved as it is, and the next
    attempt generates it again.

    Raises:
        GracefulStop: The evaluation was asked to stop.
    """
    given, folder = settings.evaluation, Path(settings.run.dir)
    firsts = range(0, len(examples), given.chunk)
    progress = ProgressDisplay(len(firsts), title="evaluate") if world.is_main else None
    for number, first in enumerate(firsts):
        part, path = examples[first : first + given.chunk], chunk_path(folder, number)
        found = run_on_rank_zero(lambda: load_chunk(path, part, samples=given.samples))  # noqa: B023 - called at once
        if found is None:
            stop.check()
            playing = make_generator()
            rollouts = playing.generate(part, first)
            if number == 0:
                run_on_rank_zero(lambda: _save_prompt(folder, playing.render_prompt(rollouts[0])))  # noqa: B023 - called at once
            save_chunk(path, rollouts, chunk=number)
            found = [without_images(rollout) for rollout in rollouts]
        scores = [rollout.reward for rollout in found if rollout.reward is not None]
        if progress is not None:
            progress.log_step(number, {"reward/mean": sum(scores) / len(scores)} if scores else {})
        yield from found
    if progress is not None:
        progress.close()


def _save_prompt(folder: Path, text: str) -> None:
    with explain_write_errors(folder):
        write_bytes_atomically(folder / PROMPT_FILE, text.encode(errors="replace"))


def _write_results(
    settings: Settings, task: Task, examples: Sequence[Example], rollouts: list[Rollout], scores: dict[str, float]
) -> dict[str, float]:
    """Write and print the scores with their confidence intervals, and return them."""
    folder, lines = Path(settings.run.dir), collect_example_results(task, examples, rollouts)
    if "episodes" in scores:
        scores = scores | compute_success_statistics(lines, samples=settings.evaluation.samples)
    scores = scores | compute_official_interval(
        settings.task.data.benchmark, examples, [rollout for rollout in rollouts if rollout.is_scored]
    )
    conditions = describe_conditions(settings, num_examples=len(examples), prompt=read_text(folder / PROMPT_FILE, at_most=MAX_LINE_BYTES))
    with explain_write_errors(folder):
        write_lines_atomically(folder / EXAMPLES_FILE, lines)
        write_bytes_atomically(folder / EVALUATION_FILE, (json.dumps({"scores": scores, "stated": conditions}, indent=1) + "\n").encode())
    print_report(scores, conditions, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    print(folder / EVALUATION_FILE, flush=True)
    return scores
