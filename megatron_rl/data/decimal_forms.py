"""Decimal forms of the numbers in data files, as expected in responses.

A number in JSON keeps the digits written in the file. A 32-bit or 16-bit float in a Parquet or
Arrow file is written with the fewest digits that distinguish it from other floats of the same type.
A 64-bit float is also written with the fewest digits. If the 64-bit float was converted from a
32-bit float, the digits of the 32-bit float are used. For example, 0.10000000149011612 is written
as 0.1.
"""

import re
from decimal import Decimal

import numpy as np
import pyarrow as pa

MOST_PLACES = 1000
"""Largest exponent of a number that is converted to decimal notation; 1e-999999999 would take a
gigabyte in decimal notation.
"""
MORE_DIGITS = 3
"""The 32-bit or 16-bit form of a float is used if it saves at least this many digits.

If the form saves fewer digits, the exact value is used: 128.015625, not 128.01562.
"""
WIDENED_DIGITS = 8
"""The float32 form of a double is used if it saves at least this many digits.

A double with such a float32 form counts as a widened 32-bit float. Every widened decimal with up to
five digits is recognized, and no fraction k/2 to k/8192 with k below 32,768 is mistaken for a
widened decimal. For longer decimals, either form counts as correct, because one form rounds to the
other.
"""
_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}


class WrittenNumber(float):
    """A float together with its decimal form."""

    text: str
    """Decimal form of the number, possibly with an exponent."""

    def __new__(cls, value: float | str, text: str = "") -> "WrittenNumber":
        """Create a number; its decimal form is `text`, or `str(value)` if `text` is empty."""
        number = super().__new__(cls, value)
        number.text = text or str(value)
        return number


def with_decimal_forms(value: object, kind: pa.DataType) -> object:
    """Convert the 32-bit and 16-bit floats in a value of an Arrow column to `WrittenNumber`.

    Floats are converted at the top level and inside structs and maps.
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

    The result has the digits written in the file if these are known, else the fewest digits that
    identify the number. Return None if the absolute value of the exponent exceeds MOST_PLACES.

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
    """Return True if a text looks like a 32-bit float that was printed as a 64-bit float.

    Example: `0.10000000149011612`, which is the 32-bit float 0.1.
    """
    try:
        value = float(text)
    except ValueError:
        return False
    return text == repr(value) and _narrow_text(value, np.float32, WIDENED_DIGITS) != text


def _narrow_text(value: float, narrow: type, more_digits: int) -> str:
    """Return a float as text, with the digits of type `narrow` if this saves enough digits.

    The digits of `narrow` are used only if they represent the same value and at least `more_digits`
    digits are saved.
    """
    with np.errstate(over="ignore"):
        short = narrow(value)
    wide = repr(float(value))
    is_narrow = float(short) == value and _num_digits(wide) - _num_digits(str(short)) >= more_digits
    return str(short) if is_narrow else wide


def _num_digits(text: str) -> int:
    return len(Decimal(text).normalize().as_tuple().digits) if text[-1].isdigit() else 0
