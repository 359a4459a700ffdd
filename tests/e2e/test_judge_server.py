"""The judge client against vLLM's own OpenAI-compatible server on the CPU, with responses
constrained by a JSON schema.

The model is a nano Qwen2.5-VL with random weights. Its responses are valid verdicts only because of
the schema; the tests check that both sides agree on the format of requests, images and verdicts.
"""

import asyncio
import json
import math
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import yaml
from PIL import Image

from megatron_rl.config import JudgeSettings
from megatron_rl.errors import InfraError
from megatron_rl.io.jsonl import read_lines
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.observe.recorder import read_recorded
from megatron_rl.rewards.judge import Judge
from megatron_rl.rewards.judge_prompt import load_judge_prompt
from megatron_rl.rewards.rubrics import build_rubric
from megatron_rl.types import Image as Shown
from megatron_rl.types import ToolCall, Turn
from tests.conftest import SUPPORT
from tests.support import fork_server
from tests.support.rollout_factory import make_reward_input

pytestmark = pytest.mark.timeout(600)
_XGRAMMAR = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Structured-output settings without optional whitespace. A random model that may write whitespace
writes nothing else.
"""


@pytest.fixture(scope="module")
def url(random_model: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    options = ("--model", random_model, "--served-model-name", "judge", "--dtype", "float32", "--enforce-eager", "--max-model-len", 4096)
    options += ("--kv-cache-memory-bytes", 64 << 20, "--structured-outputs-config", _XGRAMMAR)
    server = fork_server.Process(
        SUPPORT / "vllm_openai_server.py", "--host", "127.0.0.1", "--port", port, *options, environment=environment
    )
    try:
        began = time.monotonic()
        while not _is_up(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None and time.monotonic() - began < 400, server.output.read_text()[-6000:]
            time.sleep(0.2)
        print(f"up after {time.monotonic() - began:.0f} s")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate(deadline=time.monotonic() + 60)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_a_real_server_gives_verdicts(url: str, tmp_path: Path) -> None:
    """Every verdict on text and on images is one of the values of its prompt.

    Greedy verdicts are equal when requested again and when read from the cache.
    """
    cache = str(tmp_path / "verdicts.sqlite")
    settings = JudgeSettings(urls=[url], max_tokens=64, timeout_s=120, max_attempts=2, concurrency=4)
    equivalence, evidence = load_judge_prompt("answer_equivalence", examples="general"), load_judge_prompt("step_evidence")
    pictures = [Image.new("RGB", (84, 56), color) for color in ("red", "blue")]

    async def ask(settings: JudgeSettings) -> tuple[Judge, list[float], list[float]]:
        judge = Judge(settings)
        await judge.start()
        fields = [{"question": "What color?", "reference": "red", "answer": f"crimson {index}"} for index in range(8)]
        words = await asyncio.gather(*(judge.score(equivalence, fields=given) for given in fields))
        steps = {"question": "What color?", "metadata": "zoom"}
        seen = await asyncio.gather(*(judge.score(evidence, fields=steps, images=[picture]) for picture in pictures))
        await judge.close()
        return judge, words, seen

    first, words, seen = asyncio.run(ask(settings))
    counts = first.endpoints.requests, first.endpoints.failures
    assert first.model == "judge" and counts == (11, 0), "10 verdicts and the question for the model's name"
    assert set(words) <= {0.0, 1.0} and set(seen) <= {0.0, 0.25, 1.0}
    second, *again = asyncio.run(ask(JudgeSettings(urls=[url], max_tokens=64, timeout_s=120, cache=cache)))
    assert again == [words, seen] and second.endpoints.requests == 11
    recorded, *replayed = asyncio.run(ask(JudgeSettings(model="judge", cache=cache)))
    assert replayed == [words, seen] and (recorded.endpoints.requests, recorded.cache_hits) == (0, 10)


def test_a_rubric_is_scored_by_it(url: str) -> None:
    """A TAPO rubric is scored end to end, with accuracy by rule and one step by the server.

    A model name that the server does not have raises an InfraError instead of a score.
    """
    crop = Shown(Image.new("RGB", (56, 56), "red"), None, (1, 4, 4), "crop", merge=2)
    zoom = ToolCall(tool="zoom", source=json.dumps({"bbox_2d": [0, 0, 40, 40]}))
    turns = [Turn(0, (0, 1), "zoom", tool_call=zoom, images=[crop]), Turn(0, (2, 3), "<answer>red</answer>")]
    payload = {"question": "What color?", "answer": "red", "data_source": "vstar"}
    outcome = make_reward_input(*turns, payload=payload, images=[crop])

    async def score(model: str) -> float:
        judge = Judge(JudgeSettings(urls=[url], model=model, max_tokens=64, timeout_s=120, max_attempts=2))
        await judge.start()
        try:
            return (await build_rubric("tapo", judge=judge, tool_format="deepeyes").score(outcome)).reward
        finally:
            await judge.close()

    assert asyncio.run(score("judge")) in (1.0, 1.125, 1.5)
    with pytest.raises(InfraError, match="nobody"):
        asyncio.run(score("nobody"))


def num_judged(url: str) -> float:
    """Return the number of requests that the server has completed, from its own metrics."""
    told = httpx.get(url.replace("/v1", "/metrics")).text
    return sum(float(number) for number in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", told, re.MULTILINE))


@pytest.fixture(scope="module")
def judged(url: str, learning_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Run PPO with rewards from the server.

    Return the run's home folder and the number of verdicts that the server gave.
    """
    home, before = tmp_path_factory.mktemp("judged"), num_judged(url)
    ended = fork_server.run_script(SUPPORT / "judged_ppo_run.py", learning_model, home, url, timeout_s=300)
    assert ended.returncode == 0, ended.stdout[-6000:]
    return home, num_judged(url) - before


def test_ppo_is_rewarded_by_it(judged: tuple[Path, float]) -> None:
    """Every reward equals the verdict on the policy's boxed answer, as stored in the run's verdict
    cache. A response without a boxed answer or with two of them has reward 0.
    """
    home, num_asked = judged
    rollouts = [entry.rollout for number in range(2) for entry in read_recorded(home / "ppo" / "rollouts" / f"step_{number:06d}.jsonl")]
    questions, steps = read_lines(home / "questions.jsonl"), read_metrics(home / "ppo" / "metrics.jsonl")
    with closing(sqlite3.connect(home / "verdicts.sqlite")) as file:
        rows = file.execute("SELECT fields, verdict FROM verdicts").fetchall()
    verdicts = {frozenset(json.loads(fields).items()): verdict for fields, verdict in rows}
    assert len(verdicts) == num_asked, "each was given by the server, once"
    assert sum(step["judge/called"] for step in steps) == num_asked, "the last line has those of the last evaluation"
    given = []
    for rollout in rollouts:
        (turn,), row = rollout.turns, questions[int(rollout.example_id.removeprefix("train/"))]
        fields = {"question": row["question"], "reference": row["answer"], "answer": answer_in(turn.text)}
        given.append(verdicts[frozenset(fields.items())] if fields["answer"] else None)
        assert rollout.reward == (given[-1] or 0.0), turn.text
    assert sum(step["judge/decided_fraction"] for step in steps[:2]) / 2 == pytest.approx(1 - given.count(None) / 48)
    assert len(rollouts) == 48 and given.count(1.0) >= 4 and given.count(0.0) >= 4, given


def answer_in(text: str) -> str:
    """Return the content of the only `boxed` command in the text, or an empty string."""
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return boxed[0].strip() if text.count("\\boxed{") == len(boxed) == 1 else ""


def test_its_critic_learns_beside_the_policy(judged: tuple[Path, float]) -> None:
    """The critic's metrics are finite and change from step to step, a new value head predicts 0,
    and the checkpoint contains the critic.

    The verdicts are random: a first step in which all of them are 0 leaves the critic as it is.
    """
    home, _ = judged
    first, second, _ = read_metrics(home / "ppo" / "metrics.jsonl")
    for name in ("value/loss", "value/return", "value/rmse", "value/grad_norm", "grad_norm"):
        assert math.isfinite(first[name]) and math.isfinite(second[name]) and first[name] != second[name], name
    assert first["value/mean"] == 0.0, "a new head expects nothing"
    assert math.isfinite(second["value/mean"]) and (second["value/mean"] != 0.0) == (first["reward/mean"] > 0), first["reward/mean"]
    assert max(step["rollout_mismatch/logprob_abs_diff_max"] for step in (first, second)) <= 1e-4
    saved = home / "ppo" / "checkpoints" / "step_00000002"
    assert {path.name for path in (saved / "critic").iterdir()} == {path.name for path in saved.iterdir() if path.is_file()}


def test_its_weight_of_the_kl_follows_what_was_measured(judged: tuple[Path, float]) -> None:
    """The second step's KL coefficient equals the adaptive-KL formula applied to the first step's
    KL. The KL is positive once an update had a reward.
    """
    home, _ = judged
    first, second, _ = read_metrics(home / "ppo" / "metrics.jsonl")
    algo = yaml.safe_load((home / "ppo" / "config.yaml").read_text())["algo"]
    error = min(max(first["policy/kl_ref"] / algo["kl_target"] - 1, -0.2), 0.2)
    assert first["policy/kl_ref"] >= 0 and (second["policy/kl_ref"] > 0 or first["reward/mean"] == 0), first["reward/mean"]
    assert first["policy/kl_coef"] == algo["kl_coef"] == 0.05
    assert second["policy/kl_coef"] == pytest.approx(0.05 * (1 + error * 24 / algo["kl_horizon"]), rel=1e-12)
