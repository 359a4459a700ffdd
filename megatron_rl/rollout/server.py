"""A server of vLLM as its clients see it: its calls by HTTP, and how it fares.

All that it says is checked. A call that goes wrong raises ServerFault, with what the server said about it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import httpx
import torch
from pydantic import BaseModel, ValidationError

from megatron_rl.config import EngineSettings, Settings, require
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.command import PROGRAM, VLLM, nature_of, server_arguments, shell_line
from megatron_rl.servers import Endpoint, ServerFault, one_line, told

ANSWER_S, LOAD_S, CHECK_S = 10.0, 120.0, 600.0
"""What a server may take to say something of itself, for a call that changes it, and to read all of its weights."""
FIRST_REST_S = 0.5
T = TypeVar("T", bound=BaseModel)
HOW = "start it with the command that launch/engine.py prints"


class _Version(BaseModel):
    version: str


class _WeightInfo(BaseModel):
    weight_version: str


class _WorldSize(BaseModel):
    world_size: int


class _Checksums(BaseModel):
    checksums: dict[str, str]


class _Natures(BaseModel):
    results: list[dict[str, str]]


@dataclass(slots=True)
class Work:
    """How long a server has had something under way; times are a clock's."""

    num_open: int = 0
    since: float = 0.0
    past_s: float = 0.0

    def begin(self, now: float) -> None:
        if self.num_open == 0:
            self.since = now
        self.num_open += 1

    def end(self, now: float) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self.past_s += now - self.since

    def seconds(self, now: float) -> float:
        return self.past_s + (now - self.since if self.num_open else 0.0)


class Server:
    """One server. Of the loop's thread, but for `call` and what is made of it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.endpoint = Endpoint(self.url, FIRST_REST_S)
        self.is_in = False
        """It holds the weights that are served now, as far as is known."""
        self.answers = True
        """It has said what weights it has when it was asked last, or was not asked yet."""
        self.is_reading = False
        """Its engine reads all of its weights because it was asked to, and answers nothing else meanwhile."""
        self.work = Work()
        """Of this process's turns, on time.perf_counter's clock."""
        self.heard = 0.0
        """When it has sampled last, on time.monotonic's clock."""
        self.known: set[str] = set()
        """Keys of the pictures that it was sent."""
        self.coming: dict[str, asyncio.Event] = {}
        """By key of a picture that is being sent: done when that has ended, well or not."""
        self.fall: asyncio.Future[str] | None = None
        """Done, with the reason, when it is given up while it is in."""
        self._http = httpx.Client(base_url=self.url, trust_env=False)

    def call(self, path: str, body: object = None, *, timeout_s: float = ANSWER_S, **query: str) -> bytes:
        """GET without a body, POST with one. ServerFault: it said no, or nothing."""
        try:
            if body is None:
                answer = self._http.get(path, params=query, timeout=timeout_s)
            else:
                answer = self._http.post(path, json=body, params=query, timeout=timeout_s)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerFault(f"{path}: {told(error)}") from error
        if answer.is_error:
            raise ServerFault(f"{path}: {answer.status_code}, {one_line(answer.text)}")
        return answer.content

    def ask(self, kind: type[T], path: str, body: object = None, *, timeout_s: float = ANSWER_S) -> T:
        """What it says, as this kind of answer. ServerFault: it says no, nothing, or something else."""
        answer = self.call(path, body, timeout_s=timeout_s)
        try:
            return kind.model_validate_json(answer)
        except ValidationError as error:
            raise ServerFault(f"{path}: is no answer of vLLM's, {one_line(answer[:80].decode(errors='replace'))}") from error

    def num_workers(self) -> int:
        return self.ask(_WorldSize, "/get_world_size").world_size

    def checksums(self) -> dict[str, str]:
        """vLLM's own of all weights that it holds, by worker and parameter (model_executor/model_loader/weight_checksum.py: SHA-256)."""
        self.is_reading = True
        try:
            return self.ask(_Checksums, "/weight_checker", {"action": "checksum"}, timeout_s=CHECK_S).checksums
        finally:
            self.is_reading = False

    def check(self, wanted: Mapping[str, str]) -> None:
        """ValueError: nothing answers there, it is no server of vLLM, or it would not sample what this run samples."""
        try:
            version = self.ask(_Version, "/version").version
        except ServerFault as error:
            raise ValueError(f"engine.urls={self.url}: no server of vLLM answers there ({one_line(str(error))}); {HOW}") from error
        remedy = f"is a server of vLLM {version}, this is for {VLLM}; start one of that version"
        require(version.partition("+")[0] == VLLM, "engine.urls", self.url, remedy)
        try:
            natures = self.ask(_Natures, "/collective_rpc", {"method": "rl_nature"}, timeout_s=LOAD_S).results
        except ServerFault as error:
            raise ValueError(f"engine.urls={self.url}: is no engine of a run ({one_line(str(error))}); {HOW}") from error
        for name, value in ((name, value) for given in natures for name, value in given.items()):
            remedy = f"has {name} {value}, this run {wanted.get(name)}; {HOW}"
            require(value == wanted.get(name), "engine.urls", self.url, remedy)

    def close(self) -> None:
        self._http.close()


def label_of(body: bytes) -> str:
    """Of the answer of /weight_info. ServerFault: it is another server's."""
    try:
        return _WeightInfo.model_validate_json(body).weight_version
    except ValidationError as error:
        raise ServerFault(told(error)) from error


def wanted_of(settings: Settings, renderer: Renderer) -> dict[str, str]:
    """What an engine of this run must be."""
    return nature_of(settings.engine, settings.model.path, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)


def command_of(settings: Settings) -> str:
    """The shell's line that starts an engine of this run."""
    renderer = Renderer(settings.model)
    cuda = is_on_gpu(settings.engine)
    return shell_line(settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels, cuda=cuda)


def words_of(settings: Settings) -> list[str]:
    """The same for a server beside this process, without its place and its seed."""
    renderer = Renderer(settings.model)
    given = server_arguments(
        settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels,
        cuda=is_on_gpu(settings.engine), seed=None, timeout_s=settings.parallel.timeout_s,
    )  # fmt: skip
    return [*PROGRAM, *given]


def is_on_gpu(settings: EngineSettings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def check_servers(settings: Settings) -> None:
    """ValueError: one of engine.urls would not sample what this run samples."""
    if not settings.engine.urls:
        return
    wanted = wanted_of(settings, Renderer(settings.model))
    for url in settings.engine.urls:
        server = Server(url)
        try:
            server.check(wanted)
        finally:
            server.close()
