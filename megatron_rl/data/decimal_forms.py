"""Decimal forms of the numbers in data files, as a response would write them.

A number in JSON keeps the digits written in the file. A 32-bit or 16-bit float in Parquet or Arrow
gets the fewest digits that identify it in its own type. A 64-bit float gets the fewest digits too,
unless it is a widened 32-bit float: the 32-bit 0.1 is stored as 0.10000000149011612, but a response
writes 0.1.
"""

import re
from decimal import Decimal

import numpy as np
import pyarrow as pa

MOST_PLACES = 1000
"""Largest exponent that is written out. Writing out 1e-999999999 would take a gigabyte."""
MORE_DIGITS = 3
"""Number of extra digits from which the narrow form of a float in a narrow column is used.

With fewer extra digits the exact value is kept: 128.015625, not 128.01562.
"""
WIDENED_DIGITS = 8
"""Number of extra digits over the float32 form from which a double counts as a widened 32-bit
float.

Every widened decimal of up to five digits is recognized, and no k/2 to k/8192 with k below 32,768
is mistaken for one. For longer decimals either form earns the reward, because one rounds to the
other.
"""
_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}


class WrittenNumber(float):
    """A float together with its decimal form."""

    text: str
    """Decimal form of the number, possibly with an exponent."""

    def __new__(cls, value: float | str, text: str = "") -> "WrittenNumber":
        """Create a number. Without `text` its decimal form is `str(value)`."""
        number = super().__new__(cls, value)
        number.text = text or str(value)
        return number


def with_decimal_forms(value: object, kind: pa.DataType) -> object:
    """Return the value of an Arrow column, its 32-bit and 16-bit floats as `WrittenNumber`.

    Floats are converted as values of their own and within structs and maps.
    """
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {name: with_decimal_forms(item, kind.field(name).type) for name, item in value.items()}
    if isinstance(value, dict) and pa.types.is_map(kind):
        return {name: with_decimal_forms(item, kind.item_type) for name, item in value.items()}
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return with_decimal_forms(value, kind.value_type)
    narrow = _NARROW.get(kind)
    return WrittenNumber(value, _narrow_text(value, narrow, MORE_DIGITS)) if narrow and isinstance(value, float) else value


def decimal_text(value: float | Decimal) -> str | None:
    """Return a finite number in decimal notation without an exponent.

    It has the digits of its file if they are known, else the fewest that identify it. Return None
    if the exponent is above MOST_PLACES.

    Example: 1e-05 -> 0.00001, 1e+22 -> 10000000000000000000000.
    """
    if isinstance(value, WrittenNumber):
        text = value.text
    else:
        text = str(value) if isinstance(value, Decimal) else _narrow_text(value, np.float32, WIDENED_DIGITS)
    exponent = re.search(r"[eE]([-+]?\d+)\Z", text)
    if exponent and (len(exponent[1]) > 6 or abs(int(exponent[1])) > MOST_PLACES):
        return None
    return format(Decimal(text), "f")


def looks_widened(text: str) -> bool:
    """Return True if a text is the 64-bit form of a shorter 32-bit float: `0.10000000149011612`."""
    try:
        value = float(text)
    except ValueError:
        return False
    return text == repr(value) and _narrow_text(value, np.float32, WIDENED_DIGITS) != text


def _narrow_text(value: float, narrow: type, more_digits: int) -> str:
    """Return the shortest text of a float.

    The text in the narrow type is used if it has the same value and at least `more_digits` fewer
    digits.
    """
    with np.errstate(over="ignore"):
        short = narrow(value)
    wide = repr(float(value))
    is_narrow = float(short) == value and _num_digits(wide) - _num_digits(str(short)) >= more_digits
    return str(short) if is_narrow else wide


def _num_digits(text: str) -> int:
    return len(Decimal(text).normalize().as_tuple().digits) if text[-1].isdigit() else 0
