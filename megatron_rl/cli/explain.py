"""Command line of launch/explain.py, which analyzes one recorded step and prints its findings."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

EXAMPLES = """examples:
  explain.py runs/quickstart/grpo --step 0
  explain.py runs/agent --step 40 --weights runs/agent/checkpoints/step_00000040 --rollouts 16
  explain.py runs/agent --step 40 --no-model
  explain.py runs/agent --step 40 --engine
  launch.py --nproc_per_node 2 launch/explain.py runs/tp2 --step 3          (with the run's layout; torchrun works, too)

exit code: 0 everything agrees; 1 differences were found and are listed; 2 nothing could be checked
"""
EXIT_AGREE, EXIT_DIFFERS, EXIT_NO_DATA = 0, 1, 2
TIMEOUT_S = 3600.0


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = argparse.ArgumentParser(
        prog="explain.py", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check a recorded step, replay it with Hugging Face's model and the trainer's, and report where they first differ.",
    )  # fmt: skip
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="run.dir of the run; without rollouts.save=all, only the best and worst rollouts of a step can be checked",
    )
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step to analyze, one of RUN/rollouts/step_*")
    parser.add_argument(
        "--weights",
        default="",
        metavar="DIR",
        help="checkpoint, in any format, with the weights that sampled the step (default: the run's own checkpoint)",
    )
    parser.add_argument(
        "--older",
        default="",
        metavar="DIR",
        help="checkpoint with older weights that the engine may still have used (default: the run's previous checkpoint)",
    )
    parser.add_argument(
        "--model", default="", metavar="DIR", help="directory with config, tokenizer and processor (default: the run's model.path)"
    )
    parser.add_argument(
        "--rollouts", type=int, default=4, metavar="N", help="number of rollouts to replay, most suspicious first (default: 4)"
    )
    parser.add_argument("--no-model", action="store_true", help="run only the checks that need no weights")
    parser.add_argument("--engine", action="store_true", help="also start the engine to recompute the logprobs of the same tokens")
    parser.add_argument(
        "--whole-gb",
        type=float,
        default=16.0,
        metavar="GB",
        help="maximum size in GB of the unsharded float32 weights in one process (default: 16)",
    )
    for name in ("tp", "pp", "vpp"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"overrides the run's parallel.{name}")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    sizes = tuple((name, number) for name in ("tp", "pp", "vpp") if (number := vars(options)[name]))
    given = (("step", 0, options.step), ("rollouts", 1, options.rollouts), ("whole-gb", 0, options.whole_gb))
    for name, least, number in (*given, *((each, 1, num) for each, num in sizes)):
        if number < least:
            parser.error(f"--{name}={number}: must be at least {least}")
    from megatron_rl.distributed.world import connect, disconnect, read_world
    from megatron_rl.errors import RunFailed
    from megatron_rl.explain.findings_page import render_page
    from megatron_rl.explain.step_explanation import ExplainRequest, explain_step  # imports torch and Megatron
    from megatron_rl.io.bounded_files import to_printable

    world = read_world()
    asked = ExplainRequest(
        run=options.run, step=options.step, weights=options.weights, older_weights=options.older, model=options.model,
        num_rollouts=options.rollouts,
        with_model=not options.no_model, with_engine=options.engine, max_model_gb=options.whole_gb,
        parallel_sizes=sizes,
    )  # fmt: skip
    with ExitStack() as closing:
        try:
            connect(world, timeout_s=TIMEOUT_S)
            closing.callback(disconnect)
            page = explain_step(asked, world)
        except (ValueError, OSError, RunFailed) as error:
            return _report_error(world.is_main, f"error: {to_printable(str(error))}", EXIT_NO_DATA)
        code = EXIT_DIFFERS if page.has_differences else EXIT_AGREE
        if world.is_main:
            print(render_page(page), flush=True)
        return code if world.is_main else EXIT_AGREE


def _report_error(is_main: bool, line: str, code: int) -> int:
    """On the main rank, print the error and return its exit code.

    On the other ranks, return EXIT_AGREE.
    """
    if is_main:
        print(line, file=sys.stderr, flush=True)
    return code if is_main else EXIT_AGREE
