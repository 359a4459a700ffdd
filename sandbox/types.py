"""Records of the sandbox: what a box may use, what a call gave back and whose fault it was that it gave nothing."""

from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO

from PIL import Image


class Fault(Enum):
    """Who is to blame for a call without a result. The policy answers for `code`: scored, trained on. `host` is ours: never scored."""

    NONE = "none"
    CODE = "code"
    HOST = "host"


class Isolation(Enum):
    """`auto` takes every layer that the host offers and refuses to run where they make no room; `none` runs without any, knowingly."""

    AUTO = "auto"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """What one box may use. Sizes in bytes, times in seconds; `per call` is a turn, `in total` the box's whole life."""

    call_timeout_s: float = 10.0
    """Wall time of a call; past it every process of the box is killed and its state is lost."""
    open_timeout_s: float = 30.0
    """Wall time of opening a box, its images and its preload included."""
    cpu_s: int = 300
    """Processor time of one process of the box, in total."""
    cpus: float = 1.0
    """Cores that all processes of the box share (cgroup)."""
    memory: int = 1 << 30
    """Of all processes of the box together, above what the libraries take that all boxes share."""
    processes: int = 32
    """Processes and threads at the same time."""
    open_files: int = 256
    disk: int = 64 << 20
    """The box's private file system, which lies in memory: working directory, /tmp and /dev/shm."""
    inodes: int = 4096
    file: int = 32 << 20
    """The largest file, and the most that a call may print."""
    code: int = 1 << 20
    """Source of a call."""
    text: int = 20_000
    """Characters kept of what a call printed on each of its two streams: the first half and the last."""
    images: int = 5
    """Images returned per call."""
    images_total: int = 100
    pixels: int = 12_000_000
    """Of the images returned per call together..."""
    pixels_total: int = 120_000_000
    png_bytes: int = 12 << 20
    """...and their size as PNG."""
    png_bytes_total: int = 120 << 20
    image_pixels: int = 4_000_000
    image_bytes: int = 4 << 20
    image_aspect: float = 100.0
    """Longer side over shorter side, at most."""
    image_side: int = 28
    """Pixels of the shorter side, at least: one patch of Qwen2.5-VL after its merger."""
    input_pixels: int = 64_000_000
    """Pixels of an image given to `open`; more is refused as a bomb before it is decoded."""
    input_bytes: int = 64 << 20
    """All images and files given to `open`. They lie beside `disk`, not inside it."""
    files: int = 100
    """New or changed files listed per call."""

    @property
    def max_fetch_bytes(self) -> int:
        """Bytes of the files of one `Box.fetch_files` together: what a box can hold."""
        return self.disk + self.input_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedImage:
    """An image that a call returned: a plain PNG whose header, chunks and length of pixel data were checked outside of the box."""

    png: bytes = field(repr=False)
    width: int
    height: int
    source: str
    """`figure` (shown or left open), `show` (Image.show) or the file's name."""

    def to_pil(self) -> Image.Image:
        picture = Image.open(BytesIO(self.png), formats=("PNG",))
        picture.load()
        return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Why a call did not end well. `type` is the exception's class; of a killed box LimitExceeded, InterpreterDied or InterpreterBroken."""

    type: str
    message: str
    line: int | None = None
    """Line of the call's own source, from 1; None where it is unknown or in a library called from nowhere."""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedOutput:
    """Something the call made that is not in its result. `str()` is the sentence for the model."""

    what: str
    """`text`, `stderr`, `image` or `files`"""
    reason: str

    def __str__(self) -> str:
        return f"{self.what} left out: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """`wall_s` is measured outside of the box. The others come from inside it and are as honest as its code."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the call, children that were waited for included."""
    memory: int = 0
    """Largest resident size so far of the box's own process, bytes, shared libraries included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What one call gave back."""

    id: int
    """Counts the calls of a box from 1."""
    fault: Fault = Fault.NONE
    text: str = ""
    """Standard output, what was printed before a kill included."""
    stderr: str = ""
    images: tuple[ReturnedImage, ...] = ()
    error: CallError | None = None
    limit: str | None = None
    """The limit that stopped the code: `time`, `memory`, `cpu`, `processes`, `system call`, `code`; None for an exception of its own."""
    files: dict[str, int] = field(default_factory=dict)
    """Files of the working directory that the call made or changed, name -> bytes. `Box.fetch_files` reads them."""
    dropped: tuple[DroppedOutput, ...] = ()
    usage: CallUsage = field(default_factory=CallUsage)
    state_lost: bool = False
    """The interpreter of the calls before was killed: this call began with the inputs and the preload only."""


def check_source_length(number: int, code: str, *, limits: BoxLimits) -> CallResult | None:
    """The result of a call whose source is longer than it may be; None where it is not."""
    if len(code) <= limits.code:
        return None
    reason = f"the source has {len(code)} characters, {limits.code} are allowed"
    return CallResult(id=number, fault=Fault.CODE, limit="code", error=CallError(type="CodeTooLong", message=reason))


class SandboxError(RuntimeError):
    """The host could not make or keep a box: never the code's doing."""


class SandboxAccessDenied(SandboxError):
    """A server is well and does not accept this client's token: asking again is of no use."""


class PoolFull(RuntimeError):
    """No box came free in the time that the caller was ready to wait."""


class BoxClosed(RuntimeError):
    """The box was closed, or its pool was."""
