"""Functions shared by the command-line tools: error messages, progress bars and warnings."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_rl.io.jsonl import write_error_line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def progress_bar() -> Progress:
    """Return a progress bar that counts bytes.

    The bar is drawn on standard error if standard error is a terminal, and removed when it is
    complete.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def quiet_libraries() -> None:
    """Silence transformers' progress bars and Megatron's warnings about missing packages."""
    warnings.filterwarnings("ignore", module="megatron")
    transformers.utils.logging.disable_progress_bar()


def run_command(command: Callable[[], str], *, out: Path) -> int:
    """Run a command that writes `out` and return its exit code.

    If the command succeeds, the result is printed and the exit code is 0. If the command raises a
    ValueError or OSError, a one-line error message is printed and the exit code is 1.
    """
    try:
        print(command())
    except (ValueError, OSError) as error:
        print(f"error: {format_error(error, out=out)}", file=sys.stderr)
        return 1
    return 0


def format_error(error: ValueError | OSError, *, out: Path | None = None) -> str:
    """Return the one-line message for an error.

    Errors raised by this project (ValueError) already name the key, the value and the fix. For an
    operating-system error, the message names `--out` if the path in the error belongs to `out`;
    otherwise, the message names the file that could not be read.
    """
    if isinstance(error, ValueError):
        return str(error)
    if out is not None and (error.filename is None or _is_within(Path(error.filename).absolute(), out.absolute())):
        return write_error_line("--out", out, error)
    return f"{error.filename or 'a file'}: could not be read ({error.strerror or error}); check the disk and the file's permissions"


def _is_within(path: Path, out: Path) -> bool:
    """Return True if `path` equals `out`, is a parent of `out`, or is inside `out`.

    The hidden folders in which `out` is built count as part of `out`.
    """
    return out.is_relative_to(path) or any(path.is_relative_to(out.with_name(name)) for name in (
        out.name, f".{out.name}.partial", f".{out.name}.replaced",
    ))  # fmt: skip
