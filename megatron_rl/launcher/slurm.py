"""Submission of a run as a Slurm job (launch/submit.py).

    RUN/job.sbatch    job script: Slurm options, and launch/slurm/train.sbatch with the overrides
    RUN/job.yaml      all settings of the run at the time of submission
    RUN/logs          attempt_N for each attempt, a link `latest`, and the job's slurm-JOB.out

No file is written until the settings are validated and the run directory is checked.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from megatron_rl.config import Settings
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.io.jsonl import write_bytes_atomically
from megatron_rl.launcher.compose import compose_settings
from megatron_rl.run.directory import read_resume_state
from megatron_rl.run.paths import explain_write_errors
from megatron_rl.run.process import LOGS
from megatron_rl.run.status import is_running

SCRIPT_FILE, SETTINGS_FILE = "job.sbatch", "job.yaml"
TRAIN_SCRIPT = "launch/slurm/train.sbatch"


def render_job_script(settings: Settings, overrides: Sequence[str], sbatch_arguments: Sequence[str]) -> str:
    """Return the text of the job script. The job's working directory is the current directory.

    `sbatch_arguments` are additional sbatch options, which override options from the settings.
    """
    if not Path(TRAIN_SCRIPT).is_file():
        raise ValueError(f"{Path.cwd()}: does not contain {TRAIN_SCRIPT}; submit from the folder that contains launch/")
    slurm, folder = settings.slurm, Path(settings.run.dir).absolute()
    asked = [f"--job-name={folder.name}", f"--chdir={Path.cwd()}", f"--output={folder / LOGS / 'slurm-%j.out'}", f"--nodes={slurm.nodes}"]
    asked += ["--ntasks-per-node=1", "--requeue" if slurm.requeue else "--no-requeue", "--open-mode=append"]
    asked += [f"--gpus-per-node={slurm.gpus}"] if slurm.gpus else []
    asked += [f"--time={slurm.time}"] if slurm.time else []
    asked += [f"--signal=B:USR1@{slurm.signal_s}"]
    train = ["bash", TRAIN_SCRIPT, *(["--requeue"] if slurm.requeue else []), f"--logs={folder / LOGS}"]
    train += [f"--nproc_per_node={slurm.processes}"] if slurm.processes else []
    lines = [f"#SBATCH {shlex.quote(word)}" for word in [*asked, *slurm.sbatch, *sbatch_arguments]]
    return "\n".join(["#!/usr/bin/env bash", *lines, f"exec {shlex.join([*train, *overrides])}", ""])


def write_job(settings: Settings, script: str) -> Path:
    """Write the job script and the settings into the run directory; return the script's path.

    Raises:
        ValueError: A run is active in the run directory, or run.overwrite is false and the
            directory contains a finished run or a run with other settings.
    """
    folder = Path(settings.run.dir)
    stand = read_resume_state(folder, settings)
    if is_running(folder):
        raise ValueError(f"run.dir={folder}: is in use by an active run; choose another folder")
    if not settings.run.overwrite and (stand.refusal or stand.is_finished):
        why = stand.refusal or "contains a finished run"
        raise ValueError(f"run.dir={folder}: {why}; set run.overwrite=true to move this folder aside, or choose another folder")
    with explain_write_errors(folder):
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(folder / SETTINGS_FILE, yaml.safe_dump(asdict(settings), sort_keys=False).encode())
        write_bytes_atomically(folder / SCRIPT_FILE, script.encode())
    return folder / SCRIPT_FILE


def submit_job(script: Path) -> str:
    """Submit the script and return the job ID.

    Raises:
        ValueError: Slurm rejects the job, or sbatch is not installed.
    """
    try:
        told = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise ValueError(f"sbatch: command not found; submit {script} from a login node of the cluster") from error
    except subprocess.CalledProcessError as error:
        raise ValueError(f"sbatch: {' '.join(error.stderr.split()).removeprefix('sbatch: error: ')} ({script})") from error
    return told.stdout.strip().partition(";")[0]


def submit_main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    words, further = list(arguments), []
    if "--" in words:
        words, further = words[: words.index("--")], words[words.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="submit.py", description="Submit a run as a Slurm job (docs/cluster.md).")
    parser.add_argument("--dry-run", action="store_true", help="write the script and the settings, but do not submit the job")
    parser.add_argument(
        "words", nargs="+", metavar="KEY=VALUE", help="overrides for launch/train.py and slurm.KEY=VALUE; sbatch options follow after --"
    )
    options = parser.parse_intermixed_args(words)
    try:
        settings = compose_settings(options.words)
        script = write_job(settings, render_job_script(settings, options.words, further))
        print(script if options.dry_run else f"job {submit_job(script)}: {script}; its output: {script.parent / LOGS}")
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    return 0
