"""Tests frames against the messages that were packed, and the rejection of every kind of malformed
frame. The reader's peer is hostile."""

import asyncio
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl_sandbox import frames

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


def read(data: bytes, *, max_bytes: int = 1 << 20) -> frames.Frame:
    async def feed() -> frames.Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        text, blobs = await frames.read_frame(reader, max_bytes=max_bytes, max_blobs=1024)
        return await frames.parse_json(text), blobs

    return asyncio.run(feed())


@given(st.dictionaries(st.text(), JSON, max_size=4), st.lists(st.binary(max_size=50), max_size=4))
def test_what_was_packed_is_read(message: str, blobs: list[bytes]):
    """Reading a packed frame returns the message and the byte strings."""
    assert read(frames.pack_frame(message, blobs)) == (message, blobs)


def head(num_text: int, lengths: list[int]) -> bytes:
    return struct.pack(f"!II{len(lengths)}Q", num_text, len(lengths), *lengths)


@pytest.mark.parametrize(
    "data",
    [
        head(1 << 30, []),
        struct.pack("!II", 2, 1 << 30),
        head(2, [1 << 62]) + b"{}",
        head(2, [600_000, 600_000]) + b"{}",
        head(2, []) + b"[]",
        head(3, []) + b"{,}",
        head(4, []) + b"\xff\xfe{}",
        head(200_000, []) + b"[" * 200_000,
        head(5010, []) + b'{"a":' + b"1" * 5004 + b"}",
    ],
    ids=["json", "count", "blob", "sum", "array", "syntax", "encoding", "depth", "digits"],
)
def test_what_is_no_frame_is_refused_before_it_takes_memory(data: bytes):
    """A malformed or oversized frame raises MalformedFrame."""
    with pytest.raises(frames.MalformedFrame):
        read(data)


@pytest.mark.parametrize("cut", range(len(frames.pack_frame({"a": 1}, [b"xyz"]))))
def test_a_frame_cut_anywhere_is_an_end(cut: int):
    """A frame that is cut at any byte raises IncompleteReadError."""
    with pytest.raises(asyncio.IncompleteReadError):
        read(frames.pack_frame({"a": 1}, [b"xyz"])[:cut])


def test_lone_surrogates_travel():
    message = {"code": "\ud800"}
    assert read(frames.pack_frame(message)) == (message, [])
    assert json.dumps(message).isascii()
