"""Names of columns that are recognised in files of questions. Those of pictures are compared without regard to case."""

import re

from megatron_rl.data.images import SUFFIXES

QUESTION_COLUMNS, MESSAGE_COLUMNS = ("question", "problem"), ("prompt", "messages")
ANSWER_COLUMNS = ("answer", "solution")
IMAGE_COLUMNS = (
    "images", "image", "image_path", "image_paths", "img", "imgs", "img_path", "image_file", "image_files", "image_url", "image_urls",
    "picture", "pictures", "photo", "photos", "image_bytes", "decoded_image",
)  # fmt: skip
FILE_NAME_COLUMNS = ("file_name", "filename")
"""Columns that hold pictures only if no other column does and the value names a picture: `file_name` is that of imagefolder's metadata."""
PICTURE_SUFFIXES = SUFFIXES[1:]
NUMBERED_IMAGE_COLUMN = re.compile(r"(image|img|picture|photo)(_path|_url|_file|_bytes)?_?(\d+)")
"""Columns image_0, image_1, ... are one list of pictures."""
LIKELY_NAMES = {
    "question": ("questions", "query", "instruction", "input", "text", "user", "q", "message", "conversations", "conversation"),
    "answer": (
        "label", "labels", "answers", "target", "ground_truth", "groundtruth", "gt", "gold", "final_answer", "correct_answer", "output",
        "response", "reference", "class", "a",
    ),
}  # fmt: skip
"""Names that a question or an answer may have in files where the usual ones are missing: for messages."""


def is_picture_column(name: str) -> bool:
    return name.casefold() in (*IMAGE_COLUMNS, *FILE_NAME_COLUMNS) or NUMBERED_IMAGE_COLUMN.fullmatch(name.casefold()) is not None
