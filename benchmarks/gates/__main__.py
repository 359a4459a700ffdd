"""Checks whether a run of a small recipe lies in the bands of earlier runs.

    python -m benchmarks.gates check runs/quickstart/grpo quickstart   # exit code 1 if outside
    python -m benchmarks.gates record runs/quickstart/grpo quickstart  # adds the run to the history
    python -m benchmarks.gates run geometry --seed 0 --out runs/gates  # warm start and run
    python -m benchmarks.gates show                                    # all bands

The histories are benchmarks/gates/RECIPE.json; docs/gates.md explains figures and bands.
"""

import argparse
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gates.figures import FIGURES, compute_band
from benchmarks.gates.history import RecordedRun, append_run, compare, history_path, load_history, read_run_figures, read_seed
from benchmarks.gates.recipes import RECIPES
from megatron_rl.config import require_choice
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.observe.metrics import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]


def check(run: Path, recipe: str) -> int:
    """Print each figure with its band and return 1 if one lies outside, else 0."""
    findings = compare(read_run_figures(run, recipe), load_history(history_path(recipe)))
    for finding in findings:
        print(f"{recipe} {finding.name}: {finding.value:.4g}, band {finding.band}{'' if finding.is_inside else ': OUTSIDE'}")
    outside = [finding.name for finding in findings if not finding.is_inside]
    print(f"{recipe}: " + (f"outside of the band: {', '.join(outside)}" if outside else "inside of all bands"))
    return int(bool(outside))


def read_commit() -> str:
    """Return the short hash of the checked-out commit.

    Raises:
        ValueError: this is no git checkout.
    """
    result = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ValueError(f"{ROOT}: no git checkout; name the commit of the run with --commit")
    return result.stdout.strip()


def record(run: Path, recipe: str, *, commit: str) -> int:
    """Add a run to its recipe's history and return 0; an empty `commit` is the one checked out."""
    machine = f"{platform.node()}, {os.cpu_count()} cores, {platform.machine()}"
    entry = RecordedRun(
        date=datetime.fromtimestamp((run / METRICS_FILE).stat().st_mtime, UTC).date().isoformat(),
        machine=machine,
        commit=commit or read_commit(),
        seed=read_seed(run),
        figures=read_run_figures(run, recipe),
    )
    print(f"{recipe}: {append_run(history_path(recipe), entry)} runs")
    return 0


def run_recipe(recipe: str, *, seed: int, out: Path) -> int:
    """Train the warm start of a recipe and the recipe, where they are missing, and return 0."""
    require_choice("RECIPE", recipe, tuple(RECIPES))
    chosen, home = RECIPES[recipe], out.resolve() / f"seed{seed}"
    for required in chosen.requires:
        run_recipe(required, seed=seed, out=out)
    home.mkdir(parents=True, exist_ok=True)
    if chosen.data and not (home / "data").exists():
        _run(f"tools/data/{chosen.data}.py", "--out", home / "data", "--seed", seed)
    if not (home / "nano").exists():
        _run("tools/data/make_tiny_qwen2_5_vl.py", "--out", home / "nano", "--seed", seed)
    warm_start = home / chosen.warm_start_folder
    for folder, start, overrides in (
        (warm_start, home / "nano", chosen.warm_start),
        (home / recipe, warm_start / "final", chosen.overrides),
    ):
        if not (folder / "eval.json").exists():
            settings = [each.format(home=home) for each in overrides]
            paths = [f"model.path={start}", f"run.dir={folder}", f"run.seed={seed}"]
            _run("launch/launch.py", "--nproc_per_node", 2, "launch/train.py", *settings, *paths)
    print(home / recipe)
    return 0


def _run(*command: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True, env=environment, stdout=sys.stderr)


def show() -> int:
    """Print the bands of all recipes and return 0."""
    for recipe in RECIPES:
        history = load_history(history_path(recipe))
        print(f"{recipe}: {len(history)} runs, {RECIPES[recipe].num_steps} steps")
        for name in FIGURES:
            print(f"  {name:14s} {compute_band(name, [run.figures[name] for run in history])}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="exit with 1 if a figure of a run lies outside of its band")
    recording = commands.add_parser("record", help="add a run to the history")
    for command in (checking, recording):
        command.add_argument("run", type=Path, metavar="RUN", help="run directory")
        command.add_argument("recipe", metavar="RECIPE", help=", ".join(RECIPES))
    recording.add_argument("--commit", default="", help="commit of the run; default: the commit that is checked out")
    command = commands.add_parser("run", help="train the warm start and the run of a recipe")
    command.add_argument("recipe", metavar="RECIPE", help=", ".join(RECIPES))
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--out", type=Path, default=Path("runs/gates"), help="default: %(default)s")
    commands.add_parser("show", help="print the bands of all recipes")
    given = parser.parse_args(arguments)
    try:
        if given.command == "run":
            return run_recipe(given.recipe, seed=given.seed, out=given.out)
        if given.command == "show":
            return show()
        history_path(given.recipe)
        if given.command == "check":
            return check(given.run, given.recipe)
        return record(given.run, given.recipe, commit=given.commit)
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
