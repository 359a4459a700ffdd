"""Complete runs on two simulated nodes of one machine: a model that spans both nodes is trained,
and files that the nodes do not share are named before anything is built.
"""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_rl.observe.metrics import read_metrics
from tests.conftest import ROOT
from tests.support.loopback_nodes import start_ranks

TRAIN = ROOT / "launch" / "train.py"
TINY = (
    "task=number_line",
    "model.min_pixels=3136", "model.max_pixels=4000", "engine.kv_cache_mib=16", "task.max_turns=1", "task.max_new_tokens=4",
    "task.eval_samples=0", "batch.prompts_per_step=2", "batch.group_size=2", "run.steps=500", "algo.entropy_coef=0.01",
)  # fmt: skip
HOST = socket.gethostname()


@dataclass(frozen=True)
class Lost:
    """The outcome of killing the first of two nodes, which hosts the ranks' store, in training."""

    run: Path
    code: int
    said: str
    seconds: float


@pytest.fixture(scope="module")
def lost(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lost]:
    run, homes = tmp_path_factory.mktemp("nodes") / "run", [tmp_path_factory.mktemp("home") for _ in range(2)]
    nodes = start_ranks(TRAIN, f"model.path={random_model}", f"run.dir={run}", "parallel.tp=2", *TINY, folders=homes)
    metrics = run / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert time.monotonic() < deadline and nodes[0].poll() is nodes[1].poll() is None, [node.output.read_text() for node in nodes]
            time.sleep(0.1)
        began = time.monotonic()
        nodes[0].kill()
        said, _ = nodes[1].communicate(timeout=60)
        yield Lost(run, nodes[1].returncode, said, time.monotonic() - began)
    finally:
        for node in nodes:
            node.kill()


def test_a_model_that_spans_two_nodes_is_trained(lost: Lost) -> None:
    """Each node has an engine, and the trainer's tensor parallelism spans both nodes.

    Engines and trainer agree on every logprob within 1e-4.
    """
    steps = [step for step in read_metrics(lost.run / "metrics.jsonl") if "loss" in step]
    assert len(steps) >= 2 and (lost.run / "config.yaml").exists()
    assert all(step["rollout_mismatch/logprob_abs_diff_max"] < 1e-4 and step["grad_norm"] > 0 for step in steps)
    assert not list(lost.run.glob(".node_*")), "the marks by which nodes see each other are gone"


def test_the_first_node_that_is_lost_ends_the_other(lost: Lost) -> None:
    """The second node exits with code 1 within 45 s, and its last line is an error that reports the
    lost node.
    """
    assert lost.code == 1 and lost.seconds < 45
    assert lost.said.splitlines()[-1].startswith("error: the first node, which hosts the store of all ranks, is not reachable ("), lost.said
    assert "Traceback" not in lost.said


@pytest.mark.parametrize("key", ["run.dir", "model.path"])
def test_what_nodes_do_not_share_is_named(key: str, random_model: Path, tmp_path: Path) -> None:
    """Both nodes get equal arguments but run in different folders. run.dir=run then names two
    folders, and model.path=model names two models, one of which has an extra line in its
    config.json.
    """
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(random_model, folder / "model")
    with (folders[1] / "model" / "config.json").open("a") as file:
        file.write("\n")
    given = {"run.dir": ("run.dir=run", f"model.path={random_model}"), "model.path": (f"run.dir={tmp_path}/run", "model.path=model")}
    lacks = {
        "run.dir": "run.dir=run: node 1 ({0}) does not see a file that rank 0 wrote there; put",
        "model.path": "model.path=model: node 1 ({0}) does not have the same model/config.json as node 0 ({0}); copy it, or put",
    }
    line = f"error: {lacks[key].format(HOST)} it in a folder that all nodes share"
    nodes = start_ranks(TRAIN, *given[key], *TINY, folders=folders)
    try:
        said, _ = nodes[0].communicate(timeout=120)
    finally:
        for node in nodes:
            node.kill()
    assert (nodes[0].returncode, said) == (1, f"{line}\n")
    assert not (folders[0] / "run").exists() and not (tmp_path / "run").exists(), "nothing began"


def test_what_one_node_lacks_every_node_says(random_model: Path, tmp_path: Path) -> None:
    """A data file is missing on the second node only.

    The first node, which has the file, prints the same error and exits before the nodes compare
    their inputs.
    """
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "mine.jsonl").write_text(json.dumps({"question": "?", "answer": "4", "images": []}) + "\n")
    data = ("task=vqa", "task.data.train=[mine.jsonl]", "task.data.eval=[mine.jsonl]")
    nodes = start_ranks(TRAIN, f"model.path={random_model}", f"run.dir={tmp_path}/run", *data, folders=folders)
    try:
        said, _ = nodes[0].communicate(timeout=120)
    finally:
        for node in nodes:
            node.kill()
    assert nodes[0].returncode == 1
    assert said.startswith("error: task.data.") and said.endswith(f"(rank 1 on {HOST})\n") and said.count("\n") == 1, said
