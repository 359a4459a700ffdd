"""Captures the images that code creates inside a box.

A call returns the images that its code shows, the image files that the code saves, and the figures
that the code leaves open. A call also returns existing image files whose names the code prints. The
hooks that capture images are installed before the first call.

`plt.show()` adds every open figure to the call's images and closes the figure. A figure that is
still open at the end of a call is returned by that call and stays open for the next call. A later
call returns the figure again only if the figure has changed. If a call saves a figure to a file,
the file is returned instead of the figure.
"""

import os
import stat
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakSet

import matplotlib.figure
import matplotlib.pyplot as plt
from matplotlib._pylab_helpers import Gcf  # plt.figure(number) would change the current figure
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from megatron_rl_sandbox import image_codec
from megatron_rl_sandbox.records import BoxLimits

MAX_ENTRIES = 5000
MAX_DEPTH = 6


class ImageCapture:
    """Collects the images of one call at a time, in the order in which they are created."""

    def __init__(self, limits: BoxLimits, *, work_dir: str) -> None:
        self.limits = limits
        self.work_dir = work_dir
        self.budget = image_codec.ImageBudget(limits)
        self.captured_figures: WeakSet[matplotlib.figure.Figure] = WeakSet()
        self.start_call()
        self._install_hooks()

    def start_call(self) -> None:
        """Reset the state of the previous call and record the current files."""
        self.budget.begin_call()
        self.captured: list[tuple[str, bytes]] = []
        self.dropped: list[tuple[str, str]] = []
        self.files_before = self._scan_work_dir()

    def add_image(self, image: Image.Image, *, source: str) -> None:
        """Add an image, or a note on why it is not returned."""
        if self._is_within_limits(source=source, width=image.width, height=image.height):
            self._store_png(image_codec.encode_png(image), source=source)

    def add_figure(self, figure: matplotlib.figure.Figure) -> None:
        """Render and add a figure, or add a note on why it is not returned."""
        width, height = (round(side) for side in figure.bbox.size)
        if self._is_within_limits(source="figure", width=width, height=height):
            canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
            canvas.draw()
            drawn = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
            self._store_png(image_codec.encode_png(drawn.convert("RGB")), source="figure")
        self.captured_figures.add(figure)
        figure.stale = False

    def finish_call(self, stdout_text: str) -> dict[str, int]:
        """Add the remaining images of a call and return the sizes of its new and changed files.

        The remaining images are added in this order: open figures, saved image files, existing
        image files that are named in `stdout_text`. Sizes are in bytes, keyed by file name.
        """
        for figure in _open_figures():
            if figure not in self.captured_figures or figure.stale:
                self.add_figure(figure)
        after = self._scan_work_dir()
        changed = {name: entry for name, entry in after.items() if self.files_before.get(name) != entry}
        saved = sorted((name for name in changed if _is_image(name)), key=lambda name: (after[name].modified, name))
        named = [
            name for name in dict.fromkeys(_find_image_names(stdout_text, work=self.work_dir)) if name in after and name not in changed
        ]
        for name in [*saved, *named]:
            self._add_file(name)
        listed = dict(sorted((name, entry.size) for name, entry in changed.items())[: self.limits.files])
        if len(changed) > len(listed):
            self.dropped.append(("files", f"{len(changed)} files, {len(listed)} of them listed"))
        return listed

    def _add_file(self, name: str) -> None:
        try:
            with Image.open(Path(self.work_dir, name), formats=image_codec.PIL_FORMATS) as picture:
                if self._is_within_limits(source=name, width=picture.width, height=picture.height):
                    picture.load()
                    self._store_png(image_codec.encode_png(picture), source=name)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's errors for broken files
            self.dropped.append(("image", f"{name}: cannot be read: {str(error)[:200]}"))

    def _is_within_limits(self, *, source: str, width: int, height: int) -> bool:
        reason = image_codec.check_image_size(width=width, height=height, limits=self.limits)
        reason = reason or self.budget.check_image(pixels=width * height)
        if reason:
            self.dropped.append(("image", f"{source}: {reason}"))
        return reason is None

    def _store_png(self, png: bytes, *, source: str) -> None:
        width, height = image_codec.read_png_size(png)
        reason = self.budget.check_image(pixels=width * height, num_bytes=len(png))
        if len(png) > self.limits.image_bytes:
            reason = f"{len(png)} bytes as PNG, more than {self.limits.image_bytes}; make it smaller"
        if reason:
            self.dropped.append(("image", f"{source}: {reason}"))
        else:
            self.budget.count_image(pixels=width * height, num_bytes=len(png))
            self.captured.append((source, png))

    def _scan_work_dir(self) -> dict[str, "FileEntry"]:
        """Return the regular files below the working directory, keyed by relative path."""
        found: dict[str, FileEntry] = {}
        folders = [("", 0)]
        while folders and len(found) < MAX_ENTRIES:
            prefix, depth = folders.pop()
            try:
                with os.scandir(os.path.join(self.work_dir, prefix)) as entries:
                    for entry in entries:
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                            folders.append((f"{prefix}{entry.name}/", depth + 1))
                        elif stat.S_ISREG(status.st_mode) and len(found) < MAX_ENTRIES:
                            found[prefix + entry.name] = FileEntry((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:  # the code removed the directory or its read permission
                continue
        return found

    def _install_hooks(self) -> None:
        save_figure = matplotlib.figure.Figure.savefig

        def show(*arguments: Any, **options: Any) -> None:
            for figure in _open_figures():
                self.add_figure(figure)
            plt.close("all")

        def show_figure(figure: matplotlib.figure.Figure, *arguments: Any, **options: Any) -> None:
            self.add_figure(figure)

        def save(figure: matplotlib.figure.Figure, target: Any, *arguments: Any, **options: Any) -> None:
            save_figure(figure, target, *arguments, **options)
            if isinstance(target, str | os.PathLike) and _is_image(os.fspath(target) if os.path.splitext(target)[1] else f"{target}.png"):
                self.captured_figures.add(figure)
                figure.stale = False

        def show_image(picture: Image.Image, *arguments: Any, **options: Any) -> None:
            self.add_image(picture, source="show")

        plt.show, matplotlib.figure.Figure.show, matplotlib.figure.Figure.savefig = show, show_figure, save
        Image.Image.show = show_image
        warnings.formatwarning = format_warning


def format_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning without local paths.

    The file name and the line number are included only for warnings raised in the executed code.
    """
    where = "" if os.path.isabs(filename) else f"{filename}:{lineno}: "
    return f"{where}{category.__name__}: {message}\n"


class FileEntry(tuple[int, int, int]):
    """Modification time (ns), size (bytes) and inode of a file."""

    __slots__ = ()

    @property
    def modified(self) -> int:
        """Modification time in nanoseconds."""
        return self[0]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self[1]


def _open_figures() -> list[matplotlib.figure.Figure]:
    return [manager.canvas.figure for manager in Gcf.get_all_fig_managers()]


def _is_image(name: str) -> bool:
    return name.lower().endswith(image_codec.SUFFIXES)


def _find_image_names(printed: str, *, work: str) -> list[str]:
    """Return the image file names in printed text, as paths relative to the working directory."""
    words = (word.strip("'\"`()[]{}<>,;:").removeprefix(work + "/").removeprefix("./") for word in printed.split())
    return [word for word in words if _is_image(word)]
