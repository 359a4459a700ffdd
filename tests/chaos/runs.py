"""The runs into which faults are injected: small runs of two ranks over gloo. Each rank starts as
if on its own machine, without a launcher.

A home folder contains what all seeds need: the initial models, the questions, and one undisturbed
run of each kind.
"""

import contextlib
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.tasks.visual_search.task import SearchCanvas
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.chaos import pair
from tests.chaos.pair import prepare_pair, words_of_pair
from tests.chaos.plan import STEPS
from tests.chaos.servers import ENGINE
from tests.golden.golden_runs import LOOK
from tests.support import fork_server
from tests.support.free_port import free_port

PLAYER = Path(__file__).parent / "player.py"
WAIT_S = 60
"""Timeout of collectives in seconds (parallel.timeout_s, parallel.straggler_timeout_s). A rank that
is stopped forever costs a seed this much time.
"""
COMMON = (
    "algo.name=chaos", "algo.entropy_coef=0.1", "optim.lr=1e-3", "checkpoint.every=1", "engine.kv_cache_mib=16", "task.eval_samples=0",
    f"parallel.timeout_s={WAIT_S}", f"parallel.straggler_timeout_s={WAIT_S}", "rollouts.keep_best=0", "rollouts.keep_worst=0",
)  # fmt: skip
"""Settings of all runs. The entropy bonus changes the weights in every step, whatever the rewards
are.
"""
LINE = (
    "task=chaos_line", "task.max_turns=1", "task.max_new_tokens=8", "model.min_pixels=3136", "model.max_pixels=4000",
    "batch.prompts_per_step=4", "batch.group_size=2",
)  # fmt: skip
SEARCH = (
    "task.max_turns=2", "task.max_new_tokens=80", "model.min_pixels=19600", "model.max_pixels=20000", "batch.prompts_per_step=4",
    "batch.group_size=4", "task.data.max_eval=4",
)  # fmt: skip
SHARED = (*LINE, "engine.mode=server", *(f"engine.{key}={value}" for key, value in ENGINE.items()), "engine.outage_timeout_s=120")
JUDGE = ("task.judge.model=judge", "task.judge.max_tokens=64", "task.judge.timeout_s=30")
NUM_QUESTIONS = 24


def words_of(run: str, home: Path, *, judge: str = "", sandbox: str = "", engine: str = "") -> tuple[str, ...]:
    """Return the overrides of a run, including the addresses of its servers but not its run
    directory.
    """
    if run == "lewis_pair":
        return words_of_pair(home / "starts", num_steps=STEPS[run])
    start = home / "starts" / ("look/final" if run in ("visual_search", "vqa") else "nano")
    common = (*COMMON, f"run.steps={STEPS[run]}", f"model.path={start}")
    if run == "number_line":
        return (*LINE, *common)
    if run == "shared_engine":
        common = [word for word in common if not word.startswith("engine.")]
        return (*SHARED, *common, f"engine.urls=[{engine}]", f"engine.token_file={home}/engine/token")
    if run == "visual_search":
        return ("task=chaos_search", "task.reward=pyvision", "task.sandbox.size=2", *SEARCH, *common)
    data = (f"task.data.train=[{home}/data/train.jsonl]", f"task.data.eval=[{home}/data/eval.jsonl]")
    servers = (f"task.judge.urls=[{judge}]", f"task.sandbox.url={sandbox}")
    return ("task=chaos_vqa", "task.tool_format=pyvision", "task.reward=accuracy", *SEARCH, *JUDGE, *data, *servers, *common)


def prepare(home: Path, runs: Sequence[str]) -> None:
    """Create whatever is missing in the home folder: the nano model, the nano model trained to look
    at images, and the questions.
    """
    starts = home / "starts"
    if {"number_line", "vqa", "shared_engine"} & {*runs} and not (starts / "nano").exists():
        make_checkpoint(starts / "nano", preset="nano", init="random", seed=1)
    if {"visual_search", "vqa"} & {*runs} and not (starts / "look" / "final").exists():
        make_checkpoint(starts / "nano_search", preset="nano_search", init="learn", seed=0)
        taught = (*LOOK, f"model.path={starts / 'nano_search'}", f"run.dir={starts / 'look'}")
        result = fork_server.run_world(2, fork_server.ROOT / "launch" / "train.py", *taught, timeout_s=1200)
        assert result.returncode == 0, result.stdout[-3000:]
    if "lewis_pair" in runs and not (starts / "listener").exists():
        prepare_pair(starts)
    if "vqa" in runs and not (home / "data").exists():
        write_questions(home / "data")


def write_questions(folder: Path) -> None:
    """Write visual-search questions with image files.

    No rule can decide whether an answer is correct, so the judge decides all of them.
    """
    folder.mkdir(parents=True)
    for split in ("train", "eval"):
        with (folder / f"{split}.jsonl").open("w") as file:
            for index in range(NUM_QUESTIONS):
                canvas, picture = SearchCanvas(f"{split} {index}"), f"{split}_{index}.png"
                canvas.open().save(folder / picture)
                answer = f"a label like {canvas.scene.target.label}"
                row = {"question": canvas.scene.question, "answer": answer, "images": [picture], "env_name": "pyvision_gym_w_image_hint"}
                file.write(json.dumps(row) + "\n")


@dataclass(slots=True)
class Life:
    """One attempt of a run: its two ranks from their start to their exit.

    As a context manager, it kills the ranks that are left at the end.
    """

    words: Sequence[str]
    folder: Path
    """The run directory."""
    temporary: Path
    ranks: list[fork_server.Process] = field(default_factory=list)
    struck: set[int] = field(default_factory=set)
    """Ranks that a mishap has ended or stopped forever. They print nothing, and the attempt is over
    when all other ranks have exited.
    """
    recorded_s: list[float] = field(default_factory=list)
    """Seconds from the start until each line of metrics was noticed."""
    began: float = 0.0

    def __enter__(self) -> "Life":
        self.began, before = time.monotonic(), self.num_recorded
        self.recorded_s = [0.0] * before
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "TMPDIR": str(self.temporary)}
        for rank in range(2):
            environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.ranks.append(fork_server.Process(PLAYER, *self.words, f"run.dir={self.folder}", environment=environment))
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()

    def is_over(self) -> bool:
        return all(process.poll() is not None or rank in self.struck for rank, process in enumerate(self.ranks))

    @property
    def has_finished(self) -> bool:
        return set(self.codes) == {0}

    @property
    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    @property
    def said(self) -> list[str]:
        return [rank.output.read_text(errors="replace") for rank in self.ranks]

    @property
    def num_recorded(self) -> int:
        with contextlib.suppress(OSError):
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def look(self) -> float:
        """Return the seconds since the start, after noting which steps have been recorded."""
        passed = time.monotonic() - self.began
        self.recorded_s += [passed] * (self.num_recorded - len(self.recorded_s))
        return passed


class PairLife(Life):
    """An attempt of a Lewis pair. `folder` is the speaker's run directory."""

    def __enter__(self) -> "PairLife":
        self.began = time.monotonic()
        self.recorded_s = [0.0] * self.num_recorded
        pictures = next(word for word in self.words if word.startswith("task.data.images=")).removeprefix("task.data.images=")
        starts = Path(pictures).parent
        environment = {"TMPDIR": str(self.temporary), "PORTS": (starts / "ports").read_text(), "GRACE_S": str(WAIT_S)}
        self.ranks.append(fork_server.Process(pair.SCRIPT, starts, self.folder, *self.words, environment=environment))
        return self


LIVES = {"lewis_pair": PairLife}
RUN_FOLDERS = {"lewis_pair": "disk/run/speaker"}
"""Run directories that are not disk/run."""


def run_folder(run: str, folder: Path) -> Path:
    return folder / RUN_FOLDERS.get(run, "disk/run")


def begin_life(run: str, words: Sequence[str], folder: Path) -> Life:
    """Create an attempt of the run. `folder` is the folder of the seed."""
    return LIVES.get(run, Life)(words, run_folder(run, folder), folder / "tmp")


@dataclass(slots=True, frozen=True)
class Undisturbed:
    """The reference run without mishaps."""

    folder: Path
    first_s: float
    """Seconds until its first step was recorded."""
    step_s: float
    """Seconds per step from the first recorded step to the end."""

    def seconds(self, share: float, *, after: int) -> float:
        """Return the given fraction of the time that this run took for its next step."""
        return share * (self.step_s if after else self.first_s)


def undisturbed(run: str, home: Path, words: Sequence[str], *, limit_s: float) -> Undisturbed:
    """Return the reference run without mishaps; run it if it does not exist yet."""
    whole = home / "undisturbed" / run
    folder, told = run_folder(run, whole), whole / "told.json"
    own = [word for word in words if not word.startswith(("task.judge.urls", "task.sandbox.url", "engine.urls"))]
    if told.exists() and (kept := json.loads(told.read_text()))["words"] == own:
        return Undisturbed(folder, kept["first_s"], kept["step_s"])
    shutil.rmtree(whole, ignore_errors=True)
    (whole / "tmp").mkdir(parents=True)
    with begin_life(run, words, whole) as life:
        deadline = time.monotonic() + limit_s
        while not life.is_over() and time.monotonic() < deadline:
            life.look()
            time.sleep(0.1)
        assert life.has_finished, f"{run}, undisturbed: {life.codes}\n" + "\n".join(said[-3000:] for said in life.said)
    first_s = life.recorded_s[0]
    step_s = (life.look() - first_s) / STEPS[run]
    told.write_text(json.dumps({"words": own, "first_s": first_s, "step_s": step_s}))
    return Undisturbed(folder, first_s, step_s)


def spoil_data(home: Path, number: int) -> tuple[Path, bytes]:
    """Rewrite the training questions in place with their rows in another order.

    Returns the file and its previous content.
    """
    file = home / "data" / "train.jsonl"
    before = file.read_bytes()
    lines = before.splitlines(keepends=True)
    random.Random(number).shuffle(lines)
    file.write_bytes(b"".join(lines))
    os.utime(file)
    return file, before
