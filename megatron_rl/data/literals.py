"""Values that tables and other files hold as text, in JSON's or Python's notation."""

import ast
import json


def parse_literal(text: str) -> object:
    """Return what a text holds in JSON's or Python's notation, None where it is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return None


def parse_text_list(value: object) -> object:
    """Return the list that a text is where it is one of texts in JSON's or Python's notation, as tables have it; else the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    found = parse_literal(value)
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else value
