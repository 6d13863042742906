"""Write clients/config_types.pyi from the schema: what editors complete in a configuration.

`python -m docs.typed_config` writes it; a test compares the committed one with what this makes.
"""

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import Section
from tinkermq.schemas.wire.field_docs import field_docs

TARGET = Path(__file__).resolve().parents[1] / "clients" / "config_types.pyi"
_HEAD = '''# Written by `make docs` from schemas/config/: change that, not this file.
"""The configuration of a job as typed dictionaries: every key is optional."""

from typing import Any, Literal, TypedDict
'''


def typed_config() -> str:
    """Return the text of the stub."""
    classes = "\n".join(_class(model) for model in _inner_first(JobConfig))
    return f"{_HEAD}\n{classes}"


def _inner_first(model: type[Section]) -> list[type[Section]]:
    found: list[type[Section]] = []
    for inner in _sections(model):
        found += [one for one in _inner_first(inner) if one not in found]
    return [*found, model]


def _sections(model: type[Section]) -> Iterator[type[Section]]:
    for field in model.model_fields.values():
        for part in _parts(field.annotation):
            if isinstance(part, type) and issubclass(part, Section):
                yield part


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)


def _class(model: type[Section]) -> str:
    lines = [f"class {_name(model)}(TypedDict, total=False):"]
    for name, field in model.model_fields.items():
        lines.append(f"    {name}: {_type(field.annotation)}")
        lines += [f'    """{text}"""' for text in [_text(model, name)] if text]
    return "\n".join(lines) + "\n"


def _text(model: type[Section], name: str) -> str:
    return re.sub(r"\s+", " ", field_docs(model)[name]).replace("\\", "\\\\").strip()


def _name(model: type[Section]) -> str:
    return f"{model.__name__}Dict"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or annotation is type(None):
        return "None"
    if annotation is Any:
        return "Any"
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is tuple:
        return f"tuple[{', '.join(map(_type, arguments))}] | list[{_type(arguments[0])}]"
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(map(_type, arguments))}]"
    if issubclass(annotation, Section):
        return _name(cast("type[Section]", annotation))
    return str(annotation.__name__)


if __name__ == "__main__":
    TARGET.write_text(typed_config(), encoding="utf-8")
    sys.exit(0)
