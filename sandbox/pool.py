"""The pool: boxes handed out, called, killed and replaced. (Signatures first; the body follows.)"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from PIL import Image

from sandbox.layers import Layers
from sandbox.types import Isolation, Limits, Result


class Box:
    """One episode's Python. One call at a time; a second waits for the first. `async with` closes it."""

    id: int

    async def run(self, code: str, *, timeout_s: float | None = None) -> Result:
        """Execute `code` in the box's namespace. A cancelled run kills the box's processes. Raises BoxClosed; all other trouble is in the result."""
        raise NotImplementedError

    async def fetch(self, names: Sequence[str]) -> dict[str, bytes]:
        """Contents of files of the working directory; a name that is no readable file of at most `Limits.file` bytes is left out."""
        raise NotImplementedError

    async def close(self) -> None:
        """Kill what runs and free the place. Twice is once."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class Sandbox:
    """At most `size` boxes at once on one zygote. `layers=None` takes what the host offers; `isolation="none"` runs without any layer."""

    layers: Layers
    """Those in force once the pool is started."""
    limits: Limits
    size: int

    def __init__(self, *, size: int = 8, limits: Limits | None = None, layers: Layers | None = None, isolation: str = Isolation.AUTO.value) -> None:
        raise NotImplementedError

    @property
    def num_open(self) -> int:
        raise NotImplementedError

    async def start(self) -> None:
        """Raises HostFault, with every missing layer and its reason, where the host offers no room and isolation is not "none"."""
        raise NotImplementedError

    async def close(self) -> None:
        """Kill every box and the zygote; nothing of them is left. Twice is once."""
        raise NotImplementedError

    async def open(
        self,
        *,
        images: Mapping[str, Image.Image | bytes] | None = None,
        files: Mapping[str, bytes] | None = None,
        preload: str = "",
        wait_s: float | None = None,
    ) -> Box:
        """A box with `images` as variables and files, `files` in the working directory, after `preload` ran in it.

        An image's name is an identifier (`image_0`: the variable and the file image_0.png) or a file's name (`photo.jpg`: the file, and the
        variable `photo`). Waits for a free place for ever, or `wait_s` seconds: then PoolFull. Raises ValueError for a name, an image or a
        preload that is no good, HostFault when the host fails.
        """
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
