"""Probes of file readers: untrusted run directories, models and datasets."""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.probes import bombs, readers
from benchmarks.probes.probe import Probe
from megatron_rl.io.bounded_files import read_tail, to_printable
from megatron_rl.io.jsonl import read_lines
from megatron_rl.models.hf_config import read_spec
from megatron_rl.observe.metrics import read_metrics
from megatron_rl.run.changed_settings import read_settings
from megatron_rl.run.checkpoints import CheckpointState, write_state
from megatron_rl.weights.formats.digests import make_file_record

Read = Callable[[Path], Any]


def file_at(make: Callable[[Path], Path], name: str) -> Callable[[Read, Path], str]:
    """Return an attack in which the reader reads a file of this name, created by `make`.

    The attack never returns a success message. The attack succeeds if the reader exceeds the
    probe's limits on time or memory, or fails with an unexpected exception.
    """

    def attack(read: Read, folder: Path) -> str:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        read(make(path))
        return ""

    return attack


def is_printed(read: Read, folder: Path) -> str:
    """Return a success message if the reader accepts a value that cannot be printed, else "".

    The value is a hexadecimal number with more digits than Python converts to decimal text.
    """
    found = read(bombs.text(folder / "config.yaml", HEX))
    try:
        return "" if str(found) else "nothing is read"
    except ValueError:
        return "the value that was read cannot be printed"


def reads_a_link(read: Read, folder: Path) -> str:
    """Return a success message if a link to a file outside the run is followed, else ""."""
    images = folder / "run" / "rollouts" / "images"
    images.mkdir(parents=True)
    secret = folder / "secret"
    secret.write_bytes(bombs.PNG + b"private")
    found = read(bombs.link(images / "a.png", str(secret)))
    return "a file outside the run is shown" if found else ""


def shares_bytes(read: Read, folder: Path) -> str:
    """Return a success message if tensors with the same offsets are accepted, else "".

    Changing one of these tensors would change the other.
    """
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    found = read(bombs.safetensors(folder / "model.safetensors", {"a": entry, "b": entry}, data=16))
    return f"{len(found)} tensors are read" if found else ""


def reads_before_the_file(read: Read, folder: Path) -> str:
    """Return a success message if invalid offsets or shapes are accepted, else "".

    The offsets of one tensor start before the file, and the shape of the other tensor has too many
    elements for a 64-bit integer.
    """
    places = {"a": ([4], [-16, 0]), "b": ([2**62, 4], [0, 0])}
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": ends} for name, (shape, ends) in places.items()}
    found = read(bombs.safetensors(folder / "model.safetensors", header, data=16))
    return f"{len(found)} tensors are read" if found else ""


def runs_code(read: Read, folder: Path) -> str:
    """Return a success message if reading a pickle runs code, else "".

    The file is `.metadata`, which torch.distributed.checkpoint loads with pickle.
    """
    with suppress(ValueError):
        read(bombs.pickled(folder / ".metadata", opens=folder / "written"))
    return "a file is opened for writing" if (folder / "written").exists() else ""


def checkpoint(folder: Path, name: str, content: bytes, **changes: object) -> Path:
    """Create a checkpoint that consists of one file, and record the digest of this file."""
    made = folder / name
    (made / "run").mkdir(parents=True)
    (made / "__0_0.distcp").write_bytes(content)
    write_state(
        made / "run" / "state.json", {**asdict(CheckpointState(files={"__0_0.distcp": make_file_record(made / "__0_0.distcp")})), **changes}
    )
    return made


def swaps_files(difference: Callable[[Path], str], folder: Path) -> str:
    """Return a success message if a file from an older checkpoint is accepted, else "".

    The file has the same length as the file that it replaces in the newer checkpoint.
    """
    old, new = checkpoint(folder, "step_1", b"old numbers"), checkpoint(folder, "step_2", b"new numbers")
    (new / "__0_0.distcp").write_bytes((old / "__0_0.distcp").read_bytes())
    return "" if difference(new) else "the old numbers are accepted"


def claims_a_step(value: object) -> Callable[[Callable[[Path], int], Path], str]:
    """Return an attack with a checkpoint state that contains this step and has a valid digest."""

    def attack(step_of: Callable[[Path], int], folder: Path) -> str:
        found = step_of(checkpoint(folder, "step_1", b"numbers", step=value))
        return f"step {found!r} is accepted"

    return attack


def names_a_file_outside(difference: Callable[[Path], str], folder: Path) -> str:
    """Return a success message if a file outside the checkpoint is hashed, else ""."""
    (folder / "secret").write_text("private")
    files = {"../secret": {"bytes": 7, "sha256": hashlib.sha256(b"private").hexdigest()}}
    return "" if difference(checkpoint(folder, "step_1", b"numbers", files=files)) else "a file outside the checkpoint is read"


def moves_the_terminal(printed: Callable[[str], str], folder: Path) -> str:
    """Return a success message if an error message contains control characters, else "".

    The control characters come from config.json and would reach the terminal.
    """
    bombs.text(folder / "config.json", json.dumps({"model_type": "\x1b]0;owned\x07\x1b[2J"}))
    try:
        read_spec(folder)
    except ValueError as error:
        return "the terminal's title is changed" if "\x1b" in printed(str(error)) else ""
    return ""


def reaches_classes(render: Callable[[str], str], folder: Path) -> str:
    """Return a success message if a chat template can access a Python class, else ""."""
    forms = (
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.__class__ }}",
    )
    reached = []
    for form in forms:
        try:
            reached += [form] if "class" in render(form) or "globals" in render(form) else []
        except Exception:
            continue
    return f"{len(reached)} of {len(forms)} forms reach a class" if reached else ""


def renders_for_ever(form: str) -> Callable[[Callable[[str], str], Path], str]:
    """Return an attack with a chat template that takes very long to render."""

    def attack(render: Callable[[str], str], folder: Path) -> str:
        render(form + CHAT)
        return ""

    return attack


CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BASE_60 = "steps: 1" + ":59" * 160_000
HEX = "steps: 0x" + "f" * 400_000


def settings_of(content: str) -> Callable[[Read, Path], str]:
    """Return an attack with a config.yaml that has this content."""
    return file_at(partial(bombs.text, content=content), "config.yaml")


def picture_of(make: Callable[[Path], Path], name: str = "a.png") -> Callable[[Read, Path], str]:
    """Return an attack with the image file that `make` creates."""
    return file_at(make, name)


ZEROS = partial(bombs.link, target="/dev/zero")
DEEP = file_at(partial(bombs.text, content="[" * 100_000 + "\n"), "metrics.jsonl")
MANY_ROWS = file_at(bombs.step_of_many_rows, "step_000001.parquet")
FILES = tuple(
    Probe("files", name, attack, defended, control)
    for name, attack, defended, control in (
        ("settings: nested merge keys", file_at(bombs.merges, "config.yaml"), read_settings, readers.plain_yaml),
        ("settings: a base-60 number of 160,001 digits", settings_of(BASE_60), read_settings, readers.plain_yaml),
        ("settings: a number that cannot be printed", is_printed, read_settings, readers.plain_yaml),
        ("settings: a sparse file of 100 GB", file_at(bombs.sparse, "config.yaml"), read_settings, readers.plain_yaml),
        ("metrics: a link to /dev/zero", file_at(ZEROS, "metrics.jsonl"), read_metrics, readers.plain_lines),
        ("metrics: a FIFO, in the viewer", file_at(bombs.fifo, "metrics.jsonl"), readers.metrics_of_folder, readers.plain_lines),
        ("metrics: a line of 100,000 nested lists", DEEP, read_lines, readers.plain_lines),
        ("log: the tail of a file of 100 GB", file_at(bombs.sparse, "judge.log"), read_tail, readers.plain_end),
        (
            "images: 144 megapixels, in a rollout",
            picture_of(bombs.png, "images/a.png"),
            readers.loaded_picture,
            readers.plain_picture,
        ),
        ("images: 144 megapixels, in a question", picture_of(bombs.png), readers.stored_picture, readers.plain_picture),
        ("images: a FIFO instead of a question's image", picture_of(bombs.fifo), readers.stored_picture, readers.plain_picture),
        ("images: the size of a FIFO", picture_of(bombs.fifo), readers.size_of_picture, readers.plain_size),
        ("images: a link to /dev/zero", picture_of(ZEROS), readers.stored_picture, Path.read_bytes),
        ("images: a link out of the run, in the viewer", reads_a_link, readers.shown_picture, Path.read_bytes),
        ("videos: a FIFO instead of a question's video", file_at(bombs.fifo, "a.mp4"), readers.stored_clip, Path.read_bytes),
        ("rollouts: a million rows with the same text", MANY_ROWS, readers.stored_rollouts, readers.plain_rollouts),
        ("tokenizer: a token that is doubled 40 times", file_at(bombs.tokenizer, "tokenizer.json"), readers.decoded, readers.decoded_here),
        ("weights: two tensors that share their bytes", shares_bytes, readers.stored_safetensors, readers.plain_safetensors),
        (
            "weights: offsets before the file, and a shape of 2**64 elements",
            reads_before_the_file,
            readers.stored_safetensors,
            readers.plain_safetensors,
        ),
        ("checkpoint: a pickle that opens a file", runs_code, readers.metadata, readers.plain_pickle),
        ("checkpoint: another checkpoint's file of the same length", swaps_files, readers.by_digest, readers.by_size),
        ("checkpoint: infinitely many steps, with a valid digest", claims_a_step(1e999), readers.by_state, readers.by_plain_state),
        ("checkpoint: a record of files outside the checkpoint", names_a_file_outside, readers.by_digest, readers.plain_digest),
        ("terminal: control characters in a model's config.json", moves_the_terminal, to_printable, str),
        ("template: four ways to reach a class", reaches_classes, readers.rendered, readers.as_a_page),
        ("template: loops of 10**10 iterations", renders_for_ever(LOOPS), readers.inspected, readers.rendered),
        ("template: a string of 10 GB", renders_for_ever("{% set text = 'x' * 10000000000 %}"), readers.inspected, readers.rendered),
    )
)
