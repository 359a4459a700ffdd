"""Writes a visual-search dataset with large canvases that contain small named objects.

Each object has a label that is only legible after zooming in. The label of the target object is the
answer. The rows have the columns that the trainer reads (megatron_rl/data/questions.py). In
addition, extra_info contains the target's `bbox` in pixels and the list `things` of all objects,
starting with the target. Each canvas has its own seed, derived from --seed, the name of the split
and the canvas's index in the split. With --things fluent or noto, one fifth of the pictograms
occurs in the eval split only.
"""

import argparse
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Image as Picture

from megatron_rl.config import require, require_choice
from megatron_rl.tasks.visual_search.drawing import SEARCH_LEVELS, SHAPES, SearchLevel, SearchScene, Sprites, draw_shapes, make_scene

FLUENT = "@lobehub/fluent-emoji-3d@1.1.0"
"""npm package with Microsoft's Fluent emojis (MIT)."""
NOTO_SIZE = 109
"""The only font size that NotoColorEmoji.ttf provides.

The font file is taken from Debian's package fonts-noto-color-emoji 2.042 (OFL).
"""
PICTOGRAPHS = (*range(0x2600, 0x27C0), *range(0x1F300, 0x1FB00))
EVAL_SHARE = 5
"""One of every EVAL_SHARE pictograms is reserved for the eval split."""
ROWS = 256
"""Number of rows that are in memory at a time while a Parquet file is written."""


def load_fluent_emojis(source: Path | None) -> Sprites:
    """Return the emojis of the npm package `source`, keyed by name.

    If `source` is None, the package is downloaded.
    """
    with tempfile.TemporaryDirectory() as folder:
        if source is None:
            subprocess.run(["npm", "pack", "--silent", FLUENT], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            source = next(Path(folder).glob("*.tgz"))
        require(source.is_file(), "--source", source, f"no such file; use the .tgz of `npm pack {FLUENT}`")
        return _remove_duplicates(_read_package(source))


def _read_package(path: Path) -> Iterator[tuple[str, Picture]]:
    with tarfile.open(path) as package:
        for member in sorted(package, key=lambda member: member.name):
            code = re.search(r"/([0-9a-f]{4,5})(?:-fe0f)?\.webp$", member.name)  # longer codes are sequences, which have no names
            name = code and unicodedata.name(chr(int(code[1], 16)), "").lower()
            content = package.extractfile(member) if name else None
            if name and content is not None:
                yield name, Image.open(io.BytesIO(content.read())).convert("RGBA")


def load_noto_emojis(source: Path | None) -> Sprites:
    """Return the emojis in the font file `source`, keyed by Unicode name."""
    require(source is not None and source.is_file(), "--source", source, "must be the path of NotoColorEmoji.ttf")
    font = ImageFont.truetype(source, NOTO_SIZE, layout_engine=ImageFont.Layout.BASIC)
    missing = _draw_glyph(font, "\uffff")
    drawn = ((unicodedata.name(point, "").lower(), _draw_glyph(font, point)) for point in map(chr, PICTOGRAPHS))
    return _remove_duplicates((name, picture) for name, picture in drawn if name and picture.tobytes() != missing.tobytes())


def _draw_glyph(font: ImageFont.FreeTypeFont, character: str) -> Picture:
    picture = Image.new("RGBA", (136, 136))
    ImageDraw.Draw(picture).text((68, 68), character, font=font, embedded_color=True, anchor="mm")
    return picture


def _remove_duplicates(named: Iterable[tuple[str, Picture]]) -> Sprites:
    """Map names to images, leaving out empty images and duplicates of earlier images.

    Each returned image is cropped to its visible part and centered in a square.
    """
    kept: dict[bytes, tuple[str, Picture]] = {}
    for name, picture in named:
        if picture.getbbox() is not None:
            kept.setdefault(picture.tobytes(), (name, _center_in_square(picture.crop(picture.getbbox()))))
    return dict(kept.values())


def _center_in_square(picture: Picture) -> Picture:
    side = max(picture.size)
    square = Image.new("RGBA", (side, side))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


def split_sprites(things: str, *, source: Path | None) -> dict[str, Sprites]:
    """Return the images of the objects, keyed by split and then by object name.

    Both splits have the same colored shapes. With pictograms, no pictogram is in both splits.
    """
    require_choice("--things", things, ("shapes", "fluent", "noto"))
    if things == "shapes":
        require(source is None, "--source", source, "not used with --things shapes; remove --source")
        return {"train": draw_shapes(SHAPES), "eval": draw_shapes(SHAPES)}
    every = load_fluent_emojis(source) if things == "fluent" else load_noto_emojis(source)
    names = sorted(every)
    random.Random(0).shuffle(names)
    held_out = set(names[::EVAL_SHARE])
    return {
        "train": {name: picture for name, picture in every.items() if name not in held_out},
        "eval": {name: every[name] for name in held_out},
    }


def make_row(drawn: SearchScene, *, split: str, index: int, source: str, image: dict[str, object]) -> dict[str, object]:
    """Return a dataset row for one scene; the prompt contains the image placeholder."""
    answer = drawn.target.label
    things = [{"name": thing.name, "bbox": list(thing.cell), "label": thing.label} for thing in drawn.objects]
    return {
        "prompt": [{"role": "user", "content": f"<image>\n{drawn.question}"}],
        "data_source": source,
        "ability": "visual_search",
        "env_name": "pyvision_gym_w_image_hint",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {
            "answer": answer, "index": index, "question": drawn.question, "split": split, "bbox": list(drawn.target.cell), "things": things,
        },
        "images": [image],
    }  # fmt: skip


def make_rows(split: str, *, num: int, seed: int, level: str, sprites: Sprites, images: Path | None) -> Iterator[dict[str, object]]:
    """Yield the rows of one split.

    Images are written as files into the folder `images`, and the rows contain paths relative to the
    parent of `images`. If `images` is None, the rows contain the bytes of the images.
    """
    names = sorted(sprites)
    for index in range(num):
        drawn = make_scene(SEARCH_LEVELS[level], names, seed=f"{split} {seed} {index}")
        content = io.BytesIO()
        drawn.draw(sprites).save(content, format="PNG")
        image: dict[str, object] = {"bytes": content.getvalue()}
        if images is not None:
            path = images / f"{split}_{index:06d}.png"
            path.write_bytes(content.getvalue())
            image = {"path": f"{images.name}/{path.name}"}
        yield make_row(drawn, split=split, index=index, source=f"visual_search_{level}", image=image)


def write_jsonl(path: Path, records: Iterator[dict[str, object]]) -> None:
    """Write the rows as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_parquet(path: Path, records: Iterator[dict[str, object]]) -> None:
    """Write the rows as Parquet, in blocks of ROWS rows."""
    writer = None
    try:
        while block := [record for record, _ in zip(records, range(ROWS), strict=False)]:
            table = pa.Table.from_pylist(block)
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def make_dataset(
    out: Path, *, level: str, things: str, source: Path | None, num_train: int, num_eval: int, seed: int, parquet: bool
) -> SearchLevel:
    """Write the train and eval splits into a new folder and return the `SearchLevel` of `level`.

    Raises:
        ValueError: `out` exists, or an argument is invalid.
    """
    require_choice("--level", level, tuple(SEARCH_LEVELS))
    require(min(num_train, num_eval) >= 1, "--num-train, --num-eval", (num_train, num_eval), "must be at least 1")
    require(not out.exists(), "--out", out, "exists; choose another folder")
    splits = split_sprites(things, source=source)
    images = None if parquet else out / "images"
    (images or out).mkdir(parents=True)
    for split, num in (("train", num_train), ("eval", num_eval)):
        records = make_rows(split, num=num, seed=seed, level=level, sprites=splits[split], images=images)
        if parquet:
            write_parquet(out / f"{split}.parquet", records)
        else:
            write_jsonl(out / f"{split}.jsonl", records)
    return SEARCH_LEVELS[level]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out data/visual_search
  %(prog)s --out data/visual_search_small --num-train 20 --num-eval 5 --parquet""",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--level", default="medium", help=f"one of {', '.join(SEARCH_LEVELS)}")
    parser.add_argument("--things", default="shapes", help="shapes (drawn), fluent (npm) or noto (a font)")
    parser.add_argument("--source", type=Path, help="fluent: .tgz of the package (default: download it with npm); noto: NotoColorEmoji.ttf")
    parser.add_argument("--num-train", type=int, default=1000)
    parser.add_argument("--num-eval", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--parquet",
        action="store_true",
        help="write one Parquet file per split, including the images, instead of JSON lines and images/",
    )
    options = vars(parser.parse_args(arguments))
    try:
        level = make_dataset(**options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{options['num_train']} + {options['num_eval']} canvases of {level.canvas_px} x {level.canvas_px} pixels in {options['out']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
