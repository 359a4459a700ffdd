"""Process of a box: it reads the box's inputs, confines itself and executes calls.

The process exits when its channel to the pool closes. The code runs in the same interpreter as this
module, so the code can forge replies. Therefore, the pool validates every reply (replies.py), and a
forged reply can only harm the box that sent it.
"""

import builtins
import contextlib
import errno
import io
import linecache
import os
import random
import resource
import signal
import socket
import sys
import traceback
import types
from pathlib import Path
from typing import TextIO

import numpy as np
from PIL import Image

from megatron_rl_sandbox import confine, frames, image_codec, kernel
from megatron_rl_sandbox.image_capture import ImageCapture

MAX_MESSAGE = 2000
MAX_TRACEBACK = 4000
MAX_SCANNED_OUTPUT = 1 << 20
LIMIT_OF_ERRNO = {errno.EFBIG: "disk", errno.ENOSPC: "disk", errno.EDQUOT: "disk", errno.EAGAIN: "processes", errno.ENOMEM: "memory"}


class BadInput(ValueError):
    """An input image or the preload was invalid."""


def run_box(channel: socket.socket, *, confinement: confine.Confinement, proc: int, output_fds: tuple[int, int]) -> None:
    """Run a box in this forked process until the pool closes the channel.

    The steps before receiving the inputs are the same for all boxes. Therefore, a process can be
    forked in advance and wait for the inputs of its box.
    """
    for number, handler in ((signal.SIGCHLD, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    try:
        confine.enter_box_namespaces(confinement.layers, proc=proc)
        os.close(proc)
        message, blobs = frames.receive_frame(channel)
        names = [str(item["name"]) for item in message["inputs"]]
        work = confine.prepare_directory(confinement, dict(zip(names, blobs, strict=True)))
        set_environment(confinement.directory)
        confine.drop_privileges(confinement)
    except EOFError:  # the box was never opened
        return
    except OSError as error:
        channel.sendall(frames.pack_frame({"host": f"{type(error).__name__}: {error}"}))
        return
    session = BoxSession(channel, confinement=confinement, work_dir=work, output_fds=output_fds)
    try:
        session.load_inputs(message["inputs"], preload=str(message["preload"]))
    except BadInput as error:
        channel.sendall(frames.pack_frame({"bad": str(error)[:MAX_MESSAGE]}))
        return
    channel.sendall(frames.pack_frame({"ready": True}))
    session.serve_calls()


def set_environment(directory: str) -> None:
    """Remove the pool's paths from the environment, and set HOME, TMPDIR and USER for the box."""
    del os.environ["PYTHONPATH"], os.environ["MPLCONFIGDIR"]
    os.environ.update(HOME=f"{directory}/tmp", TMPDIR=f"{directory}/tmp", USER="box")


class BoxSession:
    """Runs the calls of a box in one namespace, which is kept between calls."""

    def __init__(self, channel: socket.socket, *, confinement: confine.Confinement, work_dir: str, output_fds: tuple[int, int]) -> None:
        self.channel = channel
        self.limits = confinement.limits
        self.output_fds = output_fds
        self.work_dir = work_dir
        self.pid = os.getpid()
        self.data_limits = resource.getrlimit(resource.RLIMIT_DATA)  # (soft limit for the code, hard limit for the worker)
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        sys.argv = [""]
        sys.path[0:0] = [""]
        self.namespace = module.__dict__
        random.seed()
        # Reseed the global random generators, because otherwise all boxes forked from the zygote
        # would draw the same numbers.
        np.random.seed()
        self.capture = ImageCapture(confinement.limits, work_dir=work_dir)

    def load_inputs(self, inputs: list[dict[str, object]], *, preload: str) -> None:
        """Bind input images to their variables and run the preload.

        Raises BadInput if an image cannot be decoded or the preload raises an exception.
        """
        for item in inputs:
            if item["image"]:
                picture = self._decode_image(str(item["name"]))
                if item["variable"] is not None:
                    self.namespace[str(item["variable"])] = picture
        if preload:
            stdout, stderr = self._open_streams()
            error, _ = self._execute(preload, name="<preload>")
            self._close_streams(stdout, stderr)
            if error:
                raise BadInput(f"preload: line {error['line']}: {error['type']}: {error['message']}")

    def serve_calls(self) -> None:
        """Serve requests from the pool until the channel closes."""
        while True:
            try:
                message, _ = frames.receive_frame(self.channel)
            except EOFError:
                return
            if "code" in message:
                self._run_call(int(message["id"]), str(message["code"]))
            else:
                self._send_files(int(message["id"]), [str(name) for name in message["names"]])

    def _run_call(self, number: int, code: str) -> None:
        spent = _cpu_s()
        self.capture.start_call()
        stdout, stderr = self._open_streams()
        error, limit = self._execute(code, name=f"<call {number}>")
        signal.setitimer(signal.ITIMER_REAL, 0)  # cancel an alarm that the code left set
        self._close_streams(stdout, stderr)
        if os.getpid() != self.pid:  # this is a child process forked by the code; it must not reply
            os._exit(0)
        files = self._finish_capture()
        reply = {
            "id": number,
            "error": error,
            "limit": limit,
            "sources": [source for source, _ in self.capture.captured],
            "dropped": self.capture.dropped[:100],
            "files": files,
            "cpu_s": _cpu_s() - spent,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        self.channel.sendall(frames.pack_frame(reply, [png for _, png in self.capture.captured]))

    def _finish_capture(self) -> dict[str, int]:
        size = os.fstat(self.output_fds[0]).st_size
        printed = os.pread(self.output_fds[0], MAX_SCANNED_OUTPUT, max(0, size - MAX_SCANNED_OUTPUT)).decode("utf-8", "replace")
        try:
            return self.capture.finish_call(printed)
        except BaseException as error:  # drawing a figure runs code that the call attached to it
            self.capture.dropped.append(("image", f"figure: {type(error).__name__}: {_safe_str(error)}"))
            return {}

    def _execute(self, code: str, *, name: str) -> tuple[dict[str, object] | None, str | None]:
        """Execute `code` and return (error, exceeded_limit); each value may be None."""
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        own, worker = self.data_limits
        resource.setrlimit(resource.RLIMIT_DATA, (own, worker))
        try:
            exec(compile(code, name, "exec"), self.namespace)
        except BaseException as error:
            resource.setrlimit(resource.RLIMIT_DATA, (worker, worker))  # without this, a MemoryError could not be reported
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return None, None
            return _describe_error(error, name=name)
        resource.setrlimit(resource.RLIMIT_DATA, (worker, worker))
        return None, None

    def _open_streams(self) -> tuple[TextIO, TextIO]:
        """Restore descriptors 1 and 2 and Python's streams, which a call can change."""
        for number, stream in enumerate(self.output_fds, start=1):
            os.dup2(stream, number)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(
                io.BufferedWriter(io.FileIO(number, "wb", closefd=False)), encoding="utf-8", errors="replace", line_buffering=True
            )
            for number in (1, 2)
        )
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        return sys.stdout, sys.stderr

    def _close_streams(self, *streams: TextIO) -> None:
        for stream in streams:
            with contextlib.suppress(OSError, ValueError):  # full, or closed by the code
                stream.flush()

    def _decode_image(self, name: str) -> Image.Image:
        try:
            with Image.open(Path(self.work_dir, name), formats=image_codec.PIL_FORMATS) as picture:
                if picture.width * picture.height > self.limits.input_pixels:
                    raise BadInput(
                        f"images.{name}: {picture.width}x{picture.height} pixels, more than the allowed {self.limits.input_pixels}"
                    )
                picture.load()
                return picture
        except (OSError, SyntaxError, MemoryError, ValueError, Image.DecompressionBombError) as error:
            raise BadInput(str(error) if isinstance(error, BadInput) else f"images.{name}: cannot be read: {_safe_str(error)}") from error

    def _send_files(self, number: int, names: list[str]) -> None:
        found: dict[str, bytes] = {}
        left = self.limits.max_fetch_bytes
        for name in dict.fromkeys(names):
            most = min(self.limits.file, left)
            try:
                with open(Path(self.work_dir, name), "rb") as file:
                    content = file.read(most + 1)
            except (OSError, ValueError):
                continue
            if len(content) <= most:
                found[name] = content
                left -= len(content)
        self.channel.sendall(frames.pack_frame({"id": number, "names": list(found)}, list(found.values())))


def _describe_error(error: BaseException, *, name: str) -> tuple[dict[str, object], str | None]:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    line = lines[-1] if lines else None
    if isinstance(error, SyntaxError) and error.filename == name:
        line = error.lineno
    limit = LIMIT_OF_ERRNO.get(error.errno) if isinstance(error, OSError) and error.errno else None
    if isinstance(error, MemoryError):
        limit = "memory"
    elif isinstance(error, RuntimeError) and "can't start new thread" in _safe_str(error):
        limit = "processes"
    described = {"type": type(error).__name__[:100], "message": _safe_str(error), "line": line, "traceback": _format_traceback(error)}
    return described, limit


def _safe_str(error: BaseException) -> str:
    try:
        return str(error)[:MAX_MESSAGE]
    except BaseException as worse:
        return f"its message cannot be printed: {type(worse).__name__}"


def _format_traceback(error: BaseException) -> str:
    """Format a traceback without this file's frame and cut it to MAX_TRACEBACK characters."""
    try:
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, trace, limit=-20))
    except BaseException as worse:
        return f"the traceback cannot be printed: {type(worse).__name__}"
    return text if len(text) <= MAX_TRACEBACK else f"{text[: MAX_TRACEBACK // 2]}\n[...]\n{text[-MAX_TRACEBACK // 2 :]}"


def _cpu_s() -> float:
    own, waited = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + waited.ru_utime + waited.ru_stime


def preload_libraries() -> None:
    """Load the libraries for boxes, and their lazily imported modules, before any fork.

    The process must stay single-threaded: a fork does not copy other threads, and the kernel
    refuses unshare(CLONE_NEWUSER) in a process with several threads. Therefore, this function
    limits OpenCV to one thread, and an environment variable limits OpenBLAS to one thread. The
    import of pyarrow is blocked, because pandas imports pyarrow if available, and pyarrow's
    allocator starts a thread.
    """
    sys.modules["pyarrow"] = None
    import cv2
    import matplotlib.pyplot as plt
    import pandas
    import scipy.ndimage
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import sympy

    cv2.setNumThreads(0)
    Image.init()
    figure, axes = plt.subplots()
    axes.plot([0, 1], label="a")
    axes.legend()
    figure.canvas.draw()
    plt.close(figure)
    image_codec.encode_png(Image.new("RGB", (32, 32)).resize((16, 16)))
    str(pandas.DataFrame({"a": [1.5]}))
    sympy.solve(sympy.Symbol("x") - 1)
    np.linalg.svd(np.eye(2))


def close_other_fds(kept_fds: list[int]) -> None:
    """Close all file descriptors from 3 up, except `kept_fds`."""
    last = 3
    for descriptor in sorted(kept_fds):
        os.closerange(last, descriptor)
        last = descriptor + 1
    kernel.close_from(last)
