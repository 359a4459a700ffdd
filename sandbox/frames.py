"""Frames exchanged between the pool and a box: a JSON object followed by byte strings.

    u32 length of the JSON | u32 number of byte strings | u64 length of each | JSON | byte strings

Code in a box may have forged the frames that the pool reads. Therefore, the pool checks every
length before it reads the data, and raises MalformedFrame for invalid data.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Sequence

HEADER = struct.Struct("!II")
MAX_JSON = 2 << 20
MAX_INLINE_JSON = 64 << 10
"""Maximum size in bytes of JSON parsed on the event loop (in under 1 ms) instead of in a thread."""
MAX_CONTROL_BYTES = 1 << 16
"""Maximum size in bytes of a JSON datagram between the pool and its zygote."""
Frame = tuple[dict[str, object], list[bytes]]


class MalformedFrame(ValueError):
    """The peer sent data that is not a valid frame."""


def pack_frame(message: dict[str, object], blobs: Sequence[bytes] = ()) -> bytes:
    """Encode a message and its byte strings as a frame."""
    text = json.dumps(message).encode("ascii")
    return b"".join([HEADER.pack(len(text), len(blobs)), struct.pack(f"!{len(blobs)}Q", *map(len, blobs)), text, *blobs])


async def read_frame(reader: asyncio.StreamReader, *, max_bytes: int, max_blobs: int) -> tuple[bytes, list[bytes]]:
    """Read one frame.

    A frame may contain at most `max_blobs` byte strings with a total size of at most `max_bytes`.

    The JSON object is returned unparsed. The caller parses the object with `parse_json` after the
    call's timer has stopped, because parsing time must not count as the box's time.

    Raises:
        MalformedFrame: A length exceeds its limit.
        IncompleteReadError: The channel was closed before the end of the frame.
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
    """Parse a JSON object, in a thread if the text is long.

    Raises MalformedFrame if the text is invalid.
    """
    return _parse_json(text) if len(text) <= MAX_INLINE_JSON else await asyncio.to_thread(_parse_json, text)


def receive_frame(channel: socket.socket) -> Frame:
    """Read one frame from a trusted peer on a blocking socket.

    Raises:
        EOFError: The peer closed the socket.
    """
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
