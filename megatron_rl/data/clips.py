"""Video files named in data rows; only sandbox code decodes them (tasks/visual_python/clip.py)."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.data.images import check_inside_roots, shorten
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.io.bounded_files import open_regular, read_bytes

MAX_VIDEO_BYTES = 256 << 20
"""Maximum size of a stored video in bytes; each episode's sandbox receives a copy."""
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm")
MPEG4, MATROSKA, AVI = (4, b"ftyp"), (0, b"\x1a\x45\xdf\xa3"), (8, b"AVI ")
"""Offset and magic bytes that identify each supported video format."""


@dataclass(slots=True, frozen=True)
class StoredVideo:
    """A video file named in a row."""

    source: Path
    where: str
    """Location used in messages, such as `train.jsonl row 17: mm_hint.hint_path`."""

    def check_video(self) -> None:
        """Raise ValueError if the file is too large or not in a supported video format."""
        with open_regular(self.source) as file:
            size, first = os.fstat(file.fileno()).st_size, file.read(16)
        if size > MAX_VIDEO_BYTES:
            raise ValueError(f"{self.where}: {size} bytes, more than {MAX_VIDEO_BYTES}; shorten the video or reduce the file size")
        if not any(first[at:].startswith(mark) for at, mark in (MPEG4, MATROSKA, AVI)):
            raise ValueError(f"{self.where}: {shorten(str(self.source))} is not an MP4, Matroska, WebM or AVI file")

    def read(self) -> bytes:
        """Return the contents of the file.

        Raises:
            InfraError: reading from disk failed.
            PermanentInfraError: the file was removed, or replaced by an invalid file, after the run
                started.
        """
        try:
            self.check_video()
            return read_bytes(self.source, at_most=MAX_VIDEO_BYTES)
        except (FileNotFoundError, ValueError) as error:
            raise PermanentInfraError(f"{self.where}: cannot be opened ({error})") from error
        except OSError as error:
            raise InfraError(f"{self.where}: cannot be read ({error})") from error


def find_stored_videos(hint: Mapping[str, object], *, folder: Path, where: str, roots: Sequence[Path]) -> tuple[StoredVideo, ...]:
    """Return the videos named by an mm_hint of type video.

    The value of hint_path is one path or a list of paths.

    Raises:
        ValueError: a file does not exist, has no video suffix, or is outside the allowed folders.
    """
    values = hint.get("hint_path")
    paths = values if isinstance(values, list) else [values]
    clips = []
    for value in paths:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{where}: must be the path of a video, not {type(value).__name__}")
        path = folder / value
        if path.suffix.lower() not in VIDEO_SUFFIXES or not path.is_file():
            raise ValueError(
                f"{where}: no video {shorten(str(path))}; the file must exist, with one of the suffixes {', '.join(VIDEO_SUFFIXES)}"
            )
        clips.append(StoredVideo(check_inside_roots(path, folder, roots, where), where))
    return tuple(clips)
