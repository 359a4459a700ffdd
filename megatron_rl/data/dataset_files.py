"""Resolves names in task.data to data files.

A name refers to a file, a folder of files, or a Hugging Face data set in the local cache.

A folder may be the output of `datasets.save_to_disk` (shards.py) or a copy of a hub repository.
`NAME:SPLIT` selects the files of one split. Splits are inferred from file and folder names, such as
data/train-00000-of-00002.parquet or test/data-00000-of-00001.arrow. Nothing is downloaded.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_rl.config import require
from megatron_rl.data.file_formats import COMPRESSED, FORMATS, FORMATS_BY_PREFERENCE, UNFINISHED
from megatron_rl.data.shards import METADATA_FILES, check_shards, find_saved_files, read_saved_splits

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_data_files(name: str, *, key: str) -> list[Path]:
    """Return the data files for a name, sorted by path.

    Raises:
        ValueError: there are no files, the name selects no split of a folder that contains several
            splits, or files of the data set are missing. The message names the setting `key`.
    """
    if Path(name).is_file():
        return [Path(name)]
    folder, path, split = _resolve_folder(name, key=key)
    saved = read_saved_splits(folder, key=key, name=name)
    within = [found.relative_to(folder) for found in _data_files(folder, key=key, name=name) if _is_of_splits(found, folder, saved)]
    _check_compressed(folder, within, key=key, name=name)
    kind = next((kind for kind in FORMATS_BY_PREFERENCE if any(_suffix(found) in kind for found in within)), ())
    files = [found for found in within if _suffix(found) in kind]
    splits = saved or sorted({word for found in files for word in _name_words(found)} & set(SPLITS))
    choose = f"contains the splits {', '.join(splits)}; choose one of them, {path}:{splits[0] if splits else ''}"
    require(bool(split) or len(splits) < 2, key, name, choose)
    chosen = [folder / found for found in files if not split or _is_of_split(found, split, saved)]
    others = ", ".join(sorted({found.suffix for found in folder.rglob("*") if found.is_file() and found.suffix})[:10])
    nothing = f"contains no files that end in {', '.join(FORMATS)}" + (f"; it contains files that end in {others}" if others else "")
    require(bool(chosen), key, name, f"contains no files of the split {split}" if split and files else nothing)
    check_shards(chosen, key=key, name=name)
    return chosen


def _data_files(folder: Path, *, key: str, name: str) -> list[Path]:
    """Return the candidate data files in the folder and its subfolders.

    In folders written by save_to_disk, only the files listed in state.json are returned.
    """
    found = [path for path in sorted(folder.rglob("*")) if _suffix(path) in FORMATS and _is_data(path)]
    folders = sorted({path.parent for path in folder.rglob("state.json")})
    saved = find_saved_files(folders, key=key, name=name)
    return sorted([path for path in found if path.parent not in saved] + [path for files in saved.values() for path in files])


def _is_of_splits(path: Path, folder: Path, saved: list[str]) -> bool:
    return not saved or path.relative_to(folder).parts[0] in saved


def _is_of_split(path: Path, split: str, saved: list[str]) -> bool:
    if saved:
        return path.parts[0] == split
    return split in _name_words(path) or split in path.parts or path.name.startswith((f"{split}-", f"{split}."))


def _check_compressed(folder: Path, within: list[Path], *, key: str, name: str) -> None:
    """Raise ValueError if the folder contains a compressed data file or an unfinished download.

    If `within` contains data files, only compressed files of the same formats are checked, such as
    b.jsonl.gz next to a.jsonl. If `within` is empty, compressed files of every supported format are
    checked.
    """
    wanted = {_suffix(found) for found in within} or {*FORMATS}
    for path in sorted(folder.rglob("*")):
        suffix = _suffix(path)
        if suffix not in (*COMPRESSED, *UNFINISHED) or _suffix(path.with_suffix("")) not in wanted or not _is_data(path):
            continue
        unfinished = "is an unfinished download; download it again, or remove it"
        packed = f"is compressed, which is not read; unpack it: {COMPRESSED.get(suffix)} {path}"
        require(False, key, name, f"{path.relative_to(folder)} {unfinished if suffix in UNFINISHED else packed}")


def _suffix(path: Path) -> str:
    return path.suffix.casefold()


def allowed_image_folders(name: str, *, key: str) -> list[Path]:
    """Return the folders from which the rows of a data set may load images.

    For a folder, return the folder itself, because files in one subfolder may name images in
    another subfolder. For a data set in the Hugging Face cache, also return its blobs folder,
    because the cached files are links to blobs. For a single file, return an empty list.
    """
    if Path(name).is_file():
        return []
    folder, path, _ = _resolve_folder(name, key=key)
    return [folder] if folder == path else [folder, folder.parent.parent / "blobs"]


def _resolve_folder(name: str, *, key: str) -> tuple[Path, Path, str]:
    """Return the folder that a name refers to, the name without the split, and the split.

    The split is "" if the name has none.
    """
    path, split = Path(name), ""
    if not path.is_dir() and ":" in name:
        start, _, split = name.rpartition(":")
        path = Path(start)
    return path if path.is_dir() else _find_in_hub_cache(str(path), name, key=key), path, split


def describe_searched_path(name: str) -> str:
    """Return a phrase with the absolute form of a relative path, or "" for an absolute path."""
    return "" if Path(name).is_absolute() else f" (looked at {Path(name).absolute()})"


def _find_in_hub_cache(hub_name: str, name: str, *, key: str) -> Path:
    """Return the folder of a data set in the Hugging Face cache."""
    require(_HUB_NAME.fullmatch(hub_name) is not None, key, name, f"no such file{describe_searched_path(name)}")
    try:
        return Path(snapshot_download(hub_name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError as error:
        remedy = f"and no such data set in the Hugging Face cache; download it: hf download --repo-type dataset {hub_name}"
        raise ValueError(f"{key}={name}: no such file{describe_searched_path(name)}, {remedy}") from error


def _is_data(path: Path) -> bool:
    """Return True for a data file.

    Hidden files, metadata files and cache files (such as the files cache-*.arrow of `datasets`) are
    not data files.
    """
    return path.is_file() and not path.name.startswith((".", "cache-")) and path.name not in METADATA_FILES


def _name_words(path: Path) -> set[str]:
    """Split the folder names and the file name in a path into words.

    Example: data/train-00000-of-00002.parquet -> {data, train, 00000, of, 00002}.
    """
    return {word for part in path.with_suffix("").parts for word in re.split(r"[-_.]", part)}
