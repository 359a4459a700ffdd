"""Every settings field is followed by a docstring that is a complete sentence."""

from dataclasses import fields, is_dataclass

import pytest

from megatron_rl.cli.help import read_field_docs
from megatron_rl.config import Settings


def schemas(schema: type = Settings) -> list[type]:
    """Return the settings dataclass and all dataclasses nested in it."""
    return [schema, *(found for field in fields(schema) if is_dataclass(field.type) for found in schemas(field.type))]


def stands_alone(doc: str) -> bool:
    """Return True if the docstring makes sense out of context, as in a tooltip or a grep result: at
    least four words, a capital letter first, a period last, no fragment.
    """
    return len(doc.split()) >= 4 and doc[0].isupper() and not doc.startswith(("Of ", "And ")) and doc.endswith(".")


@pytest.mark.parametrize("schema", schemas(), ids=lambda schema: schema.__name__)
def test_what_a_field_means_stands_below_it(schema: type) -> None:
    docs = read_field_docs(schema)
    assert docs.keys() == {field.name for field in fields(schema)}
    assert {name: doc for name, doc in docs.items() if not stands_alone(doc)} == {}


def test_a_field_without_a_meaning_is_noticed() -> None:
    halves = ("", "Of one box.", "...and their size as PNG.", "And all the rest of it.", "none runs without any wall.", "Wall time.")
    assert not [half for half in halves if stands_alone(half)]
    assert stands_alone("Wall time of one call.")
