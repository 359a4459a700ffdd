"""Sizes and SHA-256 digests of the files in a training checkpoint.

The file run/state.json of a checkpoint contains a record of every other file. When a file is read,
the size and the digest are compared with the record of the file. The records have this form:
    "files": {"__0_0.distcp": {"bytes": 4454168, "sha256": "9f86d0..."}, ...}
Folders without run/state.json are not checked. A CPU core with SHA extensions hashes more than
1 GB/s.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.io.jsonl import read_json

STATE = "run/state.json"
"""Path, relative to the checkpoint, of the file that contains the records of all other files."""
MAX_STATE_BYTES = 64 << 20
CRITIC = "critic"
"""Name of the checkpoint's subfolder that contains the critic's training state. The files in the
subfolder are recorded in the checkpoint's run/state.json.
"""
FileRecord = Mapping[str, object]


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits, as sha256sum prints it."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_file_record(path: Path, sha256: str | None = None) -> dict[str, int | str]:
    """Return the size and the SHA-256 of a file; compute the SHA-256 unless `sha256` is passed."""
    return {"bytes": path.stat().st_size, "sha256": sha256 or compute_sha256(path)}


def find_difference(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> str:
    """Describe the first file that differs from its record; return "" if all files match.

    Raises OSError if a file cannot be read.
    """
    for name in names:
        expected, path = files[name], folder / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{name} has {size} bytes, not {expected['bytes']}"
        found = compute_sha256(path)
        if found != expected["sha256"]:
            return f"{name} has the SHA-256 {found}, not {expected['sha256']}"
    return ""


@dataclass(slots=True, frozen=True)
class RecordedFiles:
    """File records for one tensor folder of a checkpoint."""

    checkpoint: Path
    files: Mapping[str, FileRecord]
    prefix: str
    """Path of the tensor folder, relative to the checkpoint: "" or "critic/"."""

    def find_difference(self, names: Iterable[str]) -> str:
        """Describe the first file that differs from its record; return "" if all files match.

        A file without a record is reported as a difference, because the run did not write the file.
        """
        recorded = [self.prefix + name for name in names]
        unknown = next((name for name in recorded if name not in self.files), "")
        return f"{unknown} is not recorded in {STATE}" if unknown else find_difference(self.checkpoint, self.files, recorded)

    def non_tensor_files(self) -> list[str]:
        """Return the recorded files of the folder, except *.distcp files, which contain tensors."""
        own = [name.removeprefix(self.prefix) for name in self.files if name.startswith(self.prefix)]
        return [name for name in own if not name.endswith(".distcp")]


def recorded_files(folder: Path) -> RecordedFiles | None:
    """Return the file records of a training checkpoint or of its critic subfolder.

    Returns None if the folder is neither a training checkpoint nor a critic subfolder. Raises
    ValueError if the record cannot be read; the caller prepends the folder name to the message.
    """
    for checkpoint, prefix in ((folder, ""), (folder.absolute().parent, f"{CRITIC}/")):
        if (checkpoint / STATE).is_file() and (not prefix or folder.absolute().name == CRITIC):
            try:
                files = check_records(read_json(checkpoint / STATE, at_most=MAX_STATE_BYTES)["files"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{STATE} cannot be read ({error})") from error
            return RecordedFiles(checkpoint, files, prefix)
    return None


def check_records(files: object) -> Mapping[str, FileRecord]:
    """Validate the file records of a state file and return them.

    Raises ValueError if a name is a path outside the checkpoint, or TypeError if a size or digest
    is missing.
    """
    if not isinstance(files, dict):
        raise TypeError(f"`files` must be a JSON object, not {type(files).__name__}")
    for name, expected in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{name!r:.80} is not a path inside the checkpoint")
        if not isinstance(expected, dict) or (type(expected.get("bytes")), type(expected.get("sha256"))) != (int, str):
            raise TypeError(f"the record of {name} has no valid size and digest")
    return files
