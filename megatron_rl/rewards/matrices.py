r"""Parses LaTeX matrices such as `\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}` into rows of entries.

Determinants (`vmatrix`) do not count as matrices. Round and square brackets are equivalent.
"""

import re
from collections.abc import Sequence

from megatron_rl.data.answer_text import normalize_text

MOST_ENTRIES = 36
_MATRIX = re.compile(r"[\s$]*\\begin\{([pb]?matrix)\}(.*)\\end\{\1\}[\s$.]*", re.DOTALL)


def matrix(text: str) -> Sequence[Sequence[str]] | None:
    """Return the entries of a matrix, row by row.

    Return None for any other text, for rows of unequal length and for more than MOST_ENTRIES
    entries.
    """
    found = _MATRIX.fullmatch(text) if len(text) < 1000 else None
    if found is None or "\\begin" in found[2]:
        return None
    rows = [[normalize_text(entry) for entry in row.split("&")] for row in found[2].strip().removesuffix("\\\\").split("\\\\")]
    is_read = len({len(row) for row in rows}) == 1 and all(map(all, rows)) and sum(map(len, rows)) <= MOST_ENTRIES
    return rows if is_read else None
