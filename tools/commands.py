"""What the commands have in common: how they end, errors in one line, number types, the progress bar, quiet libraries."""

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
    """Of bytes, on standard error where that is a terminal, and gone when it is done."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip


def quiet_libraries() -> None:
    """Megatron warns of what it lacks when it is imported, transformers draws bars; neither is news for who converts."""
    warnings.filterwarnings("ignore", module="megatron")
    transformers.utils.logging.disable_progress_bar()


def run_command(command: Callable[[], str], *, out: Path) -> int:
    """The exit code of a command that writes `out`. 0: what the work returned was said; 1: one line says why it was not done."""
    try:
        print(command())
    except (ValueError, OSError) as error:
        print(f"error: {format_error(error, out=out)}", file=sys.stderr)
        return 1
    return 0


def format_error(error: ValueError | OSError, *, out: Path | None = None) -> str:
    """An error as the user reads it: ours name key, value and remedy; the system's get them here, for `out` or for what was read."""
    if isinstance(error, ValueError):
        return str(error)
    if out is not None and (error.filename is None or _is_within(Path(error.filename).absolute(), out.absolute())):
        return write_error_line("--out", out, error)
    return f"{error.filename or 'a file'}: could not be read ({error.strerror or error}); check the disk and the file's permissions"


def _is_within(path: Path, out: Path) -> bool:
    """Whether it is `out`, above it, in it, or in the hidden folders beside it in which it is made."""
    return out.is_relative_to(path) or any(path.is_relative_to(out.with_name(name)) for name in (
        out.name, f".{out.name}.partial", f".{out.name}.replaced",
    ))  # fmt: skip
