"""Rollouts in files: the best and the worst of every step for people, or whatever else is to be kept and played back.

    RUN/rollouts/step_000012.jsonl            a line a rollout: an Entry, whose rollout is a record of io/rollout_codec.py
    RUN/rollouts/images/KEY.png               KEY is Image.key: equal pixels are stored once
A file's pictures lie in the folder `images` beside it: both can be moved together. A rollout takes 25 bytes for each token that it
observed and 56 for each that it sampled (37 and 98 where old and reference logprobs are known), about 1 kB, and its pictures.
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
from megatron_rl.types import Image, Rollout

ROLLOUTS_FOLDER = "rollouts"
IMAGES_FOLDER = "images"
"""In the folder of a file."""
NUM_WRITER_THREADS = 4
"""That write pictures: each waits until the disk has its own."""
MAX_IMAGE_BYTES, MAX_PIXELS = 256 << 20, 1 << 26
"""Limits of a recorded picture that is read back: more than a policy is ever given."""
_IMAGE_REFERENCE = re.compile(IMAGES_FOLDER.encode() + rb"/([0-9A-Za-z]+)\.png")
_IMAGE_NAME = re.compile(IMAGES_FOLDER + r"/[0-9A-Za-z]+\.png")


@dataclass(slots=True, frozen=True, kw_only=True)
class RecordedRollout:
    """One line of a file."""

    step: int
    kind: str
    """best or worst of its step; kept: the file holds all of them."""
    num_rollouts: int
    """Rollouts of the step in all..."""
    num_failed: int
    """...and those among them that failed through our own fault, which are never the best or the worst."""
    rollout: Rollout


class BestWorstRecorder:
    """Writes into one run folder, on the main rank. Steps that are done again were moved away before (run/superseded_steps.py)."""

    def __init__(self, run_dir: Path, *, num_best: int, num_worst: int) -> None:
        assert min(num_best, num_worst) >= 0, f"num_best={num_best}, num_worst={num_worst}"
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._best, self._worst = num_best, num_worst

    def record(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Write the best, then the worst of a step (select_best_and_worst).

        Leaves no file when there is nothing to tell: no rollout was scored, or none is wanted.
        """
        chosen = select_best_and_worst(rollouts, num_best=self._best, num_worst=self._worst)
        if any(chosen.values()):
            write_rollouts(self._folder / f"step_{step:06d}.jsonl", chosen, step=step, step_rollouts=rollouts)


def select_best_and_worst(rollouts: Sequence[Rollout], *, num_best: int, num_worst: int) -> dict[str, list[Rollout]]:
    """So many of either kind by reward; none twice; equal rewards in the order of group and sample."""
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    best_first = sorted(scored, key=lambda rollout: (-rollout.reward, rollout.group, rollout.sample_index))
    return {"best": best_first[:num_best], "worst": best_first[num_best:][::-1][:num_worst]}


def write_rollouts(path: Path, rollouts_by_kind: Mapping[str, Sequence[Rollout]], *, step: int, step_rollouts: Sequence[Rollout]) -> None:
    """Write a file of these rollouts of a step by kind, and what this rank has of their pictures beside it. `step_rollouts` is all that
    the step rolled out."""
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
    """Write the pictures of these rollouts, each the first time that its key is seen. A picture is its first rollout's, and is written by
    the rank that has that one's: with the same rollouts on all ranks no two write the same file."""
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
    image.pil.save(encoded, format="PNG")
    write_bytes_atomically(folder / image_file_name(image.key), encoded.getvalue())


def read_recorded(path: Path, *, with_images: bool = True) -> list[RecordedRollout]:
    """The entries of a file; without `with_images` their images are known by size and key alone, and lie at `image_path`.

    ValueError: the file is damaged, of another version, or lacks a picture; it names file and line.
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
    """Of the pictures that a file names, whatever else of it can be read."""
    return frozenset(key.decode() for key in _IMAGE_REFERENCE.findall(read_bytes(path, at_most=MAX_LINES_BYTES)))


def image_path(path: Path, image: Image) -> Path:
    """Where the picture of an image lies that was read from the file `path`."""
    return path.parent / image_file_name(image.key)


def make_image_loader(folder: Path) -> Callable[[str], Picture]:
    """Gives the picture of a name (io/rollout_codec.from_record), each read once. ValueError: there is none that can be read."""
    return cache(partial(_load_image, folder))


def _decode_entry(line: object, load: Callable[[str], Picture | None]) -> RecordedRollout:
    names = {"step": int, "num_rollouts": int, "num_failed": int, "kind": str}
    if not isinstance(line, dict) or line.keys() != {*names, "rollout"}:
        raise ValueError("not an entry of recorded rollouts, or one of another version; play it back with the program that wrote it")
    for name, kind in names.items():
        if type(line[name]) is not kind:
            raise ValueError(f"{name} is {line[name]!r:.40}")
    return RecordedRollout(**{**line, "rollout": from_record(line["rollout"], load)})


def image_file_name(key: str) -> str:
    """Of the file of the picture with this Image.key."""
    assert key.isalnum() and key.isascii(), f"Image.key {key!r} cannot name a file"
    return f"{IMAGES_FOLDER}/{key}.png"


def _load_image(folder: Path, name: str) -> Picture:
    if not _IMAGE_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.80} names no picture of the folder images")
    try:
        content = read_bytes(folder / name, at_most=MAX_IMAGE_BYTES)
        with pil.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if math.prod(picture.size) > MAX_PIXELS:
                raise ValueError(f"{picture.width}x{picture.height} pixels, more than {MAX_PIXELS}")
            return picture.copy()
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error, DecompressionBombError) as error:
        raise ValueError(f"{name}: no picture can be read ({error})") from error
