"""Column names recognized in question files.

Names of image columns are matched case-insensitively.
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
"""Columns that contain file names. They are read as images only if no other column contains images.

Their values must be names of image files. Hugging Face's imagefolder names images in its metadata
column `file_name`.
"""
PICTURE_SUFFIXES = SUFFIXES[1:]
NUMBERED_IMAGE_COLUMN = re.compile(r"(image|img|picture|photo)(_path|_url|_file|_bytes)?_?(\d+)")
"""Matches numbered image columns: image_0, image_1, ... form one list of images."""
LIKELY_NAMES = {
    "question": ("questions", "query", "instruction", "input", "text", "user", "q", "message", "conversations", "conversation"),
    "answer": (
        "label", "labels", "answers", "target", "ground_truth", "groundtruth", "gt", "gold", "final_answer", "correct_answer", "output",
        "response", "reference", "class", "a",
    ),
}  # fmt: skip
"""Likely names of question and answer columns.

Error messages suggest these names if the usual columns are missing.
"""


def is_picture_column(name: str) -> bool:
    """Return True if a column with this name contains images."""
    return name.casefold() in (*IMAGE_COLUMNS, *FILE_NAME_COLUMNS) or NUMBERED_IMAGE_COLUMN.fullmatch(name.casefold()) is not None
