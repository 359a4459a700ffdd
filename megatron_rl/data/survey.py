"""Surveys all questions before a run starts, and returns counts, errors and warnings."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.data.images import StoredImage, shorten
from megatron_rl.data.problem_lines import ProblemLines
from megatron_rl.data.unread import ExaminedRow
from megatron_rl.data.unread_names import ImageColumnCounts, UnreadColumns
from megatron_rl.types import Example

BOX_KEYS = ("bbox", "bboxes")
"""Keys of `extra` that contain bounding boxes.

A box is x1, y1, x2, y2 in pixels of the question's first image.
"""
_BATCH_SIZE = 32
_MOST_COLUMNS = 30
"""Maximum number of columns that a message lists."""
_READS = "'task.data.columns={images: COLUMN}' reads one (likewise question, answer), and custom rewards receive them in extra"

Size = tuple[int, int]
QuestionCheck = Callable[[Example, list[Size]], list[str]]
"""Function that returns warnings about a question, given the sizes (width, height) of its images.
"""


class QuestionSource(Protocol):
    """Methods and attributes of a question data set that a survey needs."""

    @property
    def column_mapping(self) -> Mapping[str, str]:
        """Maps the trainer's column names to the names given in task.data.columns."""
        ...

    @property
    def ignored_columns(self) -> Sequence[str]:
        """Columns that never cause a warning."""
        ...

    def __len__(self) -> int:
        """Return the number of questions."""
        ...

    def examine_row(self, index: int) -> ExaminedRow:
        """Return a question, the findings about its row, and the row's values that are not read."""
        ...

    def locate(self, index: int) -> str:
        """Return the file and row of a question, such as `train.jsonl row 17`."""
        ...


@dataclass(slots=True)
class QuestionSurvey:
    """Results of a survey of questions."""

    num_rows: int = 0
    num_images: int = 0
    """Number of images in usable rows."""
    first_video: str = ""
    """Description of the first row with a video; "" if there is none."""
    sources: Counter[str] = field(default_factory=Counter)
    """Number of usable rows per data source."""
    errors: list[str] = field(default_factory=list)
    """Error lines; rows of a file with the same error share one line."""
    num_errors: int = 0
    """Number of rows with an error."""
    num_more_errors: int = 0
    """Number of rows with an error that is not listed in `errors`."""
    column_warnings: list[str] = field(default_factory=list)
    """Warnings about important columns that are not read, and about rows without images."""
    unread_columns: list[str] = field(default_factory=list)
    """One line that lists the columns that are not read; empty if all columns are read."""
    warnings: list[str] = field(default_factory=list)
    num_warnings: int = 0
    """Number of rows with a warning."""
    num_more_warnings: int = 0
    """Number of rows with a warning that is not listed in `warnings`."""

    def raise_on_errors(self) -> None:
        """Raise ValueError with the first error, if there is any."""
        if self.errors:
            others = len(self.errors) - 1 + self.num_more_errors
            raise ValueError(self.errors[0] + (f" (and {others} more problems; launch/doctor.py lists them)" if others else ""))


def survey_questions(examples: QuestionSource, *, check_question: QuestionCheck | None = None) -> QuestionSurvey:
    """Survey every question.

    The survey also reads the first and last bytes of every image. Warnings returned by
    `check_question` are included.
    """
    found, errors, columns, warnings = QuestionSurvey(num_rows=len(examples)), ProblemLines(), ProblemLines(), ProblemLines()
    num_rows_of: Counter[str] = Counter()
    names: dict[str, None] = {}
    unread, pictured = UnreadColumns(examples.ignored_columns), ImageColumnCounts()
    with ThreadPoolExecutor(max_workers=16) as pool:  # reading headers from a network disk is mostly waiting
        for start in range(0, len(examples), _BATCH_SIZE):
            places = range(start, min(start + _BATCH_SIZE, len(examples)))
            num_rows_of.update(examples.locate(place).rpartition(" row ")[0] for place in places)
            read = [_examine_row(examples, place) for place in places]
            for row, sizes in zip(read, pool.map(_image_sizes, read), strict=True):
                broken = [broken for broken in (row, *sizes, *_video_errors(row)) if isinstance(broken, ValueError)]
                if isinstance(row, ValueError) or broken:
                    errors.add_error(broken[0])
                    continue
                sizes = [size for size in sizes if not isinstance(size, ValueError)]
                _count(row.example, sizes, found)
                names |= dict.fromkeys(row.columns)
                unread.add(row.unread_values, row.example.where)
                pictured.add(row.image_column, row.example.where)
                for finding in row.findings:
                    (errors if finding.is_error else columns).add_finding(finding, row.example.where)
                for wrong in [
                    *find_invalid_boxes(row.example.payload["extra"], sizes),
                    *(check_question(row.example, sizes) if check_question else ()),
                ]:
                    warnings.add_message(f"{row.example.where or row.example.id}: {wrong}")
    errors.move_errors_in_all_rows(columns, num_rows_of)
    found.errors = [*_missing_column_errors(examples.column_mapping, names), *unread.errors(names), *errors.format_lines(num_rows_of)]
    found.unread_columns = unread.format_lines(_READS)
    found.num_errors, found.num_more_errors = errors.num_rows, errors.num_omitted_rows()
    found.column_warnings = [*_without_pictures(found, names), *pictured.format_lines(), *columns.format_lines(num_rows_of)]
    found.warnings, found.num_warnings, found.num_more_warnings = (
        warnings.format_lines(num_rows_of),
        warnings.num_rows,
        warnings.num_omitted_rows(),
    )
    return found


def _count(example: Example, sizes: list[Size], found: QuestionSurvey) -> None:
    found.num_images += len(sizes)
    found.first_video = found.first_video or (f"{example.where or example.id} contains a video" if example.payload["videos"] else "")
    found.sources[example.payload["data_source"]] += 1


def _missing_column_errors(chosen: Mapping[str, str], names: Mapping[str, None]) -> list[str]:
    """Return an error for each column that task.data.columns names but no row contains.

    If no row is usable, return an empty list, because other errors explain why.
    """
    listed = ", ".join([*names][:_MOST_COLUMNS])
    return [
        f"task.data.columns.{ours}={theirs}: no row has that column; columns: {listed}"
        for ours, theirs in chosen.items()
        if names and theirs not in names
    ]


def _without_pictures(found: QuestionSurvey, names: Mapping[str, None]) -> list[str]:
    usable = sum(found.sources.values())
    if found.num_images or found.first_video or not usable:
        return []
    listed = ", ".join([*names][:_MOST_COLUMNS])
    remedy = f"Columns: {listed}. If one contains images: 'task.data.columns={{images: COLUMN}}'"
    return [f"0 images in {usable} rows: the policy sees only text. {remedy}"]


def _examine_row(examples: QuestionSource, place: int) -> ExaminedRow | ValueError:
    try:
        return examples.examine_row(place)
    except ValueError as error:
        return error


def _image_sizes(row: ExaminedRow | ValueError) -> list[Size | ValueError]:
    return [] if isinstance(row, ValueError) else [_image_size(image) for image in row.example.payload["images"]]


def _video_errors(row: ExaminedRow | ValueError) -> list[ValueError]:
    wrong = []
    for clip in () if isinstance(row, ValueError) else row.example.payload["videos"]:
        try:
            clip.check_video()
        except ValueError as error:
            wrong.append(error)
    return wrong


def _image_size(image: StoredImage) -> Size | ValueError:
    try:
        size = image.size()
        image.check_complete()
        return size
    except ValueError as error:
        return error


def find_invalid_boxes(extra: dict[str, object], sizes: list[Size]) -> list[str]:
    """Return the problems with bounding boxes, such as `bbox [5, 0, 3, 9] is empty`."""
    wrong = []
    for key in BOX_KEYS:
        given = extra.get(key, [])
        boxes = given if isinstance(given, list) and (not given or any(isinstance(item, list) for item in given)) else [given]
        for box in boxes:
            if not (isinstance(box, list) and len(box) == 4 and all(isinstance(side, int | float) for side in box)):
                wrong.append(f"{key} {shorten(str(box))} is not a list of four numbers")
                continue
            x1, y1, x2, y2 = box
            if x2 <= x1 or y2 <= y1:
                wrong.append(f"{key} {box} is empty")
            elif sizes and (min(x1, y1) < 0 or x2 > sizes[0][0] or y2 > sizes[0][1]):
                wrong.append(f"{key} {box} exceeds the image of {sizes[0][0]}x{sizes[0][1]} pixels")
    return wrong
