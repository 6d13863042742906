"""Whatever a user writes has a bound: every key of a configuration, every field of a request."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.config.sections import Section
from tinkermq.schemas.job import ListRequest, SubmitRequest
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import ConfigError, MessageError
from tinkermq.schemas.wire.message import Empty, Request

from docs.topics import TOPICS

BOUNDS = {
    "string": ("maxLength",),
    "array": ("maxItems",),
    "integer": ("maximum", "exclusiveMaximum"),
    "number": ("maximum", "exclusiveMaximum"),
}
"""What says how large a value of a kind may be, in JSON schema."""
ASKED_OF_THE_POOL = [
    topic
    for topic in TOPICS
    if topic.route.endswith(("→ scheduler", "→ auth service")) and "node →" not in topic.route
]


def unbounded(schema: Any, path: str) -> Iterator[str]:
    """Yield the places of a JSON schema that any amount fits in."""
    if isinstance(schema, list):
        for one in schema:
            yield from unbounded(one, path)
    if not isinstance(schema, dict):
        return
    kind, is_one_of = schema.get("type"), "enum" in schema or "const" in schema
    if kind in BOUNDS and not is_one_of and not any(key in schema for key in BOUNDS[kind]):
        yield path
    is_map = kind == "object" and schema.get("additionalProperties", False) is not False
    if is_map and "maxProperties" not in schema:
        yield path
    for name, inner in {**schema.get("properties", {}), **schema.get("$defs", {})}.items():
        yield from unbounded(inner, f"{path}.{name}")
    for key in ("items", "prefixItems", "anyOf", "additionalProperties"):
        yield from unbounded(schema.get(key), path)


@pytest.mark.parametrize(
    "model", [JobConfig, *dict.fromkeys(topic.message for topic in ASKED_OF_THE_POOL)]
)
def test_every_field_that_a_user_writes_has_a_bound(model: type[Any]) -> None:
    assert list(unbounded(model.model_json_schema(), model.__name__)) == []


def test_every_request_to_the_pool_itself_is_one_whose_fields_are_bounded() -> None:
    assert [one.subject for one in ASKED_OF_THE_POOL if not issubclass(one.message, Request)] == []


class Later(Section):
    """A section that somebody adds."""

    text: str = ""
    texts: list[str] | None = None
    tree: dict[str, Any] | None = None
    count: int = 0
    seconds: float | None = None


@pytest.mark.parametrize(
    "given",
    [
        {"text": "x" * 5000},
        {"texts": ["x" * 5000]},
        {"texts": ["x"] * 20_000},
        {"tree": {"key": "x" * 300_000}},
        {"tree": {"key": ["x" * 1000] * 300}},
        {"tree": {"key": [0] * 100_000}},
        {"tree": {"x" * 5000: 1}},
        {"count": 10**30},
        {"count": -(10**30)},
        {"seconds": 1e300},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_field_that_names_no_bound_has_that_of_its_kind(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given))):
        Later(**given)


def test_a_tree_cannot_be_deeper_than_anybody_writes_it() -> None:
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValidationError, match="more than 32 levels"):
        Later(tree={"key": deep})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generator.count", 100_000),
        ("generator.threads", 1 << 30),
        ("learner.ranks", 100_000),
        ("learner.replicas", 100_000),
        ("env.hosts", 100_000),
        ("env.workers", 1 << 30),
        ("env.step_timeout_s", 1e300),
        ("limits.rollout_bytes", 1 << 60),
        ("model.path", "x" * 5000),
        ("env.train_data", ["x"] * 20_000),
    ],
)
def test_a_configuration_over_a_bound_is_refused_by_its_key(key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    config: dict[str, Any] = {"model": {"path": "m"}, "env": {"game": "g"}}
    config.setdefault(section, {})[name] = value
    with pytest.raises(ConfigError, match=key):
        parse_config(config)


def test_a_request_of_many_bytes_is_refused_before_it_is_read() -> None:
    for model in (Empty, ListRequest):
        with pytest.raises(MessageError, match="over the limit"):
            model.from_bytes(pack({"v": 1, "junk": "x" * 100_000}))
    large = {"v": 1, "request_id": "r", "config": {"env": {"kwargs": {"a": "x" * (1 << 20)}}}}
    with pytest.raises(MessageError, match="over the limit"):
        SubmitRequest.from_bytes(pack(large))
