"""Inside a box: what a call shows, leaves open, saves or prints the name of becomes images; the hooks are put in place before the fork.

`plt.show()` takes every open figure and closes it, as a window would be; a figure left open is taken at the end of the call, stays open for
the next turn, and is taken again only when it changed. A figure that the call saved to a file comes back as that file.
"""

import os
import stat
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakSet

import matplotlib.figure
import matplotlib.pyplot as plt
from matplotlib._pylab_helpers import Gcf  # plt.figure(number) would make another figure the current one
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from sandbox import images
from sandbox.types import Limits

MAX_ENTRIES = 5000
MAX_DEPTH = 6


class Gallery:
    """The images of one call, in the order in which they were made."""

    def __init__(self, limits: Limits, *, work: str) -> None:
        self.limits = limits
        self.work = work
        self.allowance = images.Allowance(limits)
        self.seen: WeakSet[matplotlib.figure.Figure] = WeakSet()
        self.start()
        self._hook()

    def start(self) -> None:
        """Begin a call."""
        self.allowance.begin_call()
        self.taken: list[tuple[str, bytes]] = []
        self.dropped: list[tuple[str, str]] = []
        self.before = self._scan()

    def add(self, picture: Image.Image, *, source: str) -> None:
        if self._has_room(source=source, width=picture.width, height=picture.height):
            self._keep(images.encode(picture), source=source)

    def add_figure(self, figure: matplotlib.figure.Figure) -> None:
        width, height = (round(side) for side in figure.bbox.size)
        if self._has_room(source="figure", width=width, height=height):
            canvas = figure.canvas if isinstance(figure.canvas, FigureCanvasAgg) else FigureCanvasAgg(figure)
            canvas.draw()
            drawn = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
            self._keep(images.encode(drawn.convert("RGB")), source="figure")
        self.seen.add(figure)
        figure.stale = False

    def finish(self, printed: str) -> dict[str, int]:
        """Takes figures left open, then image files that were saved or whose name was printed. Returns files made or changed."""
        for figure in _open_figures():
            if figure not in self.seen or figure.stale:
                self.add_figure(figure)
        after = self._scan()
        changed = {name: entry for name, entry in after.items() if self.before.get(name) != entry}
        saved = sorted((name for name in changed if _is_image(name)), key=lambda name: (after[name].modified, name))
        named = [name for name in dict.fromkeys(_words(printed, work=self.work)) if name in after and name not in changed]
        for name in [*saved, *named]:
            self._add_file(name)
        listed = dict(sorted((name, entry.size) for name, entry in changed.items())[: self.limits.files])
        if len(changed) > len(listed):
            self.dropped.append(("files", f"{len(changed)} files, {len(listed)} of them listed"))
        return listed

    def _add_file(self, name: str) -> None:
        try:
            with Image.open(Path(self.work, name), formats=images.FORMATS) as picture:
                if self._has_room(source=name, width=picture.width, height=picture.height):
                    picture.load()
                    self._keep(images.encode(picture), source=name)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # Pillow's ways to say that a file is broken
            self.dropped.append(("image", f"{name}: cannot be read: {str(error)[:200]}"))

    def _has_room(self, *, source: str, width: int, height: int) -> bool:
        reason = images.refusal(width=width, height=height, limits=self.limits) or self.allowance.refusal(pixels=width * height)
        if reason:
            self.dropped.append(("image", f"{source}: {reason}"))
        return reason is None

    def _keep(self, png: bytes, *, source: str) -> None:
        width, height = images.png_size(png)
        reason = self.allowance.refusal(pixels=width * height, num_bytes=len(png))
        if len(png) > self.limits.image_bytes:
            reason = f"{len(png)} bytes as PNG, more than {self.limits.image_bytes}; make it smaller"
        if reason:
            self.dropped.append(("image", f"{source}: {reason}"))
        else:
            self.allowance.count(pixels=width * height, num_bytes=len(png))
            self.taken.append((source, png))

    def _scan(self) -> dict[str, "Entry"]:
        """Regular files of the working directory by relative name; links are not followed."""
        found: dict[str, Entry] = {}
        folders = [("", 0)]
        while folders and len(found) < MAX_ENTRIES:
            prefix, depth = folders.pop()
            try:
                with os.scandir(os.path.join(self.work, prefix)) as entries:
                    for entry in entries:
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
                            folders.append((f"{prefix}{entry.name}/", depth + 1))
                        elif stat.S_ISREG(status.st_mode) and len(found) < MAX_ENTRIES:
                            found[prefix + entry.name] = Entry((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:  # the code took the directory away, or its own right to read it
                continue
        return found

    def _hook(self) -> None:
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
                self.seen.add(figure)
                figure.stale = False

        def show_image(picture: Image.Image, *arguments: Any, **options: Any) -> None:
            self.add(picture, source="show")

        plt.show, matplotlib.figure.Figure.show, matplotlib.figure.Figure.savefig = show, show_figure, save
        Image.Image.show = show_image
        warnings.formatwarning = brief_warning


def brief_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """Return what is printed of a warning: its line where that is of the code that was given, and no path of this machine."""
    where = "" if os.path.isabs(filename) else f"{filename}:{lineno}: "
    return f"{where}{category.__name__}: {message}\n"


class Entry(tuple[int, int, int]):
    """Modified (ns), size (bytes), inode."""

    __slots__ = ()

    @property
    def modified(self) -> int:
        return self[0]

    @property
    def size(self) -> int:
        return self[1]


def _open_figures() -> list[matplotlib.figure.Figure]:
    return [manager.canvas.figure for manager in Gcf.get_all_fig_managers()]


def _is_image(name: str) -> bool:
    return name.lower().endswith(images.SUFFIXES)


def _words(printed: str, *, work: str) -> list[str]:
    """Names of image files among the words that were printed, relative to the working directory."""
    words = (word.strip("'\"`()[]{}<>,;:").removeprefix(work + "/").removeprefix("./") for word in printed.split())
    return [word for word in words if _is_image(word)]
