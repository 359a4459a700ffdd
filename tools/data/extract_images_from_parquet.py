"""Extracts the images of a Parquet file into JPEG files and writes a table with their paths.

Reads the columns images (a list of {bytes} or {path}) and extra_info.image_file_name (a name, or a
list with one name per image).

The images are written to OUT/images/NAME.jpg with JPEG quality 95. The images are rotated upright,
and transparent areas are filled with white. The table is written to
OUT/STEM_with_image_paths.parquet. The table contains the input rows, with {path} in the column
images. The columns image_file_path (relative to the table's folder), image_file_name and
image_file_size (bytes) are added; they contain lists if the input's image_file_name is a list.

Files are written atomically. If the tool is restarted, it skips images that are already extracted.
It recognizes them by the SHA-256 of the source image, which is stored in the comment of each JPEG
file. Files not written by this tool are
never overwritten.
"""

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_rl.config import require
from megatron_rl.data.images import SUFFIXES, UNREADABLE, StoredImage, make_stored_image, shorten
from megatron_rl.errors import InfraError
from megatron_rl_tools.commands import run_command

JPEG_QUALITY = 95
ROWS_AT_ONCE = 64


@dataclass(slots=True, frozen=True)
class WrittenImage:
    """Extracted image of a row."""

    path: str
    """Path of the image relative to the folder of the table."""
    name: str
    size: int


def extract_images(source: Path, out: Path, *, threads: int, console: Console) -> str:
    """Write the images and the table of a Parquet file, and return a one-line summary.

    Raises:
        ValueError: The file does not have the format described in the module docstring, or a row is
            invalid.
    """
    require(source.is_file(), "--parquet", source, "no such file")
    require(threads >= 1, "--threads", threads, "must be at least 1")
    try:
        table = pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"--parquet={source}: could not be read as Parquet ({error}); check the file") from error
    many = _names_are_lists(table.schema_arrow, source)
    target = out / f"{source.stem}_with_image_paths.parquet"
    target.parent.mkdir(parents=True, exist_ok=True)
    schema = _make_schema(table.schema_arrow, many=many)
    seen: dict[str, str] = {}
    partial = target.with_name(f".{target.name}.partial")
    try:
        with pq.ParquetWriter(partial, schema) as writer, ThreadPoolExecutor(threads) as pool, _progress(console) as bar:
            task, start = bar.add_task("rows", total=table.metadata.num_rows), 0
            for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, use_threads=False):
                jobs = list(_list_jobs(batch, source, start=start, many=many, seen=seen))
                written = list(pool.map(lambda row: [_write_image(image, name, digest, out) for image, name, digest in row], jobs))
                writer.write_batch(_replace_image_columns(batch, written, schema, many=many))
                start += batch.num_rows
                bar.advance(task, batch.num_rows)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return f"{start} rows, {len(seen)} images in {out / 'images'}; table {target}"


def _names_are_lists(schema: pa.Schema, source: Path) -> bool:
    remedy = "must have the columns images and extra_info.image_file_name"
    require({"images", "extra_info"} <= set(schema.names), "--parquet", source, remedy)
    extra = schema.field("extra_info").type
    require(pa.types.is_struct(extra) and extra.get_field_index("image_file_name") >= 0, "--parquet", source, remedy)
    return pa.types.is_list(extra.field("image_file_name").type)


def _make_schema(schema: pa.Schema, *, many: bool) -> pa.Schema:
    images = pa.field("images", pa.list_(pa.struct({"path": pa.string()})))
    added = {"image_file_path": pa.string(), "image_file_name": pa.string(), "image_file_size": pa.int64()}
    kept = [images if field.name == "images" else field for field in schema if field.name not in added]
    return pa.schema([*kept, *(pa.field(name, pa.list_(kind) if many else kind) for name, kind in added.items())])


def _list_jobs(
    batch: pa.RecordBatch, source: Path, *, start: int, many: bool, seen: dict[str, str]
) -> Iterator[list[tuple[StoredImage, str, str]]]:
    """Yield the images of each row with their file names and the SHA-256 of their bytes."""
    extras = batch.column("extra_info").to_pylist()
    for offset, (images, extra) in enumerate(zip(batch.column("images").to_pylist(), extras, strict=True)):
        where = f"{source.name} row {start + offset}"
        given = (extra or {}).get("image_file_name")
        names = (given or []) if many else [given]
        if len(images or []) != len(names):
            raise ValueError(f"{where}: has {len(images or [])} images but {len(names)} names in extra_info.image_file_name")
        row = []
        for number, (value, name) in enumerate(zip(images or [], names, strict=True)):
            present = {key: item for key, item in (value or {}).items() if item is not None}
            image = make_stored_image(present, folder=source.parent, where=f"{where}: images[{number}]")
            file, digest = file_name(name, where=where), hashlib.sha256(image.load_bytes()).hexdigest()
            if seen.setdefault(file, digest) != digest:
                raise ValueError(f"{where}: a different image is also named {file}; rename one of them in extra_info.image_file_name")
            row.append((image, file, digest))
        yield row


def file_name(name: object, *, where: str) -> str:
    """Return an image's file name as a relative path with the suffix .jpg.

    Raises:
        ValueError: The name is empty or points outside the folder.
    """
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath()
    if not path.name or path.is_absolute() or ".." in path.parts or any(character in str(name) for character in "\\\0:"):
        raise ValueError(f"{where}: extra_info.image_file_name {shorten(repr(name))} is not a relative file path; correct it")
    return str(path.with_suffix(".jpg") if path.suffix.lower() in SUFFIXES[1:] else f"{path}.jpg")


def _write_image(image: StoredImage, name: str, digest: str, out: Path) -> WrittenImage:
    target = out / "images" / name
    if not _is_done(image, name, digest, out):
        try:
            picture = image.open()
        except InfraError as fault:
            raise ValueError(str(fault)) from fault
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.{hash(image)}.partial")
        picture.save(partial, format="JPEG", quality=JPEG_QUALITY, comment=digest)
        partial.replace(target)
    return WrittenImage(path=f"images/{name}", name=name, size=target.stat().st_size)


def _is_done(image: StoredImage, name: str, digest: str, out: Path) -> bool:
    """Return True if the image was already extracted.

    Raises:
        ValueError: The output file exists but was not written by this tool, or the image's source
            is a file in the output folder and would be overwritten.
    """
    target = out / "images" / name
    if not os.path.lexists(target):
        return False
    try:
        with Image.open(target, formats=["JPEG"]) as picture:
            made_of = picture.info.get("comment", b"")
    except UNREADABLE:
        made_of = b""
    is_ours = re.fullmatch(b"[0-9a-f]{64}", made_of) is not None
    if is_ours and (made_of == digest.encode() or (isinstance(image.source, Path) and image.source.samefile(target))):
        return True
    if not is_ours or (isinstance(image.source, Path) and image.source.resolve().is_relative_to((out / "images").resolve())):
        what = "contains the image of another row" if is_ours else "was not written by this tool"
        raise ValueError(f"{image.where}: {target} {what} and is not overwritten; choose another --out")
    return False


def _replace_image_columns(batch: pa.RecordBatch, written: list[list[WrittenImage]], schema: pa.Schema, *, many: bool) -> pa.RecordBatch:
    columns = {
        "images": [[{"path": file.path} for file in row] for row in written],
        "image_file_path": [[file.path for file in row] if many else row[0].path for row in written],
        "image_file_name": [[file.name for file in row] if many else row[0].name for row in written],
        "image_file_size": [[file.size for file in row] if many else row[0].size for row in written],
    }
    arrays = [pa.array(columns[field.name], field.type) if field.name in columns else batch.column(field.name) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """Show a progress bar inside the `with` block, if the console is a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --parquet data/train.parquet --out data/train
  %(prog)s --parquet data/train.parquet --out data/train --threads 4

exit codes: 0 the table and all images are written; 1 a one-line error; no table is written, but finished images are kept""",
    )  # fmt: skip
    parser.add_argument("--parquet", type=Path, required=True, metavar="FILE", help="Parquet file with the images")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for images/ and the new table")
    parser.add_argument("--threads", type=int, default=16, metavar="N", help="number of images written in parallel (default 16)")
    given = parser.parse_args(arguments)
    return run_command(lambda: extract_images(given.parquet, given.out, threads=given.threads, console=Console(stderr=True)), out=given.out)


if __name__ == "__main__":
    sys.exit(main())
