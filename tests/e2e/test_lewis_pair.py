"""The speaker and the listener of the Lewis game train at the same time in two runs that
communicate only over HTTP. Each run's rewards come from the other run's current weights.

The order is fixed: the listener's run is paused after its first step until the speaker's run has
ended.
"""

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl_tools.data.make_tiny_qwen2_5_vl import make_checkpoint
from tests.conftest import ROOT
from tests.e2e.test_lewis_run import SIZES, wait_for
from tests.support import fork_server
from tests.support.model_server_process import running_model_server, start_model_server
from tests.support.trained_speaker import train_speaker, write_lewis_data

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# A random listener never answers yes or no, so all its rewards are equal; the entropy bonus
# provides a gradient.
MOVING = ("optim.lr=1e-2", "algo.entropy_coef=0.1", "batch.group_size=2", "task.max_new_tokens=4")
SPEAKS, HEARS = 2, 3
"""Number of training steps of the speaker's and of the listener's run."""

TOKEN = "a-word-of-many-letters"


@dataclass(frozen=True, slots=True)
class Pair:
    home: Path
    versions: dict[str, list[str]]
    """Weight versions of each service in the order of their appearance: the model folder's, the
    run's initial one, then one per step.
    """

    def log(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.home / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    write_lewis_data(home)
    train_speaker(home / "speaker", vocabulary_file=home / "rounds" / "words.txt")
    make_checkpoint(home / "listener", preset="nano", init="random", seed=1, words=home / "rounds" / "words.txt")
    token = home / "token"
    token.write_text(TOKEN)
    taken = ("--trained", "--token-file", token)
    services = {name: start_model_server(name, home / name, *taken, "--log", home / f"{name}.jsonl") for name in ("listener", "speaker")}
    says, listens = services["speaker"].url, services["listener"].url
    data = [f"task.data.{split}=[{home}/rounds/speaker:{folder}]" for split, folder in (("train", "train"), ("eval", "test"))]
    words = [*data, f"task.data.images={home}/pictures", *SIZES]
    hears = fork_server.Process(
        ROOT / "launch" / "train.py", "task=lewis_listener", "task.options.reward=heard", f"model.path={home}/listener", *words, *MOVING,
        f"run.dir={home}/listener_run", f"run.steps={HEARS}", f"task.speaker.urls=[{says}]", f"weight_publish.urls=[{listens}]",
        f"task.speaker.token_file={token}", f"weight_publish.token_file={token}",
    )  # fmt: skip
    runs, versions, is_over = [hears], {name: [] for name in services}, threading.Event()
    watcher = threading.Thread(target=watch, args=({name: each.url for name, each in services.items()}, versions, is_over))
    watcher.start()
    try:
        wait_for(home / "listener_run" / "metrics.jsonl", "\n", hears)
        hears.send_signal(signal.SIGSTOP)
        runs.append(fork_server.Process(
            ROOT / "launch" / "train.py", "task=lewis_speaker", f"model.path={home}/speaker", *words, f"run.dir={home}/speaker_run",
            f"run.steps={SPEAKS}", f"task.listener.urls=[{listens}]", "task.listener.partner_is_training=true",
            f"weight_publish.urls=[{says}]",
            f"task.listener.token_file={token}", f"weight_publish.token_file={token}",
        ))  # fmt: skip
        said, _ = runs[1].communicate(400)
        assert runs[1].returncode == 0, said[-6000:]
        hears.send_signal(signal.SIGCONT)
        said, _ = hears.communicate(400)
        assert hears.returncode == 0, said[-6000:]
        is_over.set()
        watcher.join()
        yield Pair(home, versions)
    finally:
        is_over.set()
        for run in runs:
            run.send_signal(signal.SIGCONT)
            run.kill()
        for service in services.values():
            service.process.kill()


def watch(urls: dict[str, str], versions: dict[str, list[str]], is_over: threading.Event) -> None:
    """Append each weight version of a service when its health endpoint first reports it."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while not is_over.wait(0.02):
        for name, url in urls.items():
            version = httpx.get(f"{url}/health", trust_env=False, timeout=60, headers=headers).json()["version"]
            if version not in versions[name]:
                versions[name].append(version)


def test_each_partners_version_moves_with_its_steps(pair: Pair) -> None:
    """Each service had the version of its model folder, the run's initial version, and one version
    per step; no update was missed.
    """
    assert {name: len(found) for name, found in pair.versions.items()} == {"listener": 2 + HEARS, "speaker": 2 + SPEAKS}
    for name, num in (("listener_run", HEARS), ("speaker_run", SPEAKS)):
        steps = read_metrics(pair.home / name / "metrics.jsonl")[:-1]
        assert [step["weight_publish/num_behind"] for step in steps] == [0.0] * num and min(step["grad_norm"] for step in steps) > 0


def test_a_speakers_rewards_are_by_what_the_listener_had_become(pair: Pair) -> None:
    """Every accuracy reward of the speaker's training equals a score in the listener's log.

    All of these scores were computed by weights from after the listener's first step.
    """
    lines, trained = pair.log("listener"), pair.versions["listener"][2:]
    assert lines and {line["version"] for line in lines} <= {*trained}
    scores = {round(line["reward_score"], 6) for line in lines}
    files = [pair.home / "speaker_run" / "rollouts" / f"step_{step:06d}.jsonl" for step in range(SPEAKS)]
    rollouts = [entry.rollout for file in files for entry in read_recorded(file)]
    paid = [rollout.reward_terms["accuracy"] for rollout in rollouts if rollout.reward_terms["accuracy"]]
    assert len(rollouts) == SPEAKS * 16 and len(paid) > 4 and {round(value, 6) for value in paid} <= scores


def test_a_listener_hears_what_the_speaker_had_become(pair: Pair) -> None:
    """Only the listener's run queries the speaker's service: under the model folder's weights in
    its first step, then under the weights of the speaker's last step. A new server started from the
    speaker run's final folder returns the same descriptions for the same images.
    """
    lines, versions = pair.log("speaker"), pair.versions["speaker"]
    assert {line["version"] for line in lines} == {versions[0], versions[-1]}
    said = {line["text"] for line in lines if line["version"] == versions[-1]}
    shown = sorted(path.relative_to(pair.home / "pictures") for path in (pair.home / "pictures").glob("*/*/*.png"))
    with running_model_server("speaker", pair.home / "speaker_run" / "final", "--root", pair.home / "pictures") as fresh:
        batch = [{"image_path": str(path), "category": path.parts[0]} for path in shown]
        again = {each["text"] for each in fresh.post("/batch_describe", {"batch": batch}).json()["results"]}
    assert said and said <= again
