"""Reads the documentation of settings from the source of their dataclasses."""

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from itertools import pairwise


def read_field_docs(schema: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, each joined to one line, keyed by field name.

    A field that holds a settings dataclass and has no docstring gets the docstring of the
    dataclass.
    """
    sources = [inspect.getsource(each) for each in reversed(schema.__mro__) if is_dataclass(each)]
    classes = [ast.parse(textwrap.dedent(source)).body[0] for source in sources]
    body = [node for each in classes if isinstance(each, ast.ClassDef) for node in [*each.body, ast.Pass()]]
    docs = {field.name: str(field.type.__doc__) if is_dataclass(field.type) else "" for field in fields(schema)}
    for node, below in pairwise(body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                docs[name] = str(text)
    return {name: " ".join(doc.split()) for name, doc in docs.items()}
