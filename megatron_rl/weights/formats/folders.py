"""Checkpoint folders that are whole or absent, whatever kills the process that writes them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_COMPANIONS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx", ".distcp"}
"""Suffixes of weights in a Hugging Face folder; `*.index.json` belongs to them."""


@contextmanager
def whole_or_absent(out: Path) -> Iterator[Path]:
    """An empty hidden folder beside `out`; when the block ends it is flushed to disk and takes out's name and place.

    If the block raises, what was written is removed, with the parents that were made for it, and a folder that was at `out` stays.
    What a killed process left is removed by the next one, which puts the old folder back if it died between the two renames.
    Raises OSError (disk full, no permission, a file in the way).
    """
    partial, replaced = out.with_name(f".{out.name}.partial"), out.with_name(f".{out.name}.replaced")
    if replaced.exists() and not out.exists():
        replaced.rename(out)
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        yield partial
        for folder, _, files in os.walk(partial):
            for file in files:
                flush(Path(folder, file))
            flush(Path(folder))
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        flush(out.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        with suppress(OSError):  # somebody else's file is in it by now, or it was not made
            for parent in made:
                parent.rmdir()
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def flush(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_companions(source: Path, into: Path) -> list[str]:
    """Copy config, tokenizer, processor and chat template: every file of a Hugging Face folder but its weights and hidden files.

    Returns the parts of a complete folder that are missing, in words.
    """
    into.mkdir(exist_ok=True)
    for path in source.iterdir():
        is_weights = path.suffix in NO_COMPANIONS or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, into / path.name)
    names = {path.name for path in into.iterdir()}
    parts = {
        "tokenizer": {"tokenizer.json", "vocab.json"},
        "processor": {"preprocessor_config.json", "processor_config.json"},
        "generation config": {"generation_config.json"},
    }
    return [part for part, files in parts.items() if not files & names]
