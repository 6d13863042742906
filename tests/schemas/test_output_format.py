"""Schemas of answers: what is refused at once, with its place, and what the library compiles."""

import datetime
import json
import uuid
from enum import Enum
from typing import Annotated, Any, Literal

import jsonschema
import llguidance
import pytest
from pydantic import BaseModel, Field
from tinkermq.schemas.output_format import (
    _UNSUPPORTED,
    MAX_SCHEMA_CHARS,
    MAX_SCHEMA_DEPTH,
    SchemaError,
    check_schema,
    closed,
)


def compiles(schema: Any) -> str:
    """Return what the library has against a schema; empty: nothing."""
    return llguidance.LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}")


class Colour(Enum):
    red = "red"
    blue = "blue"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    size: Annotated[int, Field(ge=1, le=9)]


class Branch(BaseModel):
    kind: Literal["branch"]
    children: list["Branch | Leaf"] = Field(max_length=3)


class Tagged(BaseModel):
    node: Annotated[Leaf | Branch, Field(discriminator="kind")]


class Many(BaseModel):
    name: Annotated[str, Field(min_length=1, max_length=20, pattern="^[a-z]+$")]
    colour: Colour | None = None
    when: datetime.date
    at: datetime.datetime
    id: uuid.UUID
    pair: tuple[int, bool]
    counts: dict[str, int]
    share: Annotated[float, Field(gt=0, lt=1)]
    step: Annotated[int, Field(multiple_of=5)]
    anything: Any


class Open(BaseModel, extra="allow"):
    a: int


MODELS = (Leaf, Branch, Tagged, Many, Open)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_schemas_of_pydantic_are_taken(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    check_schema(schema, "schema")
    assert not compiles(closed(schema))
    jsonschema.Draft202012Validator.check_schema(closed(schema))


@pytest.mark.parametrize("keyword", _UNSUPPORTED)
def test_what_is_refused_by_name_is_what_the_library_cannot(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: {}}}}
    with pytest.raises(SchemaError, match="is not supported") as caught:
        check_schema(schema, "s")
    assert caught.value.place == f"s.properties.a.{keyword}"
    if keyword != "contentSchema":  # which the library passes over
        assert "Unimplemented" in compiles({keyword: {}})


@pytest.mark.parametrize("name", ["date", "date-time", "duration", "email", "hostname", "ipv4"])
def test_formats_that_are_known_are_taken(name: str) -> None:
    check_schema({"type": "string", "format": name}, "s")
    assert not compiles({"type": "string", "format": name})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (3, "s"),
        (None, "s"),
        ([], "s"),
        ("object", "s"),
        ({"properties": []}, "s.properties"),
        ({"properties": {"a": 1}}, "s.properties.a"),
        ({"items": "string"}, "s.items"),
        ({"items": [{"type": "x"}]}, "s.items[0].type"),
        ({"prefixItems": {}}, "s.prefixItems"),
        ({"oneOf": []}, "s.oneOf"),
        ({"allOf": [1]}, "s.allOf[0]"),
        ({"type": []}, "s.type"),
        ({"type": None}, "s.type"),
        ({"required": [1]}, "s.required"),
        ({"maxLength": 1.5}, "s.maxLength"),
        ({"maxItems": True}, "s.maxItems"),
        ({"multipleOf": 0}, "s.multipleOf"),
        ({"pattern": 1}, "s.pattern"),
        ({"additionalProperties": "no"}, "s.additionalProperties"),
        ({"$defs": {"a": {"enum": 3}}}, "s.$defs.a.enum"),
        ({"$ref": 3}, "s.$ref"),
        ({"$ref": "#/$defs/a/b", "$defs": {"a": {}}}, "s.$ref"),
        ({"format": "colour"}, "s.format"),
        ({"patternProperties": {f"^{n}_": {} for n in range(33)}}, "s.patternProperties"),
    ],
)
def test_what_is_no_schema_is_told_with_its_place(schema: Any, place: str) -> None:
    with pytest.raises(SchemaError) as caught:
        check_schema(schema, "s")
    assert caught.value.place == place


@pytest.mark.parametrize(
    "schema",
    [
        True,
        False,
        {},
        {"properties": {"type": {"type": "string"}, "not": {"type": "null"}}},
        {"$ref": "#/properties/a", "properties": {"a": {"const": {"not": "a schema"}}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}},
        {"$ref": "#"},
        {"type": "string", "pattern": r"^\p{L}+$"},
        {"uniqueItems": False, "title": "t", "x-mine": {"not": 1}, "nullable": True},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"type": "null"}]},
    ],
)
def test_what_is_a_schema_is_taken(schema: Any) -> None:
    check_schema(schema, "s")


def test_size_and_depth_are_bounded_before_anything_is_read() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(SchemaError, match=f"more than {MAX_SCHEMA_DEPTH} deep"):
        check_schema(deep, "s")
    while deep:  # or Python frees it by recursion
        deep = deep.pop("items")
    with pytest.raises(SchemaError, match=f"at most {MAX_SCHEMA_CHARS:,}"):
        check_schema({"description": "x" * MAX_SCHEMA_CHARS}, "s")


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    told = closed({"properties": {"properties": {"properties": {"a": {}}}}, "default": {}})
    assert told["additionalProperties"] is False
    inner = told["properties"]["properties"]
    assert inner == {"properties": {"a": {}}, "additionalProperties": False}
    assert closed({"type": "object"}) == {"type": "object"}
    for kept in (
        {"properties": {}, "additionalProperties": {"type": "integer"}},
        {"properties": {}, "patternProperties": {"^a": {}}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"enum": [{"properties": {}}]},
        True,
    ):
        assert closed(kept) == kept
    assert closed({"items": {"properties": {}, "uniqueItems": False}}) == {
        "items": {"properties": {}, "additionalProperties": False}
    }


@pytest.mark.parametrize(
    "schema",
    [
        {
            "properties": {"kind": {}},
            "required": ["kind"],
            "anyOf": [{"properties": {"a": {}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"properties": {"b": {}}, "required": ["b"]}},
        },
        {"properties": {"kind": {}}, "anyOf": [{"allOf": [{"properties": {"a": {}}}]}]},
        {
            "$ref": "#/$defs/base",
            "properties": {"b": {}},
            "$defs": {"base": {"properties": {"a": {}}, "required": ["a"]}},
        },
        {"properties": {"a": {}}, "required": ["a", "b"]},
    ],
)
def test_no_part_of_an_object_excludes_what_another_names(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema
    assert not compiles(closed(schema))


def test_alternatives_that_only_require_leave_an_object_closed() -> None:
    schema = {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    assert closed(schema) == {**schema, "additionalProperties": False}
