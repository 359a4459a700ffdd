"""Decimal forms of the numbers in files, as a reply would write them.

A number of JSON has the digits that stand in the file. A float of 32 or 16 bits in Parquet or Arrow has the fewest that stand for it as
such; one of 64 bits too, unless it is 32 bits that were widened: 0.1 of 32 bits is 0.10000000149011612 there, and a reply says 0.1.
"""

import re
from decimal import Decimal

import numpy as np
import pyarrow as pa

MOST_PLACES = 1000
"""An exponent above is not written out: 1e-999999999 would take a gigabyte."""
MORE_DIGITS = 3
"""A float of a narrow column keeps its exact value where that takes fewer digits more than its narrow form: 128.015625, not 128.01562."""
WIDENED_DIGITS = 8
"""A double that takes so many digits more than the float32 of the same value is a widened one. Every decimal of up to five digits that was
widened is, and no k/2 to k/8192 with k below 32,768 is taken for one. Longer ones earn by either form: one rounds to the other."""
_NARROW = {pa.float32(): np.float32, pa.float16(): np.float16}


class WrittenNumber(float):
    """A number and its decimal form."""

    text: str
    """May have an exponent."""

    def __new__(cls, value: float | str, text: str = "") -> "WrittenNumber":
        number = super().__new__(cls, value)
        number.text = text or str(value)
        return number


def with_decimal_forms(value: object, kind: pa.DataType) -> object:
    """Return the value of an Arrow column; floats of 32 and 16 bits, alone or in structs and maps, with their decimal forms."""
    if isinstance(value, dict) and pa.types.is_struct(kind):
        return {name: with_decimal_forms(item, kind.field(name).type) for name, item in value.items()}
    if isinstance(value, dict) and pa.types.is_map(kind):
        return {name: with_decimal_forms(item, kind.item_type) for name, item in value.items()}
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return with_decimal_forms(value, kind.value_type)
    narrow = _NARROW.get(kind)
    return WrittenNumber(value, _narrow_text(value, narrow, MORE_DIGITS)) if narrow and isinstance(value, float) else value


def decimal_text(value: float | Decimal) -> str | None:
    """Return a finite number without an exponent, with the digits of its file, else with the fewest; None where they are too many.

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
    """Return whether a text is the 64-bit form of a float of 32 bits with fewer digits: `0.10000000149011612`."""
    try:
        value = float(text)
    except ValueError:
        return False
    return text == repr(value) and _narrow_text(value, np.float32, WIDENED_DIGITS) != text


def _narrow_text(value: float, narrow: type, more_digits: int) -> str:
    """Return the shortest text of a float; that of the narrow type where it has the same value and `more_digits` fewer digits."""
    with np.errstate(over="ignore"):
        short = narrow(value)
    wide = repr(float(value))
    is_narrow = float(short) == value and _num_digits(wide) - _num_digits(str(short)) >= more_digits
    return str(short) if is_narrow else wide


def _num_digits(text: str) -> int:
    return len(Decimal(text).normalize().as_tuple().digits) if text[-1].isdigit() else 0
