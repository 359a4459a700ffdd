"""Speaker and listener of the Lewis game in training at a time, two runs that meet by HTTP alone: each is rewarded under what the other has
become. The order is fixed: the listener's run is held after its first step until the speaker's has ended."""

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
from tests.conftest import ROOT
from tests.e2e.test_lewis_run import SIZES, wait_for
from tests.support import fork_server
from tests.support.model_server_process import running_model_server, start_model_server
from tests.support.trained_speaker import train_speaker, write_lewis_data
from tools.data.make_tiny_qwen2_5_vl import make_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
# A random listener never says yes or no, and all its rewards are alike: the entropy bonus moves it.
MOVING = ("optim.lr=1e-2", "algo.entropy_coef=0.1", "batch.group_size=2", "task.max_new_tokens=4")
SPEAKS, HEARS = 2, 3
"""Steps."""

TOKEN = "a-word-of-many-letters"


@dataclass(frozen=True, slots=True)
class Pair:
    home: Path
    versions: dict[str, list[str]]
    """By service, in the order in which it had them: its folder's, that of the run's beginning, those of its steps."""

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
            service.process.wait()


def watch(urls: dict[str, str], versions: dict[str, list[str]], is_over: threading.Event) -> None:
    """Note each version of a service when it first says it."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    while not is_over.wait(0.02):
        for name, url in urls.items():
            version = httpx.get(f"{url}/health", trust_env=False, timeout=60, headers=headers).json()["version"]
            if version not in versions[name]:
                versions[name].append(version)


def test_each_partners_version_moves_with_its_steps(pair: Pair) -> None:
    """The folder's, that of the run's beginning, and one of each step; no service missed an update."""
    assert {name: len(found) for name, found in pair.versions.items()} == {"listener": 2 + HEARS, "speaker": 2 + SPEAKS}
    for name, num in (("listener_run", HEARS), ("speaker_run", SPEAKS)):
        steps = read_metrics(pair.home / name / "metrics.jsonl")[:-1]
        assert [step["weight_publish/num_behind"] for step in steps] == [0.0] * num and min(step["grad_norm"] for step in steps) > 0


def test_a_speakers_rewards_are_by_what_the_listener_had_become(pair: Pair) -> None:
    """Each accuracy of its training is of a line in the listener's log, all of them under versions of after the listener's first step."""
    lines, trained = pair.log("listener"), pair.versions["listener"][2:]
    assert lines and {line["version"] for line in lines} <= {*trained}
    scores = {round(line["reward_score"], 6) for line in lines}
    files = [pair.home / "speaker_run" / "rollouts" / f"step_{step:06d}.jsonl" for step in range(SPEAKS)]
    rollouts = [entry.rollout for file in files for entry in read_recorded(file)]
    paid = [rollout.reward_terms["accuracy"] for rollout in rollouts if rollout.reward_terms["accuracy"]]
    assert len(rollouts) == SPEAKS * 16 and len(paid) > 4 and {round(value, 6) for value in paid} <= scores


def test_a_listener_hears_what_the_speaker_had_become(pair: Pair) -> None:
    """Its service is asked by the listener's run alone: in the first step under the folder's weights, and after it under those of the
    speaker's last step, which started anew from the run's final folder says the same of the same picture."""
    lines, versions = pair.log("speaker"), pair.versions["speaker"]
    assert {line["version"] for line in lines} == {versions[0], versions[-1]}
    said = {line["text"] for line in lines if line["version"] == versions[-1]}
    shown = sorted(path.relative_to(pair.home / "pictures") for path in (pair.home / "pictures").glob("*/*/*.png"))
    with running_model_server("speaker", pair.home / "speaker_run" / "final", "--root", pair.home / "pictures") as fresh:
        batch = [{"image_path": str(path), "category": path.parts[0]} for path in shown]
        again = {each["text"] for each in fresh.post("/batch_describe", {"batch": batch}).json()["results"]}
    assert said and said <= again
