"""Saves, publishes, deletes and restores the checkpoints of a run.

    RUN/checkpoints/step_00000003/            complete checkpoint after 3 steps, with the training
                                              state of the policy (policy/training_state.py)
        critic/                               training state of a critic with its own backbone
        hf/                                   Hugging Face folder without weights, for
                                              tools/convert/merger.py
        adapter/                              LoRA adapter in PEFT format, if LoRA is used
        run/state.json                        state of the run, sizes and digests of all other files
    RUN/checkpoints/.step_00000004.partial/   checkpoint that is being written or deleted; if the
                                              run is killed, the next attempt removes this folder

Values that are computed from the seed and the step, such as sampling seeds, are not saved.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron_rl.config import Settings
from megatron_rl.distributed.world import all_gather_object, raise_on_all_ranks, run_on_rank_zero
from megatron_rl.errors import RunFailed
from megatron_rl.policy.critic import Critic
from megatron_rl.policy.policy import Policy
from megatron_rl.policy.training_state import AsyncSave
from megatron_rl.run.checkpoint_state import CheckpointState, InputDigests, read_state, write_state
from megatron_rl.run.history import History
from megatron_rl.run.paths import CHECKPOINTS_FOLDER, explain_write_errors, list_checkpoints, step_name, step_of
from megatron_rl.run.record import Run
from megatron_rl.run.superseded_steps import SUPERSEDED, find_free_path
from megatron_rl.weights.formats.digests import CRITIC, STATE, find_difference, make_file_record
from megatron_rl.weights.formats.tensor_files import copy_companions, fsync_path

_SUCCESS = "eval/greedy_success"
_REMEDY = "no older checkpoint is intact; restore this one from a copy, or move it to another folder to start from the beginning"


def find_checkpoint(settings: Settings, *, group: dist.ProcessGroup | None = None) -> tuple[Path | None, CheckpointState]:
    """Return the newest intact checkpoint and its state; (None, CheckpointState()) for a new run.

    All ranks must call this together; they synchronize through the process group `group`. Damaged
    checkpoints that are newer than the returned checkpoint are moved to RUN/superseded/checkpoints,
    with one log line each. Partial checkpoints of a killed attempt are removed. Before this call,
    run/directory.py has checked that the run may resume in this directory.

    Raises:
        ValueError: All checkpoints are damaged.
    """
    folder = Path(settings.run.dir) / CHECKPOINTS_FOLDER
    with explain_write_errors(folder.parent):
        run_on_rank_zero(partial(_remove_partial, folder))
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(run_on_rank_zero(lambda: list_checkpoints(folder))):
        state, damage = run_on_rank_zero(partial(_try_load, checkpoint))
        damage = damage or _find_damage(checkpoint, state, group=group)
        if not damage:
            with explain_write_errors(folder.parent):
                run_on_rank_zero(lambda: _set_aside(damaged, into=folder.parent / SUPERSEDED / CHECKPOINTS_FOLDER, intact=checkpoint))  # noqa: B023
            return checkpoint, state
        damaged[checkpoint] = damage
    if damaged:
        raise ValueError(f"{next(iter(damaged.values()))}; {_REMEDY}")
    return None, CheckpointState()


def _try_load(checkpoint: Path) -> tuple[CheckpointState, str]:
    try:
        return read_state(checkpoint), ""
    except ValueError as error:
        return CheckpointState(), str(error)


def _find_damage(checkpoint: Path, state: CheckpointState, *, group: dist.ProcessGroup | None) -> str:
    """Compare a checkpoint's files with the recorded digests; return the first mismatch, or "".

    Each rank checks a share of the files.
    """
    by_size = sorted(state.files, key=lambda name: (-int(state.files[name]["bytes"]), name))
    share = by_size[dist.get_rank() :: dist.get_world_size()]
    found = raise_on_all_ranks(lambda: find_difference(checkpoint, state.files, share), group=group)
    difference = next(filter(None, all_gather_object(found, group=group)), "")
    return f"{checkpoint}: damaged: {difference}" if difference else ""


def _set_aside(damaged: Mapping[Path, str], *, into: Path, intact: Path) -> None:
    """Move damaged checkpoints to the folder `into`, because the run will save them again."""
    for checkpoint, damage in damaged.items():
        into.mkdir(parents=True, exist_ok=True)
        target = find_free_path(into / checkpoint.name)
        checkpoint.rename(target)
        print(f"{damage}; moved the checkpoint to {target}; resuming from {intact.name} and repeating the later steps", flush=True)


def expired(successes: Mapping[int, float | None], *, keep_last: int, keep_best: int) -> set[int]:
    """Return the steps of the checkpoints to delete, given {step: greedy success or None}.

    None means that the step was not evaluated. The `keep_last` newest checkpoints and the
    `keep_best` checkpoints with the highest success are kept. Of two checkpoints with the same
    success, the later checkpoint is kept.

    Example: the success is 0.5 after step 1, 0.9 after step 2 and 0.1 after step 4, and step 3 was
    not evaluated. With keep_last=1 and keep_best=1, the result is {1, 3}.
    """
    last = sorted(successes)[-keep_last:]
    evaluated = {step: success for step, success in successes.items() if success is not None}
    best = sorted(evaluated, key=lambda step: (-evaluated[step], -step))[:keep_best]
    return successes.keys() - {*last, *best}


@dataclass(slots=True)
class _Pending:
    """A checkpoint that is being written."""

    folder: Path
    step: int
    saves: list[AsyncSave]
    state: CheckpointState | None = None


class Checkpoints:
    """Writes and restores a run's checkpoints. All ranks must call every method together."""

    def __init__(
        self, settings: Settings, policy: Policy, critic: Critic | None = None, *,
        resume_from: Path | None, inputs: InputDigests, group: dist.ProcessGroup | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Create the object without reading or writing a checkpoint.

        Args:
            settings: Settings of the run.
            policy: Policy to save and restore.
            critic: Critic with its own backbone; None without a critic or with a shared backbone.
            resume_from: Checkpoint that `find_checkpoint` returned; None for a new run.
            inputs: Digests of the run's model and data files.
            group: Process group with a long timeout (world.long_timeout_group), because some ranks
                write more slowly than others.
            clock: Returns the time in seconds, for checkpoint.every_s.
        """
        self._settings, self._policy, self._critic, self._resume_from, self._group = settings, policy, critic, resume_from, group
        self._inputs = inputs
        self._run = Path(settings.run.dir)
        self._pending: _Pending | None = None
        self._clock, self._last = clock, clock()

    def restore(self) -> None:
        """Restore policy and critic from `resume_from`; do nothing for a new run.

        Call this after all other components are built, because building them may advance the random
        generators.
        """
        if self._resume_from is not None:
            self._policy.load(self._resume_from, seed=self._settings.run.seed)
            if self._critic is not None:
                self._critic.load(self._resume_from / CRITIC, seed=self._settings.run.seed)

    def begin_step(self, step: int, *, is_last: bool = False) -> None:
        """Start writing a checkpoint after `step` completed steps if a checkpoint is due.

        The checkpoint contains the state at the time of this call. The policy must not be
        offloaded.
        """
        every, save_last = self._settings.checkpoint.every, self._settings.checkpoint.save_last
        if (every and step % every == 0) or (is_last and save_last) or self._is_late():
            self._begin(step)

    def _is_late(self) -> bool:
        """Return True if at least checkpoint.every_s seconds have passed since the last save began.

        The clock of rank 0 decides for all ranks.
        """
        limit = self._settings.checkpoint.every_s
        return limit > 0 and run_on_rank_zero(lambda: self._clock() - self._last >= limit)

    def _begin(self, step: int) -> None:
        self.wait_for_save()
        self._last = self._clock()
        folder = self._run / CHECKPOINTS_FOLDER / _hidden_name(step)
        with explain_write_errors(self._run):
            model = self._settings.model
            pixels = (model.min_pixels, model.max_pixels)
            run_on_rank_zero(lambda: _create_folder(folder, hf=Path(model.path), pixels=pixels, with_critic=self._critic is not None))
            if self._settings.lora.rank:
                self._policy.save_adapter(folder / "adapter")
        background = self._settings.checkpoint.background
        saves = [self._policy.save(folder, background=background)]
        if self._critic is not None:
            saves.append(self._critic.save(folder / CRITIC, background=background))
        self._pending = _Pending(folder, step, saves)

    def finish_step(self, step: int, *, history: History, metrics: Mapping[str, float]) -> None:
        """Add the run's state to the pending checkpoint; publish it if all its files are written.

        Call this after the step is recorded, so that the state includes the step's evaluation.
        """
        pending = self._pending
        if pending is None:
            return
        if pending.step == step:
            pending.state = CheckpointState(
                step=step, history=deepcopy(history), success=metrics.get(_SUCCESS), settings=asdict(self._settings), inputs=self._inputs
            )  # fmt: skip
        if not self._settings.checkpoint.background or all([save.is_written() for save in pending.saves]):
            self.wait_for_save()

    def save(self, step: int, *, history: History, metrics: Mapping[str, float]) -> None:
        """Write and publish a checkpoint after `step` completed steps, even if none is due.

        The policy must not be offloaded.
        """
        checkpoint = self._run / CHECKPOINTS_FOLDER / step_name(step)
        is_begun = self._pending is not None and self._pending.step == step
        if step > 0 and not is_begun and not run_on_rank_zero(checkpoint.exists):
            self._begin(step)
        self.finish_step(step, history=history, metrics=metrics)
        self.wait_for_save()

    def wait_for_save(self) -> None:
        """Wait until the pending checkpoint is written, and publish it.

        Raises:
            OSError: The checkpoint could not be written; raised on every rank.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        with explain_write_errors(self._run):
            try:
                for save in pending.saves:
                    save.finish(group=self._group)
                run_on_rank_zero(lambda: self._publish(pending), group=self._group)
            except OSError:
                if dist.get_rank() == 0:
                    shutil.rmtree(pending.folder, ignore_errors=True)
                raise

    @contextmanager
    def wait_for_save_on_failure(self, run: Run) -> Iterator[None]:
        """Publish the pending checkpoint if the block raises RunFailed.

        RunFailed must be raised on all ranks. If the evaluation after the checkpoint's step failed,
        the step's metrics stay pending in the history. A resumed run then repeats the evaluation.
        """
        try:
            yield
        except RunFailed:
            if self._pending is not None and self._pending.state is None and self._pending.step == run.num_done:
                self.finish_step(run.num_done, history=run.history, metrics=run.metrics)
            if self._pending is not None and self._pending.state is not None:
                self.wait_for_save()
            raise

    def mark_evaluated(self, *, history: History, metrics: Mapping[str, float]) -> None:
        """Update the restored checkpoint with the results of its pending evaluation."""

        def write() -> None:
            assert self._resume_from is not None
            state = replace(read_state(self._resume_from), history=history, success=metrics.get(_SUCCESS))
            write_state(self._resume_from / STATE, asdict(state))

        with explain_write_errors(self._run):
            run_on_rank_zero(write)

    def _publish(self, pending: _Pending) -> None:
        """Publish a checkpoint: flush it to disk, rename it, then delete expired checkpoints."""
        assert pending.state is not None
        folder, checkpoint = pending.folder, pending.folder.with_name(step_name(pending.step))
        digests = {path: sha256 for save in pending.saves for path, sha256 in save.digests.items()}
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        files = {str(path.relative_to(folder)): make_file_record(path, digests.get(path)) for path in paths}
        write_state(folder / STATE, asdict(replace(pending.state, files=files)))
        for root, _, names in os.walk(folder):
            for path in (*(Path(root, name) for name in names), Path(root)):
                fsync_path(path)
        folder.rename(checkpoint)
        fsync_path(checkpoint.parent)
        self._thin_out(checkpoint.parent)

    def _thin_out(self, folder: Path) -> None:
        keep = self._settings.checkpoint
        states = {step_of(path): _try_load(path)[0] for path in list_checkpoints(folder)}
        successes = {step: state.success if state else None for step, state in states.items()}
        for step in expired(successes, keep_last=keep.keep_last, keep_best=keep.keep_best):
            going = folder / _hidden_name(step)
            (folder / step_name(step)).rename(going)
            shutil.rmtree(going)


def _hidden_name(step: int) -> str:
    """Return the folder name of a checkpoint that is being written or deleted."""
    return f".{step_name(step)}.partial"


def _remove_partial(folder: Path) -> None:
    for leftover in folder.glob(".step_*.partial"):
        shutil.rmtree(leftover)


def _create_folder(folder: Path, *, hf: Path, pixels: tuple[int, int], with_critic: bool) -> None:
    """Create a checkpoint folder with a copy of the model's Hugging Face files without weights.

    In the copied processor files, the pixel limits are set to the limits used in training.
    """
    (folder / Path(STATE).parent).mkdir(parents=True)
    if with_critic:
        (folder / CRITIC).mkdir()
    copy_companions(hf, folder / "hf", pixels=pixels)
