"""Starts the services of a run, and stops these services when the run ends.

Rank 0 starts the services and waits until they respond. Each service has a supervisor
(supervisor.py), which terminates the service when the run ends, even after a crash. The log of a
service is RUN/services/NAME.log. The same folder contains a file with the address of the service
(address.py).
"""

import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from megatron_rl.clients.endpoint_pool import KeyRefused
from megatron_rl.config import (
    JudgeSettings,
    ListenerSettings,
    ServiceSettings,
    ServicesSettings,
    Settings,
    SpeakerSettings,
    TaskSettings,
    require,
    service_of,
)
from megatron_rl.distributed.world import World, run_on_rank_zero
from megatron_rl.rollout.vllm.http_gate import TOKEN_FILE
from megatron_rl.services.address import (
    SERVICE_KINDS,
    SERVICES_FOLDER,
    address_file,
    can_prove_token,
    find_address,
    is_service_running,
    publish_address,
    token_file,
)
from megatron_rl.services.supervised_process import SupervisedProcess, find_free_port, is_port_free, make_environment
from megatron_rl_sandbox.token import write_token

P = TypeVar("P", JudgeSettings, ListenerSettings, SpeakerSettings)

POLL_S, REPORT_INTERVAL_S = 0.5, 10.0
"""Seconds between two health checks, and between two log lines about a service that has not
responded yet.
"""


class LaunchedService:
    """One service of a run.

    Call `poll` until the service has an address. Always call `stop` at the end.
    """

    def __init__(self, name: str, settings: ServiceSettings, *, run: Path, host: str) -> None:
        """Start the service unless it is external. Call `check_service` first.

        Args:
            name: Name of the service.
            settings: Settings of the service.
            run: Run directory.
            host: Host at which the service listens, unless its settings specify a host.

        Raises:
            ValueError: The host is not an address of this node.
        """
        self.name, self._settings, self._run, self._kind = name, settings, run, SERVICE_KINDS[settings.kind]
        self._nonce, self._started_at, self._reported_at = secrets.token_hex(8), time.monotonic(), time.monotonic()
        self.url = ""
        """Address of the service; empty until the service responds."""
        self.log = run / SERVICES_FOLDER / f"{name}.log"
        self._process: SupervisedProcess | None = None
        if not settings.external:
            self._start(settings.host or host)

    def _start(self, host: str) -> None:
        try:
            port = self._settings.port or find_free_port(host)
        except OSError as error:
            raise ValueError(f"services.{self.name}.host={host}: {error}; set it to an address of {socket.gethostname()}") from error
        self._address = f"http://{host}:{port}{self._kind.url_path}"
        options = self._kind.make_options(self._settings, self.name, self._nonce, token_file(self._run, self.name))
        command = [*(self._settings.command or self._kind.command), *options, "--host", host, "--port", str(port), *self._settings.args]
        address_file(self._run, self.name).unlink(missing_ok=True)
        file = token_file(self._run, self.name)
        own = {"VLLM_API_KEY": write_token(file), TOKEN_FILE: str(file.absolute())}  # variables of vLLM and of http_gate.py
        own = own if self._settings.kind == "vllm" else {}
        self._process = SupervisedProcess(command, log=self.log, environment=make_environment(os.environ, self._settings.gpus) | own)

    def poll(self) -> None:
        """Check the service, and publish its address once it responds.

        Raises:
            ValueError: The service has exited, it rejects its token, or it has not responded within
                startup_timeout_s.
        """
        if self.url and not self._settings.external:
            self._require_alive()
        if self.url:
            return
        passed, refusal = time.monotonic() - self._started_at, ""
        try:
            self.url = self._published_url() if self._settings.external else self._own_url()
        except KeyRefused as refused:
            refusal = str(refused)
        if refusal and not self._settings.external:  # another server may have taken the port of a dead external server
            self._fail("kind", self._settings.kind, refusal)
        if self.url:
            print(f"service {self.name}: ready at {self.url} after {passed:.0f} s", flush=True)
        elif passed > self._settings.startup_timeout_s:
            self._fail("startup_timeout_s", self._settings.startup_timeout_s, refusal or "it does not respond")
        elif time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self._reported_at = time.monotonic()
            print(f"service {self.name}: {refusal or 'no response yet'} after {passed:.0f} s; {self._log_tail()}", flush=True)

    def _published_url(self) -> str:
        return find_address(self._run, self.name, self._settings.kind, is_gated=can_prove_token(self._settings))

    def _own_url(self) -> str:
        self._require_alive()
        file, is_gated = token_file(self._run, self.name), can_prove_token(self._settings)
        if not is_service_running(self._address, self._settings.kind, nonce=self._nonce, token=file, is_gated=is_gated):
            return ""
        publish_address(self._run, self.name, url=self._address, nonce=self._nonce)
        return self._address

    def _require_alive(self) -> None:
        assert self._process is not None
        code = self._process.exit_code()
        if code is not None:
            self._fail("kind", self._settings.kind, f"its server exited with code {code}")

    def _fail(self, key: str, value: object, what: str) -> NoReturn:
        raise ValueError(f"services.{self.name}.{key}={value}: {what}; {self._log_tail()}")

    def _log_tail(self) -> str:
        """Return the last line of the service's log, or a hint if the service is external."""
        if self._settings.external:
            return f"{address_file(self._run, self.name)} must be written by launch/serve.py in another job"
        assert self._process is not None
        return self._process.log_tail()

    def stop(self) -> None:
        """If this process started the service, remove its address and token files and stop it."""
        if self._process is None:
            return
        for file in (address_file(self._run, self.name), token_file(self._run, self.name)):
            file.unlink(missing_ok=True)
        self._process.stop()


def enabled_services(services: ServicesSettings) -> dict[str, ServiceSettings]:
    """Return the settings of the configured services, keyed by name."""
    named = {"judge": services.judge, "listener": services.listener, "sandbox": services.sandbox, "speaker": services.speaker}
    return {name: service for name, service in named.items() if service.kind}


@contextmanager
def run_services(settings: Settings, world: World, *, raise_if_stopped: Callable[[], None]) -> Iterator[dict[str, str]]:
    """Start the services, yield their addresses keyed by name, and stop the services on exit.

    All ranks must enter the block together. `raise_if_stopped` is called while waiting for the
    services, and may raise an exception to end the wait.
    """
    own: list[LaunchedService] = []
    with ExitStack() as running:

        def begin() -> None:
            for name, service in enabled_services(settings.services).items():
                own.append(LaunchedService(name, service, run=Path(settings.run.dir), host=rank_zero_host(world)))
                running.callback(own[-1].stop)

        run_on_rank_zero(begin)
        while not run_on_rank_zero(lambda: are_ready(own)):
            raise_if_stopped()
            time.sleep(POLL_S)
        yield run_on_rank_zero(lambda: {service.name: service.url for service in own})


def are_ready(services: Sequence[LaunchedService]) -> bool:
    """Poll all services; return True if every service has an address."""
    for service in services:
        service.poll()
    return all(service.url for service in services)


def resolve_addresses(task: TaskSettings, urls: Mapping[str, str], *, run: Path) -> TaskSettings:
    """Return the task's settings with the names of services replaced by their addresses.

    If the sandbox, judge, listener or speaker uses a service of the run, its token_file is set to
    the token file of this service.
    """
    sandbox, name = task.sandbox, service_of(task.sandbox.url)
    if name:
        sandbox = replace(sandbox, url=urls[name], token_file=str(token_file(run, name)))
    judge, listener = _resolve_partner(task.judge, urls, run=run), _resolve_partner(task.listener, urls, run=run)
    speaker = _resolve_partner(task.speaker, urls, run=run)
    return replace(task, judge=judge, sandbox=sandbox, listener=listener, speaker=speaker)


def _resolve_partner(partner: P, urls: Mapping[str, str], *, run: Path) -> P:
    """Return a partner's settings with the names of services replaced by their addresses.

    If the partner uses a service of the run, its token_file is set to the token file of this
    service.
    """
    own = [service_of(url) for url in partner.urls if service_of(url)]
    token = str(token_file(run, own[0])) if own else partner.token_file
    return replace(partner, urls=[urls.get(service_of(url), url) for url in partner.urls], token_file=token)


def check_service(name: str, settings: ServiceSettings, *, num_used_gpus: int, num_gpus: int) -> None:
    """Check that a service can be started on this node.

    The run's ranks and engines use the first `num_used_gpus` of the node's `num_gpus` GPUs.

    Raises:
        ValueError: The command or a GPU of the service does not exist, its port is in use, or it
            uses a GPU of the run without a limit on GPU memory (sandboxes need no limit).
    """
    key, host = f"services.{name}", socket.gethostname()
    if settings.external:
        return
    program = (settings.command or SERVICE_KINDS[settings.kind].command)[0]
    remedy = f"program {program} not found on {host}; correct the command, or omit it"
    require(shutil.which(program) is not None, f"{key}.command", settings.command, remedy)
    remedy = f"is in use on {host}; choose another, or 0 for a free one"
    require(settings.port == 0 or is_port_free(settings.port), f"{key}.port", settings.port, remedy)
    require(max(settings.gpus, default=-1) < num_gpus, f"{key}.gpus", settings.gpus, f"{host} has {num_gpus} GPUs, with indices from 0")
    shared = [gpu for gpu in settings.gpus or range(num_gpus) if gpu < num_used_gpus]
    has_share = settings.kind == "sandbox" or any(word.startswith("--gpu-memory-utilization") for word in settings.args)
    remedy = (
        f"the run uses GPU {', '.join(map(str, shared))}; choose other GPUs, or limit its memory: {key}.args=[--gpu-memory-utilization,0.3]"
    )
    require(has_share or not shared, f"{key}.gpus", settings.gpus, remedy)


def rank_zero_host(world: World) -> str:
    """Return the host at which all ranks can reach servers on rank 0's node."""
    return os.environ["MASTER_ADDR"] if world.num_nodes > 1 else "127.0.0.1"
