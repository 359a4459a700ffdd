"""Pickles of strangers: read without running anything of theirs, in memory and time that follow the file's size.

What a pickle names is looked up in a table of the format; what is not there becomes a Record, which knows what it was made of and did
nothing. This is pickle.py's own unpickler in Python, because the one in C (Python 3.11, Modules/_pickle.c, _Unpickler_ResizeMemoList) takes
34 GB for the nine bytes that put something at place 2**31 - 1 of its memo. Some of its verbs are written anew: NEWOBJ calls the table's
maker, BUILD sets no attribute of a class or function, the keys of a dict are flat (hashing a deep tuple overflows C's stack).
"""

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import ClassVar

UNPICKLING_ERRORS = (
    pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError,
    RecursionError, AssertionError, struct.error,
)  # fmt: skip
"""What pickle.py of Python 3.11 raises on bytes that are no pickle, or one of another kind."""
_FLAT = (str, int, float, bool, bytes, NoneType)

Maker = Callable[..., object]
"""Makes an object of the format out of what a pickle gives it, which may be anything."""


@dataclass(slots=True, eq=False)
class InertRecord:
    """Stands for an object of a class or function that the format's table does not name."""

    name: str
    arguments: tuple
    state: object = None

    def set_state(self, state: object) -> None:
        self.state = state


def make_record_maker(module: str, name: str) -> Maker:
    """A table of its own that names nothing: all become records."""
    return lambda *arguments: InertRecord(name, arguments)


class SafeUnpickler(pickle._Unpickler):
    """`known` says what a name makes, `fill` what an object made so does with its state, `stored` what a persistent id stands for.

    `load` raises BROKEN.
    """

    dispatch: ClassVar[dict[int, Callable]] = dict(pickle._Unpickler.dispatch)

    def __init__(
        self, content: bytes, *, find_maker: Callable[[str, str], object], set_state: Callable[[object, object], None],
        load_stored: Callable[[object], object] | None = None, key_types: tuple[type, ...] = (),
    ) -> None:  # fmt: skip
        """`key_types`: types of the format that a dict may have as keys beside numbers and text."""
        super().__init__(io.BytesIO(content))
        self._known, self._fill, self._stored, self._keys = find_maker, set_state, load_stored, (*_FLAT, InertRecord, *key_types)

    def find_class(self, module: str, name: str) -> object:
        return self._known(module, name)

    def persistent_load(self, pid: object) -> object:
        if self._stored is None:
            raise pickle.UnpicklingError("it refers to something outside of itself")
        return self._stored(pid)

    def load_newobj(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)

    def load_build(self) -> None:
        state = self.stack.pop()
        self._fill(self.stack[-1], state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list) -> None:
        into = self.stack[-1]
        if type(into) is not dict:
            raise pickle.UnpicklingError(f"it puts keys into a {type(into).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._check_key(key)
            into[key] = value

    def load_additems(self) -> None:
        items = self.pop_mark()
        for item in items:
            self._check_key(item)
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    def _check_key(self, key: object) -> None:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in self._keys for part in parts):
            raise pickle.UnpicklingError(
                f"a {type(key).__name__} of {', '.join(sorted({type(part).__name__ for part in parts}))} is a key in it"
            )

    def load_refused(self) -> None:
        raise pickle.UnpicklingError("it uses a verb that no file of torch has")

    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    for verb in (pickle.DICT, pickle.FROZENSET, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[verb[0]] = load_refused


def make_blank_maker(kind: type) -> Maker:
    """Makes an object of a dataclass as pickles make them: without its __init__, its state follows."""
    return partial(_blank, kind)


def _blank(kind: type) -> object:
    return kind.__new__(kind)
