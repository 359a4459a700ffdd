"""Ranks with stragglers: an engine and a part of a checkpoint that each take DELAY_S longer on one
rank. Run as a world by distributed/test_skew.py.

    straggler_world.py OUT SKEW_S

SKEW_S is parallel.straggler_timeout_s; parallel.timeout_s is 1.
"""

import asyncio
import sys
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron_rl import build
from megatron_rl.config import ModelSettings, ParallelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.distributed.hang_watchdog import HangWatchdog
from megatron_rl.distributed.image_exchange import ImageExchange
from megatron_rl.distributed.world import World, all_gather_object, connect, disconnect, long_timeout_group, read_world
from megatron_rl.errors import PeerLost
from megatron_rl.rollout.manager import RunCallbacks
from megatron_rl.run.checkpoint_state import InputDigests
from megatron_rl.run.checkpoints import Checkpoints
from megatron_rl.run.history import History
from megatron_rl.run.shutdown import StopSignal

DELAY_S = 3.0


@dataclass
class DelayedRunEngine:
    delay_s: float

    def run(self, main: Coroutine) -> object:
        time.sleep(self.delay_s)
        return asyncio.run(main)


@dataclass
class DelayedSave:
    delay_s: float
    digests: dict[Path, str] = field(default_factory=dict)

    def is_written(self) -> bool:
        return False

    def finish(self, *, group: dist.ProcessGroup) -> None:
        time.sleep(self.delay_s)
        all_gather_object(None, group=group)


class DelayedSavePolicy:
    def __init__(self, late_s: float) -> None:
        self.delay_s = late_s

    def save(self, folder: Path, *, background: bool) -> DelayedSave:
        return DelayedSave(self.delay_s)


def run_stragglers(settings: Settings, world: World) -> None:
    group, late_s = long_timeout_group(timeout_s=settings.parallel.straggler_timeout_s), DELAY_S * world.rank
    gallery = ImageExchange(patch_size=14, group=group)
    build.build_colocated_engine = lambda *_: DelayedRunEngine(late_s)
    fleet = build.build_rollout_manager(
        settings,
        None,
        trainer=None,
        renderer=None,
        world=world,
        image_exchange=gallery,
        callbacks=RunCallbacks(run_with_grace=StopSignal(grace_s=1).run_with_grace),
    )
    fleet.run_examples([], num_samples=1, settings=fleet.episode_settings)
    checkpoints = Checkpoints(settings, DelayedSavePolicy(late_s), resume_from=None, inputs=InputDigests(), group=group)
    publish = checkpoints._publish
    checkpoints._publish = lambda pending: (time.sleep(DELAY_S), publish(pending))
    checkpoints.save(1, history=History(), metrics={})
    (Path(settings.run.dir) / f"through_{world.rank}").touch()


def main(out: Path, skew_s: float) -> None:
    world, parallel = read_world(), ParallelSettings(timeout_s=1, straggler_timeout_s=skew_s)
    run, model = RunSettings(dir=str(out)), ModelSettings(path=str(out))
    settings = Settings(model=model, parallel=parallel, run=run, task=TaskSettings(name="number_line"))
    watch = HangWatchdog(world, folder=out, timeout_s=parallel.timeout_s)
    connect(world, timeout_s=parallel.timeout_s)
    with ExitStack() as closing, watch:
        closing.callback(disconnect)
        run_stragglers(settings, world)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), float(sys.argv[2]))
    except PeerLost:
        sys.exit(1)
