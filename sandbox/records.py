"""Records of the sandbox: limits of a box, result of a call, and the fault if it failed."""

from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO

from PIL import Image


class Fault(Enum):
    """Party at fault for a call that did not succeed.

    `CODE`: the executed code is at fault; the result is scored and trained on. `HOST`:
    infrastructure error, never scored.
    """

    NONE = "none"
    CODE = "code"
    HOST = "host"


class Isolation(Enum):
    """Isolation mode of a pool.

    `AUTO` uses every layer that the host offers and refuses to start without the required ones.
    `NONE` uses no layer at all.
    """

    AUTO = "auto"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Resource limits of one box: sizes in bytes, times in seconds.

    "Per call" means one `Box.run`; "in total" means the whole lifetime of the box.
    """

    call_timeout_s: float = 10.0
    """Wall time of a call; past it, every process of the box is killed and its state is lost."""
    open_timeout_s: float = 30.0
    """Wall time of opening a box, including loading its images and running its preload."""
    cpu_s: int = 300
    """Processor time of one process of the box, in total."""
    cpus: float = 1.0
    """CPU cores shared by all processes of the box (cgroup)."""
    memory: int = 1 << 30
    """Memory of all processes of the box together, beyond the library pages shared by all boxes."""
    processes: int = 32
    """Number of simultaneous processes and threads."""
    open_files: int = 256
    disk: int = 64 << 20
    """Size of the box's private in-memory file system: working directory, /tmp and /dev/shm."""
    inodes: int = 4096
    file: int = 32 << 20
    """Size of the largest file, and of all that a call may print."""
    code: int = 1 << 20
    """Length of a call's source, in characters."""
    text: int = 20_000
    """Characters kept of each output stream of a call: the first half and the last half."""
    images: int = 5
    """Number of images returned per call."""
    images_total: int = 100
    pixels: int = 12_000_000
    """Pixels of all images returned per call together."""
    pixels_total: int = 120_000_000
    png_bytes: int = 12 << 20
    """Size of all images returned per call together, as PNG."""
    png_bytes_total: int = 120 << 20
    image_pixels: int = 4_000_000
    image_bytes: int = 4 << 20
    image_aspect: float = 100.0
    """Largest allowed ratio of an image's longer side to its shorter side."""
    image_side: int = 28
    """Smallest allowed length of an image's shorter side, in pixels.

    The default is one patch of Qwen2.5-VL after its merger.
    """
    input_pixels: int = 64_000_000
    """Pixels of an image given to `open`.

    A larger image is refused as a decompression bomb before it is decoded.
    """
    input_bytes: int = 64 << 20
    """Size of all images and files given to `open` together; they do not count towards `disk`."""
    files: int = 100
    """Number of new or changed files listed per call."""

    @property
    def max_fetch_bytes(self) -> int:
        """Return the largest total size of one `Box.fetch_files`: all that a box can hold."""
        return self.disk + self.input_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedImage:
    """Image returned by a call, as a plain PNG.

    Its header, chunks and length of pixel data were validated outside the box.
    """

    png: bytes = field(repr=False)
    width: int
    height: int
    source: str
    """Origin: `figure` (shown or left open), `show` (Image.show) or the name of the file."""

    def to_pil(self) -> Image.Image:
        """Return the decoded image."""
        picture = Image.open(BytesIO(self.png), formats=("PNG",))
        picture.load()
        return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Reason why a call failed.

    `type` is the class of the exception; for a killed box it is LimitExceeded, InterpreterDied or
    InterpreterBroken.
    """

    type: str
    message: str
    line: int | None = None
    """Line of the call's own source, from 1; None if no line of it is known to be involved."""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedOutput:
    """Output of a call that is not in its result.

    `str()` returns the sentence for the model.
    """

    what: str
    """Kind of output: `text`, `stderr`, `image` or `files`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.what} left out: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """Resources used by a call.

    `wall_s` is measured outside the box. The other values are measured inside it, so code in the
    box can falsify them.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor seconds of the call, including child processes that were waited for."""
    memory: int = 0
    """Peak resident size so far of the box's own process, in bytes, including shared libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of one call."""

    id: int
    """Number of the call in its box, from 1."""
    fault: Fault = Fault.NONE
    text: str = ""
    """Standard output, including output printed before a kill."""
    stderr: str = ""
    images: tuple[ReturnedImage, ...] = ()
    error: CallError | None = None
    limit: str | None = None
    """Limit that stopped the code, or None for an exception raised by the code itself.

    One of `time`, `memory`, `cpu`, `processes`, `system call`, `code`.
    """
    files: dict[str, int] = field(default_factory=dict)
    """Files of the working directory that the call created or changed: name -> bytes."""
    dropped: tuple[DroppedOutput, ...] = ()
    usage: CallUsage = field(default_factory=CallUsage)
    state_lost: bool = False
    """True if the interpreter of the previous calls was killed.

    This call then started with the inputs and the preload only.
    """


def check_source_length(number: int, code: str, *, limits: BoxLimits) -> CallResult | None:
    """Return a failed result for source longer than `limits.code`, or None if it is allowed."""
    if len(code) <= limits.code:
        return None
    reason = f"the source has {len(code)} characters, {limits.code} are allowed"
    return CallResult(id=number, fault=Fault.CODE, limit="code", error=CallError(type="CodeTooLong", message=reason))


class SandboxError(RuntimeError):
    """The host could not create or keep a box; never the fault of the executed code."""


class SandboxAccessDenied(SandboxError):
    """The server is healthy but does not accept this client's token; a retry cannot succeed."""


class PoolFull(RuntimeError):
    """No box became free within the time that the caller allowed."""


class BoxClosed(RuntimeError):
    """The box or its pool is closed."""
