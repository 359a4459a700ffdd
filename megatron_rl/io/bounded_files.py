"""Readers for untrusted files. Only regular files up to a size limit are accepted.

A FIFO or a device is rejected, because reading it could block. Messages of ValueError omit the
file's name, which the caller must prepend. An OSError means that the file cannot be read. Parsing a
file can use memory of up to about 30 times the file size. YAML aliases are rejected, because they
could expand a small file to any size.
"""

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.composer import Composer

MAX_YAML_BYTES = 512 << 10
"""Maximum size of a YAML file in bytes. A run's settings are about 10 KB; parsing a file of the
maximum size takes at most about 6 s.
"""
MAX_NUMBER_CHARACTERS = 100
"""Maximum length in characters of a number in YAML. Parsing a base-60 number (such as 1:59:59) of
500 KB takes minutes, and a long hexadecimal number may have more decimal digits than Python can
print.
"""
TAIL_BYTES = 64 << 10
"""Number of bytes that are read from the end of a log."""
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_YAML_ERRORS = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that PyYAML 6 raises for invalid input: for example, IndexError for `!!int ""`, and
AttributeError for `!!timestamp x`.
"""


def open_regular(path: Path, *, follow_link: bool = True) -> BinaryIO:
    """Open a regular file for reading, without blocking if the path is a FIFO.

    Raises:
        ValueError: `path` is not a regular file.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_link else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("is not a regular file")
    return os.fdopen(descriptor, "rb")


def is_regular(path: Path, *, follow_link: bool = True) -> bool:
    """Return True if `path` is valid and refers to an existing regular file."""
    try:
        return stat.S_ISREG(os.stat(path, follow_symlinks=follow_link).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, *, at_most: int, follow_link: bool = True) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: `path` is not a regular file, or has more than `at_most` bytes.
    """
    with open_regular(path, follow_link=follow_link) as file:
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > at_most else file.read(at_most + 1)  # the file may grow meanwhile
    if max(size, len(content)) > at_most:
        raise ValueError(f"has {max(size, len(content))} bytes, more than {at_most}")
    return content


def read_text(path: Path, *, at_most: int) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        ValueError: The file is not valid UTF-8, or has more than `at_most` bytes.
    """
    return read_bytes(path, at_most=at_most).decode()


def read_tail(path: Path, *, num_bytes: int = TAIL_BYTES, start: int = 0) -> str:
    """Return up to `num_bytes` bytes from the end of a log as text.

    Bytes before the offset `start` are not returned.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(start, size - num_bytes))
        return file.read(num_bytes).decode(errors="replace")


def read_yaml(path: Path, *, at_most: int = MAX_YAML_BYTES, as_text: bool = False) -> Any:
    """Return the content of a YAML file.

    Raises:
        ValueError: The file is too large, or `parse_yaml` rejects its text.
    """
    return parse_yaml(read_text(path, at_most=at_most), as_text=as_text)


def parse_yaml(text: str, *, as_text: bool = False) -> Any:
    """Parse YAML text into plain Python values; with `as_text`, every scalar remains a string.

    Raises:
        ValueError: The text is not valid YAML, or contains an alias.
    """
    try:
        return yaml.load(text, Loader=_TextLoader if as_text else _PlainLoader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1} " if error.problem_mark else ""
        raise ValueError(f"{where}is not valid YAML: {error.problem}") from error
    except _YAML_ERRORS as error:
        raise ValueError(f"is not valid YAML: {' '.join(str(error).split())[:200] or type(error).__name__}") from error


def to_printable(text: str) -> str:
    """Return the text as one line, with unprintable characters replaced by "?".

    Error messages that quote text from a file must not contain terminal control characters.
    """
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


class _NoAliasComposer(Composer):
    check_event: Callable[..., bool]
    """Methods of the parser, with which every loader is combined."""
    peek_event: Callable[[], Any]

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"the alias *{event.anchor} is not allowed; replace it with its value", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)


class _PlainLoader(_NoAliasComposer, yaml.SafeLoader):
    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER_CHARACTERS:
            problem = f"a number of {len(node.value)} characters, more than {MAX_NUMBER_CHARACTERS}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return super().construct_scalar(node)


class _TextLoader(_NoAliasComposer, yaml.BaseLoader):
    pass


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys. Example: {"a": {"b": 1}} -> {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
