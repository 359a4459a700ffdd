"""A server of vLLM as its clients see it: its calls by HTTP, and how it fares.

All that it says is checked. A call that goes wrong raises EndpointError, with what the server said about it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, KeyRefused, describe_error, to_one_line
from megatron_rl.config import EngineSettings, Settings, require
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.server_command import PROGRAM, VLLM_VERSION, expected_fingerprint, launch_commands, server_arguments
from sandbox.bounded_http import DENIED_STATUSES, BoundedClient, BoundedResponse, NoResponse, send_request
from sandbox.token import read_token

REPLY_TIMEOUT_S, LOAD_TIMEOUT_S, CHECKSUM_TIMEOUT_S = 10.0, 120.0, 600.0
"""What a server may take to say something of itself, for a call that changes it, and to read all of its weights."""
MAX_REPLY_BYTES, MAX_CHECKSUM_BYTES = 1 << 20, 64 << 20
"""Limits of an answer, and of the one that lists the checksums of all parameters of all workers."""
MIN_BACKOFF_S = 0.5
T = TypeVar("T", bound=BaseModel)
CONNECTION_HINT = "start it with the command that launch/engine.py prints"
KEY_REMEDY = "it does not accept this run's requests; give the file of its token as engine.token_file"
OWN_SERVER_KEY_REMEDY = (
    "this run started its own (engine.num_local_servers), and this one does not accept their token: another may have the port; start again"
)


class _Version(BaseModel):
    version: str


class _WeightInfo(BaseModel):
    weight_version: str


class _WorldSize(BaseModel):
    world_size: int


class _Checksums(BaseModel):
    checksums: dict[str, str]


class _Fingerprints(BaseModel):
    results: list[dict[str, str]]


@dataclass(slots=True)
class BusyTimer:
    """How long a server has had something under way; times are a clock's."""

    num_in_flight: int = 0
    since: float = 0.0
    finished_s: float = 0.0

    def start(self, now: float) -> None:
        if self.num_in_flight == 0:
            self.since = now
        self.num_in_flight += 1

    def stop(self, now: float) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self.finished_s += now - self.since

    def busy_seconds(self, now: float) -> float:
        return self.finished_s + (now - self.since if self.num_in_flight else 0.0)


class VllmServer:
    """One server. Of the loop's thread, but for `call` and what is made of it."""

    def __init__(self, url: str, *, token: str = "", is_own: bool = False, max_timeout_s: float = CHECKSUM_TIMEOUT_S) -> None:
        """`token` goes with every request. `is_own`: the run started it. `max_timeout_s` is what any call may take at most, with
        its whole answer."""
        self.url, self.token, self._max_timeout_s = url.rstrip("/"), token, max_timeout_s
        self._key_remedy = OWN_SERVER_KEY_REMEDY if is_own else KEY_REMEDY
        self.endpoint = Endpoint(self.url, MIN_BACKOFF_S)
        self.is_healthy = False
        """It holds the weights that are served now, as far as is known."""
        self.is_responding = True
        """It has said what weights it has when it was asked last, or was not asked yet."""
        self.is_checksumming = False
        """Its engine reads all of its weights because it was asked to, and answers nothing else meanwhile."""
        self.busy_timer = BusyTimer()
        """Of this process's turns, on time.perf_counter's clock."""
        self.last_sampled_at = 0.0
        """When it has sampled last, on time.monotonic's clock."""
        self.known_images: set[str] = set()
        """Keys of the pictures that it was sent."""
        self.pending_images: dict[str, asyncio.Event] = {}
        """By key of a picture that is being sent: done when that has ended, well or not."""
        self.failure: asyncio.Future[str] | None = None
        """Done, with the reason, when it is given up while it is in."""
        self.access_error = ""
        """The answer by which it has refused this run's key or token, in words: no outage, the run ends."""

    def call(
        self, path: str, body: object = None, *, timeout_s: float = REPLY_TIMEOUT_S, max_bytes: int = MAX_REPLY_BYTES, **query: str
    ) -> bytes:  # fmt: skip
        """GET without a body, POST with one. KeyRefused, EndpointError: it said no, or nothing."""
        verb, limit_s = "GET" if body is None else "POST", min(timeout_s, self._max_timeout_s)
        try:
            answer = send_request(verb, self.url + path, body, timeout_s=limit_s, max_bytes=max_bytes, token=self.token, params=query)
        except NoResponse as error:
            raise EndpointError(f"{path}: {to_one_line(str(error))}") from error
        return self.check_reply(answer, path)

    async def call_in_loop(
        self, http: BoundedClient, path: str, body: object = None, *, limit_s: float, max_bytes: int = MAX_REPLY_BYTES
    ) -> bytes:  # fmt: skip
        """The same by the connections of an event loop."""
        try:
            answer = await http.request("GET" if body is None else "POST", self.url + path, body, timeout_s=limit_s, max_bytes=max_bytes)
        except NoResponse as error:
            raise EndpointError(f"{path}: {to_one_line(str(error))}") from error
        return self.check_reply(answer, path)

    def check_reply(self, answer: BoundedResponse, path: str) -> bytes:
        """Return the content of an answer that is good. KeyRefused, EndpointError: it is none."""
        text = f"{path}: {answer.status}, {to_one_line(answer.text)}"
        if answer.status in DENIED_STATUSES:
            self.access_error = f"engine.urls={self.url}: {text}; {self._key_remedy}"
            raise KeyRefused(text)
        if not answer.is_success:
            raise EndpointError(text)
        return answer.content

    def call_typed(
        self, reply_type: type[T], path: str, body: object = None, *, timeout_s: float = REPLY_TIMEOUT_S, max_bytes: int = MAX_REPLY_BYTES
    ) -> T:
        """Request a path and parse the answer as this model. EndpointError: an error status, no answer, or another body."""
        answer = self.call(path, body, timeout_s=timeout_s, max_bytes=max_bytes)
        try:
            return reply_type.model_validate_json(answer)
        except ValidationError as error:
            raise EndpointError(f"{path}: is no answer of vLLM's, {to_one_line(answer[:80].decode(errors='replace'))}") from error

    def num_workers(self) -> int:
        return self.call_typed(_WorldSize, "/get_world_size").world_size

    def checksums(self) -> dict[str, str]:
        """vLLM's own of all weights that it holds, by worker and parameter (model_executor/model_loader/weight_checksum.py: SHA-256)."""
        self.is_checksumming = True
        try:
            return self.call_typed(
                _Checksums, "/weight_checker", {"action": "checksum"}, timeout_s=CHECKSUM_TIMEOUT_S, max_bytes=MAX_CHECKSUM_BYTES
            ).checksums
        finally:
            self.is_checksumming = False

    def check(self, expected: Mapping[str, str]) -> None:
        """ValueError: nothing answers there, it is no server of vLLM, or it would not sample what this run samples."""
        try:
            version = self.call_typed(_Version, "/version").version
        except KeyRefused as error:
            raise ValueError(self.access_error) from error
        except EndpointError as error:
            raise ValueError(
                f"engine.urls={self.url}: no server of vLLM answers there ({to_one_line(str(error))}); {CONNECTION_HINT}"
            ) from error
        remedy = f"is a server of vLLM {version}, this is for {VLLM_VERSION}; start one of that version"
        require(version.partition("+")[0] == VLLM_VERSION, "engine.urls", self.url, remedy)
        try:
            natures = self.call_typed(_Fingerprints, "/collective_rpc", {"method": "rl_fingerprint"}, timeout_s=LOAD_TIMEOUT_S).results
        except KeyRefused as error:
            raise ValueError(self.access_error) from error
        except EndpointError as error:
            raise ValueError(f"engine.urls={self.url}: is no engine of a run ({to_one_line(str(error))}); {CONNECTION_HINT}") from error
        for name, value in ((name, value) for given in natures for name, value in given.items()):
            remedy = f"has {name} {value}, this run {expected.get(name)}; {CONNECTION_HINT}"
            require(value == expected.get(name), "engine.urls", self.url, remedy)


def server_label(body: bytes) -> str:
    """Return the label of the weights in an answer of /weight_info. EndpointError: it is no such answer."""
    try:
        return _WeightInfo.model_validate_json(body).weight_version
    except ValidationError as error:
        raise EndpointError(describe_error(error)) from error


def expected_label(settings: Settings, renderer: Renderer) -> dict[str, str]:
    """What an engine of this run must be."""
    return expected_fingerprint(settings.engine, settings.model.path, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)


def launch_command(settings: Settings) -> str:
    """The shell's line that starts an engine of this run, or one for each of engine.urls."""
    renderer = Renderer(settings.model)
    cuda = is_on_gpu(settings.engine)
    return launch_commands(settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels, cuda=cuda)


def server_command_line(settings: Settings) -> list[str]:
    """The same for a server beside this process, without its place and its seed."""
    renderer = Renderer(settings.model)
    given = server_arguments(
        settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels,
        cuda=is_on_gpu(settings.engine), seed=None, timeout_s=settings.parallel.timeout_s,
    )  # fmt: skip
    return [*PROGRAM, *given]


def read_engine_token(settings: EngineSettings) -> str:
    """Return the token of the run's engines; empty without engine.token_file. ValueError: the file cannot be read."""
    try:
        return read_token(settings.token_file) if settings.token_file else ""
    except ValueError as error:
        raise ValueError(f"engine.token_file={error}") from error


def is_on_gpu(settings: EngineSettings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def check_servers(settings: Settings) -> None:
    """ValueError: one of engine.urls would not sample what this run samples."""
    if not settings.engine.urls:
        return
    wanted = expected_label(settings, Renderer(settings.model))
    for url in settings.engine.urls:
        VllmServer(url, token=read_engine_token(settings.engine), max_timeout_s=settings.parallel.timeout_s).check(wanted)
