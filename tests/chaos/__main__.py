"""Fault injection into training runs: each seed selects a run and its mishaps (injected faults),
and the run's outcome is checked.

    python -m tests.chaos --seeds 0:40 --out runs/chaos.jsonl
    python -m tests.chaos --seeds 7 12 --runs number_line --out runs/chaos.jsonl
    python -m tests.chaos --seeds 0:40 --show

Appends one line per seed to the file and skips seeds that the file already contains. With --runs,
only the seeds that select one of these runs are used. --show prints the plans and runs nothing. The
exit code is 1 if one of these seeds has troubles.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from megatron_rl.io.jsonl import read_lines
from tests.chaos.plan import LATER_MISHAPS, MISHAPS, Plan, plan
from tests.chaos.room import Room
from tests.chaos.runs import prepare
from tests.chaos.seed import play
from tests.chaos.servers import STANDING, Servers, standing

RUNS = MISHAPS | LATER_MISHAPS


def seeds_of(word: str) -> range:
    first, colon, behind = word.partition(":")
    return range(int(first), int(behind) if colon else int(first) + 1)


def parse() -> argparse.Namespace:
    whole = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__, formatter_class=whole)
    add, home = parser.add_argument, Path(tempfile.gettempdir()) / "chaos"
    add("--seeds", type=seeds_of, nargs="+", required=True, metavar="SEED", help="numbers, or FROM:TO without TO")
    add("--out", type=Path, help="the file of lines")
    add("--runs", nargs="+", choices=[*RUNS], default=[*RUNS], help="the seeds of these runs; all")
    add("--home", type=Path, default=home, help="models, undisturbed runs, folders of seeds; %(default)s")
    add("--limit-s", type=float, default=600.0, help="what one life of a run may take")
    add("--show", action="store_true", help="print the plans, play nothing")
    asked = parser.parse_args()
    if asked.out is None and not asked.show:
        parser.error("--out: give the file of lines, or --show")
    return asked


def main() -> int:
    asked = parse()
    plans = [each for seed in chain(*asked.seeds) if (each := plan(seed)).run in asked.runs]
    if asked.show:
        for each in plans:
            print(each.seed, each.run, "; ".join(map(str, each.mishaps)))
        return 0
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = {line["seed"]: line for line in read_lines(asked.out)} if asked.out.exists() else {}
    if left := {each.seed: each for each in plans if each.seed not in done}:
        play_all(left.values(), done, asked)
    return int(any(done[each.seed]["troubles"] for each in plans))


def play_all(plans: Iterable[Plan], done: dict[int, dict], asked: argparse.Namespace) -> None:
    """Play the plans one after the other; append each record to the file and to `done`."""
    room = Room()
    lacks = sorted({room.lacks, room.lacks_blocks} - {""})
    for line in lacks:
        print(f"chaos: {line}", flush=True)
    home = asked.home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    prepare(home, asked.runs)
    with ExitStack() as stack, asked.out.open("a") as out:
        there: dict[str, Servers] = {}
        for each in plans:
            if each.run in STANDING and each.run not in there:  # it takes as long to start as a run
                there[each.run] = stack.enter_context(standing(each.run, home))
            record = play(each, home=home, room=room, standing=there, limit_s=asked.limit_s)
            line = done[each.seed] = asdict(record) | {"lacks": "; ".join(lacks)}
            out.write(json.dumps(line) + "\n")
            out.flush()
            how = "equal" if record.is_equal else f"given up in steps {record.given_up}" if record.given_up else "differs"
            print(f"seed {each.seed}, {each.run}, {len(record.lives)} lives, {record.seconds:.0f} s: {how}; {record.troubles}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
