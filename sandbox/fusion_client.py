"""Client for a SandboxFusion server, with the same interface as `SandboxPool`.

The client is for clusters that already run SandboxFusion. The client has fewer features than
`SandboxClient`:

- SandboxFusion runs every request in a new process, so `CallResult.state_lost` is True from the
  second call in a box onwards. The inputs are sent with every request.
- `CallResult.files` is always empty.
- The isolation of the code depends on the SandboxFusion server.

Images are returned as files with fixed names, which a wrapper around the code writes. These files
are validated in the same way as the images of a `Box`.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from PIL import Image
from pydantic import ValidationError
from pydantic_core import from_json

from megatron_rl_sandbox import image_codec as pictures
from megatron_rl_sandbox.bounded_http import BoundedClient, NoResponse, Transport
from megatron_rl_sandbox.clock import MAX_WALL_FACTOR
from megatron_rl_sandbox.fusion import CommandStatus, FusionRunStatus, RunCodeRequest, RunCodeResponse
from megatron_rl_sandbox.messages import count_json_delimiters, decode_base64, encode_base64, max_response_bytes
from megatron_rl_sandbox.records import (
    BoxClosed,
    BoxLimits,
    CallError,
    CallResult,
    CallUsage,
    DroppedOutput,
    Fault,
    ReturnedImage,
    SandboxError,
)
from megatron_rl_sandbox.sandbox_client import CLIENT_GRACE_S, CONNECT_RETRIES, CONNECT_TIMEOUT_S, encode_image_file

MAX_STREAM_BYTES = 8 << 20
"""Maximum size of each output stream in a response, in bytes of JSON.

SandboxFusion does not shorten output streams to `BoxLimits.text`.
"""
CODE_FILE, PRELOAD_FILE, ERROR_FILE, IMAGE_FILE = "_call.py", "_preload.py", "_error.json", "_image_{}.png"
WRAPPER = """
import io, json, sys, traceback
try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    plt = None
from PIL import Image
_scope = {"__name__": "__main__", "__builtins__": __builtins__}
_count = 0
def _keep(save):
    global _count
    if _count <= MOST:
        save(NAME.format(_count))
    _count += 1
def _show_figures(*arguments, **options):
    for number in plt.get_fignums():
        _keep(plt.figure(number).savefig)
    plt.close("all")
def _show_image(picture, *arguments, **options):
    _keep((picture if picture.mode in ("L", "RGB", "RGBA") else picture.convert("RGB")).save)
Image.Image.show = _show_image
if plt:
    plt.show = _show_figures
for _variable, _name in IMAGES.items():
    _scope[_variable] = Image.open(_name)
    _scope[_variable].load()
_status = 0
for _file in FILES:
    try:
        exec(compile(open(_file).read(), _file, "exec"), _scope)
    except SystemExit:
        raise
    except BaseException as error:
        _lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _file]
        if isinstance(error, SyntaxError) and error.filename == _file:
            _lines = [error.lineno]
        with open(ERROR, "w") as _out:
            json.dump([type(error).__name__, str(error), _lines[-1] if _lines else None], _out)
        traceback.print_exc()
        _status = 1
        break
if plt:
    _show_figures()
sys.exit(_status)
"""


class FusionSandbox:
    """Client for one SandboxFusion server.

    `open` makes no request, because the inputs of a box are sent with each of its calls.
    """

    def __init__(self, url: str, *, limits: BoxLimits | None = None, token: str = "", transport: Transport | None = None) -> None:
        self.limits = limits or BoxLimits()
        self.http = BoundedClient(url, token=token, retries=CONNECT_RETRIES, transport=transport)

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> "FusionBox":
        """Return a box with these inputs.

        `wait_s` exists for compatibility and is ignored, because opening a box never waits.
        """
        variables = {}
        inputs = dict(files or {})
        for name, image in (images or {}).items():
            file = name if "." in name else f"{name}.png"
            inputs[file] = encode_image_file(image)
            variables[name.split(".")[0]] = file
        return FusionBox(self, inputs=inputs, variables=variables, preload=preload)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.http.close()


class FusionBox:
    """Box that keeps no state, because each call runs in a new process."""

    def __init__(self, pool: FusionSandbox, *, inputs: Mapping[str, bytes], variables: Mapping[str, str], preload: str) -> None:
        self.pool = pool
        self.inputs = {name: encode_base64(content) for name, content in inputs.items()} | {PRELOAD_FILE: encode_base64(preload.encode())}
        self.variables = variables
        self.num_calls = 0
        self.image_budget = pictures.ImageBudget(pool.limits)
        self.is_closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        """Execute `code` in a new process on the server.

        Raises:
            BoxClosed: The box is closed. All other failures are reported in the result.
        """
        if self.is_closed:
            raise BoxClosed("the box was closed")
        self.num_calls += 1
        names = [IMAGE_FILE.format(number) for number in range(self.pool.limits.images + 1)]
        constants = {
            "MOST": self.pool.limits.images,
            "NAME": IMAGE_FILE,
            "IMAGES": self.variables,
            "FILES": [PRELOAD_FILE, CODE_FILE],
            "ERROR": ERROR_FILE,
        }
        head = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
        request = RunCodeRequest(
            code=head + WRAPPER,
            language="python",
            run_timeout=timeout_s or self.pool.limits.call_timeout_s,
            files={**self.inputs, CODE_FILE: encode_base64(code.encode(errors="surrogatepass"))},
            fetch_files=[*names, ERROR_FILE],
        )
        try:
            response = await self._send_request(request)
        except SandboxError as error:
            return CallResult(id=self.num_calls, fault=Fault.HOST, error=CallError(type="SandboxError", message=str(error)))
        return await asyncio.to_thread(self._make_result, response)  # decoding and encoding an image may take 0.1 s

    async def _send_request(self, request: RunCodeRequest) -> RunCodeResponse:
        try:
            limit_s = CONNECT_TIMEOUT_S + 2 * (MAX_WALL_FACTOR * request.run_timeout + CLIENT_GRACE_S)
            bounds = {
                "timeout_s": limit_s,
                "max_bytes": max_response_bytes(self.pool.limits) + 2 * MAX_STREAM_BYTES,
            }  # SandboxFusion does not truncate its output streams
            answer = await self.pool.http.request("POST", "/run_code", request.model_dump(), connect_timeout_s=CONNECT_TIMEOUT_S, **bounds)
            if not answer.is_success:
                raise SandboxError(f"SandboxFusion: status {answer.status}: {answer.text[:2000]}")
            if count_json_delimiters(answer.content) > MAX_STREAM_BYTES:
                raise SandboxError(f"SandboxFusion: the response has more than {MAX_STREAM_BYTES} commas and opening brackets")
            response = RunCodeResponse.model_validate_json(answer.content)
        except (NoResponse, ValidationError) as error:
            raise SandboxError(f"SandboxFusion: {type(error).__name__}: {error}"[:2000]) from error
        if response.status is FusionRunStatus.SANDBOX_ERROR or response.run_result is None:
            raise SandboxError(f"SandboxFusion: {response.message[:2000]}")
        return response

    def _make_result(self, response: RunCodeResponse) -> CallResult:
        run = response.run_result
        assert run is not None
        files = _decode_files(response.files)
        images, dropped = self._check_images(files)
        error, limit = None, None
        if run.status is CommandStatus.TIME_LIMIT:
            error, limit = CallError(type="time", message="the call took too long and was stopped"), "time"
        elif run.return_code != 0:
            error = _parse_error(files.get(ERROR_FILE), return_code=run.return_code, stderr=run.stderr or "")
        text, stderr = (
            self._truncate(part or "", what=what, dropped=dropped) for part, what in ((run.stdout, "text"), (run.stderr, "stderr"))
        )
        return CallResult(
            id=self.num_calls,
            fault=Fault.CODE if error else Fault.NONE,
            text=text,
            stderr=stderr,
            images=tuple(images),
            error=error,
            limit=limit,
            dropped=tuple(dropped),
            usage=CallUsage(wall_s=run.execution_time or 0.0),
            state_lost=self.num_calls > 1,
        )

    def _truncate(self, text: str, *, what: str, dropped: list[DroppedOutput]) -> str:
        half = self.pool.limits.text // 2
        if len(text) <= 2 * half:
            return text
        dropped.append(DroppedOutput(what=what, reason=f"{len(text) - 2 * half} characters in the middle"))
        return text[:half] + "\n[...]\n" + text[-half:]

    def _check_images(self, files: Mapping[str, bytes]) -> tuple[list[ReturnedImage], list[DroppedOutput]]:
        """Return (images, dropped): the images within the limits, and records of dropped images.

        The images are re-encoded as plain PNGs, so the result contains only their pixel values and
        no other data of the response.
        """
        limits = self.pool.limits
        taken: list[ReturnedImage] = []
        dropped: list[DroppedOutput] = []
        self.image_budget.begin_call()
        for number in range(limits.images + 1):
            png = files.get(IMAGE_FILE.format(number))
            if png is None:
                break
            try:
                width, height = pictures.read_png_size(png)
                reason = pictures.check_image_size(width=width, height=height, limits=limits)
                reason = reason or self.image_budget.check_image(pixels=width * height, num_bytes=len(png))
                if reason is None:
                    with Image.open(pictures.BytesIO(png), formats=("PNG",)) as picture:
                        taken.append(ReturnedImage(png=pictures.encode_png(picture), width=width, height=height, source="show"))
                    self.image_budget.count_image(pixels=width * height, num_bytes=len(png))
            except (OSError, ValueError, SyntaxError) as error:
                reason = f"cannot be read: {error}"
            if reason is not None:
                dropped.append(DroppedOutput(what="image", reason=reason))
        return taken, dropped

    async def fetch_files(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the requested files that are inputs of the box.

        Files that the code writes are lost when the call's process ends.
        """
        return {name: decode_base64(self.inputs[name]) for name in names if name in self.inputs}

    async def close(self) -> None:
        """Mark the box as closed. The server keeps no state of the box."""
        self.is_closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def _decode_files(answered: Mapping[str, str]) -> dict[str, bytes]:
    """Decode base64 files, and leave out files that are not valid base64."""
    files = {}
    for name, content in answered.items():
        with contextlib.suppress(ValueError):
            files[name] = decode_base64(content)
    return files


def _parse_error(written: bytes | None, *, return_code: int | None, stderr: str) -> CallError:
    """Return the error that the wrapper recorded, or a SystemExit error if the record is malformed.

    The executed code can write to the wrapper's directory, so the record is not trusted.
    """
    try:
        kind, message, line = from_json(written or b"")  # refuses lone surrogates and unbounded nesting
        if isinstance(kind, str) and isinstance(message, str) and (line is None or isinstance(line, int)):
            return CallError(type=kind[:100], message=message[:2000], line=line, traceback=stderr[-4000:])
    except (ValueError, TypeError):
        pass
    return CallError(type="SystemExit", message=f"the program ended with status {return_code}")
