"""No pattern of a name lets a line break pass: `$` alone matches before the last one."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import tinkermq.schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, StringConstraints, TypeAdapter, ValidationError
from tinkermq.broker.client.keys import (
    JobIdentity,
    id_of_invitation,
    invitation_code,
    job_key,
    new_api_key,
    read_job_key,
    user_of_key,
)
from tinkermq.schemas.wire.errors import TinkermqError
from tinkermq.schemas.wire.subjects import number_of, token, user_name

from tests.support.configs import REPOSITORY

ROOMS = ("schemas", "broker", "envs", "actors", "clients")
BREAKS = ("\n", "\r", "\r\n", "\u2028", "\x00", " ")
AT_THE_END = re.compile(r"(?<!\\)\$\Z")


def _written() -> Iterator[tuple[str, str]]:
    """Each pattern that stands in the code and ends with `$`, and its place."""
    for room in ROOMS:
        for path in sorted((REPOSITORY / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                owner, first = node.func.value, node.args[0] if node.args else None
                if not isinstance(owner, ast.Name) or owner.id != "re":
                    continue
                if "MULTILINE" in ast.unparse(node):  # meant for the end of each line
                    continue
                if isinstance(first, ast.Constant) and AT_THE_END.search(str(first.value)):
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno}", str(first.value)


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for inner in schema.values():
            yield from _patterns(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _patterns(inner)


ALL_CHECKS: Any = list(HealthCheck)


def _of_messages() -> set[str]:
    """Each pattern of a field of a message, or of the configuration."""
    found: set[str] = set()
    for module in pkgutil.walk_packages(tinkermq.schemas.__path__, "tinkermq.schemas."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, type) and issubclass(value, BaseModel) and value is not BaseModel:
                found.update(_patterns(value.model_json_schema()))
    return found


def test_no_pattern_of_the_code_ends_where_a_line_break_may_follow() -> None:
    allowed = {"(?<=[\\d.}%])(?:\\s+[A-Za-z]{2,})+\\.?$"}  # cuts words off the end of an answer
    found = [(place, pattern) for place, pattern in _written() if pattern not in allowed]
    assert not found, "write fullmatch, or \\Z"


def test_no_pattern_of_a_message_lets_a_line_break_pass() -> None:
    patterns = sorted(_of_messages())
    assert len(patterns) > 10
    for pattern in patterns:
        _assert_no_line_break_passes(pattern)


def _assert_no_line_break_passes(pattern: str) -> None:
    kind: Any = Annotated[str, StringConstraints(pattern=pattern)]
    adapter: TypeAdapter[str] = TypeAdapter(kind)

    @settings(max_examples=5, database=None, suppress_health_check=ALL_CHECKS)
    @given(st.from_regex(pattern, fullmatch=True))
    def check(valid: str) -> None:
        plain = valid.rstrip("\n")
        adapter.validate_python(plain)
        for more in BREAKS:
            for text in (plain + more, more + plain):
                if text.startswith(plain) and not pattern.endswith("$"):
                    continue  # a prefix, and no name
                with pytest.raises(ValidationError):
                    adapter.validate_python(text)

    check()


@pytest.mark.parametrize("more", BREAKS)
def test_no_name_key_or_number_takes_a_line_break(more: str) -> None:
    key, (_, code) = new_api_key("ada"), invitation_code(b"s" * 32, "a request")
    process = job_key(JobIdentity("ada", "j", "learner", "learner", 1), b"s")
    for text in (f"ada{more}", f"{more}ada"):
        for check in (lambda one: token(one, what="user"), user_name):
            with pytest.raises(TinkermqError):
                check(text)
    for text in (key.replace("ada", f"ada{more}"), key + more):
        with pytest.raises(TinkermqError):
            user_of_key(text)
    assert id_of_invitation(code + more) is None
    assert read_job_key(process.replace(".j.", f".j{more}.")) is None
    with pytest.raises(TinkermqError):
        number_of(f"a.b.1{more}")
