"""Looks at every row before a run starts: what is there, what a run cannot use, and what is only strange."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megatron_rl.data.images import StoredImage, shortened
from megatron_rl.types import Example

BOXES = ("bbox", "bboxes")
"""Keys of a question's extra that hold boxes: x1, y1, x2, y2 in pixels of its first picture."""
SHOWN = 20
"""Messages that are kept of a kind; all are counted."""
_AT_ONCE = 32

Size = tuple[int, int]
Look = Callable[[Example, list[Size]], list[str]]
"""What is strange about a question, given the width and height of its pictures."""


@dataclass(slots=True)
class Survey:
    num_rows: int = 0
    num_images: int = 0
    """Of the rows that can be used; so are the sources."""
    video: str = ""
    """Which row is the first that shows one."""
    sources: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    """The first SHOWN rows that cannot be used, one line each."""
    num_errors: int = 0
    warnings: list[str] = field(default_factory=list)
    num_warnings: int = 0

    def error(self, line: str) -> None:
        self.num_errors += 1
        self.errors += [line][: SHOWN - len(self.errors)]

    def warn(self, line: str) -> None:
        self.num_warnings += 1
        self.warnings += [line][: SHOWN - len(self.warnings)]

    def require_sound(self) -> None:
        """ValueError with the first error, if there is one."""
        if self.errors:
            others = f" (and {self.num_errors - 1} more rows; launch/doctor.py lists them)" if self.num_errors > 1 else ""
            raise ValueError(self.errors[0] + others)


def survey(examples: Sequence[Example], *, look: Look | None = None) -> Survey:
    """Read every question and the two ends of every picture; `look` may find more that is strange."""
    found = Survey(num_rows=len(examples))
    with ThreadPoolExecutor(max_workers=16) as pool:  # headers on a network disk are mostly waiting
        for start in range(0, len(examples), _AT_ONCE):
            read = [_read(examples, place) for place in range(start, min(start + _AT_ONCE, len(examples)))]
            for row, sizes in zip(read, pool.map(_sizes, read), strict=True):
                broken = [broken for broken in (row, *sizes, *_clips(row)) if isinstance(broken, ValueError)]
                if broken:
                    found.error(str(broken[0]))
                    continue
                found.num_images += len(sizes)
                found.video = found.video or (f"{row.where or row.id} shows a video" if row.payload["videos"] else "")
                found.sources[row.payload["data_source"]] += 1
                for wrong in [*bad_boxes(row.payload["extra"], sizes), *(look(row, sizes) if look else ())]:
                    found.warn(f"{row.where or row.id}: {wrong}")
    return found


def _read(examples: Sequence[Example], place: int) -> Example | ValueError:
    try:
        return examples[place]
    except ValueError as error:
        return error


def _sizes(row: Example | ValueError) -> list[Size | ValueError]:
    return [] if isinstance(row, ValueError) else [_size(image) for image in row.payload["images"]]


def _clips(row: Example | ValueError) -> list[ValueError]:
    """What is wrong with its videos."""
    wrong = []
    for clip in () if isinstance(row, ValueError) else row.payload["videos"]:
        try:
            clip.require_sound()
        except ValueError as error:
            wrong.append(error)
    return wrong


def _size(image: StoredImage) -> Size | ValueError:
    try:
        size = image.size()
        image.require_whole()
        return size
    except ValueError as error:
        return error


def bad_boxes(extra: dict[str, object], sizes: list[Size]) -> list[str]:
    """What is wrong with the boxes of a question. Example: `bbox [5, 0, 3, 9] is empty`."""
    wrong = []
    for key in BOXES:
        given = extra.get(key, [])
        boxes = given if isinstance(given, list) and (not given or any(isinstance(item, list) for item in given)) else [given]
        for box in boxes:
            if not (isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)):
                wrong.append(f"{key} {shortened(str(box))} is not four numbers")
                continue
            x1, y1, x2, y2 = box
            if x2 <= x1 or y2 <= y1:
                wrong.append(f"{key} {box} is empty")
            elif sizes and (min(x1, y1) < 0 or x2 > sizes[0][0] or y2 > sizes[0][1]):
                wrong.append(f"{key} {box} reaches out of the picture of {sizes[0][0]}x{sizes[0][1]} pixels")
    return wrong
