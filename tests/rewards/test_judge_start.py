"""Tests the checks of a judge when a run starts, and the cost of a server with every failure at
once, with real HTTP servers on loopback."""

import asyncio
import random
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.clients import health_check
from megatron_rl.config import JudgeSettings
from megatron_rl.errors import InfraError
from megatron_rl.rewards.judge import Judge, make_judge
from tests.support.fake_judge_server import (
    PROMPT,
    JudgeReply,
    answer_correct,
    make_completion,
    make_judge_settings,
    prompt_fields,
    run_judge,
    serve_judge,
)

HTML = JudgeReply("<html><body>Bad gateway, but politely</body></html>", headers={"Content-Type": "text/html"})


def test_nobody_listens() -> None:
    """If no server is reachable, the start fails within 5 s with an error that names the
    setting."""
    with serve_judge(answer_correct) as gone:
        pass
    began = time.monotonic()
    with pytest.raises(
        InfraError, match=rf"^task.judge.urls=\['{gone.url}'\]: no judge is available \({gone.url}: ConnectError.*; start one"
    ):
        run_judge(make_judge_settings(gone), lambda _: asyncio.sleep(0))
    assert time.monotonic() - began < 5


def test_one_of_two_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """If one of two servers is unreachable, a warning names it and the run uses the other one."""
    with serve_judge(answer_correct) as gone:
        pass
    with serve_judge(answer_correct) as server:
        assert (
            run_judge(make_judge_settings(gone, server), lambda judge: judge.score(PROMPT, fields=prompt_fields())).endpoints.failures <= 1
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: task.judge.urls=") and f"{gone.url}: ConnectError" in line and f"({server.url}" not in line


def test_a_server_that_is_slow_to_greet_or_serves_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is too slow or serves another model fails the start. One that is busy or has no
    list of models does not."""
    with serve_judge(answer_correct) as server:
        with pytest.raises(
            InfraError, match=r"serves served, judge, other, not task.judge.model=another: choose one of these\); start one"
        ):
            run_judge(make_judge_settings(server, model="another"), lambda _: asyncio.sleep(0))
        server.models_reply = JudgeReply("", delay_s=1.0)
        with monkeypatch.context() as patched:
            patched.setattr(health_check, "HEALTH_TIMEOUT_S", 0.3)
            with pytest.raises(InfraError, match=rf"no judge is available \({server.url}: no response within 0 s\)"):
                run_judge(make_judge_settings(server), lambda _: asyncio.sleep(0))
        for busy in (JudgeReply("", 429), JudgeReply("", 404), HTML):
            server.models_reply = busy
            run_judge(make_judge_settings(server), lambda judge: judge.score(PROMPT, fields=prompt_fields()))


@pytest.mark.parametrize(("status", "kind"), [(401, "AuthenticationError"), (403, "PermissionDeniedError")])
def test_a_key_that_is_not_accepted_ends_the_start(status: int, kind: str) -> None:
    """A rejected key fails the start even if another judge is healthy. It is no outage, and would
    end the run at its first verdict."""
    with serve_judge(answer_correct) as server, serve_judge(answer_correct) as well:
        server.models_reply = JudgeReply("", status)
        for urls in ((server,), (server, well)):
            with pytest.raises(InfraError, match=rf"^task.judge.urls=.*{server.url}: {kind}.*: set OPENAI_API_KEY"):
                run_judge(make_judge_settings(*urls), lambda _: asyncio.sleep(0))


def test_a_judge_that_is_chosen_must_be_somewhere(tmp_path: Path) -> None:
    """The presets judge=text and judge=vision name a model. Without servers or recorded verdicts,
    nothing could ever judge, which is an error."""
    assert make_judge(JudgeSettings()) is None
    with pytest.raises(ValueError, match=r"^task.judge.urls=\[\]: the judge model is judge; set the addresses of its servers"):
        make_judge(JudgeSettings(model="judge"))
    assert isinstance(make_judge(JudgeSettings(model="judge", cache=str(tmp_path / "verdicts"))), Judge)


def test_a_server_with_every_fault_at_once() -> None:
    """As measured in newcomer.md, 7 of 10 requests fail, in five ways, with a timeout shorter than
    the backoffs. Of 16 verdicts, only those with five failures in a row are missing, and repeated
    calls obtain them within 9 rounds."""
    dice, lock = random.Random(3), threading.Lock()
    faults = [
        JudgeReply("", 429, {"Retry-After": "1"}),
        JudgeReply("", 500),
        HTML,
        JudgeReply("", delay_s=1.0),
        make_completion("so so"),
        answer_correct({}),
    ]

    def behave(_: dict) -> JudgeReply:
        with lock:
            return dice.choices(faults, (20, 15, 10, 5, 20, 30))[0]

    with serve_judge(behave) as server:

        async def use(judge: Judge) -> None:
            lacking, rounds = range(16), 0
            while lacking:
                given = await asyncio.gather(*(judge.score(PROMPT, fields=prompt_fields(f"{i}")) for i in lacking), return_exceptions=True)
                assert all(verdict == 1.0 or isinstance(verdict, InfraError) for verdict in given)
                assert not any("are backing off" in str(verdict) for verdict in given), "the patience ran out before the tries did"
                lacking = [place for place, verdict in zip(lacking, given, strict=True) if verdict != 1.0]
                rounds += 1
            assert rounds <= 9

        run_judge(make_judge_settings(server, max_attempts=5, timeout_s=0.5), use)
