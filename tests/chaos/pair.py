"""A Lewis pair: launch/lewis_pair.sh with two services and two runs as its children; each run uses
the other's service.

The speaker learns and the listener does not (optim.lr=0). In any order of events, the same listener
rewards the speaker, so the trained speaker can be compared with that of the undisturbed pair. The
listener's run only has to exit cleanly.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.chaos.room import descendants
from tests.support import fork_server
from tests.support.free_port import free_port
from tests.support.trained_speaker import train_speaker, write_lewis_data

SCRIPT = Path(__file__)
MEMBERS = {
    "speaker_run": "launch/train.py experiment=lewis_cpu",
    "listener_run": "launch/train.py experiment=lewis_listener_cpu",
    "speaker_service": "-m megatron_rl.tasks.lewis.server.speaker_app",
    "listener_service": "-m megatron_rl.tasks.lewis.server.listener_app",
}
"""Part of the command line that identifies each process of the pair."""


def prepare_pair(starts: Path) -> None:
    (starts / "ports").write_text(f"{free_port()} {free_port()}")  # the model card contains the ports
    write_lewis_data(starts)
    train_speaker(starts / "speaker", vocabulary_file=starts / "rounds" / "words.txt")
    make_checkpoint(starts / "listener", preset="nano", init="random", seed=1, words=starts / "rounds" / "words.txt")


def words_of_pair(starts: Path, *, num_steps: int) -> tuple[str, ...]:
    data = [f"task.data.{split}=[{starts}/rounds/speaker:{folder}]" for split, folder in (("train", "train"), ("eval", "test"))]
    return (
        *data, f"task.data.images={starts}/pictures", "task.data.max_eval=2", f"run.steps={num_steps}", "checkpoint.every=1",
        "batch.prompts_per_step=4", "batch.group_size=2", "task.eval_samples=0", "engine.kv_cache_mib=32", "engine.max_model_len=512",
        "speaker:optim.lr=1e-3", "speaker:algo.entropy_coef=0.1", "speaker:task.options.accuracy=binary", "listener:optim.lr=0",
    )  # fmt: skip


def members(whom: str) -> list[int]:
    """Return the process ids of the topmost processes of a member."""
    found = []
    for pid, command in descendants().items():
        with suppress(psutil.NoSuchProcess):
            if MEMBERS[whom] in command and MEMBERS[whom] not in " ".join(psutil.Process(psutil.Process(pid).ppid()).cmdline()):
                found.append(pid)
    return found


if __name__ == "__main__":
    starts, folder, *words = sys.argv[1:]
    own = ("simultaneous", f"{starts}/speaker", f"{starts}/listener", str(Path(folder).parent), *words)
    os.execvp("bash", ["bash", str(fork_server.ROOT / "launch" / "lewis_pair.sh"), *own])
