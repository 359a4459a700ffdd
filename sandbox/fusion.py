"""SandboxFusion's `/run_code` request, answered by our pool, so that what was written for its servers can point at ours.

One of its servers behind our verbs: fusion_client.py. Names, defaults and statuses are SandboxFusion's (documented REST API). A time-out
is `TimeLimitExceeded` without a return code, any other end of the program `Finished` with one; the request as a whole is `Success` only for
a return code of 0, and `SandboxError` is the host's.
"""

import re
from collections.abc import Awaitable, Callable
from enum import StrEnum

from pydantic import BaseModel, Field

from sandbox.inputs import MAX_INPUTS
from sandbox.messages import decode_base64, encode_base64
from sandbox.pool import Box
from sandbox.types import CallResult, Fault

KILLED_EXIT_CODE = 137
"""What a shell reports for a program that was killed (128 + SIGKILL)."""


class FusionRunStatus(StrEnum):
    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


class RunCodeRequest(BaseModel):
    """Keys that we do not know are left alone, as SandboxFusion does: clients send keys of several versions."""

    code: str
    language: str
    compile_timeout: float = 10
    """Not used: Python is not compiled."""
    run_timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """At most the pool's own limit counts."""
    memory_limit_MB: int = -1
    """Not used: the memory of a box is the pool's setting (`serve --limit memory=...`), whoever asks."""
    stdin: str | None = Field(default=None, max_length=8 << 20)
    files: dict[str, str | None] = Field(default={}, max_length=MAX_INPUTS)
    fetch_files: list[str] = Field(default=[], max_length=1000)
    args: list[str] = []


class CommandResult(BaseModel):
    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    status: FusionRunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


async def handle_run_code(
    request: RunCodeRequest, *, open_box: Callable[..., Awaitable[Box]], call_timeout_s: float
) -> tuple[RunCodeResponse, CallResult | None]:
    """Run the code in a fresh box for `call_timeout_s` at most. `open_box` takes `files` and `preload`; what it raises is the caller's."""
    if request.language != "python":
        return _error_response(f"this server runs python only, not {request.language[:64]!r}"), None
    try:
        files = {name: decode_base64(content) for name, content in request.files.items() if content is not None}
    except ValueError as error:
        return _error_response(str(error)), None
    async with await open_box(files=files, preload=_stdin_preload(request)) as box:
        result = await box.run(request.code, timeout_s=min(request.run_timeout, call_timeout_s))
        fetched = await box.fetch_files(request.fetch_files) if request.fetch_files and not _was_killed(result) else {}
    return _make_response(result, fetched), result


def _error_response(why: str) -> RunCodeResponse:
    return RunCodeResponse(status=FusionRunStatus.SANDBOX_ERROR, message=why)


def _was_killed(result: CallResult) -> bool:
    """Did the program end without an exception of its own?"""
    return result.fault is Fault.HOST or (result.error is not None and not result.error.traceback)


def _stdin_preload(request: RunCodeRequest) -> str:
    """Standard input, both as a descriptor and as sys.stdin; leaves no name behind."""
    return f"""import os, sys, tempfile
with tempfile.TemporaryFile() as file:
    file.write({(request.stdin or "").encode()!r})
    file.seek(0)
    os.dup2(file.fileno(), 0)
sys.stdin = open(0, encoding="utf-8", closefd=False)
del file, os, sys, tempfile"""


def _make_response(result: CallResult, fetched: dict[str, bytes]) -> RunCodeResponse:
    error = result.error
    if result.fault is Fault.HOST:
        return _error_response(error.message if error else "the host failed")
    stderr = result.stderr + (error.traceback or f"{error.type}: {error.message}\n" if error else "")
    run = CommandResult(status=CommandStatus.FINISHED, execution_time=result.usage.wall_s, stdout=result.text, stderr=stderr)
    if result.limit == "time":
        run.status = CommandStatus.TIME_LIMIT
    else:
        run.return_code = _return_code(result)
    good = run.return_code == 0
    files = {name: encode_base64(content) for name, content in fetched.items()}
    return RunCodeResponse(status=FusionRunStatus.SUCCESS if good else FusionRunStatus.FAILED, run_result=run, files=files)


def _return_code(result: CallResult) -> int:
    if result.error is None:
        return 0
    if result.error.type == "SystemExit":
        if not re.fullmatch(r"-?[0-9]+", result.error.message):
            return 1
        number = int(result.error.message)  # of 2000 digits at most, as all messages; int() takes 4300
        return number & 255 if abs(number) < 1 << 63 else 255  # Python's own exit has no room for more
    return KILLED_EXIT_CODE if _was_killed(result) else 1
