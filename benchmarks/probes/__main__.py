"""Runs all probes with and without the defenses and prints a table.

    python -m benchmarks.probes                     # all probes; takes minutes
    python -m benchmarks.probes clients yaml        # only areas or names that contain a word

The exit code is 1 if a defense is broken or a control fails. All attacks run in child processes and
use only loopback addresses and temporary folders.
"""

import argparse
import sys

from benchmarks.probes.clients import CLIENTS
from benchmarks.probes.files import FILES
from benchmarks.probes.probe import run, table
from benchmarks.probes.servers import SERVERS

PROBES = (*SERVERS, *CLIENTS, *FILES)


def main(arguments: list[str]) -> int:
    """Run the selected probes, print the table and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probes", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="run the probes whose area or name contains this word (default: all)")
    parser.add_argument("--at-once", type=int, default=6, help="number of parallel attempts (default %(default)s)")
    options = parser.parse_args(arguments)
    chosen = [each for each in PROBES if not options.words or any(word in f"{each.area} {each.name}" for word in options.words)]
    rows = run(chosen, at_once=options.at_once)
    print(table(rows))
    for area in dict.fromkeys(row.probe.area for row in rows):
        own = [row for row in rows if row.probe.area == area]
        print(
            f"{area}: {len(own)} probes, {sum(row.is_held for row in own)} blocked by the defense, "
            f"{sum(row.control.succeeded for row in own)} successful against the control"
        )
    return 0 if all(row.is_good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
