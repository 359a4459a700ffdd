"""Records the history, metrics, evaluations and rollouts of a run in the run directory."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import yaml

from megatron_rl.callbacks import NO_CALLBACKS
from megatron_rl.config import ALARMS, AlarmSettings, Settings
from megatron_rl.distributed.world import World, all_gather_object, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.errors import LogprobMismatch, NonFiniteValue
from megatron_rl.io.jsonl import write_bytes_atomically, write_lines_atomically
from megatron_rl.observe.alarms import AlarmMonitor
from megatron_rl.observe.judge_stats import JudgeStats
from megatron_rl.observe.memory import max_over_ranks, peak_memory
from megatron_rl.observe.metrics import METRICS_FILE, MetricsLog, StepTimer, read_metrics
from megatron_rl.observe.progress import ProgressDisplay
from megatron_rl.observe.recorder import IMAGES_FOLDER, BestWorstRecorder, save_images, select_best_and_worst
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER as ROLLOUTS
from megatron_rl.observe.recorder import write_rollouts as write_rollouts
from megatron_rl.observe.rollout_store import RolloutStore
from megatron_rl.observe.step_metrics import EngineBusyCounter, groups_with_advantages, idle_metrics
from megatron_rl.observe.trace import STEP_ROW, StepTrace
from megatron_rl.observe.trace import write_trace as write_trace
from megatron_rl.run.history import History
from megatron_rl.run.paths import ADAPTER_FOLDER, CONFIG_FILE, EVALUATION_FILE, FINAL_FOLDER, PROMPTS_FILE, explain_write_errors
from megatron_rl.run.superseded_steps import find_gaps, supersede_records
from megatron_rl.types import MicroBatch, Rollout


class Run:
    """Writes to the run directory on rank 0; keeps the timer and the history on every rank."""

    def __init__(self, settings: Settings, world: World, *, num_steps: int, first_step: int = 0, history: History | None = None) -> None:
        """Open the run directory.

        Earlier attempts have completed `first_step` steps, and `history` is the state after these
        steps. Records of later steps are moved to superseded/.
        """
        self.settings, self.folder = settings, Path(settings.run.dir)
        self.final_folder = self.folder / FINAL_FOLDER
        self.history = history or History()
        self.num_steps, self.first_step = num_steps, first_step
        self.num_done = first_step
        """Number of training steps with completed updates."""
        self.is_finished = False
        self.callbacks = NO_CALLBACKS
        """Functions of the user, set by the entry point on every rank."""
        self.stops_early = False
        """True after a callback has ended training."""
        self.judge_stats: JudgeStats | None = None
        """Judge statistics, set by the entry point on every rank if the task has a judge."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last step in this attempt."""
        self.evaluation: dict[str, float] = {}
        """Scores of the last evaluation in this attempt, as in eval.json."""
        self.is_main, self._rank, self._is_alone = world.is_main, world.rank, world.size == 1
        self._is_async = settings.run.max_staleness > 0
        self._recorded = {"num_best": settings.rollouts.keep_best, "num_worst": settings.rollouts.keep_worst}
        self._saves_all = settings.rollouts.save == "all"
        self._distill = settings.distill
        self._reported_examples, self._busy_tracker = set(self.history.bad_examples), EngineBusyCounter()
        self.progress = ProgressDisplay(num_steps, title=settings.stage, first_step=first_step) if self.is_main else None
        self.trace = StepTrace(settings.run.trace)
        self.step_timer = StepTimer(on_span=self.progress.set_phase if self.progress else None, trace=partial(self.trace, STEP_ROW))
        if not self.is_main:
            return
        with self.step_timer("start"), explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            first_line = first_step - bool(self.history.pending_metrics)
            superseded = supersede_records(
                self.folder, first_step=first_step, first_line=first_line, num_steps=num_steps, results=(EVALUATION_FILE, PROMPTS_FILE),
                models=(FINAL_FOLDER, ADAPTER_FOLDER),
            )  # fmt: skip
            if superseded and superseded[1]:
                self.log(f"{superseded[1]} recorded steps will be repeated; their records are kept in {superseded[0]}")
            gaps = find_gaps(self.folder, first_line=first_line)
            if gaps:
                self.log(f"warning: {gaps}")
            config = asdict(settings)
            write_bytes_atomically(self.folder / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False).encode())
            self.metrics_log = MetricsLog(
                self.folder, settings.wandb, config, trackio_settings=settings.trackio, start_step=first_line
            )  # fmt: skip
            alarms = settings.alarms if settings.stage == "rl" else AlarmSettings(disable=list(ALARMS))
            self._alarms = AlarmMonitor(alarms, read_metrics(self.folder / METRICS_FILE))
            self.recorder = BestWorstRecorder(self.folder, **self._recorded)
            self.rollout_store = RolloutStore(self.folder, max_gb=settings.rollouts.max_gb)

    @contextmanager
    def timed_rollout(self, busy_s: Callable[[], float]) -> Iterator[None]:
        """Time the generation of a step's rollouts.

        The engine's busy time is added to the "engine" timer. The remaining time, spent in
        environments and rewards, is added to the "environment" timer.
        """
        busy = self._busy_tracker.start(busy_s)
        with self.step_timer("environment"):
            yield
            self.step_timer.add_seconds("engine", busy_s() - busy)

    @contextmanager
    def dump_on_error(self, rollouts: Sequence[Rollout], *, step: int) -> Iterator[None]:
        """If the block raises NonFiniteValue, save the step's rollouts in the run directory.

        All ranks must have the same rollouts and raise the same error. Each rank writes the images
        whose pixels it has, and rank 0 writes everything else.
        """
        try:
            yield
        except NonFiniteValue as error:
            path = self.folder / "not_finite" / f"step_{step:06d}.jsonl"
            with explain_write_errors(self.folder):
                raise_on_all_ranks(lambda: save_images(path.parent, rollouts))
                run_on_rank_zero(lambda: write_rollouts(path, {"kept": rollouts}, step=step, step_rollouts=rollouts))
            raise NonFiniteValue(f"step {step}, {error}; the step's rollouts are saved in {path}; earlier checkpoints are kept") from error

    @contextmanager
    def dump_batches_on_error(
        self, batches: Sequence[MicroBatch], *, step: int, load_image_patches: Callable[[MicroBatch], MicroBatch]
    ) -> Iterator[None]:
        """If the block raises NonFiniteValue, save this rank's micro-batches in the run directory.

        The files can be read with torch.load(weights_only=True). `load_image_patches` adds the
        image patches to a micro-batch. Each micro-batch is saved to its own file, because the
        patches of all micro-batches may exceed the host's memory.
        """
        try:
            yield
        except NonFiniteValue as error:
            folder = self.folder / "not_finite"
            with explain_write_errors(self.folder):
                folder.mkdir(parents=True, exist_ok=True)
                for number, batch in enumerate(batches):
                    kept = {**asdict(replace(batch, images=[])), "patch_PC": load_image_patches(batch).patch_PC}
                    torch.save(kept, folder / f"step_{step:08d}_rank_{self._rank}_micro_batch_{number}.pt")
                    del kept  # free the patches before computing those of the next micro-batch
            raise NonFiniteValue(f"step {step}, {error}; the micro-batches are saved in {folder}; earlier checkpoints are kept") from error

    @contextmanager
    def recording_mismatch(self, rollouts: Sequence[Rollout], *, step: int) -> Iterator[None]:
        """If the block raises LogprobMismatch, save a few rollouts for launch/explain.py."""
        try:
            yield
        except LogprobMismatch as error:
            chosen = select_best_and_worst(rollouts, num_best=4, num_worst=4)
            path = self.folder / ROLLOUTS / f"step_{step:06d}.jsonl"
            with explain_write_errors(self.folder):
                raise_on_all_ranks(lambda: save_images(path.parent, [rollout for kind in chosen.values() for rollout in kind]))
                run_on_rank_zero(lambda: write_rollouts(path, chosen, step=step, step_rollouts=rollouts))
            explain = f"python launch/explain.py {self.folder} --step {step}"
            remedy = f"`{explain}` finds where they differ; run.max_logprob_abs_diff raises the bound"
            raise LogprobMismatch(f"step {step}: {error}; {remedy}") from error

    def log(self, line: str) -> None:
        """Print one line on rank 0."""
        if self.progress is not None:
            self.progress.print_line(line)

    def log_episodes(self, done: int, total: int) -> None:
        """Display on rank 0 how many episodes of an evaluation have ended."""
        if self.progress is not None:
            self.progress.log_episodes(done, total)

    def log_step(self, step: int, rollouts: list[Rollout], metrics: dict[str, float]) -> None:
        """Record a step's rollouts after the step's updates.

        With rollouts.save=all, all rollouts are saved; otherwise, only the best and worst rollouts
        are saved. Each example with a permanent infrastructure error is logged once. `metrics`
        stays pending in the history until `record` is called.
        """
        _, moving = groups_with_advantages(rollouts)
        self.history.num_learning_steps += bool(moving) or self._is_taught()
        metrics["rollout/bad_prompts"] = float(len(self.history.bad_examples))
        if self.judge_stats is not None:
            metrics |= self.judge_stats.record_decided(rollouts, self.history.judge)
        self.num_done, self.metrics, self.history.pending_metrics = step + 1, metrics, metrics
        if not self._is_alone:
            best_worst = [each for kind in select_best_and_worst(rollouts, **self._recorded).values() for each in kind]
            chosen = rollouts if self._saves_all else best_worst
            with explain_write_errors(self.folder):
                raise_on_all_ranks(lambda: save_images(self.folder / ROLLOUTS, chosen))
        if not self.is_main:
            return
        for name in [name for name in self.history.bad_examples if name not in self._reported_examples]:
            self.log(f"permanent error, not retried: {name}: {self.history.bad_examples[name]}")
            self._reported_examples.add(name)
        with explain_write_errors(self.folder):
            self.recorder.record(step, rollouts)
            self.metrics_log.log_rollouts(
                step, select_best_and_worst(rollouts, **self._recorded), image_folder=self.folder / ROLLOUTS / IMAGES_FOLDER
            )
            if self._saves_all:
                self.rollout_store.record_step(step, rollouts, num_gen_batches=int(metrics["rollout/num_gen_batches"]))

    def _is_taught(self) -> bool:
        """Return True if a teacher changes the policy even without rewards.

        A merge of the policy's own checkpoints differs from the policy only after the policy has
        learned from rewards.
        """
        return self._distill.has_teacher and (not self._distill.merge.method or self.history.num_learning_steps > 0)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Record a step's metrics and times, and print one line of progress."""
        self.num_done, self.metrics, self.history.pending_metrics = step + 1, metrics, {}
        self.evaluation = _evaluation(metrics) or self.evaluation
        if self.trace.is_enabled:
            events = all_gather_object(self.trace.pop_events())
            with explain_write_errors(self.folder):
                run_on_rank_zero(lambda: write_trace(self.folder, step, events))
        memory = [peak_memory()] if self._is_alone else all_gather_object(peak_memory())
        metrics = {**metrics, **(self.judge_stats.collect(self.history.judge) if self.judge_stats else {})}
        if self.is_main:
            metrics = self._write_metrics(step, metrics, memory)
        if self.callbacks.call(step + 1, metrics):
            self.stops_early, self.num_steps = True, step + 1

    def _write_metrics(self, step: int, metrics: dict[str, float], memory: Sequence[dict[str, float]]) -> dict[str, float]:
        """Write a step's metrics on rank 0, with times and memory, and return them."""
        with explain_write_errors(self.folder):
            times = self.step_timer.collect()
            shares = idle_metrics(times, busy_s=self._busy_tracker.busy_since_last()) if self._is_async else {}
            metrics = {**metrics, **times, **shares, **self.rollout_store.metrics(), **max_over_ranks(memory)}
            metrics |= self._check_alarms(step, metrics)
            self.metrics_log.log(step, metrics)
        taught_nothing = metrics.get("rollout/all_groups_zero_std", 0.0) > 0 and not self._is_taught()
        assert self.progress is not None, "the main rank has a display"
        self.progress.log_step(step, metrics, note="rewards equal in every group: nothing learned" if taught_nothing else "")
        return metrics

    def _check_alarms(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Print the alarms that begin with these metrics, and return alarms/NAME of every rule."""
        for alarm in self._alarms.update({"step": step, **metrics}):
            self.log(f"warning: after step {self.num_done}: {alarm}")
        return self._alarms.metrics()

    def finish(self, metrics: dict[str, float]) -> None:
        """Mark the run as finished and write the final evaluation to eval.json and the metrics."""
        values = self.evaluation = _evaluation(metrics)
        self.is_finished = True
        metrics = {**metrics, **(self.judge_stats.collect(self.history.judge) if self.judge_stats else {})}
        self.callbacks.call(self.num_steps, metrics, has_step=False)
        if not self.is_main:
            return
        if self.judge_stats is not None:
            self.log(self.judge_stats.format_summary(self.history.judge))
        if self.history.returns and not self.history.num_learning_steps:
            remedy = "easier or harder examples, a higher algo.temperature, larger groups, or a warm start (stage=sft) can make them differ"
            self.log(f"nothing was learned in any of {len(self.history.returns)} steps: rewards were equal in every group; {remedy}")
        metrics = {**metrics, **self._check_alarms(self.num_steps, metrics)}
        with explain_write_errors(self.folder):
            self.metrics_log.log(self.num_steps, {**metrics, **self.step_timer.collect()})
            write_bytes_atomically(self.folder / EVALUATION_FILE, (json.dumps(values, indent=1) + "\n").encode())
            seen = self.history.prompts.items()
            lines = [{"id": name, "episodes": n, "mean": rewards / n, "last_step": last} for name, (n, rewards, last) in seen]
            write_lines_atomically(self.folder / PROMPTS_FILE, lines)

    def close(self) -> None:
        """Close the logs and the progress display. No files are deleted."""
        if self.is_main:
            assert self.progress is not None, "the main rank has a display"
            self.progress.close()
            with explain_write_errors(self.folder):  # closing retries earlier failed writes
                self.metrics_log.close()


def _evaluation(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval/"): value for name, value in metrics.items() if name.startswith("eval/")}
