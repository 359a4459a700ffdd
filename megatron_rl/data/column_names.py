"""Column names recognized in files of questions.

Names of image columns are compared without case.
"""

import re

from megatron_rl.data.images import SUFFIXES

QUESTION_COLUMNS, MESSAGE_COLUMNS = ("question", "problem"), ("prompt", "messages")
ANSWER_COLUMNS = ("answer", "solution")
IMAGE_COLUMNS = (
    "images", "image", "image_path", "image_paths", "img", "imgs", "img_path", "image_file", "image_files", "image_url", "image_urls",
    "picture", "pictures", "photo", "photos", "image_bytes", "decoded_image",
)  # fmt: skip
FILE_NAME_COLUMNS = ("file_name", "filename")
"""Columns that contain images only if no other column does and their value is an image file name.

`file_name` is the column of imagefolder's metadata.
"""
PICTURE_SUFFIXES = SUFFIXES[1:]
NUMBERED_IMAGE_COLUMN = re.compile(r"(image|img|picture|photo)(_path|_url|_file|_bytes)?_?(\d+)")
"""Pattern of numbered image columns: image_0, image_1, ... form one list of images."""
LIKELY_NAMES = {
    "question": ("questions", "query", "instruction", "input", "text", "user", "q", "message", "conversations", "conversation"),
    "answer": (
        "label", "labels", "answers", "target", "ground_truth", "groundtruth", "gt", "gold", "final_answer", "correct_answer", "output",
        "response", "reference", "class", "a",
    ),
}  # fmt: skip
"""Likely names of question and answer columns, suggested in error messages when the usual ones are
missing.
"""


def is_picture_column(name: str) -> bool:
    """Return True if a column name is one of those of images."""
    return name.casefold() in (*IMAGE_COLUMNS, *FILE_NAME_COLUMNS) or NUMBERED_IMAGE_COLUMN.fullmatch(name.casefold()) is not None
