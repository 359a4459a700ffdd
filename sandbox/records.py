"""Records for the limits of a box, the result of a call, and the party at fault for a failure."""

from dataclasses import dataclass, field
from enum import Enum
from io import BytesIO

from PIL import Image


class Fault(Enum):
    """Party at fault for the failure of a call, if the call failed.

    `CODE`: the executed code is at fault; the result is scored and used for training. `HOST`: the
    host had an infrastructure error; the result is never scored. `NONE`: the call succeeded.
    """

    NONE = "none"
    CODE = "code"
    HOST = "host"


class Isolation(Enum):
    """Isolation mode of a pool.

    With `AUTO`, the pool uses every layer that the host offers, and refuses to start if a required
    layer is missing. With `NONE`, the pool uses no layers.
    """

    AUTO = "auto"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxLimits:
    """Resource limits of one box: sizes in bytes, times in seconds.

    "Per call" means one `Box.run`; "in total" means the whole lifetime of the box.
    """

    call_timeout_s: float = 10.0
    """Time limit of a call.

    A timeout kills the processes of the box, and the state of the box is lost.
    """
    open_timeout_s: float = 30.0
    """Time limit for opening a box, including loading its images and running its preload."""
    cpu_s: int = 300
    """Limit on the total CPU time of each process of the box."""
    cpus: float = 1.0
    """Number of CPU cores that all processes of the box share.

    If the layer `watchdog` enforces the limit instead of `cgroup`, the number is rounded up.
    """
    memory: int = 1 << 30
    """Total memory limit of a box's processes, excluding library pages shared by all boxes."""
    processes: int = 32
    """Maximum number of simultaneous processes and threads."""
    open_files: int = 256
    disk: int = 64 << 20
    """Size of the box's private in-memory file system: working directory, /tmp and /dev/shm."""
    inodes: int = 4096
    file: int = 32 << 20
    """Maximum size of each file, and of each output stream of a call."""
    code: int = 1 << 20
    """Maximum length of the source code of a call, in characters."""
    text: int = 20_000
    """Maximum number of characters kept per output stream.

    If a stream is longer, its first and last `text // 2` characters are kept.
    """
    images: int = 5
    """Maximum number of images returned per call."""
    images_total: int = 100
    pixels: int = 12_000_000
    """Maximum total number of pixels in the images returned per call."""
    pixels_total: int = 120_000_000
    png_bytes: int = 12 << 20
    """Maximum total PNG size of the images returned per call."""
    png_bytes_total: int = 120 << 20
    image_pixels: int = 4_000_000
    image_bytes: int = 4 << 20
    image_aspect: float = 100.0
    """Maximum ratio of an image's longer side to its shorter side."""
    image_side: int = 28
    """Minimum length of an image's shorter side, in pixels.

    The default is the side length of the image area that one image token of Qwen2.5-VL covers.
    """
    input_pixels: int = 64_000_000
    """Maximum number of pixels of an image passed to `open`.

    A larger image is rejected as a decompression bomb before it is decoded.
    """
    input_bytes: int = 64 << 20
    """Maximum total size of all inputs passed to `open`. Inputs do not count towards `disk`."""
    files: int = 100
    """Maximum number of new or changed files listed in the result of a call."""

    @property
    def max_fetch_bytes(self) -> int:
        """Maximum total size of files per `Box.fetch_files` call: `disk` plus `input_bytes`."""
        return self.disk + self.input_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedImage:
    """Image returned by a call, as a plain PNG (defined in image_codec.py).

    Outside the box, the pool has validated the header, the chunks and the amount of pixel data of
    the PNG.
    """

    png: bytes = field(repr=False)
    width: int
    height: int
    source: str
    """Origin of the image: `figure` (Matplotlib), `show` (Image.show) or the image's file name."""

    def to_pil(self) -> Image.Image:
        """Return the decoded image."""
        picture = Image.open(BytesIO(self.png), formats=("PNG",))
        picture.load()
        return picture


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Reason why a call failed.

    If the code raised an exception, `type` is the class name of the exception. If the box was
    killed, `type` is LimitExceeded, InterpreterDied or InterpreterBroken. If the source code was
    too long, `type` is CodeTooLong. For a host fault, `type` is SandboxError.
    """

    type: str
    message: str
    line: int | None = None
    """One-based number of the failing line in the call's source; None if it is unknown."""
    traceback: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedOutput:
    """Record of a part of a call's output that is missing from the result.

    `str()` returns a description of the missing part for the model.
    """

    what: str
    """Kind of the missing output: `text`, `stderr`, `image` or `files`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.what} left out: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """Resources used by a call.

    `wall_s` is measured outside the box. The other values are measured inside the box, so the code
    can falsify them.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds used by the call, including child processes that the code waited for."""
    memory: int = 0
    """Peak resident set size of the interpreter so far, in bytes, including shared libraries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Result of one call."""

    id: int
    """One-based index of the call in its box."""
    fault: Fault = Fault.NONE
    text: str = ""
    """Standard output of the call. If the box was killed, this is the output before the kill."""
    stderr: str = ""
    images: tuple[ReturnedImage, ...] = ()
    error: CallError | None = None
    limit: str | None = None
    """Limit that made the call fail, or None if no limit was involved.

    One of `time`, `memory`, `cpu`, `disk`, `processes`, `system call` and `code` (source length).
    """
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of each file that the call created or changed, keyed by relative path."""
    dropped: tuple[DroppedOutput, ...] = ()
    usage: CallUsage = field(default_factory=CallUsage)
    state_lost: bool = False
    """True if the interpreter that ran the previous calls was lost before this call.

    In that case, this call started from the inputs and the preload only.
    """


def check_source_length(number: int, code: str, *, limits: BoxLimits) -> CallResult | None:
    """Return a failed result if `code` is longer than `limits.code`, else None."""
    if len(code) <= limits.code:
        return None
    reason = f"the source has {len(code)} characters, {limits.code} are allowed"
    return CallResult(id=number, fault=Fault.CODE, limit="code", error=CallError(type="CodeTooLong", message=reason))


class SandboxError(RuntimeError):
    """The host failed to create a box or keep it running; the executed code is not at fault."""


class SandboxAccessDenied(SandboxError):
    """The server rejected this client's token, so a retry would not help."""


class PoolFull(RuntimeError):
    """No box became free within the caller's `wait_s`."""


class BoxClosed(RuntimeError):
    """The box or its pool was already closed."""
