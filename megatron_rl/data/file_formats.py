"""Supported data file formats, and error messages for unsupported formats."""

from pathlib import Path

FORMATS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".tsv", ".csv")
"""Suffixes of supported data files, matched case-insensitively."""
FORMATS_BY_PREFERENCE = ((".parquet",), (".arrow",), (".jsonl", ".ndjson"), (".json",), (".tsv", ".csv"))
"""Groups of suffixes in order of preference.

In a folder, only the files of the first group that occurs are read; files of other groups are
assumed to describe the data.
"""
FORMATS_TEXT = "Parquet (.parquet), Arrow (.arrow), JSON lines (.jsonl, .ndjson), JSON (.json), tables (.tsv, .csv)"
_TEXT = (".jsonl", ".ndjson", ".json", ".tsv", ".csv")
COMPRESSED = {
    ".gz": "gunzip", ".tgz": "tar -xzf", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".lz4": "unlz4", ".zip": "unzip",
    ".7z": "7z x", ".tar": "tar -xf", ".rar": "unrar x",
}  # fmt: skip
"""Maps the suffix of a compressed file to the command that unpacks it."""
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".tmp")
_PICKLE = ("is a pickle, which could run code", "write it as Parquet or JSON lines")
_SHEET = ("is a spreadsheet", "save it as CSV in UTF-8")
_SQLITE = ("is a SQLite database", "export it as CSV or JSON lines")
_COLUMNS = ("is a pandas format that is not supported", "write it as Parquet")
UNSUPPORTED = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".ods"), _SHEET),
    **dict.fromkeys((".pkl", ".pickle", ".pt", ".pth", ".joblib"), _PICKLE),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3"), _SQLITE),
    **dict.fromkeys((".feather", ".orc", ".h5", ".hdf5"), _COLUMNS),
}
"""Maps an unsupported suffix to a description of the format and the fix."""
_MAGIC = {
    b"\x1f\x8b": ("is compressed (gzip)", "unpack it: gunzip"),
    b"\x28\xb5\x2f\xfd": ("is compressed (zstd)", "unpack it: unzstd"),
    b"BZh": ("is compressed (bzip2)", "unpack it: bunzip2"),
    b"\xfd7zXZ": ("is compressed (xz)", "unpack it: unxz"),
    b"PK\x03\x04": ("is a zip archive or an Excel file", "unpack it, or save it as CSV"),
    b"PAR1": ("is a Parquet file", "rename it to .parquet"),
    b"ARROW1": ("is an Arrow file", "rename it to .arrow"),
    b"SQLite format 3": _SQLITE,
    b"\xff\xfe": ("is in UTF-16", "write it in UTF-8"),
    b"\xfe\xff": ("is in UTF-16", "write it in UTF-8"),
    b"\x80\x04\x95": _PICKLE,
    b"version https://git-lfs": ("is a Git LFS pointer, not the data", "get the data: git lfs pull"),
}
"""Maps the first bytes of a misnamed file to the file's actual format and the fix."""


class UnreadableFile(ValueError):
    """Error that states why a file cannot be read."""


def check_format(path: Path) -> None:
    """Raise UnreadableFile if the file's suffix or its first bytes are unsupported.

    The error message suggests a fix.
    """
    suffix = path.suffix.casefold()
    if suffix in COMPRESSED:
        raise UnreadableFile(f"is compressed; unpack it: {COMPRESSED[suffix]} {path.name}")
    if suffix in UNSUPPORTED:
        raise UnreadableFile("; ".join(UNSUPPORTED[suffix]))
    if suffix not in FORMATS:
        raise UnreadableFile(f"is not in a supported format ({suffix or 'no suffix'}); {FORMATS_TEXT} are supported: convert or rename it")
    with path.open("rb") as file:
        first = file.read(32)
    found = next((told for magic, told in _MAGIC.items() if first.startswith(magic)), None)
    if found and (suffix in _TEXT or b"git-lfs" in first):
        raise UnreadableFile(f"{found[0]} despite its name; {found[1]}")
