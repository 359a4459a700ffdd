"""HTTP client that calls a vLLM server and tracks its state.

Every reply is validated. A failed call raises EndpointError with the server's message.
"""

import asyncio
from collections.abc import Mapping
from typing import TypeVar

import torch
from pydantic import BaseModel, ValidationError

from megatron_rl.clients.endpoint_pool import Endpoint, EndpointError, KeyRefused, describe_error, to_one_line
from megatron_rl.config import EngineSettings, Settings, require
from megatron_rl.rollout.busy_timer import BusyTimer
from megatron_rl.rollout.renderer import Renderer
from megatron_rl.rollout.vllm.server_command import PROGRAM, VLLM_VERSION, expected_fingerprint, launch_commands, server_arguments
from megatron_rl_sandbox.bounded_http import DENIED_STATUSES, BoundedClient, BoundedResponse, NoResponse, send_request
from megatron_rl_sandbox.token import read_token

REPLY_TIMEOUT_S, LOAD_TIMEOUT_S, CHECKSUM_TIMEOUT_S = 10.0, 120.0, 600.0
"""Timeouts in seconds for a query, for a call that changes the server's state, and for checksums of
all weights.
"""
MAX_REPLY_BYTES, MAX_CHECKSUM_BYTES = 1 << 20, 64 << 20
"""Maximum size of a reply in bytes, and maximum size of the reply that contains all checksums."""
MIN_BACKOFF_S = 0.5
PROGRESS_METRICS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
"""Counters in /metrics that change only when the server computes tokens."""
MAX_METRICS_BYTES = 16 << 20
"""Maximum size of a /metrics response in bytes."""
T = TypeVar("T", bound=BaseModel)
CONNECTION_HINT = "start it with the command that launch/server_command.py prints"
KEY_REMEDY = "the server rejects this run's token; set engine.token_file to the file with its token"
OWN_SERVER_KEY_REMEDY = (
    "this run started its own servers (engine.num_local_servers), and this server rejects their token: "
    "another process may use the port; start again"
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


class VllmServer:
    """Client of one vLLM server.

    Only `call`, and the methods that use `call`, may be used outside the event loop's thread.
    """

    def __init__(self, url: str, *, token: str = "", is_own: bool = False, max_timeout_s: float = CHECKSUM_TIMEOUT_S) -> None:
        """Create a client for a server.

        Args:
            url: Address of the server.
            token: Token that is sent with every request.
            is_own: True if the run started the server.
            max_timeout_s: Upper limit in seconds for the timeout of any `call`. The timeout covers
                the complete reply.
        """
        self.url, self.token, self._max_timeout_s = url.rstrip("/"), token, max_timeout_s
        self._key_remedy = OWN_SERVER_KEY_REMEDY if is_own else KEY_REMEDY
        self.endpoint = Endpoint(self.url, MIN_BACKOFF_S)
        self.is_healthy = False
        """True if the server is known to have the current weights."""
        self.is_responding = True
        """True if the server reported its weight version at the last check, or was never checked.
        """
        self.is_checksumming = False
        """True while the server computes checksums of all its weights. During this time, the server
        does not respond to other requests.
        """
        self.busy_timer = BusyTimer()
        """Timer for the time during which this process has requests in flight to the server. All
        times are values of time.perf_counter().
        """
        self.last_sampled_at = 0.0
        """Time at which the server last returned sampled tokens, as a value of time.monotonic()."""
        self.known_images: set[str] = set()
        """Keys of the images that were sent to the server."""
        self.pending_images: dict[str, asyncio.Event] = {}
        """Events for the images that are being sent, by image key. An event is set when sending the
        image ends, with or without success.
        """
        self.failure: asyncio.Future[str] | None = None
        """Future that receives the failure reason when the server is marked unhealthy."""
        self.access_error = ""
        """Error message if the server has rejected this run's key or token, else empty. A rejection
        ends the run and is not treated as an outage.
        """

    def call(
        self, path: str, body: object = None, *, timeout_s: float = REPLY_TIMEOUT_S, max_bytes: int = MAX_REPLY_BYTES, **query: str
    ) -> bytes:  # fmt: skip
        """Send a GET request, or a POST request if `body` is given; return the reply's content.

        Raises:
            KeyRefused: The server rejects the token.
            EndpointError: There is no reply, or the reply has an error status.
        """
        verb, limit_s = "GET" if body is None else "POST", min(timeout_s, self._max_timeout_s)
        try:
            answer = send_request(verb, self.url + path, body, timeout_s=limit_s, max_bytes=max_bytes, token=self.token, params=query)
        except NoResponse as error:
            raise EndpointError(f"{path}: {to_one_line(str(error))}") from error
        return self.check_reply(answer, path)

    async def call_in_loop(
        self, http: BoundedClient, path: str, body: object = None, *, limit_s: float, max_bytes: int = MAX_REPLY_BYTES
    ) -> bytes:  # fmt: skip
        """Send a request like `call`, but asynchronously with the HTTP client `http`."""
        try:
            answer = await http.request("GET" if body is None else "POST", self.url + path, body, timeout_s=limit_s, max_bytes=max_bytes)
        except NoResponse as error:
            raise EndpointError(f"{path}: {to_one_line(str(error))}") from error
        return self.check_reply(answer, path)

    def check_reply(self, answer: BoundedResponse, path: str) -> bytes:
        """Return the content of a successful reply.

        Raises:
            KeyRefused: The server rejects the token.
            EndpointError: The reply has another error status.
        """
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
        """Call a path and parse the reply as `reply_type`.

        Raises:
            EndpointError: There is no reply, or the reply has an error status or an invalid body.
        """
        answer = self.call(path, body, timeout_s=timeout_s, max_bytes=max_bytes)
        try:
            return reply_type.model_validate_json(answer)
        except ValidationError as error:
            raise EndpointError(
                f"{path}: the response is not a valid vLLM response: {to_one_line(answer[:80].decode(errors='replace'))}"
            ) from error

    async def read_weight_label(self, http: BoundedClient, *, limit_s: float) -> str:
        """See ServerBackend. The request goes through vLLM's engine core."""
        answer = await self.call_in_loop(http, "/weight_info", limit_s=limit_s)
        try:
            return _WeightInfo.model_validate_json(answer).weight_version
        except ValidationError as error:
            raise EndpointError(describe_error(error)) from error

    async def read_progress(self, http: BoundedClient, *, limit_s: float) -> list[str]:
        """See ServerBackend. The counters are vLLM's counts of prompt and generated tokens."""
        answer = await self.call_in_loop(http, "/metrics", limit_s=limit_s, max_bytes=MAX_METRICS_BYTES)
        return [line for line in answer.decode(errors="replace").splitlines() if line.startswith(PROGRESS_METRICS)]

    async def abort_requests(self, http: BoundedClient, *, limit_s: float) -> None:
        """See ServerBackend."""
        await self.call_in_loop(http, "/abort_requests", {}, limit_s=limit_s)

    def num_workers(self) -> int:
        """Return the number of the server's workers."""
        return self.call_typed(_WorldSize, "/get_world_size").world_size

    def checksums(self) -> dict[str, str]:
        """Return vLLM's SHA-256 checksums of all weights, keyed by worker and parameter.

        vLLM computes the checksums in model_executor/model_loader/weight_checksum.py.
        """
        self.is_checksumming = True
        try:
            return self.call_typed(
                _Checksums, "/weight_checker", {"action": "checksum"}, timeout_s=CHECKSUM_TIMEOUT_S, max_bytes=MAX_CHECKSUM_BYTES
            ).checksums
        finally:
            self.is_checksumming = False

    def check(self, expected: Mapping[str, str]) -> None:
        """Check that the server has the vLLM version and settings that this run requires.

        Raises:
            ValueError: There is no vLLM server of the required version at the address, the server
                rejects the token, or its fingerprint differs from `expected`.
        """
        try:
            version = self.call_typed(_Version, "/version").version
        except KeyRefused as error:
            raise ValueError(self.access_error) from error
        except EndpointError as error:
            raise ValueError(
                f"engine.urls={self.url}: no vLLM server responds at this URL ({to_one_line(str(error))}); {CONNECTION_HINT}"
            ) from error
        remedy = f"runs vLLM {version}, but {VLLM_VERSION} is required; start a server of that version"
        require(version.partition("+")[0] == VLLM_VERSION, "engine.urls", self.url, remedy)
        try:
            natures = self.call_typed(_Fingerprints, "/collective_rpc", {"method": "rl_fingerprint"}, timeout_s=LOAD_TIMEOUT_S).results
        except KeyRefused as error:
            raise ValueError(self.access_error) from error
        except EndpointError as error:
            raise ValueError(
                f"engine.urls={self.url}: this server cannot be used as a rollout engine ({to_one_line(str(error))}); {CONNECTION_HINT}"
            ) from error
        for name, value in ((name, value) for given in natures for name, value in given.items()):
            remedy = f"has {name} {value}, but this run has {expected.get(name)}; {CONNECTION_HINT}"
            require(value == expected.get(name), "engine.urls", self.url, remedy)


def expected_engine_fingerprint(settings: Settings, renderer: Renderer) -> dict[str, str]:
    """Return the fingerprint that an engine of this run must have."""
    return expected_fingerprint(settings.engine, settings.model.path, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels)


def launch_command(settings: Settings) -> str:
    """Return the shell commands that start this run's servers, one line per engine.urls entry."""
    renderer = Renderer(settings.model)
    cuda = is_on_gpu(settings.engine)
    return launch_commands(settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels, cuda=cuda)


def server_command_line(settings: Settings) -> list[str]:
    """Return the command for a server that the run itself starts.

    The command does not include the options --host, --port and --seed.
    """
    renderer = Renderer(settings.model)
    given = server_arguments(
        settings.model.path, settings.engine, banned_ids=renderer.banned_ids, pixels=renderer.final_pixels,
        cuda=is_on_gpu(settings.engine), seed=None, timeout_s=settings.parallel.timeout_s,
    )  # fmt: skip
    return [*PROGRAM, *given]


def read_engine_token(settings: EngineSettings) -> str:
    """Return the token of the run's engines; empty if engine.token_file is not set.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        return read_token(settings.token_file) if settings.token_file else ""
    except ValueError as error:
        raise ValueError(f"engine.token_file={error}") from error


def is_on_gpu(settings: EngineSettings) -> bool:
    """Return True if the engine computes on CUDA."""
    return settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())


def check_servers(settings: Settings) -> None:
    """Raise ValueError if a server of engine.urls does not match this run's requirements."""
    if not settings.engine.urls:
        return
    wanted = expected_engine_fingerprint(settings, Renderer(settings.model))
    for url in settings.engine.urls:
        VllmServer(url, token=read_engine_token(settings.engine), max_timeout_s=settings.parallel.timeout_s).check(wanted)
