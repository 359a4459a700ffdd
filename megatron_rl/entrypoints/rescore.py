"""Rescores recorded rollouts with another reward, judge or rubric, without an engine.

    OUT/rollouts/step_000012.parquet    rollouts with new scores, for replay or export
    OUT/scores.json                     summary of the score changes

Each step is saved as soon as it is scored, so an interrupted rescoring can be resumed. A rollout
that was recorded as failed is not scored and stays failed. If a judge is unavailable during
rescoring, the rollout is marked as failed.
"""

import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import yaml
from scipy.stats import spearmanr

from megatron_rl.config import Settings, require
from megatron_rl.distributed.world import connect, disconnect, read_world
from megatron_rl.errors import AccessDenied, GracefulStop, InfraError
from megatron_rl.export.sft_transcripts import link_images
from megatron_rl.io.jsonl import write_bytes_atomically
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.observe.rollout_store import (
    list_step_files,
    read_columns,
    read_num_gen_batches,
    read_rollouts,
    step_number,
    step_path,
    without_training_columns,
    write_step,
)
from megatron_rl.registry import Plugins, build_task
from megatron_rl.rewards.rubric import RewardInput
from megatron_rl.rollout.example_fields import example_fields
from megatron_rl.rollout.task import Task
from megatron_rl.run.changed_settings import changed_keys, describe_changes, is_mutable_key, read_settings
from megatron_rl.run.directory import lock
from megatron_rl.run.paths import CONFIG_FILE, explain_write_errors
from megatron_rl.run.shutdown import CLOSE_TIMEOUT_S, StopSignal
from megatron_rl.services.service_launcher import enabled_services, resolve_addresses, run_services
from megatron_rl.types import Example, Image, Rollout, Status

SCORES_FILE = "scores.json"
"""File name of the summary in the output directory."""
SCORE_SETTINGS = ("task.", "model.path", "rollouts.replay_from")
"""Names or prefixes of the settings that affect scores."""
MAX_ATTEMPTS = 3
"""Maximum number of attempts to score a rollout if infrastructure errors occur."""


def rescore_run(settings: Settings, plugins: Plugins = Plugins()) -> dict[str, float] | None:
    """Score the rollouts in rollouts.replay_from with the task's rubric and write them to run.dir.

    Returns:
        The summary, as in scores.json; None if a stop was requested.

    Raises:
        ValueError: rollouts.replay_from contains no recorded rollouts, run.dir is the directory of
            the recorded run, or a recorded example is not in the task's data.
    """
    folder, out = Path(settings.rollouts.replay_from), Path(settings.run.dir)
    paths = list_step_files(folder)
    require(
        bool(paths),
        "rollouts.replay_from",
        settings.rollouts.replay_from,
        "contains no steps saved with rollouts.save=all; use RUN/rollouts of a run with this setting",
    )
    remedy = "the recorded run must not change; choose another folder for the new scores"
    require(folder.resolve().parent != out.resolve(), "run.dir", settings.run.dir, remedy)
    world = read_world()
    require(world.size == 1, "processes", world.size, "must be 1, because rescoring runs in a single process")
    with StopSignal(grace_s=settings.run.grace_s, close_timeout_s=max(CLOSE_TIMEOUT_S, settings.parallel.timeout_s)) as stop, lock(out):
        _open_directory(out, settings)
        connect(world, timeout_s=settings.parallel.timeout_s)
        try:
            with run_services(settings, world, raise_if_stopped=stop.check_start) as urls:
                task = settings.task if not enabled_services(settings.services) else resolve_addresses(settings.task, urls, run=out)
                asyncio.run(_rescore_steps(build_task(task, plugins), paths, settings, stop))
        except GracefulStop:
            return None
        finally:
            disconnect()
    return _write_summary([(path, step_path(out / ROLLOUTS_FOLDER, step_number(path))) for path in paths], out)


def _open_directory(out: Path, settings: Settings) -> None:
    """Write the settings to the output directory.

    Raises ValueError if the directory contains scores that were computed with other settings.
    """
    new = yaml.safe_load(yaml.safe_dump(asdict(settings)))
    if (out / CONFIG_FILE).exists():
        try:
            changes = changed_keys(read_settings(out / CONFIG_FILE), new)
        except ValueError as error:
            raise ValueError(f"{out / CONFIG_FILE}: {error}; choose another folder") from error
        others = {key: values for key, values in changes.items() if key.startswith(SCORE_SETTINGS) and not is_mutable_key(key, *values)}
        require(
            not others,
            "run.dir",
            str(out),
            f"contains scores computed with other settings: {describe_changes(others)}; choose another folder",
        )
    with explain_write_errors(out):
        write_bytes_atomically(out / CONFIG_FILE, yaml.safe_dump(new, sort_keys=False).encode())


async def _rescore_steps(task: Task, paths: Sequence[Path], settings: Settings, stop: StopSignal) -> None:
    out, progress = Path(settings.run.dir), ProgressDisplay(len(paths), title="rescore")
    examples = {example.id: example for split in ("train", "eval") for example in task.examples(split)}
    token = read_spec(settings.model.path).image_token_id
    await task.start()
    try:
        for number, path in enumerate(paths):
            stop.check()
            target = step_path(out / ROLLOUTS_FOLDER, step_number(path))
            if not target.exists():
                rollouts = read_rollouts(path)
                scored = await asyncio.gather(*(rescore_rollout(task, find_example(examples, each), each, token) for each in rollouts))
                with explain_write_errors(out):
                    link_images(path.parent, target.parent, (image.key for each in rollouts for image in each.images))
                    write_step(target, scored, step=step_number(path), num_gen_batches=read_num_gen_batches(path))
            progress.log_step(number, {})
    finally:
        progress.close()
        await task.close()


def find_example(examples: Mapping[str, Example], rollout: Rollout) -> Example:
    """Return the example that a rollout was generated from.

    Raises:
        ValueError: The task has no example with the rollout's example id.
    """
    if rollout.example_id not in examples:
        raise ValueError(f"task.name: has no example {rollout.example_id!r:.80}; use the task and the data of the recorded run")
    return examples[rollout.example_id]


async def rescore_rollout(task: Task, example: Example, rollout: Rollout, image_token_id: int) -> Rollout:
    """Return a copy of the rollout, scored with the task's rubric; environment rewards are kept."""
    if not rollout.is_scored:
        return rollout
    turns = [replace(turn, step_score=None, reward_delta=0.0) for turn in rollout.turns]
    bare = replace(
        without_training_columns(rollout), turns=turns, reward=None, outcome_reward=0.0, reward_terms={}, verdicts=[], scoring_s=0.0
    )
    bare = replace(bare, **example_fields(example.payload))  # question, answer and other fields may have changed
    clock = asyncio.get_running_loop().time
    tried = 0
    while True:
        tried += 1
        started = clock()
        try:
            score = await task.rubric.score(
                RewardInput(payload=example.payload, rollout=bare, prompt_images=find_prompt_images(bare, image_token_id))
            )
        except AccessDenied:
            raise
        except InfraError as fault:
            if tried == MAX_ATTEMPTS:
                return replace(bare, status=Status.FAILED, reason=str(fault))
            continue
        for turn, worth, gain in zip(turns, score.step_scores, score.reward_deltas, strict=True):
            turn.step_score, turn.reward_delta = worth, gain
        return replace(
            bare, reward=score.reward, outcome_reward=score.outcome_reward, reward_terms=score.reward_terms, scoring_s=clock() - started
        )


def find_prompt_images(rollout: Rollout, image_token_id: int) -> list[Image]:
    """Return the images in a rollout's first prompt, before the first sampled token."""
    if not rollout.sequences:
        return []
    first = rollout.sequences[0]
    before = first.loss_mask.index(1) if 1 in first.loss_mask else len(first.token_ids)
    num, shown = sum(token == image_token_id for token in first.token_ids[:before]), []
    for image in first.images:
        num -= image.num_tokens
        if num < 0:
            break
        shown.append(image)
    return shown


def _write_summary(pairs: Sequence[tuple[Path, Path]], out: Path) -> dict[str, float]:
    """Compute, write, print and return a summary of the score changes.

    The summary contains the mean rewards before and after rescoring, the fraction of changed
    rewards and the rank correlation. These statistics are computed from the rollouts that have a
    score both before and after rescoring.
    """
    before, after, failed = [], [], 0
    for old, new in pairs:
        for one, other in zip(*(read_columns(path, ["reward"])["reward"].to_pylist() for path in (old, new)), strict=True):
            failed += one is not None and other is None
            if one is not None and other is not None:
                before.append(one)
                after.append(other)
    found = {"rollouts": float(len(before)), "failed_now": float(failed)}
    if before:
        found |= {
            "reward_before": statistics.fmean(before),
            "reward_after": statistics.fmean(after),
            "changed": sum(one != other for one, other in zip(before, after, strict=True)) / len(before),
        }
    if len(set(before)) > 1 and len(set(after)) > 1:
        found["rank_correlation"] = float(cast(Any, spearmanr(before, after)).statistic)
    with explain_write_errors(out):
        write_bytes_atomically(out / SCORES_FILE, (json.dumps(found, indent=1) + "\n").encode())
    print("\n".join(f"{name:<18}{value:.4g}" for name, value in found.items()))
    print(out / SCORES_FILE, flush=True)
    return found
