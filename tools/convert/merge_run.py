"""Merges each checkpoint of a run into a Hugging Face folder with the same name (`step_*`).

Steps that were already merged are skipped. An output folder exists only if the merge into that
folder is complete. If merging a step fails, the remaining steps are still merged.
"""

import argparse
import re
import sys
from pathlib import Path

from megatron_rl_tools.commands import DTYPES, format_error, quiet_libraries
from megatron_rl_tools.convert.merger import MergeOptions, add_options, check_not_input, merge_checkpoint


def find_steps(run: Path) -> dict[int, Path]:
    """Return the checkpoints in a run directory or its subfolder checkpoints/, keyed by step.

    Raises:
        ValueError: The run directory contains no checkpoint.
    """
    found = [*run.glob("checkpoints/*step_*"), *run.glob("*step_*")]
    steps = {int(name[1]): path for path in found if path.is_dir() and (name := re.fullmatch(r"(?:global_)?step_(\d+)", path.name))}
    if not steps:
        raise ValueError(f"--run={run}: no step_* folders in this folder or in its subfolder checkpoints/; set --run to a run directory")
    return dict(sorted(steps.items()))


def choose_steps(steps: dict[int, Path], wanted: list[int] | None, *, run: Path) -> dict[int, Path]:
    """Return the steps in `wanted`, or all steps if `wanted` is None.

    Raises:
        ValueError: A wanted step has no checkpoint.
    """
    missing = sorted(set(wanted or []) - steps.keys())
    if missing:
        raise ValueError(f"--steps={' '.join(map(str, missing))}: not in {run}; choose from {' '.join(map(str, steps))}")
    return {step: path for step, path in steps.items() if wanted is None or step in wanted}


def merge_all(steps: dict[int, Path], out: Path, options: dict[str, object]) -> int:
    """Merge each checkpoint, print its result, and return the number of failures."""
    counts = {"merged": 0, "skipped": 0, "failed": 0}
    for path in steps.values():
        checkpoint = path / "actor" if (path / "actor").is_dir() else path
        asked = MergeOptions(checkpoint=checkpoint, out=out / path.name, **options)
        try:
            check_not_input(asked)
            if (asked.out / "config.json").is_file() and not asked.force:
                counts["skipped"] += 1
                print(f"{path.name}: skipped, {asked.out} exists")
                continue
            print(merge_checkpoint(asked))
            counts["merged"] += 1
        except (ValueError, OSError) as error:
            print(f"error: {path.name}: {format_error(error, out=asked.out)}", file=sys.stderr)
            counts["failed"] += 1
    print(", ".join(f"{count} {how}" for how, count in counts.items()))
    return counts["failed"]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="merge_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --run outputs/my_run --out outputs/my_run/merged
  %(prog)s --run outputs/my_run --out merged --steps 100 200 --dtype bf16
  %(prog)s --run verl_checkpoints --out merged --dtype bf16        verl's global_step_*/actor folders

exit codes: 0 all chosen steps are merged; 1 at least one step failed, with a one-line error each; 2 invalid arguments""",
    )
    parser.add_argument(
        "--run", type=Path, required=True, metavar="DIR", help="run directory (with checkpoints/step_*), or a folder with step_* folders"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder; contains one Hugging Face folder per step")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="merge only these steps (default: all)")
    add_options(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = vars(parse_arguments(arguments))
    run, out, wanted = options.pop("run"), options.pop("out"), options.pop("steps")
    options["dtype"] = DTYPES.get(options["dtype"])
    quiet_libraries()
    try:
        failed = merge_all(choose_steps(find_steps(run), wanted, run=run), out, options)
    except (ValueError, OSError) as error:
        print(f"error: {format_error(error, out=out)}", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
