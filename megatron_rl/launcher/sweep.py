"""Execution of a sweep's runs, on this machine or as tasks of a Slurm job array (launch/sweep.py).

A YAML file defines the sweep (launcher/sweep_file.py). All settings are composed before the first
run starts. Finished runs are skipped; stopped or failed runs resume from their run directories
(run/directory.py).
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_rl.config import Settings
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.launcher.sweep_file import Sweep, SweepTask, read_sweep
from megatron_rl.run.directory import read_resume_state
from megatron_rl.run.process import LOGS, ManagedProcess, SignalForwarder, open_output, requeue_job, require_job
from megatron_rl.run.status import is_running, read_status

_POLL_S = 0.2


@dataclass(slots=True, frozen=True)
class LaunchScripts:
    """Scripts in launch/ that start a run, or the installed command if there are none."""

    folder: Path
    """The checkout's launch/ directory, which contains train.py, launch.py and slurm/."""

    def command(self, overrides: Sequence[str], *, processes: int, environment: Mapping[str, str]) -> list[str]:
        """Return the command that starts a run.

        If the current Slurm job has several nodes, the run uses all of these nodes; otherwise, the
        run uses only this machine.
        """
        if int(environment.get("SLURM_NNODES", 1)) > 1:
            given = [f"--nproc_per_node={processes}"] if processes else []
            return ["bash", str(self.folder / "slurm" / "nodes.sh"), *given, *overrides]
        num = processes or int(environment.get("SLURM_GPUS_ON_NODE", 1))
        alone = ["--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", str(num)]
        if not self.folder.is_dir():  # installed from a wheel
            return [sys.executable, "-m", "megatron_rl", "launch", *alone, "-m", "megatron_rl", "train", *overrides]
        return [sys.executable, str(self.folder / "launch.py"), *alone, str(self.folder / "train.py"), *overrides]


def compose_tasks(tasks: Sequence[SweepTask]) -> list[Settings]:
    """Compose and validate the settings of all tasks.

    Raises:
        ValueError: Some settings are invalid. The message has one line per distinct error; each
            line names the first task with that error.
    """
    found: list[Settings] = []
    wrong: dict[str, int] = {}
    for task in tasks:
        try:
            found.append(compose_settings(task.overrides))
        except ValueError as error:
            wrong.setdefault(str(error), task.index)
    if wrong:
        raise ValueError("\n".join(f"{line} (task {index})" for line, index in wrong.items()))
    return found


def find_pending_tasks(tasks: Sequence[SweepTask], settings: Sequence[Settings]) -> list[SweepTask]:
    """Return the tasks with unfinished runs.

    Raises:
        ValueError: Some run directories are in use, or contain runs that cannot be resumed with
            these settings. The message has one line per directory.
    """
    stands = [read_resume_state(task.folder, chosen) for task, chosen in zip(tasks, settings, strict=True)]
    refused = [(task.folder, stand.refusal) for task, stand in zip(tasks, stands, strict=True) if stand.refusal]
    refused += [(task.folder, "is in use by an active run") for task in tasks if is_running(task.folder)]
    if refused:
        raise ValueError("\n".join(f"run.dir={folder}: {why}; choose another folder, or rename this one" for folder, why in refused))
    return [task for task, stand in zip(tasks, stands, strict=True) if not stand.is_finished]


def print_sweep(sweep: Sweep) -> None:
    """Print the tasks with the state of their runs, and the sbatch command for the sweep."""
    width = max(len(str(task.folder)) for task in sweep.tasks)
    for task in sweep.tasks:
        print(f"{task.index:>3}  {read_status(task.folder).state:8}  {task.folder!s:{width}}  {' '.join(task.overrides[:-1])}")
    print(f"sbatch --array=0-{len(sweep.tasks) - 1} launch/slurm/sweep.sbatch {sweep.path}")


class SweepRunner:
    """Runs tasks, several in parallel, and prints a line whenever a task ends."""

    def __init__(self, sweep: Sweep, scripts: LaunchScripts, *, num_tasks: int) -> None:
        self._sweep, self._launch, self._num = sweep, scripts, num_tasks
        self._running: dict[ManagedProcess, SweepTask] = {}
        self.exit_codes: list[int] = []
        is_terminal = sys.stdout.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console()) if is_terminal and num_tasks > 1 else None

    def run(self, tasks: Sequence[SweepTask], *, max_parallel: int, signals: SignalForwarder) -> None:
        """Run the tasks until all have ended; after a stop signal, no further tasks start."""
        waiting = list(tasks)
        with self._bar or nullcontext():
            shown = self._bar.add_task("sweep", total=self._num, completed=self._num - len(tasks)) if self._bar else None
            while (waiting and not signals.received) or self._running:
                while waiting and len(self._running) < max_parallel and not signals.received:
                    self._start(waiting.pop(0), signals)
                time.sleep(_POLL_S)
                for attempt in [attempt for attempt in self._running if attempt.poll() is not None]:
                    self._finish(attempt, signals)
                    if self._bar and shown is not None:
                        self._bar.advance(shown)
        if waiting:
            self.exit_codes.append(os.EX_TEMPFAIL)

    def _start(self, task: SweepTask, signals: SignalForwarder) -> None:
        command = self._launch.command(task.overrides, processes=self._sweep.num_processes, environment=os.environ)
        output = open_output(task.folder / LOGS)
        self._print_line(f"{task.index:>3}  starting: {output}")
        attempt = ManagedProcess(command, output=output)
        self._running[attempt] = task
        signals.processes.append(attempt)
        if signals.received:  # the signal arrived while the process was being started
            attempt.forward_signal(signal.SIGUSR1)

    def _finish(self, attempt: ManagedProcess, signals: SignalForwarder) -> None:
        task = self._running.pop(attempt)
        signals.processes.remove(attempt)
        code = attempt.poll()
        assert code is not None, "the process has exited"
        self.exit_codes.append(code)
        self._print_line(f"{task.index:>3}  {attempt.last_line() or f'exited with code {attempt.poll()}'}  ({task.folder})")

    def _print_line(self, line: str) -> None:
        if self._bar:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, flush=True)


def run_sweep(sweep: Sweep, tasks: Sequence[SweepTask], scripts: LaunchScripts, *, max_parallel: int, should_requeue: bool = False) -> int:
    """Run the unfinished tasks. Return 0 if all tasks are finished, else the highest exit code."""
    with SignalForwarder() as signal_forwarder:
        settings = compose_tasks(sweep.tasks)
        todo = find_pending_tasks(tasks, [settings[task.index] for task in tasks])
        for task in tasks:
            if task not in todo:
                print(f"{task.index:>3}  is finished  ({task.folder})", flush=True)
        player = SweepRunner(sweep, scripts, num_tasks=len(tasks))
        player.run(todo, max_parallel=max_parallel, signals=signal_forwarder)
        code = max(player.exit_codes, default=0)
        if should_requeue and code:
            requeue_job(signal_forwarder.received)
    return code


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="sweep.py", description="Run a sweep that a YAML file defines (docs/cluster.md).")
    parser.add_argument("sweep", type=Path, metavar="SWEEP.YAML", help="YAML file with overrides, and a grid, a list or random draws")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--print", action="store_true", dest="shows", help="show the tasks and the states of their runs")
    what.add_argument("--local", type=int, metavar="N", help="run all tasks on this machine, N at a time")
    what.add_argument("--task", type=int, metavar="I", help="run one task, as launch/slurm/sweep.sbatch does")
    parser.add_argument("--requeue", action="store_true", help="in a Slurm job: requeue the job if SIGUSR1 stopped the run")
    options = parser.parse_args(arguments)
    if options.local is not None and options.local < 1:
        parser.error(f"--local={options.local}: must be at least 1")
    return options


def sweep_main(arguments: Sequence[str], *, launch: Path) -> int:
    """Run the command line and return the exit code.

    Errors in the sweep's definition are printed, one per line, before any run starts.
    """
    options = parse_options(arguments)
    try:
        if options.requeue:
            require_job()
        sweep = read_sweep(options.sweep)
        if options.shows:
            compose_tasks(sweep.tasks)
            print_sweep(sweep)
            return 0
        tasks = sweep.tasks if options.task is None else [sweep.task(options.task)]
        return run_sweep(sweep, tasks, LaunchScripts(launch), max_parallel=options.local or 1, should_requeue=options.requeue)
    except (ValueError, OSError) as error:
        for line in str(error).splitlines():
            print(f"error: {to_printable(line)}", file=sys.stderr, flush=True)
        return 1
