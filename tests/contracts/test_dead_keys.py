"""No setting is dead: every field of every settings dataclass is read somewhere from an object of
that dataclass.
"""

import ast
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_rl.config import Settings, WandbSettings
from tests.conftest import ROOT

SOURCES = [path for folder in ("megatron_rl", "launch") for path in (ROOT / folder).rglob("*.py") if path.parent.name != "config"]


def rooms(schema: type = Settings) -> dict[type, str]:
    """Return {settings dataclass: name of the field that holds it}, including nested
    dataclasses.
    """
    found = {}
    for field in fields(schema):
        if isinstance(field.type, type) and is_dataclass(field.type):
            found |= {field.type: field.name} | rooms(field.type)
    return found


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name: `a.b.c` -> c."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def assigned(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Return the (target, value) pairs of an assignment; tuple assignments are split."""
    pairs = []
    for target in node.targets if isinstance(node, ast.Assign) else []:
        both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
        pairs += list(zip(target.elts, node.value.elts, strict=True)) if both else [(target, node.value)]
    return pairs


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree that `read_from` reads."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg | ast.Assign | ast.Attribute)]


def read_from(schema: type, room: str, path: Path) -> set[str]:
    """Return the attributes that a file reads from objects of this dataclass. Such objects are
    found by annotation, by assignment (`x = settings.room`) and by access (`.room.`).
    """
    nodes, names = nodes_of(path), {room}
    names |= {
        node.arg for node in nodes if isinstance(node, ast.arg) and node.annotation and schema.__name__ in ast.unparse(node.annotation)
    }
    for _ in range(2):  # two passes: self._settings = settings, then keep = self._settings.room
        for target, value in (pair for node in nodes for pair in assigned(node)):
            if last_name(value) in names:
                names.add(last_name(target))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and last_name(node.value) in names}


def dead(schema: type, room: str) -> set[str]:
    read = set().union(*(read_from(schema, room, path) for path in SOURCES))
    return {field.name for field in fields(schema)} - read


@pytest.mark.known_failure("flag-without-effect")
@pytest.mark.parametrize("schema", rooms(), ids=lambda schema: schema.__name__)
def test_no_key_is_dead(schema: type) -> None:
    assert dead(schema, rooms()[schema]) == set()


def test_a_dead_key_with_a_common_name_is_seen() -> None:
    """Keys named `name` and `steps` are read from other settings, but that does not count as a read
    from the dataclass under test.
    """

    @dataclass
    class Planted(WandbSettings):
        name: str = ""
        steps: int = 0

    Planted.__name__ = "WandbSettings"
    assert dead(Planted, "wandb") == {"name", "steps"}
    assert len(rooms()) >= 14
