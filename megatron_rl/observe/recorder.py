"""Reads and writes rollout files, which store rollouts for inspection or for replay.

- RUN/rollouts/step_000012.jsonl: one RecordedRollout per line (io/rollout_codec.py).
- RUN/rollouts/images/KEY.png: an image; KEY is Image.key, so equal images are stored once.

The images of a rollout file are in the folder `images` next to the file, so the file and the folder
can be moved together. A rollout takes about 1 kB, plus 25 bytes per observed token and 56 bytes per
sampled token, plus its images. If old and reference logprobs are recorded too, an observed token
takes 37 bytes and a sampled token 98 bytes.
"""

import io
import math
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from PIL import Image as pil
from PIL.Image import DecompressionBombError
from PIL.Image import Image as Picture

from megatron_rl.io.bounded_files import read_bytes
from megatron_rl.io.jsonl import MAX_LINES_BYTES, read_lines, write_bytes_atomically, write_lines_atomically
from megatron_rl.io.rollout_codec import from_record, to_record
from megatron_rl.observe.step_metrics import reward_of
from megatron_rl.types import Image, Rollout

ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "images"
"""Folder of images, relative to the folder of the rollout file."""
NUM_WRITER_THREADS = 4
"""Number of threads that write images; each thread waits until its file is on disk."""
MAX_IMAGE_BYTES, MAX_PIXELS = 256 << 20, 1 << 26
"""Maximum file size in bytes and maximum number of pixels accepted for a recorded image.

Images that a policy receives are always smaller.
"""
_IMAGE_REFERENCE = re.compile(IMAGES_FOLDER.encode() + rb"/([0-9A-Za-z]+)\.png")
_IMAGE_NAME = re.compile(IMAGES_FOLDER + r"/[0-9A-Za-z]+\.png")


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedRollout:
    """A line of a rollout file."""

    step: int
    kind: str
    """"best" or "worst" for the step's best or worst rollouts; "kept" in files that contain all
    rollouts of a step.
    """
    num_rollouts: int
    """Total number of rollouts in the step, including rollouts that are not recorded."""
    num_failed: int
    """Number of rollouts in the step that failed with an infrastructure error.

    Failed rollouts are never best or worst.
    """
    rollout: Rollout


class BestWorstRecorder:
    """Writes the best and worst rollouts to the run directory, on the main rank.

    In a resumed run, run/superseded_steps.py has already moved the files of repeated steps to
    RUN/superseded.
    """

    def __init__(self, run_dir: Path, *, num_best: int, num_worst: int) -> None:
        assert min(num_best, num_worst) >= 0, f"num_best={num_best}, num_worst={num_worst}"
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._best, self._worst = num_best, num_worst

    def record(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write the best rollouts and then the worst rollouts of a step (select_best_and_worst).

        No file is written if no rollout was scored or no rollouts are requested.
        """
        chosen = select_best_and_worst(rollouts, num_best=self._best, num_worst=self._worst)
        if any(chosen.values()):
            write_rollouts(self._folder / f"step_{step:06d}.jsonl", chosen, step=step, step_rollouts=rollouts)


def select_best_and_worst(rollouts: Sequence[Rollout], *, num_best: int, num_worst: int) -> dict[str, list[Rollout]]:
    """Return the `num_best` highest-reward and the `num_worst` lowest-reward rollouts.

    No rollout is in both lists. Rollouts with equal rewards are ordered by group and sample index.
    """
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    best_first = sorted(scored, key=lambda rollout: (-reward_of(rollout), rollout.group, rollout.sample_index))
    return {"best": best_first[:num_best], "worst": best_first[num_best:][::-1][:num_worst]}


def write_rollouts(path: Path, rollouts_by_kind: Mapping[str, Sequence[Rollout]], *, step: int, step_rollouts: Sequence[Rollout]) -> None:
    """Write rollouts of a step, keyed by kind, and save the images whose pixels this rank has.

    `step_rollouts` are all rollouts of the step.
    """
    counts = {"step": step, "num_rollouts": len(step_rollouts), "num_failed": sum(not rollout.is_scored for rollout in step_rollouts)}
    save_images(path.parent, [rollout for rollouts in rollouts_by_kind.values() for rollout in rollouts])
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {**counts, "kind": kind, "rollout": to_record(each, lambda image: image_file_name(image.key))}
        for kind, rollouts in rollouts_by_kind.items()
        for each in rollouts
    ]
    write_lines_atomically(path, lines)


def save_images(folder: Path, rollouts: Sequence[Rollout]) -> None:
    """Write the images of these rollouts to files, except images that already have a file.

    If several images have the same key, only the first of them is written, and only by the rank
    that has its pixels. If all ranks pass the same rollouts, no two ranks write the same file.
    """
    first: dict[str, Image] = {}
    for rollout in rollouts:
        for image in rollout.images:
            first.setdefault(image.key, image)
    new = [image for image in first.values() if image.pil is not None and not (folder / image_file_name(image.key)).exists()]
    if new:
        (folder / image_file_name("x")).parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(NUM_WRITER_THREADS) as threads:
            list(threads.map(partial(_save_image, folder), new))


def _save_image(folder: Path, image: Image) -> None:
    encoded = io.BytesIO()
    assert image.pil is not None, "save_images selects images with pixels"
    image.pil.save(encoded, format="PNG")
    write_bytes_atomically(folder / image_file_name(image.key), encoded.getvalue())


def read_recorded(path: Path, *, with_images: bool = True) -> list[RecordedRollout]:
    """Return the rollouts in a file.

    Without `with_images`, images contain only their size and key; `image_path` returns the path of
    an image's file.

    Raises:
        ValueError: the file is damaged or has another format version, or an image is missing. The
            message names the file and line.
    """
    load = make_image_loader(path.parent) if with_images else lambda name: None
    entries = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            entries.append(_decode_entry(line, load))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from error
    return entries


def image_keys_in(path: Path) -> frozenset[str]:
    """Return the keys of the images named in a file, even if the file is damaged."""
    return frozenset(key.decode() for key in _IMAGE_REFERENCE.findall(read_bytes(path, at_most=MAX_LINES_BYTES)))


def image_path(path: Path, image: Image) -> Path:
    """Return the file path of an image; `path` is the rollout file that names the image."""
    return path.parent / image_file_name(image.key)


def make_image_loader(folder: Path) -> Callable[[str], Picture]:
    """Return a function that loads an image by its name in a record, and caches it.

    The names are defined in io/rollout_codec.from_record. The function raises ValueError if an
    image is missing or damaged.
    """
    return cache(partial(_load_image, folder))


def _decode_entry(line: object, load: Callable[[str], Picture | None]) -> RecordedRollout:
    names = {"step": int, "num_rollouts": int, "num_failed": int, "kind": str}
    if not isinstance(line, dict) or line.keys() != {*names, "rollout"}:
        raise ValueError("not a rollout record, or written by another version of this program; use the version that wrote it")
    for name, kind in names.items():
        if type(line[name]) is not kind:
            raise ValueError(f"{name} is {line[name]!r:.40}")
    return RecordedRollout(**{**line, "rollout": from_record(line["rollout"], load)})


def image_file_name(key: str) -> str:
    """Return the path, relative to the rollout file, of the image with this Image.key."""
    assert key.isalnum() and key.isascii(), f"Image.key {key!r} cannot name a file"
    return f"{IMAGES_FOLDER}/{key}.png"


def _load_image(folder: Path, name: str) -> Picture:
    if not _IMAGE_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} is not the name of an image in the folder images")
    try:
        content = read_bytes(folder / name, at_most=MAX_IMAGE_BYTES)
        with pil.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if math.prod(picture.size) > MAX_PIXELS:
                raise ValueError(f"{picture.width}x{picture.height} pixels, more than {MAX_PIXELS}")
            return picture.copy()
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, DecompressionBombError) as error:
        raise ValueError(f"{name}: cannot read the image ({error})") from error
