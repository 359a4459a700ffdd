"""Limits the size of HTTP responses of an MCP server.

The package mcp limits events of a stream, but reads other bodies without a limit.
"""

from collections.abc import AsyncIterator

import httpx2

from megatron_rl.tasks.visual_python.mcp_stdio import MAX_MESSAGE_BYTES


class LimitedStream(httpx2.AsyncByteStream):
    """Body of a response that fails once it exceeds a number of bytes."""

    def __init__(self, stream: httpx2.AsyncByteStream, max_bytes: int) -> None:
        self._stream, self._max_bytes = stream, max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the chunks of the body.

        Raises:
            StreamError: The body exceeds the limit. The package mcp makes it an error of the call.
        """
        num_bytes = 0
        async for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > self._max_bytes:
                raise httpx2.StreamError(f"the response has more than {self._max_bytes} bytes")
            yield chunk

    async def aclose(self) -> None:
        """Close the body, and the connection if the body was not read to its end."""
        await self._stream.aclose()


async def limit_response(response: httpx2.Response) -> None:
    """Limit the body of a response that is not a stream of events.

    Compressed bodies, which were not asked for, are not decoded: a small one may become a large
    one.
    """
    response.headers.pop("content-encoding", None)
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = LimitedStream(response.stream, MAX_MESSAGE_BYTES)
