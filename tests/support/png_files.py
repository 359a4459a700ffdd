"""Writes PNG files chunk by chunk (PNG 1.2, sections 3 to 6), so that tests choose bit depth, color
type and transparency.
"""

import struct
import zlib
from collections.abc import Sequence

import numpy as np

GRAY, COLOR, INDEXED, GRAY_ALPHA, COLOR_ALPHA = 0, 2, 3, 4, 6


def write_png(
    values: np.ndarray, *, color: int, depth: int, transparent: Sequence[int] = (), palette: bytes = b"", extra: Sequence[bytes] = ()
) -> bytes:
    """Return the PNG of `values` [H, W] or [H, W, samples], not interlaced, without filters.

    Args:
        transparent: The samples of tRNS (two bytes each; one byte each for an indexed image).
        extra: Complete chunks between IHDR and IDAT.
    """
    height, width = values.shape[:2]
    rows = [_pack_row(row.reshape(-1), depth) for row in values]
    alpha = bytes(transparent) if color == INDEXED else struct.pack(f">{len(transparent)}H", *transparent)
    chunks = [make_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)), *extra]
    chunks += [make_chunk(b"PLTE", palette)] if palette else []
    chunks += [make_chunk(b"tRNS", alpha)] if transparent else []
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join([*chunks, make_chunk(b"IDAT", data), make_chunk(b"IEND", b"")])


def make_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def _pack_row(values: np.ndarray, depth: int) -> bytes:
    if depth >= 8:
        return values.astype(">u2" if depth == 16 else "u1").tobytes()
    text = "".join(format(int(value), f"0{depth}b") for value in values)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8))
