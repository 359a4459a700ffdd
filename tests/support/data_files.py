"""Writes the same rows as a JSON list, JSON lines or Parquet, and creates images with known
pixels.
"""

import base64
import json
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SUFFIXES = (".json", ".jsonl", ".parquet")


def make_png(color: str = "red", *, size: tuple[int, int] = (30, 20), mode: str = "RGB") -> bytes:
    buffer = BytesIO()
    Image.new(mode, size, color).save(buffer, format="PNG")
    return buffer.getvalue()


def encode_bytes(value: object) -> object:
    """Replace bytes, which JSON does not support, by base64 text at any depth."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key: encode_bytes(item) for key, item in value.items()}
    return [encode_bytes(item) for item in value] if isinstance(value, list) else value


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write the rows in the format of the path's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_struct_array(pa.array(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(encode_bytes(rows), indent=1, ensure_ascii=False))
    else:
        path.write_text("".join(json.dumps(encode_bytes(row)) + "\n" for row in rows))
    return path
