"""SandboxFusion's `/run_code` endpoint for the sandbox server.

This endpoint lets clients of SandboxFusion use the sandbox server. A client for SandboxFusion
servers is in fusion_client.py. Names, defaults and statuses follow SandboxFusion's documented REST
API. Each response has two statuses:

- If the program times out, the command status is `TimeLimitExceeded`, and there is no return code.
  Otherwise, the command status is `Finished`, with a return code.
- The request status is `Success` for return code 0, `SandboxError` if the host failed or cannot run
  the request, and `Failed` in all other cases.
"""

import re
from collections.abc import Awaitable, Callable
from enum import StrEnum

from pydantic import BaseModel, Field

from megatron_rl_sandbox.inputs import MAX_INPUTS
from megatron_rl_sandbox.messages import decode_base64, encode_base64
from megatron_rl_sandbox.pool import Box
from megatron_rl_sandbox.records import CallResult, Fault

KILLED_EXIT_CODE = 137
"""Return code of a killed program, as reported by a shell (128 + SIGKILL)."""


class FusionRunStatus(StrEnum):
    """Status of a `/run_code` request."""

    SUCCESS = "Success"
    FAILED = "Failed"
    SANDBOX_ERROR = "SandboxError"


class CommandStatus(StrEnum):
    """Status of the command that runs the program."""

    FINISHED = "Finished"
    ERROR = "Error"
    TIME_LIMIT = "TimeLimitExceeded"


class RunCodeRequest(BaseModel):
    """Request body of `/run_code`.

    Unknown keys are ignored, as in SandboxFusion, because clients send keys from several versions
    of its API.
    """

    code: str
    language: str
    compile_timeout: float = 10
    """Unused, because Python is not compiled."""
    run_timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Timeout of the program in seconds, capped at the pool's limit."""
    memory_limit_MB: int = -1
    """Unused, because the pool sets the memory limit of a box (`serve --limit memory=...`)."""
    stdin: str | None = Field(default=None, max_length=8 << 20)
    files: dict[str, str | None] = Field(default={}, max_length=MAX_INPUTS)
    fetch_files: list[str] = Field(default=[], max_length=1000)
    args: list[str] = []


class CommandResult(BaseModel):
    """Result of the command that ran the program."""

    status: CommandStatus
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """Response body of `/run_code`."""

    status: FusionRunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


async def handle_run_code(
    request: RunCodeRequest, *, open_box: Callable[..., Awaitable[Box]], call_timeout_s: float
) -> tuple[RunCodeResponse, CallResult | None]:
    """Run the code in a new box and return (response, result).

    `result` is the result of the call, or None if the request is invalid. `call_timeout_s` is an
    upper bound on the timeout of the call. `open_box` is called with `files` and `preload`, and its
    exceptions propagate.
    """
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
    """Return True if the program was killed before it could return or raise an exception."""
    return result.fault is Fault.HOST or (result.error is not None and not result.error.traceback)


def _stdin_preload(request: RunCodeRequest) -> str:
    """Return the source code of a preload that sets standard input (descriptor 0 and sys.stdin).

    The preload leaves no names in the namespace.
    """
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
        number = int(result.error.message)  # within int()'s 4300 digits: messages have at most 2000
        return number & 255 if abs(number) < 1 << 63 else 255  # Python's exit fails for numbers beyond 64 bits
    return KILLED_EXIT_CODE if _was_killed(result) else 1
