"""Readers of untrusted files: regular files only, and no more bytes than a limit.

A FIFO or a device is refused instead of waited for. Every ValueError is worded to follow the file's
name. An OSError means that the file cannot be read. Parsing takes at most some 30 times a file's
bytes: YAML is read without aliases, which stand for any number of copies.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

import yaml

MAX_YAML_BYTES = 512 << 10
"""Maximum size of a YAML file in bytes. A run's settings have 10 KB; the parser takes some 6 s for
the worst file of this size.
"""
MAX_NUMBER_CHARACTERS = 100
"""Maximum length of a number in YAML. 1:59:59 is a number to the base of 60, which takes minutes
for 500 KB, and a hexadecimal number may have more digits than can be printed.
"""
TAIL_BYTES = 64 << 10
"""Number of bytes that are read of a log for its last lines."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions of PyYAML 6: `!!int ""` raises an IndexError, `!!timestamp x` an AttributeError."""


def open_regular(path: Path, *, follow_link: bool = True) -> BinaryIO:
    """Open a regular file for reading, without waiting for the writer of a FIFO.

    Raises:
        ValueError: It is no regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is no regular file")
    return os.fdopen(descriptor, "rb")


def is_regular(path: Path, *, follow_link: bool = True) -> bool:
    """Return True if a regular file exists; False for a name that no file can have."""
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=follow_link).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, at_most: int, follow_link: bool = True) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: It has more than `at_most` bytes.
    """
    with open_regular(path, follow_link=follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > at_most else file.read(at_most + 1)  # the file may grow meanwhile
    if max(size, len(content)) > at_most:
        raise ValueError(f"has {max(size, len(content))} bytes, more than {at_most}")
    return content


def read_text(path: Path, *, at_most: int) -> str:
    """Return the text of a file in UTF-8.

    Raises:
        ValueError: It is no UTF-8, or has more than `at_most` bytes.
    """
    return read_bytes(path, at_most=at_most).decode()


def read_tail(path: Path, *, num_bytes: int = TAIL_BYTES, start: int = 0) -> str:
    """Return the last `num_bytes` bytes of a log as text, from byte `start` on at the earliest."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(start, size - num_bytes))
        return file.read(num_bytes).decode(errors="replace")


def read_yaml(path: Path, *, at_most: int = MAX_YAML_BYTES, as_text: bool = False) -> object:
    """Return the content of a YAML file.

    Raises:
        ValueError: It is too large, or `parse_yaml` rejects it.
    """
    return parse_yaml(read_text(path, at_most=at_most), as_text=as_text)


def parse_yaml(text: str, *, as_text: bool = False) -> object:
    """Return the plain values of a YAML text; `as_text` keeps every scalar as typed.

    Raises:
        ValueError: It is no YAML, or has an alias.
    """
    try:
        return yaml.load(text, Loader=_TextLoader if as_text else _PlainLoader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1} " if error.problem_mark else ""
        raise ValueError(f"{where}is no YAML: {error.problem}") from error
    except _YAML_ERRORS as error:
        raise ValueError(f"is no YAML: {' '.join(str(error).split())[:200] or type(error).__name__}") from error


def to_printable(text: str) -> str:
    """Return the text on one line, with "?" in place of unprintable characters.

    Errors contain text from files, which must not move a terminal's cursor.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


class _NoAliasComposer(yaml.composer.Composer):
    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(problem=f"an alias, *{event.anchor}; write its value out", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _PlainLoader(_NoAliasComposer, yaml.SafeLoader):
    def construct_scalar(self, node: yaml.Node) -> str:
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(node.value)} characters, more than {MAX_NUMBER_CHARACTERS}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)


class _TextLoader(_NoAliasComposer, yaml.BaseLoader):
    pass
