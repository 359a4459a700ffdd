"""Unpickles untrusted data without executing code from the data.

Memory and time are proportional to the size of the data. Names in a pickle are looked up in a fixed
set of constructors for the file format. Depending on the format, other names are rejected or become
an `InertRecord`, which stores its arguments and does nothing. The implementation extends the Python
version of pickle's unpickler, because the C version (Python 3.11, Modules/_pickle.c,
_Unpickler_ResizeMemoList) allocates 34 GB for a nine-byte pickle that writes to position 2**31 - 1
of the memo.

Some opcodes are reimplemented. NEWOBJ calls the format's constructor. BUILD never sets attributes
on classes or functions. Keys of dicts must not be nested tuples, because hashing a deeply nested
tuple overflows the C stack.
"""

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, ClassVar

UNPICKLING_ERRORS = (
    pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, MemoryError,
    RecursionError, AssertionError, struct.error,
)  # fmt: skip
"""Exceptions that pickle.py of Python 3.11 raises for data that is not a pickle, or for a pickle
with unexpected content.
"""
_FLAT = (str, int, float, bool, bytes, NoneType)

Maker = Callable[..., object]
"""Constructor of an object of the file format. The arguments come from the pickle and may have any
type and value.
"""


@dataclass(slots=True, eq=False)
class InertRecord:
    """Placeholder for an object that the constructors of the file format cannot create."""

    name: str
    arguments: tuple
    state: object = None

    def set_state(self, state: object) -> None:
        """Store the state that the opcode BUILD passes to this object."""
        self.state = state


def make_record_maker(module: str, name: str) -> Maker:
    """Return a constructor that creates an `InertRecord` with this name."""
    return lambda *arguments: InertRecord(name, arguments)


class SafeUnpickler(pickle._Unpickler):
    """Unpickler that handles names, states and persistent ids with format-specific functions.

    `load` raises one of UNPICKLING_ERRORS for invalid data.
    """

    stack: list[Any]
    pop_mark: Callable[[], list]
    dispatch: ClassVar[dict[int, Callable]] = dict(pickle._Unpickler.dispatch)

    def __init__(
        self, content: bytes, *, find_maker: Callable[[str, str], object], set_state: Callable[[object, object], None],
        load_stored: Callable[[object], object] | None = None, key_types: tuple[type, ...] = (),
    ) -> None:  # fmt: skip
        """Prepare to unpickle `content`.

        Args:
            content: The pickle.
            find_maker: Function that returns the constructor for (module, name).
            set_state: Function called with a constructed object and its state.
            load_stored: Function that returns the object for a persistent id; None rejects
                persistent ids.
            key_types: Types of the format that are accepted as keys of dicts, in addition to
                numbers, strings, bytes, None and inert records.
        """
        super().__init__(io.BytesIO(content))
        self._known, self._fill, self._stored, self._keys = find_maker, set_state, load_stored, (*_FLAT, InertRecord, *key_types)

    def find_class(self, module: str, name: str) -> object:
        """Return the constructor for a name in the pickle."""
        return self._known(module, name)

    def persistent_load(self, pid: object) -> object:
        """Return the object for a persistent id; raise UnpicklingError if `load_stored` is None."""
        if self._stored is None:
            raise pickle.UnpicklingError("the pickle refers to an external object")
        return self._stored(pid)

    def load_newobj(self) -> None:
        """Handle NEWOBJ: call the constructor on the stack with its arguments."""
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)

    def load_build(self) -> None:
        """Handle BUILD: pass the state to `set_state`."""
        state = self.stack.pop()
        self._fill(self.stack[-1], state)

    def load_setitem(self) -> None:
        """Handle SETITEM: add one item to a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        """Handle SETITEMS: add items to a dict."""
        self._set(self.pop_mark())

    def _set(self, items: list) -> None:
        into = self.stack[-1]
        if type(into) is not dict:
            raise pickle.UnpicklingError(f"the pickle sets dict items on an object of type {type(into).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._check_key(key)
            into[key] = value

    def load_additems(self) -> None:
        """Handle ADDITEMS: add items to a set."""
        items = self.pop_mark()
        for item in items:
            self._check_key(item)
        if type(self.stack[-1]) is not set:
            raise pickle.UnpicklingError(f"the pickle adds set items to an object of type {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    def _check_key(self, key: object) -> None:
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in self._keys for part in parts):
            raise pickle.UnpicklingError(
                f"the pickle contains an unsupported dict key of type {type(key).__name__}, "
                f"with parts of type {', '.join(sorted({type(part).__name__ for part in parts}))}"
            )

    def load_refused(self) -> None:
        """Raise UnpicklingError for opcodes that torch's files do not contain."""
        raise pickle.UnpicklingError("the pickle contains an opcode that torch.save does not write")

    dispatch[pickle.NEWOBJ[0]] = load_newobj
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    for verb in (pickle.DICT, pickle.FROZENSET, pickle.NEWOBJ_EX, pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4):
        dispatch[verb[0]] = load_refused


def make_blank_maker(kind: type) -> Maker:
    """Return a constructor that creates a dataclass object without calling its __init__.

    Pickle creates objects this way and sets their state afterwards.
    """
    return partial(_blank, kind)


def _blank(kind: type[object]) -> object:
    return kind.__new__(kind)
