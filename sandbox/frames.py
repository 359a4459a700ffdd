"""Frames between the pool and a box: a JSON object followed by a list of byte strings.

    u32 length of the JSON | u32 number of byte strings | u64 length of each | JSON | byte strings

The pool reads frames that code in a box may have written: every length is checked before the data
is read, and anything else than a frame raises MalformedFrame.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence

HEADER = struct.Struct("!II")
MAX_JSON = 2 << 20
MAX_INLINE_JSON = 64 << 10
"""Bytes of JSON parsed on the event loop, in under 1 ms; longer JSON is parsed in a thread."""
MAX_CONTROL_BYTES = 1 << 16
"""Largest datagram between the pool and its zygote, in bytes; it is JSON only."""
Frame = tuple[dict[str, object], list[bytes]]


class MalformedFrame(ValueError):
    """The peer does not follow the protocol."""


def pack_frame(message: dict[str, object], blobs: Sequence[bytes] = ()) -> bytes:
    """Return a message and its byte strings as a frame."""
    text = json.dumps(message).encode("ascii")
    return b"".join([HEADER.pack(len(text), len(blobs)), struct.pack(f"!{len(blobs)}Q", *map(len, blobs)), text, *blobs])


async def read_frame(reader: asyncio.StreamReader, *, max_bytes: int, max_blobs: int) -> tuple[bytes, list[bytes]]:
    """Read one frame of at most `max_blobs` byte strings and `max_bytes` in total.

    The JSON is returned unparsed: `parse_json` runs after the timer of the call, because parsing is
    the pool's time and not the box's.

    Raises:
        MalformedFrame: A length is above its limit.
        IncompleteReadError: The box is gone.
    """
    num_text, num_blobs = HEADER.unpack(await reader.readexactly(HEADER.size))
    if num_text > MAX_JSON or num_blobs > max_blobs:
        raise MalformedFrame(f"{num_text} bytes of JSON and {num_blobs} byte strings, {max_blobs} allowed")
    lengths = struct.unpack(f"!{num_blobs}Q", await reader.readexactly(8 * num_blobs))
    if sum(lengths) > max_bytes:
        raise MalformedFrame(f"{sum(lengths)} bytes, {max_bytes} allowed")
    text = await reader.readexactly(num_text)
    return text, [await reader.readexactly(length) for length in lengths]


async def parse_json(text: bytes) -> dict[str, object]:
    """Parse a JSON object, in a thread if it is long. Raises MalformedFrame."""
    return _parse_json(text) if len(text) <= MAX_INLINE_JSON else await asyncio.to_thread(_parse_json, text)


def receive_frame(channel: socket.socket) -> Frame:
    """Read one frame from a blocking socket with a trusted peer. Raises EOFError."""
    num_text, num_blobs = HEADER.unpack(_receive_exactly(channel, HEADER.size))
    lengths = struct.unpack(f"!{num_blobs}Q", _receive_exactly(channel, 8 * num_blobs))
    message = _parse_json(_receive_exactly(channel, num_text))
    return message, [_receive_exactly(channel, length) for length in lengths]


def _parse_json(text: bytes) -> dict[str, object]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise MalformedFrame("not an object")
    return message


def _receive_exactly(channel: socket.socket, length: int) -> bytes:
    received = bytearray(length)
    view = memoryview(received)
    while view:
        count = channel.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return bytes(received)
