"""Names of files and folders in a run directory, and its list of checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_rl.io.jsonl import write_error_line

CONFIG_FILE, EVALUATION_FILE, FINAL_FOLDER, CHECKPOINTS_FOLDER = "config.yaml", "eval.json", "final", "checkpoints"
"""Names of files and folders in a run directory: the settings, the final evaluation (which marks a
finished run), the trained model and the checkpoints.
"""
PROMPTS_FILE, ADAPTER_FOLDER = "prompts.jsonl", "adapter"
"""Names of a file and a folder in a run directory: the file with statistics per example, and the
folder with the LoRA adapter.
"""


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in RUN/checkpoints, oldest first.

    Folders with names other than step_NUMBER are ignored.
    """
    return sorted(path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal())


def step_name(step: int) -> str:
    """Return the folder name of the checkpoint that is saved after `step` steps."""
    return f"step_{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Parse the number of completed steps from the folder name of a published checkpoint."""
    return int(checkpoint.name.removeprefix("step_"))


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """If the block raises an OSError, re-raise it with a message that names run.dir and the fix."""
    try:
        yield
    except OSError as error:
        raise OSError(write_error_line("run.dir", folder, error)) from error
