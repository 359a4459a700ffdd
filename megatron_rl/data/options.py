"""The options that a question lists in its text."""

import re

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARK = re.compile(r"(?:^|(?<=[\s(;,]))\(?([A-Z])[.:)\u3001]\s*(?=\S)|(?<=[^A-Za-z])\(([A-Z])\)\s*(?=\S)", re.MULTILINE)
_FULL_WIDTH = {0xFEE0 + code: chr(code) for code in (*b"().:,;", *LETTERS.encode())} | {0x3000: " "}
_LAST_WORD = re.compile(r"[\s;,(]*(?:\b(?:or|and)\s*)?\Z")


def options_in(question: str) -> dict[str, str]:
    """Return the options that a question lists, by letter: A, B, C and so on without a gap, as `A. red`, `(A) red`, `A) red` or `A: red`.

    Empty where it does not list A and B. An option's text ends where the next one begins, or with its line.
    """
    marks: list[re.Match[str]] = []
    question = question.translate(_FULL_WIDTH)
    for mark in _MARK.finditer(question):
        if len(marks) < len(LETTERS) and (mark[1] or mark[2]) == LETTERS[len(marks)]:
            marks.append(mark)
    ends = [*(mark.start() for mark in marks[1:]), len(question)]
    texts = [_LAST_WORD.sub("", question[mark.end() : end].partition("\n")[0]) for mark, end in zip(marks, ends, strict=False)]
    return dict(zip(LETTERS, texts, strict=False)) if len(marks) > 1 else {}
