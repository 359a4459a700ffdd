"""Selects the files of a folder that belong to the folder's data set, and detects missing shards.

`datasets.save_to_disk` writes state.json next to the shards of a data set and lists the shards in
its key `_data_files`. If there are several splits, save_to_disk also writes dataset_dict.json in
their parent folder. Shards from an earlier save may remain in the same folder.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import require
from megatron_rl.io.jsonl import read_json

STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
METADATA_FILES = {STATE_FILE, SPLITS_FILE, "dataset_info.json", "dataset_infos.json"}
"""JSON files that describe a data set."""
_SHARD = re.compile(r"(?P<prefix>.*?)(?P<number>(?<!\d)\d{1,6})(?P<of>[-_]of[-_])(?P<total>\d{1,6})([-_][0-9a-f]{8,16})?")
"""Matches the stem of a shard's file name, such as train-00000-of-00002 or d_1_of_8."""
_MOST_NAMED = 5


def read_saved_splits(folder: Path, *, key: str, name: str) -> list[str]:
    """Return the splits of the DatasetDict in a folder, or an empty list if there is none.

    Raises:
        ValueError: the folder of a split is missing.
    """
    path = folder / SPLITS_FILE
    splits = _read(path, key=key, name=name).get("splits", []) if path.is_file() else []
    splits = [split for split in splits if isinstance(split, str)] if isinstance(splits, list) else []
    for split in splits:
        remedy = f"{SPLITS_FILE} lists the split {split}, but there is no folder {folder / split}; save the data set again"
        require((folder / split).is_dir(), key, name, remedy)
    return splits


def find_saved_files(folders: Sequence[Path], *, key: str, name: str) -> dict[Path, list[Path]]:
    """Return the data files listed in the folders' state.json files, keyed by folder.

    Raises:
        ValueError: a listed file is missing, or the data set was saved with an indices mapping.
    """
    found = {}
    for folder in folders:
        path = folder / STATE_FILE
        state = _read(path, key=key, name=name) if path.is_file() else {}
        remedy = f"{path} lists indices of an older version of datasets, which are not supported; call flatten_indices() and save it again"
        require(not state.get("_indices_data_files"), key, name, remedy)
        listed = state.get("_data_files")
        if not isinstance(listed, list):
            continue
        names = [str(each.get("filename", "")) for each in listed if isinstance(each, Mapping)]
        missing = [each for each in names if not (folder / each).is_file()]
        listed = ", ".join(missing[:_MOST_NAMED])
        require(not missing, key, name, f"{path} lists files that do not exist: {listed}; copy the files, or save the data set again")
        found[folder] = [folder / each for each in names]
    return found


def check_shards(files: Sequence[Path], *, key: str, name: str) -> None:
    """Raise ValueError unless each set of shards NAME-NNNNN-of-MMMMM is complete.

    Each shard number must occur exactly once, and all shards with the same name must have the same
    total M.
    """
    sets: dict[tuple[Path, str, str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        if shard := _SHARD.fullmatch(file.stem):
            sets[file.parent, shard["prefix"], shard["of"], file.suffix][shard["total"]].append(shard["number"])
    for (folder, prefix, of, suffix), by_total in sets.items():
        if len(by_total) > 1:
            given = ", ".join(f"{len(numbers)} of {int(total)}" for total, numbers in sorted(by_total.items()))
            remedy = "remove the outdated shards"
            require(False, key, name, f"{folder} contains shards of several sets named {prefix.rstrip('-_.')}: {given}; {remedy}")
        ((total, numbers),) = by_total.items()
        twice = ", ".join(f"{prefix}{number}{of}{total}" for number, count in Counter(numbers).items() if count > 1)
        require(not twice, key, name, f"{folder} contains {twice} more than once; remove the outdated files")
        there = {int(number) for number in numbers}
        first = 1 if int(total) in there else 0  # some tools number shards from 1
        missing = sorted({*range(first, int(total) + first)} - there)
        told = ", ".join(f"{prefix}{number:0{min(map(len, numbers))}d}{of}{total}{suffix}" for number in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        remedy = f"{folder} lacks {told}{more}; add these files, or name the files to read"
        require(not missing, key, name, remedy)


def _read(path: Path, *, key: str, name: str) -> Mapping[str, object]:
    try:
        found = read_json(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{key}={name}: {path} is not valid JSON ({error}); save the data set again") from error
    return found if isinstance(found, dict) else {}
