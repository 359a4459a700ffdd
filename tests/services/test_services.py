"""Tests the services that a run starts itself, with a stand-in for vLLM's server that is ready
immediately and has an orphan in a session of its own."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_rl.config import JudgeSettings, ModelSettings, RunSettings, SandboxSettings, ServiceSettings, ServicesSettings, Settings
from megatron_rl.config import TaskSettings as Task
from megatron_rl.distributed.world import connect, disconnect, read_world
from megatron_rl.errors import GracefulStop
from megatron_rl.services import supervised_process
from megatron_rl.services.address import address_file, find_address, publish_address, token_file
from megatron_rl.services.service_launcher import check_service, resolve_addresses, run_services
from megatron_rl.services.supervised_process import find_free_port, make_environment
from megatron_rl_sandbox.token import write_token
from tests.conftest import ROOT, SUPPORT
from tests.support import fork_server
from tests.support.hostile_server import serve_hostile

STAND_IN = SUPPORT / "fake_vllm_server.py"
HOST, HERE = socket.gethostname(), "127.0.0.1"


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    connect(read_world(), timeout_s=30)
    yield
    disconnect()


def service_of(folder: Path, how: str = "well", **settings: object) -> ServiceSettings:
    return ServiceSettings(kind="vllm", model="m", command=[sys.executable, str(STAND_IN), str(folder), how], **settings)


def settings_of(run: Path, judge: ServiceSettings) -> Settings:
    task = Task(name="vqa", judge=JudgeSettings(urls=["service:judge"]))
    return Settings(model=ModelSettings(path="m"), run=RunSettings(dir=str(run)), task=task, services=ServicesSettings(judge=judge))


def finish(run: Path) -> None:
    """Write the files that a finished run leaves."""
    (run / "final").mkdir(parents=True)
    for name in ("eval.json", "final/config.json", "final/model.safetensors"):
        (run / name).write_text("{}")


def pids(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]


def are_gone(folder: Path, *, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids(folder) if psutil.pid_exists(pid)]:
        if time.monotonic() > deadline:
            return not left
        time.sleep(0.05)
    return True


def go_on() -> None:
    """Do nothing: the run is not being stopped."""


def test_a_service_is_started_told_of_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A service starts without rank variables and without the user's keys, publishes its address,
    and is gone after the run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    for name in ("VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "the-users-own")
    settings = settings_of(tmp_path, service_of(tmp_path, args=["--more", "1"]))
    with run_services(settings, read_world(), raise_if_stopped=go_on) as urls:
        (url,) = urls.values()
        assert urls.keys() == {"judge"} and url.startswith("http://127.0.0.1:") and url.endswith("/v1")
        assert find_address(tmp_path, "judge", "vllm", is_gated=False) == url
        assert resolve_addresses(settings.task, urls, run=tmp_path).judge.urls == [url]
        assert settings.task.judge.urls[0] == "service:judge", "what is kept with the run names no port of today"
        assert all(map(psutil.pid_exists, pids(tmp_path))) and len(pids(tmp_path)) == 2
        told = json.loads((tmp_path / "environment.json").read_text())
        assert told["VLLM_API_KEY"] == token_file(tmp_path, "judge").read_text() and "OPENAI_API_KEY" not in told
        assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & told.keys() and "PATH" in told
    assert (
        are_gone(tmp_path, within_s=0)
        and not address_file(tmp_path, "judge").exists()
        and find_address(tmp_path, "judge", "vllm", is_gated=False) == ""
    )
    log = (tmp_path / "services" / "judge.log").read_text()
    assert "--served-model-name judge " in log and log.splitlines()[0].endswith(" --more 1") and "stand-in: well" in log
    assert f"service judge: ready at {url} after " in capsys.readouterr().out


@pytest.mark.known_failure("orphaned-processes")
def test_a_holder_that_is_killed_leaves_nobody(tmp_path: Path) -> None:
    """If the process that holds a service is killed, no process of the service remains, not even
    one that left the server's session. Its address is no longer returned."""
    holder = fork_server.Process(SUPPORT / "service_process.py", tmp_path, sys.executable, STAND_IN, tmp_path, "well")
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "up").exists():
            assert time.monotonic() < deadline and holder.poll() is None, holder.output.read_text()
            time.sleep(0.05)
        (keeper,) = psutil.Process(holder.pid).children()
        assert find_address(tmp_path, "judge", "vllm", is_gated=False)
    finally:
        holder.kill()
    psutil.wait_procs([keeper], timeout=10)
    assert not keeper.is_running() and are_gone(tmp_path)
    assert address_file(tmp_path, "judge").exists() and find_address(tmp_path, "judge", "vllm", is_gated=False) == ""


def test_a_keeper_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that hangs is ended, with its server and the children of the server."""
    monkeypatch.setattr("megatron_rl.services.supervised_process.STOP_TIMEOUT_S", 1.0)
    with run_services(settings_of(tmp_path, service_of(tmp_path)), read_world(), raise_if_stopped=go_on):
        (keeper,) = [child for child in psutil.Process().children() if str(tmp_path) in child.cmdline()]
        keeper.suspend()
    assert not keeper.is_running() and are_gone(tmp_path)


def test_the_address_of_another_is_not_used(tmp_path: Path) -> None:
    """`find_address` ignores an address at which another server than the one that published it
    responds, and a truncated address file."""
    with run_services(settings_of(tmp_path, service_of(tmp_path)), read_world(), raise_if_stopped=go_on) as urls:
        write_token(token_file(tmp_path, "listener"))
        publish_address(tmp_path, "listener", url=urls["judge"], nonce="of one that died")
        assert find_address(tmp_path, "judge", "vllm", is_gated=False) and not find_address(tmp_path, "listener", "vllm", is_gated=False)
        assert not find_address(tmp_path, "judge", "sandbox"), "a server of another kind"
        whole = address_file(tmp_path, "judge").read_bytes()
        address_file(tmp_path, "judge").write_bytes(whole[: len(whole) // 2])
        assert not find_address(tmp_path, "judge", "vllm", is_gated=False) and not find_address(tmp_path, "nobody", "vllm", is_gated=False)


def test_what_another_job_starts_is_waited_for(tmp_path: Path) -> None:
    """A run waits for an external service and does not end it, because another job owns it."""
    with run_services(settings_of(tmp_path, service_of(tmp_path)), read_world(), raise_if_stopped=go_on) as started:
        with run_services(
            settings_of(tmp_path, replace(service_of(tmp_path), external=True)), read_world(), raise_if_stopped=go_on
        ) as found:
            assert found == started
        assert find_address(tmp_path, "judge", "vllm", is_gated=False) == started["judge"]
    late = replace(service_of(tmp_path), external=True, startup_timeout_s=0.2)
    line = r"^services.judge.startup_timeout_s=0.2: it does not respond; .*judge.json must be written by launch/serve.py in another job$"
    with pytest.raises(ValueError, match=line), run_services(settings_of(tmp_path, late), read_world(), raise_if_stopped=go_on):
        pass
    with serve_hostile("401") as url:  # another server has the port of a dead one: the service may still start
        write_token(token_file(tmp_path, "judge"))
        publish_address(tmp_path, "judge", url=url, nonce="n")
        line = rf"^services.judge.startup_timeout_s=0.2: {url} responds with 401, no such key: the run passes a key to its command"
        with pytest.raises(ValueError, match=line), run_services(settings_of(tmp_path, late), read_world(), raise_if_stopped=go_on):
            pass


def test_a_service_that_asks_for_another_key_is_not_waited_for(tmp_path: Path) -> None:
    """A service that responds with 401 fails the start with an error of one line."""
    line = r"^services.judge.kind=vllm: http://127.0.0.1:\d+/v1 responds with 401, .*: the run passes a key to its command in VLLM_API_KEY"
    with (
        pytest.raises(ValueError, match=line),
        run_services(settings_of(tmp_path, service_of(tmp_path, "denies")), read_world(), raise_if_stopped=go_on),
    ):
        pass
    assert are_gone(tmp_path)


def test_a_job_of_its_own_serves_until_it_is_stopped(tmp_path: Path) -> None:
    """launch/serve.py with the arguments of a run starts the external services, publishes their
    addresses and ends them on SIGTERM. The run is already finished and is to be continued."""
    finish(tmp_path)
    judge = f"kind: vllm, model: m, external: true, host: {HERE}, command: [{sys.executable},{STAND_IN},{tmp_path},well]"
    words = ("task=number_line", "model.path=m", f"run.dir={tmp_path}", f"services.judge={{{judge}}}")
    job = fork_server.Process(ROOT / "launch" / "serve.py", *words)
    try:
        with run_services(
            settings_of(tmp_path, replace(service_of(tmp_path), external=True)), read_world(), raise_if_stopped=go_on
        ) as found:
            assert found["judge"].startswith(f"http://{HERE}:")
        job.send_signal(signal.SIGTERM)
        said, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert (
        job.returncode == os.EX_TEMPFAIL and said.startswith(f"service judge: ready at {found['judge']} after ") and said.count("\n") == 1
    ), said
    assert are_gone(tmp_path, within_s=0) and not address_file(tmp_path, "judge").exists()


def test_it_serves_no_longer_than_the_run(tmp_path: Path) -> None:
    """launch/serve.py ends with code 0 when the run is finished. It refuses a run whose directory
    is to be moved aside."""
    judge = f"kind: vllm, model: m, external: true, host: {HERE}, command: [{sys.executable},{STAND_IN},{tmp_path},well]"
    words = ("task=number_line", "model.path=m", f"run.dir={tmp_path}/run", f"services.judge={{{judge}}}")
    job = fork_server.Process(ROOT / "launch" / "serve.py", *words)
    try:
        deadline = time.monotonic() + 60
        while not find_address(tmp_path / "run", "judge", "vllm", is_gated=False):
            assert time.monotonic() < deadline and job.poll() is None, job.output.read_text()
            time.sleep(0.05)
        finish(tmp_path / "run")
        said, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == 0 and are_gone(tmp_path, within_s=0) and not address_file(tmp_path / "run", "judge").exists(), said
    moved = fork_server.run_script(ROOT / "launch" / "serve.py", *words, "run.overwrite=true", timeout_s=60)
    assert moved.returncode == 1 and moved.stdout.startswith("error: run.overwrite=True: this job would rename the run directory"), (
        moved.stdout
    )


def test_a_run_that_is_stopped_waits_no_longer(tmp_path: Path) -> None:
    def stop() -> None:
        if (tmp_path / "pids").exists():
            raise GracefulStop

    with (
        pytest.raises(GracefulStop),
        run_services(settings_of(tmp_path, service_of(tmp_path, "silent")), read_world(), raise_if_stopped=stop),
    ):
        pass
    assert are_gone(tmp_path, within_s=0)


@pytest.mark.parametrize(
    ("how", "more", "line"),
    [
        ("ends", {}, "services.judge.kind=vllm: its server exited with code 3; last line of .*judge.log: stand-in: ends$"),
        ("nowhere", {"host": "192.0.2.1"}, f"services.judge.host=192.0.2.1: .*; set it to an address of {HOST}$"),
        (
            "silent",
            {"startup_timeout_s": 1.5},
            "services.judge.startup_timeout_s=1.5: it does not respond; last line of .*judge.log: stand-in: silent$",
        ),
    ],
)
def test_a_service_that_does_not_come_up_is_one_line(how: str, more: dict, line: str, tmp_path: Path) -> None:
    """A service that does not start is an error of one line that names its setting and the end of
    its log."""
    settings = settings_of(tmp_path, service_of(tmp_path, how, **more))
    with pytest.raises(ValueError, match=f"^{line}"), run_services(settings, read_world(), raise_if_stopped=go_on):
        pass
    assert (how == "nowhere" or are_gone(tmp_path, within_s=0)) and not address_file(tmp_path, "judge").exists()


def test_what_cannot_be_started_is_known_before() -> None:
    """`check_service` rejects a missing program, a port in use, and GPUs that do not exist or that
    the run uses."""
    judge = ServiceSettings(kind="vllm", model="m")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (replace(judge, command=["nope"]), 0, rf"command=\['nope'\]: program nope not found on {HOST}; correct the command"),
            (replace(judge, port=port), 0, f"port={port}: is in use on {HOST}; choose another, or 0 for a free one"),
            (replace(judge, gpus=[8]), 8, rf"gpus=\[8\]: {HOST} has 8 GPUs, with indices from 0"),
            (
                replace(judge, gpus=[5, 6]),
                8,
                r"gpus=\[5, 6\]: the run uses GPU 5; choose other GPUs, or limit its memory: services.judge.args=",
            ),
            (judge, 8, r"gpus=\[\]: the run uses GPU 0, 1, 2, 3, 4, 5;"),
        ]
        for service, num_gpus, line in cases:
            with pytest.raises(ValueError, match=f"^services.judge.{line}"):
                check_service("judge", service, num_used_gpus=6, num_gpus=num_gpus)
    for service, num_gpus in ((judge, 0), (replace(judge, gpus=[6, 7]), 8), (replace(judge, args=["--gpu-memory-utilization", "0.2"]), 8)):
        check_service("judge", service, num_used_gpus=6, num_gpus=num_gpus)


def test_a_free_port_is_not_one_of_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports are below the kernel's range for connections, or in the range if no port is below. A
    port in use is not returned, and a host of another machine is an error.
    """
    first, last = map(int, supervised_process.CONNECTION_PORTS_FILE.read_text().split())
    assert all(port < first for port in (find_free_port("127.0.0.1") for _ in range(20)))
    with pytest.raises(OSError, match="assign"):
        find_free_port("192.0.2.1")
    whole = tmp_path / "range"
    whole.write_text("1024 65535")
    monkeypatch.setattr(supervised_process, "CONNECTION_PORTS_FILE", whole)
    assert first <= find_free_port("127.0.0.1") <= last
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        whole.write_text(f"{used + 1} 65535")
        monkeypatch.setattr(supervised_process, "LOWEST_SERVER_PORT", used)  # the port in use is the only one below the range
        assert find_free_port("127.0.0.1") != used


def test_its_gpus_are_among_those_of_the_run() -> None:
    """The GPUs of a service are indices into the CUDA_VISIBLE_DEVICES of the run."""
    given = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "LOCAL_RANK": "0", "HOME": "/h"}
    assert make_environment(given, [2, 3]) == {"CUDA_VISIBLE_DEVICES": "6,7", "HOME": "/h"}
    assert (
        make_environment({}, [2, 3]) == {"CUDA_VISIBLE_DEVICES": "2,3"} and make_environment(given, [])["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    )


@pytest.mark.parametrize(
    ("services", "task", "line"),
    [
        ({}, {"judge": JudgeSettings(urls=["service:judge"])}, "task.judge.urls=service:judge: no such .*services.judge.kind=vllm$"),
        ({}, {"judge": JudgeSettings(urls=["service:jugde"])}, "task.judge.urls=service:jugde: no such .*services.judge.kind=vllm$"),
        ({}, {"sandbox": SandboxSettings(url="service:sandbox")}, "task.sandbox.url=service:sandbox: .*services.sandbox.kind=sandbox$"),
        ({"judge": ServiceSettings(model="m")}, {}, "services.judge.kind=: starts no server, but services.judge.model is set"),
    ],
)
def test_who_asks_for_a_service_must_choose_it(services: dict, task: dict, line: str) -> None:
    """An address `service:NAME` without a configured service is refused, and so is a service
    without a kind."""
    with pytest.raises(ValueError, match=f"^{line}"):
        Settings(task=Task(name="vqa", **task), services=ServicesSettings(**services))
