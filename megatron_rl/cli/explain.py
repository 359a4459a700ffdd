"""A recorded step explained on one page (launch/explain.py)."""

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
  spawn.py --nproc_per_node 2 launch/explain.py runs/tp2 --step 3          (at the run's layout; torchrun does, too)

exit code: 0 all agree; 1 something differs, and is named; 2 there was nothing to look at
"""
AGREE, DIFFERS, BLIND = 0, 1, 2
TIMEOUT_S = 3600.0


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="explain.py", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check a recorded step, play it back through Hugging Face's model and the trainer's, and say where they first differ.",
    )  # fmt: skip
    parser.add_argument("run", type=Path, metavar="RUN", help="run.dir; run.record=all keeps whole steps, else there are best and worst")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="which of RUN/rollouts/step_*")
    parser.add_argument("--weights", default="", metavar="DIR", help="that sampled it, any format (default: the run's own checkpoint)")
    parser.add_argument("--older", default="", metavar="DIR", help="weights that may have stayed (default: the run's before those)")
    parser.add_argument("--model", default="", metavar="DIR", help="config, tokenizer and processor (default: model.path of the run)")
    parser.add_argument("--rollouts", type=int, default=4, metavar="N", help="to play back, the most suspicious first (default 4)")
    parser.add_argument("--no-model", action="store_true", help="look only at what needs no weights")
    parser.add_argument("--engine", action="store_true", help="start the engine, too, and ask it for the same tokens again")
    parser.add_argument(
        "--whole-gb", type=float, default=16.0, metavar="GB", help="of weights in float32 that a process may hold whole (default 16)"
    )
    for name in ("tp", "pp", "vpp"):
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"in the place of the run's parallel.{name}")
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = parser_of()
    options = parser.parse_args(arguments)
    sizes = tuple((name, number) for name in ("tp", "pp", "vpp") if (number := vars(options)[name]))
    given = (("step", 0, options.step), ("rollouts", 1, options.rollouts), ("whole-gb", 0, options.whole_gb))
    for name, least, number in (*given, *((each, 1, num) for each, num in sizes)):
        if number < least:
            parser.error(f"--{name}={number}: give {least} or more")
    from megatron_rl.distributed.world import connect, disconnect, read_world
    from megatron_rl.errors import RunFailed
    from megatron_rl.explain.findings_page import text_of
    from megatron_rl.explain.step_explanation import Asked, explain  # brings torch and Megatron
    from megatron_rl.io.bounded_files import printable

    world = read_world()
    asked = Asked(
        run=options.run, step=options.step, weights=options.weights, older=options.older, model=options.model, rollouts=options.rollouts,
        with_model=not options.no_model, with_engine=options.engine, whole_gb=options.whole_gb,
        sizes=sizes,
    )  # fmt: skip
    with ExitStack() as closing:
        try:
            connect(world, timeout_s=TIMEOUT_S)
            closing.callback(disconnect)
            page = explain(asked, world)
        except (ValueError, OSError, RunFailed) as error:
            return _said(world.is_main, f"error: {printable(str(error))}", BLIND)
        code = DIFFERS if page.differs else AGREE
        if world.is_main:
            print(text_of(page), flush=True)
        return code if world.is_main else AGREE


def _said(is_main: bool, line: str, code: int) -> int:
    """The main rank speaks and fails for all."""
    if is_main:
        print(line, file=sys.stderr, flush=True)
    return code if is_main else AGREE
