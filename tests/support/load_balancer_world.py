"""An engine on every rank that generates its assigned groups and takes over remaining ones. Run as
a world by distributed/test_dealing.py.

    load_balancer_world.py MODEL OUT slow|down|fails

slow: rank 0 is 8 times slower. down: rank 0 is down for a while. fails: rank 1 raises an error.
OUT.RANK contains the groups that this rank generated, per round, and the rollouts of all ranks.
"""

import json
import sys
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.config import ModelSettings
from megatron_rl.distributed.world import all_gather_object, connect, default_store, disconnect, long_timeout_group, read_world
from megatron_rl.rollout.engine import Completion, SamplingSettings
from megatron_rl.rollout.load_balancer import EngineRank
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.types import Image, Rollout
from tests.support.scripted_rollout_manager import EPISODE, EXAMPLES, DelayedEngine, make_rollout_manager, strip_timings

REPLY_S = 0.2


class FailingEngine(DelayedEngine):
    async def generate(self, token_ids: list[int], images: list[Image], sampling: SamplingSettings) -> Completion:
        if len(self.requests) >= 3:  # among its first four requests, however slow the engine is
            raise KeyError("a mistake")
        return await super().generate(token_ids, images, sampling)


def main(model: str, out: str, case: str) -> None:
    world, played = read_world(), []
    engine = DelayedEngine(reply_s=REPLY_S)
    if world.rank == (case == "fails"):  # rank 0 hosts the store
        made = {
            "slow": DelayedEngine(reply_s=8 * REPLY_S),
            "down": DelayedEngine(reply_s=REPLY_S, num_faults=4),
            "fails": FailingEngine(reply_s=REPLY_S),
        }
        engine = made[case]
    with ExitStack() as closing:
        connect(world, timeout_s=30)
        closing.callback(disconnect)
        group = long_timeout_group(timeout_s=30)

        def noted(mine: list[Rollout]) -> list[Rollout]:
            played.append([rollout.group for rollout in mine])
            return [rollout for part in all_gather_object(mine, group=group) for rollout in part]

        seat = EngineRank(index=world.rank, num_engines=world.size, max_episodes=4, counter=default_store())
        fleet = make_rollout_manager(
            Renderer(ModelSettings(path=model)),
            engine,
            engine_rank=seat,
            gather_rollouts=noted,
            outage_timeout_s=60,
            log=lambda line: print(line, flush=True),
        )
        for _ in range(2):
            rollouts = fleet.run_examples(EXAMPLES, num_samples=2, settings=EPISODE)
            engine.num_faults = 0
            Path(f"{out}.{world.rank}").write_text(json.dumps({"played": played, "said": repr(strip_timings(rollouts))}))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (KeyError, RuntimeError) as error:
        print(f"ended: {error!r}", flush=True)  # each rank ends by itself, or the world's time limit ends it
