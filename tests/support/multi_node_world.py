"""Runs two training steps in each layout, as the ranks of parallel_layouts.py train. Run by
test_multi_node.py under two launchers, and as one process.

    multi_node_world.py MODELS OUT LAYOUT ... [until_lost]

Rank 0 writes OUT/steps.json: {layout: {"loss": [...], "grad_norm": [...]}}, and OUT/places.json
with the location of each rank. With `until_lost`, the ranks then run collectives until one fails.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from megatron_rl.config import ModelSettings
from megatron_rl.distributed.hang_watchdog import HangWatchdog
from megatron_rl.distributed.world import all_gather_object, connect, read_world
from megatron_rl.errors import PeerLost
from megatron_rl.policy.parallel import build_layout
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.weights.formats.safetensors_folder import HfTensors
from tests.support.packed_example import make_example_items
from tests.support.parallel_layouts import LayoutCase, destroy_layout, make_policy, train_steps

LIMIT_S = 60


def train_layout(models: Path, text: str) -> dict[str, object]:
    case = LayoutCase.parse(text)
    model, layout = models / case.model, build_layout(case.parallel_settings(), seed=0)
    renderer = Renderer(ModelSettings(path=str(model)))
    policy = make_policy(model, renderer, layout, case, lr=1e-3, eps=1e-4)
    done = train_steps(policy, make_example_items(renderer), num_steps=2, max_tokens=1, initial=HfTensors(model))
    destroy_layout(policy)
    return {"loss": done["loss"], "grad_norm": done["grad_norm"]}


def main(models: Path, out: Path, *words: str) -> None:
    world = read_world()
    watch = HangWatchdog(world, folder=out, timeout_s=LIMIT_S)
    connect(world, timeout_s=LIMIT_S)
    with watch:
        trained = {text: train_layout(models, text) for text in words if text != "until_lost"}
        places = all_gather_object({"node": world.node, "local_rank": world.local_rank, "tmp": tempfile.gettempdir(), "pid": os.getpid()})
        if world.is_main:
            (out / "steps.json").write_text(json.dumps(trained))
            (out / "places.json").write_text(json.dumps(places))
        while "until_lost" in words:
            all_gather_object(world.rank)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    except PeerLost:
        sys.exit(1)
