"""Collects the texts of messages from the source code, for tests of documents that quote them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "\0"
"""Stands for a value that is inserted at run time."""


def read_templates(source: str) -> Iterator[str]:
    """Yield every string of Python source, with VARIABLE in place of inserted values."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.JoinedStr(values=parts):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else VARIABLE for part in parts)


def collect_templates(folders: list[Path]) -> str:
    """Return all texts of the Python and shell files in the folders, joined by line breaks."""
    texts: list[str] = []
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            texts += read_templates(path.read_text())
        texts += [path.read_text() for path in sorted(folder.rglob("*.sh"))]
    return "\n".join(texts)


def find_missing(message: str, templates: str) -> list[str]:
    """Return the parts of a quoted message that no template contains.

    In the message, `...` stands for inserted values.
    """
    parts = [" ".join(part.split()) for part in re.split(r"\.\.\.", message)]
    return [part for part in parts if len(part) > 3 and part.strip(" :;,.") not in templates]
