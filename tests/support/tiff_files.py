"""Writes TIFF files tag by tag (TIFF 6.0, section 2), so that tests choose every field and know
every sample.
"""

import struct
from collections.abc import Mapping

import numpy as np

SHORT, LONG, LONG8 = 3, 4, 16
_SIZES = {SHORT: 2, LONG: 4, LONG8: 8}
_CODES = {SHORT: "H", LONG: "I", LONG8: "Q"}
WIDTH, LENGTH, BITS, COMPRESSION, PHOTOMETRIC, OFFSETS, SAMPLES, ROWS, COUNTS, PLANAR = 256, 257, 258, 259, 262, 273, 277, 278, 279, 284
FILL_ORDER, TILE_WIDTH, TILE_LENGTH, TILE_OFFSETS, TILE_COUNTS, COLOR_MAP, EXTRA, FORMAT = 266, 322, 323, 324, 325, 320, 338, 339
WHITE_IS_ZERO, BLACK_IS_ZERO, RGB, PALETTE, CMYK, YCBCR, LAB = 0, 1, 2, 3, 5, 6, 8


def pack_bits(values_HW: np.ndarray, bits: int) -> bytes:
    """Pack rows of samples with fewer than 8 bits, or with 12, high bits first.

    Each row is padded to whole bytes.
    """
    rows = []
    for row in values_HW:
        text = "".join(format(int(value), f"0{bits}b") for value in row)
        text += "0" * (-len(text) % 8)
        rows.append(bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8)))
    return b"".join(rows)


def write_tiff(
    values: np.ndarray,
    *,
    photometric: int,
    order: str = "<",
    bits: int = 0,
    big: bool = False,
    planar: bool = False,
    rows_per_strip: int = 0,
    tile: tuple[int, int] = (0, 0),
    tags: Mapping[int, tuple[int, ...]] = {},
) -> bytes:
    """Return an uncompressed TIFF of `values` [H, W] or [H, W, samples].

    Args:
        order: "<" for little endian, ">" for big endian.
        bits: Bits per sample, if they differ from the array's type (1, 2, 4 or 12).
        big: Write a BigTIFF.
        planar: Write one plane per sample instead of interleaved samples.
        rows_per_strip: 0 writes a single strip.
        tile: Height and width of tiles; (0, 0) writes strips.
        tags: Additional tags, or other values for tags.
    """
    values_HWS = values if values.ndim == 3 else values[:, :, None]
    height, width, samples = values_HWS.shape
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    planes = [values_HWS[:, :, each : each + 1] for each in range(samples)] if planar else [values_HWS]
    pieces = [_sample_bytes(piece, bits, order) for plane in planes for piece in _cut_pieces(plane, rows_per_strip or height, tile)]
    entries: dict[int, tuple[int, tuple[int, ...]]] = {
        WIDTH: (LONG, (width,)), LENGTH: (LONG, (height,)), BITS: (SHORT, (bits or values.dtype.itemsize * 8,) * samples),
        COMPRESSION: (SHORT, (1,)), PHOTOMETRIC: (SHORT, (photometric,)), SAMPLES: (SHORT, (samples,)),
        PLANAR: (SHORT, (2 if planar else 1,)), FORMAT: (SHORT, (kind,) * samples),
    }  # fmt: skip
    if tile[0]:
        entries |= {TILE_WIDTH: (LONG, (tile[1],)), TILE_LENGTH: (LONG, (tile[0],))}
    else:
        entries |= {ROWS: (LONG, (rows_per_strip or height,))}
    return assemble_tiff(entries | {tag: (SHORT, each) for tag, each in tags.items()}, pieces, order=order, big=big, is_tiled=bool(tile[0]))


def assemble_tiff(
    entries: Mapping[int, tuple[int, tuple[int, ...]]], pieces: list[bytes], *, order: str, big: bool = False, is_tiled: bool = False
) -> bytes:  # fmt: skip
    """Return the file with these tags and with the offsets and byte counts of its strips or
    tiles.
    """
    head = 16 if big else 8
    offsets = tuple(head + sum(map(len, pieces[:each])) for each in range(len(pieces)))
    whole = dict(entries)
    whole |= {TILE_OFFSETS if is_tiled else OFFSETS: (LONG, offsets), TILE_COUNTS if is_tiled else COUNTS: (LONG, tuple(map(len, pieces)))}
    data = b"".join(pieces)
    data += bytes(len(data) % 2)
    start, word = head + len(data), "Q" if big else "I"
    field = 8 if big else 4
    table_size = (8 if big else 2) + len(whole) * (12 + 2 * (field - 4)) + field
    table, behind = struct.pack(order + ("Q" if big else "H"), len(whole)), b""
    for tag, (kind, items) in sorted(whole.items()):
        content = struct.pack(f"{order}{len(items)}{_CODES[kind]}", *items)
        if len(content) > field:
            place = struct.pack(order + word, start + table_size + len(behind))
            behind += content + bytes(len(content) % 2)
        else:
            place = content.ljust(field, b"\0")
        table += struct.pack(order + "HH" + word, tag, kind, len(items)) + place
    mark = b"II" if order == "<" else b"MM"
    front = mark + (struct.pack(order + "HHHQ", 43, 8, 0, start) if big else struct.pack(order + "HI", 42, start))
    return front + data + table + bytes(field) + behind


def _cut_pieces(plane_HWS: np.ndarray, rows: int, tile: tuple[int, int]) -> list[np.ndarray]:
    height, width = plane_HWS.shape[:2]
    if not tile[0]:
        return [plane_HWS[at : at + rows] for at in range(0, height, rows)]
    padded = np.pad(plane_HWS, ((0, -height % tile[0]), (0, -width % tile[1]), (0, 0)))
    places = [(y, x) for y in range(0, height, tile[0]) for x in range(0, width, tile[1])]
    return [padded[y : y + tile[0], x : x + tile[1]] for y, x in places]


def _sample_bytes(piece: np.ndarray, bits: int, order: str) -> bytes:
    if bits:
        return pack_bits(piece.reshape(len(piece), -1), bits)
    return piece.astype(piece.dtype.newbyteorder(order)).tobytes()
