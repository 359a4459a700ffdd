"""Runs the doctor's checks on two nodes of one rank each. Run by test_doctor_job.py.

    doctor_job.py MODEL RUN_DIR

The second node has an additional error of its own and a clock that is 5 s ahead. Rank 0 prints the
report as JSON.
"""

import json
import sys
import time
from dataclasses import asdict

from megatron_rl.config import ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.distributed.world import read_world
from megatron_rl.preflight import doctor_job
from megatron_rl.preflight.check_report import CheckReport


def main(model: str, run_dir: str) -> None:
    world = read_world()
    time_of_day = time.time
    time.time = lambda: time_of_day() + 5 * world.rank
    settings = Settings(model=ModelSettings(path=model), run=RunSettings(dir=run_dir), task=TaskSettings(name="number_line"))

    def examine() -> CheckReport:
        return CheckReport(findings=[("GPUs", str(world.rank))], errors=["a=1: all have it", *["b=2: one has it"] * world.rank])

    report = doctor_job.run_checks_on_nodes(settings, world, examine)
    if world.is_main:
        print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main(*sys.argv[1:])
