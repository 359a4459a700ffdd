"""Tests the inference servers that a run starts itself, with stand-ins for vLLM's servers that are
ready immediately."""

import json
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import EngineSettings, ModelSettings, RunSettings, Settings, TaskSettings
from megatron_rl.distributed.world import connect, disconnect, read_world
from megatron_rl.errors import GracefulStop
from megatron_rl.services import address
from megatron_rl.services import engine_servers as room
from megatron_rl.services.address import has_proven_token, token_file
from megatron_rl.services.engine_servers import (
    ENGINES_TOKEN_NAME,
    EngineServer,
    EngineServers,
    check_engines,
    describe_placement,
    run_engine_servers,
    split_cores,
)
from megatron_rl_sandbox.token import read_token, write_token
from tests.conftest import SUPPORT
from tests.support.hostile_server import serve_hostile

HERE, HOST = "127.0.0.1", socket.gethostname()


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    disconnect()


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets how the stand-in servers behave from now on. At first they
    work."""
    monkeypatch.setattr(
        room, "server_command_line", lambda settings: [sys.executable, str(SUPPORT / "fake_engine_server.py"), str(tmp_path)]
    )
    monkeypatch.setattr(room, "is_on_gpu", lambda settings: False)
    monkeypatch.setattr(room, "MIN_BACKOFF_S", 0.4)

    def fare(how: str) -> None:
        (tmp_path / "next").write_text(how)
        (tmp_path / "next").rename(tmp_path / "how")

    fare("well")
    return fare


def settings_of(run: Path, num: int = 2, **more: object) -> Settings:
    engine = EngineSettings(mode="server", num_local_servers=num, **more)
    return Settings(model=ModelSettings(path="m"), run=RunSettings(dir=str(run)), task=TaskSettings(name="vqa"), engine=engine)


def starts(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "starts").read_text().splitlines()] if (folder / "starts").exists() else []


def go_on() -> None:
    """Do nothing: the run is not being stopped."""


def until(holds: Callable[[], bool], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def revived(own: EngineServers, url: str, folder: Path, *, is_unresponsive: bool = False, within_s: float = 60.0) -> dict:
    """Request a restart as the health monitor does, until one more server has started. Return the
    record of its start."""
    before = len(starts(folder))

    def again() -> bool:
        own.restart(url, is_unresponsive=is_unresponsive)
        return len(starts(folder)) > before

    until(again, within_s=within_s)
    return starts(folder)[-1]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_they_are_started_told_of_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Two servers start, each on its own port, as vLLM servers that accept weights, without rank
    variables and without the user's API keys (finding 4). They end with the run."""
    for name in ("RANK", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "0")
    with run_engine_servers(settings_of(tmp_path), read_world(), raise_if_stopped=go_on) as (urls, own):
        begun = starts(tmp_path)
        assert sorted(urls) == sorted(f"http://{HERE}:{each['port']}" for each in begun) and len(set(urls)) == 2 and own.urls == urls
        assert [(each["VLLM_SERVER_DEV_MODE"], each["RANK"]) for each in begun] == [("1", None)] * 2
        assert {each[name] for each in begun for name in ("VLLM_API_KEY", "OPENAI_API_KEY")} == {None}
        token = token_file(tmp_path, ENGINES_TOKEN_NAME)
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and all(has_proven_token(url, token=read_token(token)) for url in urls)
    assert all(gone(each["pid"]) for each in begun)
    said = capsys.readouterr().out
    assert all(f"engine {number}: ready at {url} after " in said for number, url in enumerate(urls))
    assert not token.exists()
    log = (tmp_path / "services" / "engine_1.log").read_text()
    assert f"--host {HERE} --port {urls[1].rpartition(':')[2]}" in log


@pytest.mark.parametrize(
    ("how", "more", "line"),
    [
        ("ends", {}, "engine.num_local_servers=2: engine [01] exited with code 3; last line of .*engine_[01].log: ValueError: then why$"),
        (
            "silent",
            {"startup_timeout_s": 1.0},
            r"engine.startup_timeout_s=1.0: engine [01] does not respond; .*engine_[01].log contains no output of the process yet$",
        ),
    ],
)
def test_one_that_does_not_come_up_is_one_line(how: str, more: dict, line: str, tmp_path: Path, stand_in: Callable) -> None:
    """A server that ends or stays silent at the start is an error of one line that names the
    setting and the log. No server is left."""
    stand_in(how)
    with (
        pytest.raises(ValueError, match=f"^{line}"),
        run_engine_servers(settings_of(tmp_path, **more), read_world(), raise_if_stopped=go_on),
    ):
        pass
    assert all(gone(each["pid"]) for each in starts(tmp_path))


@pytest.mark.parametrize("way", ["body by drops", "endless", "packed"])
def test_an_answer_without_end_is_none(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose response is endless or compressed counts as not running, both as an engine and
    as a service. Probing it takes no longer than probing a silent server."""
    monkeypatch.setattr(address, "HEALTH_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with serve_hostile(way) as url:
        assert not EngineServer(name="engine 0", url=url, command=[], environment={}, token="t", log=tmp_path / "log").probe_ready()
        write_token(tmp_path / "token")
        assert not any(address.is_service_running(url, kind, nonce="n", token=tmp_path / "token") for kind in ("vllm", "sandbox"))
    assert time.monotonic() - began < 20


def test_a_run_that_is_stopped_waits_no_longer(tmp_path: Path, stand_in: Callable) -> None:
    stand_in("silent")

    def stop() -> None:
        if len(starts(tmp_path)) == 2:
            raise GracefulStop

    with pytest.raises(GracefulStop), run_engine_servers(settings_of(tmp_path), read_world(), raise_if_stopped=stop):
        pass
    assert all(gone(each["pid"]) for each in starts(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_has_ended_is_started_again(tmp_path: Path, number: int, capsys: pytest.CaptureFixture) -> None:
    """A server that has ended is restarted at its address, and the other one is untouched. A
    healthy server is not restarted."""
    with run_engine_servers(settings_of(tmp_path), read_world(), raise_if_stopped=go_on) as (urls, own):
        first = next(each for each in starts(tmp_path) if urls[1].endswith(f":{each['port']}"))
        own.restart(urls[1], is_unresponsive=False)
        assert len(starts(tmp_path)) == 2, "it runs"
        os.kill(first["pid"], number)
        again = revived(own, urls[1], tmp_path)
        assert again["port"] == first["port"] and again["pid"] != first["pid"] and len(starts(tmp_path)) == 3
        assert len({each["seed"] for each in starts(tmp_path)}) == 3, "no two sample alike"
        own.restart(urls[1], is_unresponsive=True)
        assert len(starts(tmp_path)) == 3, "one that is just starting may be silent"
    assert re.search(rf"engine 1 \({urls[1]}\): exited with code \d+; restarting in 0 s; ", capsys.readouterr().out)


def test_one_that_hangs_is_ended_and_started_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A hanging server is killed and restarted. It is stopped with SIGSTOP, so it does not react to
    a request to end."""
    with run_engine_servers(settings_of(tmp_path, num=1), read_world(), raise_if_stopped=go_on) as ((url,), own):
        (first,) = starts(tmp_path)
        os.kill(first["pid"], signal.SIGSTOP)
        own.restart(url, is_unresponsive=False)
        assert len(starts(tmp_path)) == 1
        again = revived(own, url, tmp_path, is_unresponsive=True)
        assert gone(first["pid"]) and not gone(again["pid"])
    assert ": is running but does not respond; restarting in 0 s; " in capsys.readouterr().out


def test_rests_grow_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Callable, capsys: pytest.CaptureFixture) -> None:
    """A server that ends at each start is given up after MAX_RESTARTS restarts, between which the
    pauses grow. The other server is not given up."""
    monkeypatch.setattr(room, "MAX_RESTARTS", 3)
    with run_engine_servers(settings_of(tmp_path), read_world(), raise_if_stopped=go_on) as (urls, own):
        stand_in("ends")
        os.kill(next(each["pid"] for each in starts(tmp_path) if urls[0].endswith(f":{each['port']}")), signal.SIGKILL)
        times = []
        for _ in range(3):
            revived(own, urls[0], tmp_path)
            times.append(time.monotonic())
        assert times[1] - times[0] >= 0.4 and times[2] - times[1] >= 0.8
        until(
            lambda: own.restart(urls[0], is_unresponsive=False) or "not restarted after 4 consecutive failures" in capsys.readouterr().out
        )
        num = len(starts(tmp_path))
        for _ in range(20):
            own.restart(urls[0], is_unresponsive=True)
            time.sleep(0.1)
        assert len(starts(tmp_path)) == num == 5
        own.restart(urls[1], is_unresponsive=False)
        assert len(starts(tmp_path)) == 5


def test_a_long_life_lets_earlier_ends_be_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A server that was healthy for STABLE_S seconds before it ended restarts its count of
    consecutive ends."""
    monkeypatch.setattr(room, "STABLE_S", 0.3)
    with run_engine_servers(settings_of(tmp_path, num=1), read_world(), raise_if_stopped=go_on) as ((url,), own):
        for life in (0.0, 0.4, 0.0):
            own.report_alive(url)
            own.report_healthy(url)
            time.sleep(life)
            own.report_healthy(url)
            os.kill(starts(tmp_path)[-1]["pid"], signal.SIGKILL)
            revived(own, url, tmp_path)
    rests = re.findall(r"restarting in (\d) s", capsys.readouterr().out)
    assert rests == ["0", "0", "0"], "0.4 s are told as none"
    assert own._engines[url].consecutive_exits == 2, "the second life was long"


def test_nothing_is_started_when_all_is_over(tmp_path: Path) -> None:
    with run_engine_servers(settings_of(tmp_path, num=1), read_world(), raise_if_stopped=go_on) as ((url,), own):
        pass
    own.restart(url, is_unresponsive=True)
    time.sleep(0.3)
    assert len(starts(tmp_path)) == 1


def test_cores_by_hand() -> None:
    """Cores that are left over go to the ranks. If there are too few, neither ranks nor engines get
    cores of their own."""
    two, wide = EngineSettings(mode="server", num_local_servers=2), EngineSettings(mode="server", num_local_servers=2, tp=2)
    assert split_cores([0, 1], EngineSettings(mode="server", num_local_servers=1), num_ranks=1) == ([0], [[1]])
    assert split_cores([0, 1], two, num_ranks=1) == ([], [])
    assert split_cores([3, 4, 5, 8, 9, 10, 11], two, num_ranks=1) == ([3, 4, 5], [[8, 9], [10, 11]])
    assert split_cores(list(range(14)), wide, num_ranks=2) == (list(range(6)), [[6, 7, 8, 9], [10, 11, 12, 13]])


def test_engine_and_trainer_have_a_core_each(tmp_path: Path) -> None:
    """While the engines run, engine and trainer share no core. Together they use all cores of the
    process."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core")
    with run_engine_servers(settings_of(tmp_path, num=1), read_world(), raise_if_stopped=go_on):
        (begun,) = starts(tmp_path)
        own = os.sched_getaffinity(0)
        assert begun["cores"] and not own & {*begun["cores"]} and own | {*begun["cores"]} == before
        assert begun["OMP_NUM_THREADS"] == str(len(begun["cores"]))
        assert all(os.sched_getaffinity(int(thread)) == own for thread in os.listdir("/proc/self/task"))
    assert os.sched_getaffinity(0) == before


def test_servers_have_the_gpus_behind_those_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers use the GPUs after those of the ranks, by their numbers in the CUDA_VISIBLE_DEVICES
    of the run."""
    monkeypatch.setattr(room, "is_on_gpu", lambda settings: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,7")
    settings = settings_of(tmp_path, tp=2)
    own = EngineServers(settings, host=HERE, num_ranks=3, cores=[])
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in own._engines.values()] == ["3,4", "5,7"]
    assert describe_placement(settings.engine, num_ranks=3) == "GPU 3-4, GPU 5-6"
    check_engines(settings.engine, num_ranks=3, num_gpus=7)
    few = f"^engine.num_local_servers=2: 4 GPUs are needed in addition to 4 for the ranks, but {HOST} has 7 in total; start 1$"
    with pytest.raises(ValueError, match=few):
        check_engines(settings.engine, num_ranks=4, num_gpus=7)
    with pytest.raises(
        ValueError, match=f"^engine.num_local_servers=2: {HOST} has 7 GPUs, and its 6 ranks use them all; start fewer ranks"
    ):
        check_engines(settings.engine, num_ranks=6, num_gpus=7)
    monkeypatch.setattr(room, "is_on_gpu", lambda settings: False)
    check_engines(settings.engine, num_ranks=6, num_gpus=0)
