"""A SandboxFusion server behind our verbs: for clusters that have one. Weaker than our own, and it says so.

SandboxFusion runs every request in a fresh process: `state_lost` is true from a box's second call on, `files` of a result is empty, and the
isolation is that server's. Inputs go with every request. Images come back in files that the wrapper around the code writes under names
agreed upon beforehand, and are checked like those from a box of ours.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from PIL import Image
from pydantic import ValidationError
from pydantic_core import from_json

from sandbox import images as pictures
from sandbox.bounded_http import BoundedClient, NoAnswer, Transport
from sandbox.client import CONNECT_S, GRACE_S, RETRIES_AT_CONNECT, file_of
from sandbox.clock import PATIENCE
from sandbox.fusion import CommandStatus, RunCodeRequest, RunCodeResponse, RunStatus
from sandbox.messages import answer_bytes, decoded, encoded, num_marks
from sandbox.types import BoxClosed, Dropped, Error, Fault, Limits, Picture, Result, SandboxFault, Usage

STREAM_BYTES = 8 << 20
"""Of each stream of an answer as JSON at most: that server cuts them at other places than ours."""
CODE, PRELOAD, ERROR, SHOWN = "_call.py", "_preload.py", "_error.json", "_image_{}.png"
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
    """One SandboxFusion server. `open` makes no request: a box is only what every request of it carries."""

    def __init__(self, url: str, *, limits: Limits | None = None, token: str = "", transport: Transport | None = None) -> None:
        self.limits = limits or Limits()
        self.http = BoundedClient(url, token=token, retries=RETRIES_AT_CONNECT, transport=transport)

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> "FusionBox":
        """`wait_s` is for the shape of it: the server queues requests, not boxes."""
        variables = {}
        inputs = dict(files or {})
        for name, image in (images or {}).items():
            file = name if "." in name else f"{name}.png"
            inputs[file] = file_of(image)
            variables[name.split(".")[0]] = file
        return FusionBox(self, inputs=inputs, variables=variables, preload=preload)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.http.close()


class FusionBox:
    """A box without a memory."""

    def __init__(self, pool: FusionSandbox, *, inputs: Mapping[str, bytes], variables: Mapping[str, str], preload: str) -> None:
        self.pool = pool
        self.inputs = {name: encoded(content) for name, content in inputs.items()} | {PRELOAD: encoded(preload.encode())}
        self.variables = variables
        self.calls = 0
        self.allowance = pictures.Allowance(pool.limits)
        self.closed = False

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """As `Box.run`, in a fresh process each time."""
        if self.closed:
            raise BoxClosed("the box was closed")
        self.calls += 1
        names = [SHOWN.format(number) for number in range(self.pool.limits.images + 1)]
        constants = {"MOST": self.pool.limits.images, "NAME": SHOWN, "IMAGES": self.variables, "FILES": [PRELOAD, CODE], "ERROR": ERROR}
        head = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
        request = RunCodeRequest(
            code=head + WRAPPER,
            language="python",
            run_timeout=timeout_s or self.pool.limits.call_s,
            files={**self.inputs, CODE: encoded(code.encode(errors="surrogatepass"))},
            fetch_files=[*names, ERROR],
        )
        try:
            response = await self._post(request)
        except SandboxFault as error:
            return Result(id=self.calls, fault=Fault.HOST, error=Error(type="SandboxFault", message=str(error)))
        return await asyncio.to_thread(self._result, response)  # its pictures are read and encoded anew: 0.1 s each, maybe

    async def _post(self, request: RunCodeRequest) -> RunCodeResponse:
        try:
            limit_s = CONNECT_S + 2 * (PATIENCE * request.run_timeout + GRACE_S)
            bounds = {"limit_s": limit_s, "max_bytes": answer_bytes(self.pool.limits) + 2 * STREAM_BYTES}  # its streams are whole
            answer = await self.pool.http.request("POST", "/run_code", request.model_dump(), connect_s=CONNECT_S, **bounds)
            if not answer.is_success:
                raise SandboxFault(f"SandboxFusion: status {answer.status}: {answer.text[:2000]}")
            if num_marks(answer.content) > STREAM_BYTES:
                raise SandboxFault(f"SandboxFusion: more than {STREAM_BYTES} commas and brackets")
            response = RunCodeResponse.model_validate_json(answer.content)
        except (NoAnswer, ValidationError) as error:
            raise SandboxFault(f"SandboxFusion: {type(error).__name__}: {error}"[:2000]) from error
        if response.status is RunStatus.SANDBOX_ERROR or response.run_result is None:
            raise SandboxFault(f"SandboxFusion: {response.message[:2000]}")
        return response

    def _result(self, response: RunCodeResponse) -> Result:
        run = response.run_result
        assert run is not None
        files = _files(response.files)
        images, dropped = self._pictures(files)
        error, limit = None, None
        if run.status is CommandStatus.TIME_LIMIT:
            error, limit = Error(type="time", message="the call took too long and was stopped"), "time"
        elif run.return_code != 0:
            error = _error(files.get(ERROR), return_code=run.return_code, stderr=run.stderr or "")
        text, stderr = (self._cut(part or "", what=what, dropped=dropped) for part, what in ((run.stdout, "text"), (run.stderr, "stderr")))
        return Result(
            id=self.calls,
            fault=Fault.CODE if error else Fault.NONE,
            text=text,
            stderr=stderr,
            images=tuple(images),
            error=error,
            limit=limit,
            dropped=tuple(dropped),
            usage=Usage(wall_s=run.execution_time or 0.0),
            state_lost=self.calls > 1,
        )

    def _cut(self, text: str, *, what: str, dropped: list[Dropped]) -> str:
        half = self.pool.limits.text // 2
        if len(text) <= 2 * half:
            return text
        dropped.append(Dropped(what=what, reason=f"{len(text) - 2 * half} characters in the middle"))
        return text[:half] + "\n[...]\n" + text[-half:]

    def _pictures(self, files: Mapping[str, bytes]) -> tuple[list[Picture], list[Dropped]]:
        """Those that pass the limits and are plain PNGs; encoded anew, so that nothing but pixels is left of what the server sent."""
        limits = self.pool.limits
        taken: list[Picture] = []
        dropped: list[Dropped] = []
        self.allowance.begin_call()
        for number in range(limits.images + 1):
            png = files.get(SHOWN.format(number))
            if png is None:
                break
            try:
                width, height = pictures.png_size(png)
                reason = pictures.refusal(width=width, height=height, limits=limits)
                reason = reason or self.allowance.refusal(pixels=width * height, num_bytes=len(png))
                if reason is None:
                    with Image.open(pictures.BytesIO(png), formats=("PNG",)) as picture:
                        taken.append(Picture(png=pictures.encode(picture), width=width, height=height, source="show"))
                    self.allowance.count(pixels=width * height, num_bytes=len(png))
            except (OSError, ValueError, SyntaxError) as error:
                reason = f"cannot be read: {error}"
            if reason is not None:
                dropped.append(Dropped(what="image", reason=reason))
        return taken, dropped

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Inputs only: what the code wrote went with its process."""
        return {name: decoded(self.inputs[name]) for name in names if name in self.inputs}

    async def close(self) -> None:
        self.closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


def _files(answered: Mapping[str, str]) -> dict[str, bytes]:
    """What is base64 of it."""
    files = {}
    for name, content in answered.items():
        with contextlib.suppress(ValueError):
            files[name] = decoded(content)
    return files


def _error(written: bytes | None, *, return_code: int | None, stderr: str) -> Error:
    """What the wrapper wrote about the exception, as far as it can be believed; the code shares its directory."""
    try:
        kind, message, line = from_json(written or b"")  # which refuses half characters and what is nested without end
        if isinstance(kind, str) and isinstance(message, str) and (line is None or isinstance(line, int)):
            return Error(type=kind[:100], message=message[:2000], line=line, traceback=stderr[-4000:])
    except (ValueError, TypeError):
        pass
    return Error(type="SystemExit", message=f"the program ended with status {return_code}")
