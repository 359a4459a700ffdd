"""Command line of launch/export.py, which exports recorded rollouts."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import ModelSettings
from megatron_rl.export.rl_logging_board import write_board
from megatron_rl.export.sft_transcripts import TRANSCRIPTS_FILE, export_transcripts
from megatron_rl.io.bounded_files import to_printable
from megatron_rl.observe.recorder import ROLLOUTS_FOLDER
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.paths import CONFIG_FILE

EXAMPLES = """examples:
  export.py runs/agent --out runs/agent_best --min-reward 1
  export.py runs/agent --out runs/agent_best --best 4 --from-step 50
  export.py runs/agent --out runs/board --board
"""


def load_renderer_and_limit(run: Path, model: str) -> tuple[Renderer, int]:
    """Return a pair: the renderer of a run, and the value of task.max_new_tokens in that run.

    Raises:
        ValueError: The run's settings cannot be read.
    """
    try:
        found = read_settings(run / CONFIG_FILE)
        given, limit = found["model"], int(found["task"]["max_new_tokens"])
        path, least, most = model or str(given["path"]), int(given["min_pixels"]), int(given["max_pixels"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{run / CONFIG_FILE}: cannot be read ({' '.join(str(error).split())[:200]}); specify a run directory") from error
    return Renderer(ModelSettings(path=path, min_pixels=least, max_pixels=most)), limit


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="export.py", description="Convert a run's best recorded rollouts to transcripts for a warm start.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir of a run with rollouts.save=all")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"output directory for {TRANSCRIPTS_FILE} and images/")
    parser.add_argument("--best", type=int, default=1, metavar="N", help="maximum number of exported rollouts per example (default: 1)")
    parser.add_argument(
        "--min-reward", type=float, default=-math.inf, metavar="R", help="minimum reward of an exported rollout (default: no minimum)"
    )
    parser.add_argument("--from-step", type=int, default=0, metavar="STEP", help="first step to export (default: 0)")
    parser.add_argument(
        "--board", action="store_true", help="write all scored rollouts as input files for RL Logging Board, instead of transcripts"
    )
    parser.add_argument(
        "--board-mib",
        type=float,
        default=256.0,
        metavar="MIB",
        help="maximum size in MiB of an input file for RL Logging Board (default: 256)",
    )
    parser.add_argument("--model", default="", metavar="DIR", help="directory with tokenizer and processor (default: the run's model.path)")
    options = parser.parse_args(arguments)
    if options.best < 1:
        parser.error(f"--best={options.best}: must be at least 1")
    try:
        renderer, limit = load_renderer_and_limit(options.run, options.model)
        if options.board:
            given = {"file_mib": options.board_mib, "first_step": options.from_step}
            num = write_board(options.run / ROLLOUTS_FOLDER, options.out, renderer, **given)
            print(f"{num} rollouts: {options.out}")
            return 0
        chosen = {"max_per_example": options.best, "min_reward": options.min_reward, "first_step": options.from_step}
        exported = export_transcripts(options.run / ROLLOUTS_FOLDER, options.out, renderer, max_new_tokens=limit, **chosen)
    except (ValueError, OSError) as error:
        print(f"error: {to_printable(str(error))}", file=sys.stderr, flush=True)
        return 1
    print(exported)
    if not exported.num_transcripts:
        print(f"error: {options.run}: no rollout meets the criteria; lower --min-reward", file=sys.stderr, flush=True)
        return 1
    print(options.out / TRANSCRIPTS_FILE)
    return 0
