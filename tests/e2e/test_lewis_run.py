"""A speaker is trained against a fixed listener server; both use real engines. The oracle of its
rewards is the listener server itself, queried directly by the test.

The listener is killed during the run and restarted: rollouts fail and are generated again, and none
of them gets a reward of 0 for the outage. A last test runs the game's own launcher, which starts a
listener itself.
"""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.data.records import RecordFiles
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.services.supervised_process import find_free_port
from megatron_rl.types import Rollout
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.support import fork_server
from tests.support.model_server_process import ServerProcess, encode_base64, start_model_server
from tests.support.trained_speaker import train_speaker, write_lewis_data

pytestmark = pytest.mark.timeout(600)
SIZES = (
    "model.min_pixels=7056", "model.max_pixels=7100", "engine.kv_cache_mib=32", "engine.max_model_len=512", "task.max_new_tokens=48",
    "batch.prompts_per_step=4", "batch.group_size=4", "rollouts.keep_best=16", "rollouts.keep_worst=0",
    "task.data.max_eval=2", "optim.lr=1e-5",
)  # fmt: skip
HASTY = ("task.listener.max_attempts=2", "task.listener.backoff_s=0.1", "task.listener.outage_timeout_s=0.2")
STEPS = 3


@dataclass(frozen=True, slots=True)
class Played:
    """A run that has exited with code 0, and the restarted listener server."""

    home: Path
    said: str
    listener: ServerProcess

    @property
    def run(self) -> Path:
        return self.home / "run"

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts of the training steps."""
        return [entry.rollout for step in range(STEPS) for entry in read_recorded(self.run / "rollouts" / f"step_{step:06d}.jsonl")]


def wait_for(path: Path, words: str, run: fork_server.Process) -> None:
    deadline = time.monotonic() + 300
    while not (path.exists() and words in path.read_text()):
        assert time.monotonic() < deadline and run.poll() is None, run.output.read_text()[-6000:]
        time.sleep(0.02)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    home = tmp_path_factory.mktemp("lewis")
    write_lewis_data(home)
    make_checkpoint(home / "listener", preset="nano", init="random", seed=1, words=home / "rounds" / "words.txt")
    with ThreadPoolExecutor(1) as beside:
        starting = beside.submit(start_model_server, "listener", home / "listener")
        speaker = train_speaker(home / "speaker", vocabulary_file=home / "rounds" / "words.txt")
    listener = starting.result()
    data = (f"task.data.train=[{home}/rounds/speaker:train]", f"task.data.eval=[{home}/rounds/speaker:test]")
    own = (f"task.data.images={home}/pictures", f"task.listener.urls=[{listener.url}]", f"task.options.log={home}/log.jsonl")
    words = ("task=lewis_speaker", f"model.path={speaker}", f"run.dir={home}/run", f"run.steps={STEPS}", *data, *own, *SIZES, *HASTY)
    run = fork_server.Process(ROOT / "launch" / "train.py", *words)
    try:
        wait_for(home / "run" / "metrics.jsonl", "\n", run)
        listener.process.kill()
        wait_for(run.output, "rollouts failed", run)
        listener = start_model_server("listener", home / "listener", "--port", urlsplit(listener.url).port)
        said, _ = run.communicate(300)
        assert run.returncode == 0, said[-6000:]
        yield Played(home, said, listener)
    finally:
        run.kill()
        listener.process.kill()


def accuracy_by_hand(played: Played, rollout: Rollout) -> float | None:
    """Return the soft_gated accuracy of a recorded rollout, or None unless each tag occurs exactly
    once.

    The function extracts the description itself, reads the candidate images by the data row,
    queries the listener over HTTP and converts its p(yes) to a reward as the game's own service
    does. Sampled text may lack tags, so None is expected for some rollouts.
    """
    text, row = (
        rollout.turns[-1].text,
        RecordFiles([f"{played.home}/rounds/speaker:train"], images_root="")[int(rollout.example_id[6:])].row,
    )
    parts = [re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("thinking", "coarse", "detailed")]
    if [len(found) for found in parts] != [1, 1, 1]:
        return None
    words = f"{parts[1][0].strip()} {parts[2][0].strip()}"
    question = f'Does this description, "{words}", describe the main subject of the image? Answer yes or no.'
    files = [{"base64": encode_base64((played.home / "pictures" / path).read_bytes())} for path in row["ret_paths"]]
    answer = played.listener.post("/score", {"candidates": files, "question": question})
    assert answer.status_code == 200, answer.text
    p = answer.json()["yes_probabilities"]
    share = max(p) / sum(p) * (1.0 if max(p) >= 0.3 else 0.5)
    return share if p.index(max(p)) == "ABC".index(row["solution"]) else 0.0


def test_rewards_are_what_the_listener_says_when_it_is_asked_by_hand(played: Played) -> None:
    """Each recorded accuracy equals `accuracy_by_hand` within 1e-4, and the reward adds 1 for the
    tags. More than 3 distinct values are required, because equal rewards would prove nothing.
    """
    rollouts = played.rollouts
    paid = {number: value for number, rollout in enumerate(rollouts) if (value := accuracy_by_hand(played, rollout)) is not None}
    assert len(rollouts) == STEPS * 16 and len(paid) > 40 and len({round(value, 4) for value in paid.values()}) > 3
    for number, accuracy in paid.items():
        assert rollouts[number].reward_terms["accuracy"] == pytest.approx(accuracy, abs=1e-4)
        assert rollouts[number].reward == pytest.approx(accuracy + 1.0, abs=1e-4)
    lines = [json.loads(line) for line in (played.home / "log.jsonl").read_text().splitlines()]
    told = {(line["content"], round(line["reward"], 6)) for line in lines}
    assert {(rollout.turns[-1].text, round(rollout.reward_terms["accuracy"], 6)) for rollout in rollouts} <= told


def test_weights_move_and_engine_and_trainer_agree(played: Played) -> None:
    """Engine and trainer logprobs agree within 1e-4 in every step, and the final weights differ
    from the initial ones.
    """
    steps = read_metrics(played.run / "metrics.jsonl")[:-1]
    assert len(steps) == STEPS and max(step["rollout_mismatch/logprob_abs_diff_max"] for step in steps) <= 1e-4
    before, after = (load_file(played.home / "speaker" / "model.safetensors"), {})
    for file in (played.run / "final").glob("*.safetensors"):
        after |= load_file(file)
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert changed and "lm_head.weight" in changed


def test_a_listener_that_is_down_fails_rollouts_and_is_waited_for(played: Played) -> None:
    """The run's output reports failed rollouts while the listener is down.

    In the end no rollout has failed, so none was scored as 0 because of the outage.
    """
    assert re.search(r"waiting: \d+ of 16 rollouts failed \(.*listener: failed after 2 of 2 attempts", played.said)
    assert {step["rollout/failed_fraction"] for step in read_metrics(played.run / "metrics.jsonl")[:-1]} == {0.0}


def test_the_launcher_starts_a_listener_of_its_own_and_ends_it(played: Played, tmp_path: Path) -> None:
    """launch/lewis.sh is called without a host, as users call it.

    An epoch of 8 rounds is two steps of four prompts, and the listener's port is free afterwards.
    """
    home, port = played.home, find_free_port("127.0.0.1")
    variables = {"EXPERIMENT": "lewis_cpu", "PICTURES": f"{home}/pictures", "LISTENER_MODEL": f"{home}/listener"}
    command = ["bash", "launch/lewis.sh", "", str(port), "1", f"{home}/rounds", "7"]
    given = {**os.environ, **variables, "OMP_NUM_THREADS": "1"}
    own = (f"model.path={home}/speaker", f"run.dir={tmp_path}/run")
    ended = subprocess.run([*command, *own, *SIZES], cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=500)
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    run = tmp_path / "run"
    assert [step["rollout/failed_fraction"] for step in read_metrics(run / "metrics.jsonl")[:-1]] == [0.0, 0.0]
    log = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert len(log) >= 2 * 16 and len({round(line["reward"], 4) for line in log}) > 3, "random as it is, it tells descriptions apart"
    assert f":{port}" in (run / "services" / "listener.log").read_text() and list((run / "sheets").glob("*.png"))
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections keep the port in use for a minute
        taken.bind(("127.0.0.1", port))
