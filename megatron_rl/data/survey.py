"""Looks at every row before a run starts: what is there, what a run cannot use, and what is only strange."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.data.images import StoredImage, shortened
from megatron_rl.data.problem_lines import ProblemLines
from megatron_rl.data.unread import Examined
from megatron_rl.data.unread_names import PictureColumns, UnreadNames
from megatron_rl.types import Example

BOXES = ("bbox", "bboxes")
"""Keys of a question's extra that hold boxes: x1, y1, x2, y2 in pixels of its first picture."""
_AT_ONCE = 32
_MOST_COLUMNS = 30
"""Columns that a message names."""
_READS = "'task.data.columns={images: COLUMN}' reads one (so question, answer), and rewards of your own find them in extra"

Size = tuple[int, int]
Look = Callable[[Example, list[Size]], list[str]]
"""What is strange about a question, given the width and height of its pictures."""


class Examinable(Protocol):
    """The part of a question that a survey reads."""

    chosen: Mapping[str, str]
    """Our names of columns -> those that task.data.columns gives."""
    ignored: Sequence[str]
    """Columns that no warning names."""

    def __len__(self) -> int: ...

    def examine(self, index: int) -> Examined: ...

    def where(self, index: int) -> str: ...


@dataclass(slots=True)
class Survey:
    num_rows: int = 0
    num_images: int = 0
    """Of the rows that can be used; so are the sources."""
    video: str = ""
    """Which row is the first that shows one."""
    sources: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    """One line for the rows of a file that cannot be used for the same reason."""
    num_errors: int = 0
    """Rows; in `num_more_errors` those that are in no line. So for warnings."""
    num_more_errors: int = 0
    column_warnings: list[str] = field(default_factory=list)
    """Columns that seem to matter and are not read, and rows without pictures."""
    unread: list[str] = field(default_factory=list)
    """One line with all columns that are not read, if there are any."""
    warnings: list[str] = field(default_factory=list)
    num_warnings: int = 0
    num_more_warnings: int = 0

    def require_sound(self) -> None:
        """ValueError with the first error, if there is one."""
        if self.errors:
            others = len(self.errors) - 1 + self.num_more_errors
            raise ValueError(self.errors[0] + (f" (and {others} more problems; launch/doctor.py lists them)" if others else ""))


def survey(examples: Examinable, *, look: Look | None = None) -> Survey:
    """Read every question and the two ends of every picture; `look` may find more that is strange."""
    found, errors, columns, warnings = Survey(num_rows=len(examples)), ProblemLines(), ProblemLines(), ProblemLines()
    num_rows_of: Counter[str] = Counter()
    names: dict[str, None] = {}
    unread, pictured = UnreadNames(examples.ignored), PictureColumns()
    with ThreadPoolExecutor(max_workers=16) as pool:  # headers on a network disk are mostly waiting
        for start in range(0, len(examples), _AT_ONCE):
            places = range(start, min(start + _AT_ONCE, len(examples)))
            num_rows_of.update(examples.where(place).rpartition(" row ")[0] for place in places)
            read = [_read(examples, place) for place in places]
            for row, sizes in zip(read, pool.map(_sizes, read), strict=True):
                broken = [broken for broken in (row, *sizes, *_clips(row)) if isinstance(broken, ValueError)]
                if broken:
                    errors.add_error(broken[0])
                    continue
                _count(row.example, sizes, found)
                names |= dict.fromkeys(row.columns)
                unread.add(row.unread, row.example.where)
                pictured.add(row.pictured_by, row.example.where)
                for finding in row.findings:
                    (errors if finding.is_error else columns).add_finding(finding, row.example.where)
                for wrong in [*bad_boxes(row.example.payload["extra"], sizes), *(look(row.example, sizes) if look else ())]:
                    warnings.add_message(f"{row.example.where or row.example.id}: {wrong}")
    errors.take_errors_of_all(columns, num_rows_of)
    found.errors = [*_missing_choices(examples.chosen, names), *unread.errors(names), *errors.lines(num_rows_of)]
    found.unread = unread.lines(_READS)
    found.num_errors, found.num_more_errors = errors.num_rows, errors.num_left_out()
    found.column_warnings = [*_without_pictures(found, names), *pictured.lines(), *columns.lines(num_rows_of)]
    found.warnings, found.num_warnings, found.num_more_warnings = warnings.lines(num_rows_of), warnings.num_rows, warnings.num_left_out()
    return found


def _count(example: Example, sizes: list[Size], found: Survey) -> None:
    found.num_images += len(sizes)
    found.video = found.video or (f"{example.where or example.id} shows a video" if example.payload["videos"] else "")
    found.sources[example.payload["data_source"]] += 1


def _missing_choices(chosen: Mapping[str, str], names: Mapping[str, None]) -> list[str]:
    """Return an error for each column that task.data.columns names and no row has. Where no row can be used, others say why."""
    listed = ", ".join([*names][:_MOST_COLUMNS])
    return [
        f"task.data.columns.{ours}={theirs}: no row has that column; columns: {listed}"
        for ours, theirs in chosen.items()
        if names and theirs not in names
    ]


def _without_pictures(found: Survey, names: Mapping[str, None]) -> list[str]:
    usable = sum(found.sources.values())
    if found.num_images or found.video or not usable:
        return []
    listed = ", ".join([*names][:_MOST_COLUMNS])
    remedy = f"Columns: {listed}. If one has pictures: 'task.data.columns={{images: COLUMN}}'"
    return [f"0 images in {usable} rows: the policy sees text alone. {remedy}"]


def _read(examples: Examinable, place: int) -> Examined | ValueError:
    try:
        return examples.examine(place)
    except ValueError as error:
        return error


def _sizes(row: Examined | ValueError) -> list[Size | ValueError]:
    return [] if isinstance(row, ValueError) else [_size(image) for image in row.example.payload["images"]]


def _clips(row: Examined | ValueError) -> list[ValueError]:
    """What is wrong with its videos."""
    wrong = []
    for clip in () if isinstance(row, ValueError) else row.example.payload["videos"]:
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
