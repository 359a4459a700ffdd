"""Parses values that tables and other files store as text in JSON or Python notation."""

import ast
import json


def parse_literal(text: str) -> object:
    """Parse a text in JSON or Python notation; return None if it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def parse_text_list(value: object) -> object:
    """Parse a text that is a list of strings in JSON or Python notation.

    In tables, lists are stored as text. Any other value is returned unchanged.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = parse_literal(value)
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else value
