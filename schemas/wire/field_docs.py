"""Texts below the fields of models, read from the source on demand.

pydantic would read them whenever a class is created (`use_attribute_docstrings`), which takes
longer than all its other work on our classes. Only help, JSON schemas and reference pages need
them.
"""

import ast
import inspect
import itertools
import textwrap
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

_PARSING = threading.Lock()
"""CPython 3.11 may fail if two threads parse at once, also in `inspect.getsource`."""


@cache
def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """Return the text of each field of a model, inherited ones included, by name."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            texts.update(_texts(base))
    return {name: texts.get(name, "") for name in model.model_fields}


def described(
    model: type[BaseModel], core_schema: CoreSchema, handler: GetJsonSchemaHandler
) -> dict[str, Any]:
    """Return a model's JSON schema with field texts as descriptions.

    For `__get_pydantic_json_schema__`.
    """
    schema = handler(core_schema)
    properties = handler.resolve_ref_schema(schema).get("properties", {})
    for name, text in field_docs(model).items():
        if text and name in properties:
            properties[name]["description"] = text  # more specific than the field type's
    return schema


def _texts(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the fields that a class declares itself."""
    try:
        with _PARSING:
            body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    except (OSError, TypeError):  # a class of a program without a file
        return
    assert isinstance(body, ast.ClassDef)
    for field, below in itertools.pairwise(body.body):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield field.target.id, inspect.cleandoc(value.value)
