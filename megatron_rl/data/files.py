"""The files that a name in task.data stands for: a file, a folder of them, or a data set of Hugging Face's hub that this machine has.

A folder may be what `datasets` saved (save_to_disk) or a copy of a repository. `NAME:SPLIT` takes the files of one split, told by their
names and folders (data/train-00000-of-00002.parquet, test/data-00000-of-00001.arrow). Nothing is downloaded.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_rl.config import require

FORMATS = (".parquet", ".arrow", ".jsonl", ".json", ".tsv", ".csv")
"""Of a folder the first of these that it has is read: what else lies there tells of the data, and is none."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def files_of(name: str, *, key: str) -> list[Path]:
    """In order of their names. ValueError, under `key`: there are none, or a folder holds several splits and none is chosen."""
    if Path(name).is_file():
        return [Path(name)]
    folder, path, split = _folder_of(name, key=key)
    within = [found.relative_to(folder) for found in sorted(folder.rglob("*")) if found.suffix in FORMATS and _is_data(found)]
    files = [found for found in within if found.suffix == min((found.suffix for found in within), key=FORMATS.index)]
    splits = sorted({word for found in files for word in _words(found)} & set(SPLITS))
    choose = f"holds the splits {', '.join(splits)}; take one of them, {path}:{splits[0] if splits else ''}"
    require(bool(split) or len(splits) < 2, key, name, choose)
    chosen = [folder / found for found in files if not split or split in _words(found)]
    remedy = f"has no files of the split {split}" if split and files else f"has no files that end in {', '.join(FORMATS)}"
    require(bool(chosen), key, name, remedy)
    return chosen


def homes_of(name: str, *, key: str) -> list[Path]:
    """Of a folder, that folder: files in one part of it may name pictures in another. In Hugging Face's cache files are links to blobs."""
    if Path(name).is_file():
        return []
    folder, path, _ = _folder_of(name, key=key)
    return [folder] if folder == path else [folder, folder.parent.parent / "blobs"]


def _folder_of(name: str, *, key: str) -> tuple[Path, Path, str]:
    """The folder that a name stands for, what of the name says so, and the split that it chooses."""
    path, split = Path(name), ""
    if not path.is_dir() and ":" in name:
        start, _, split = name.rpartition(":")
        path = Path(start)
    return path if path.is_dir() else _cached(str(path), name, key=key), path, split


def looked_at(name: str) -> str:
    """Return where a relative path was looked for, in words."""
    return "" if Path(name).is_absolute() else f" (looked at {Path(name).absolute()})"


def _cached(hub_name: str, name: str, *, key: str) -> Path:
    """The folder of a data set in Hugging Face's cache."""
    require(_HUB_NAME.fullmatch(hub_name) is not None, key, name, f"no such file{looked_at(name)}")
    try:
        return Path(snapshot_download(hub_name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError as error:
        remedy = f"and no such data set in the cache of Hugging Face; get it by: hf download --repo-type dataset {hub_name}"
        raise ValueError(f"{key}={name}: no such file{looked_at(name)}, {remedy}") from error


def _is_data(path: Path) -> bool:
    """Not what a tool keeps beside the data: cache-*.arrow are intermediate results of `datasets`."""
    return path.is_file() and not path.name.startswith((".", "cache-"))


def _words(path: Path) -> set[str]:
    """Example: data/train-00000-of-00002.parquet -> {data, train, 00000, of, 00002}."""
    return {word for part in path.with_suffix("").parts for word in re.split(r"[-_.]", part)}
