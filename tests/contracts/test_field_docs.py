"""Every setting says what it means right below it, in a sentence that stands alone."""

from dataclasses import fields, is_dataclass

import pytest

from megatron_rl.cli.help import read_field_docs
from megatron_rl.config import Settings


def schemas(schema: type = Settings) -> list[type]:
    """The settings dataclass and all that it holds."""
    return [schema, *(found for field in fields(schema) if is_dataclass(field.type) for found in schemas(field.type))]


def stands_alone(doc: str) -> bool:
    """Whether it tells something to one who sees nothing else, in a tooltip or in grep: it does not begin in mid-sentence."""
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
