"""Messages on the wire: codec, versions, unknown keys, bounds, patterns and field texts."""

import ast
import contextlib
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Annotated, Any, cast, get_args

import msgpack
import numpy as np
import pytest
import tinkermq.schemas
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from pydantic import BaseModel, Field, StringConstraints, TypeAdapter, ValidationError
from tinkermq.broker.client.keys import (
    JobIdentity,
    job_key,
    new_api_key,
    read_job_key,
    user_of_key,
)
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.config.sections import Section
from tinkermq.schemas.job import JobRecord, ListRequest, SubmitRequest
from tinkermq.schemas.metric import LogLines, readable
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.array_codec import ARRAY_DTYPES, ARRAY_EXT
from tinkermq.schemas.wire.codec import (
    MAX_CONTAINERS,
    MAX_JSON_COMMAS,
    MAX_MESSAGE_BYTES,
    pack,
    read_json,
    unpack,
)
from tinkermq.schemas.wire.errors import (
    Boundary,
    BrokerError,
    ConfigError,
    ConflictError,
    DataError,
    DeadlineError,
    EngineError,
    FencedError,
    GameError,
    InternalError,
    MessageError,
    ModelError,
    NotFoundError,
    StateError,
    TinkermqError,
    error_from_reply,
    of_boundary,
)
from tinkermq.schemas.wire.field_docs import field_docs
from tinkermq.schemas.wire.message import Empty, ErrorReply, Message, Request
from tinkermq.schemas.wire.subjects import JobScope, number_of, rpc, token, user_name, user_of_rpc

from docs.topics import TOPICS
from tests.support.configs import REPOSITORY

TASK = {"task": 3, "seed": 5, "group_size": 2}


def test_an_unknown_key_is_ignored_and_an_unknown_version_refused() -> None:
    assert Task.from_bytes(pack({"v": 1, "later": True, **TASK})).task == 3
    with pytest.raises(MessageError, match=r"schema version 2, of a newer tinkermq; .* reads 1"):
        Task.from_bytes(pack({"v": 2, **TASK}))
    with pytest.raises(MessageError, match="schema version None"):
        Task.from_bytes(pack(TASK))


def test_a_malformed_field_is_named_with_its_value() -> None:
    with pytest.raises(MessageError, match=r"group_size: .*\(got 0\)"):
        Task.from_bytes(pack({"v": 1, **TASK, "group_size": 0}))
    with pytest.raises(MessageError, match="a Task is a map, this is a list"):
        Task.from_bytes(pack([1]))


@pytest.mark.parametrize(
    "version", [np.zeros(2, np.int32), b"1", [1], {"v": 1}, "1" * 10_000, 1.5, 2**63, None]
)
def test_a_version_of_any_type_is_refused_in_a_few_words(version: object) -> None:
    with pytest.raises(MessageError, match="schema version") as raised:
        Task.from_map({**TASK, "v": version})
    assert len(raised.value.message) < 300


def test_a_wrong_array_is_told_by_its_shape() -> None:
    array = np.zeros((4,) * 7, np.int32)
    for value in (array, [array], {"a": array}):
        with pytest.raises(MessageError) as raised:
            Task.from_bytes(pack({"v": 1, **TASK, "seed": value}))
        assert "int32 array of (4, 4, 4, 4, 4, 4, 4)" in raised.value.message
        assert len(raised.value.message) < 300


def test_of_very_many_mistakes_the_number_is_told() -> None:
    fields = {"v": 1, "actor": "a", "attempt": 1, "lines": [None] * 900, "time": 1.0}
    with pytest.raises(MessageError, match="LogLines is malformed: 900 of its values are wrong"):
        LogLines.from_bytes(pack(fields))


def test_an_error_of_any_length_fits_into_a_reply() -> None:
    reply = ErrorReply.of("config", "\ud800" + "x" * 10_000_000, "y" * 10_000_000)
    assert len(ErrorReply.from_bytes(reply.to_bytes()).to_bytes()) < 50_000


def test_a_deep_value_in_a_field_is_shown_short() -> None:
    deep: list[object] = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(MessageError) as raised:
        Task.from_bytes(pack({"v": 1, **TASK, "seed": deep}))
    assert len(raised.value.message) < 300


def test_an_error_comes_back_as_the_class_that_was_raised() -> None:
    error = error_from_reply("fenced", "another learner", "end this one")
    assert isinstance(error, FencedError)
    assert str(error) == "another learner\n  end this one"
    assert type(error_from_reply("broker", "m", "")) is BrokerError
    assert type(error_from_reply("not_found", "m", "")) is NotFoundError  # not what is below it
    assert type(error_from_reply("internal", "m", "")) is InternalError
    assert type(error_from_reply("from the future", "m", "")) is InternalError


def test_an_actor_ended_by_a_mistake_of_its_user_is_not_started_again() -> None:
    mistakes = (ConfigError, DataError, ModelError, GameError, NotFoundError, StateError)
    passing = (BrokerError, DeadlineError, EngineError, ConflictError, FencedError, InternalError)
    assert not [one for one in mistakes if one.may_pass]
    assert not [one for one in passing if not one.may_pass]


@pytest.mark.parametrize("boundary", get_args(Boundary))
def test_each_boundary_of_an_episode_has_one_kind_of_error(boundary: Boundary) -> None:
    assert of_boundary(boundary).boundary == boundary


def test_subjects_are_built_from_whole_tokens() -> None:
    scope = JobScope("ann", "j1")
    assert scope.rollout(7) == "tmq.v1.job.ann.j1.rollout.7"
    assert scope.env("h1", "step") == "tmq.v1.job.ann.j1.env.h1.step"
    assert scope.stream_task == "tmq-ann-j1-task"
    assert user_of_rpc(rpc("ann", "scheduler", "submit")) == "ann"
    assert number_of(scope.task(12)) == 12


@pytest.mark.parametrize("name", ["", "a.b", "A", "*", ">", "a b", "x" * 65, "-a", "ä"])
def test_a_name_that_cannot_be_a_token_is_refused(name: str) -> None:
    with pytest.raises(MessageError, match="cannot be part of a subject"):
        JobScope(name, "j1")


# -- msgpack with arrays: what goes in comes out, and nothing hostile gets further than an error ---


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    assert unpack(pack(value)) == value


@given(st.sampled_from(sorted(ARRAY_DTYPES)), st.data())
def test_arrays_come_back_with_dtype_shape_and_bytes(dtype: str, data: st.DataObject) -> None:
    shape = array_shapes(max_dims=3, max_side=4, min_side=0)
    array = data.draw(arrays(np.dtype(dtype), shape))
    back = unpack(pack({"a": array}))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_arrays_of_any_order_in_memory_come_back_the_same() -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4)
    for found in (array, array[:, ::2], np.asfortranarray(array), np.array(3.0), np.float32(2)):
        back = unpack(pack(found))
        assert back.dtype == found.dtype.newbyteorder("<")
        assert back.shape == found.shape
        assert np.array_equal(back, found)


def test_an_array_that_does_not_travel_is_refused_with_why() -> None:
    for array, why in (
        (np.zeros((1,) * 9), "arrays of 9 dimensions do not travel, at most 8 do"),
        (np.array(["x"]), "arrays of <U1 do not travel"),
    ):
        with pytest.raises(MessageError, match=why):
            pack(array)


def test_a_decoded_array_is_a_read_only_view() -> None:
    back = unpack(pack(np.arange(4)))
    assert not back.flags.writeable
    assert not back.flags.owndata


@given(st.binary(max_size=200))
def test_random_bytes_are_a_value_or_an_error_of_ours(payload: bytes) -> None:
    with contextlib.suppress(MessageError):
        unpack(payload)


@given(st.integers(1, 60))
def test_a_truncated_message_is_refused(cut: int) -> None:
    payload = pack({"name": "x" * 30, "ids": np.arange(8, dtype=np.int32)})
    with pytest.raises(MessageError):
        unpack(payload[:-cut])


def test_deep_nesting_is_refused_without_recursion() -> None:
    with pytest.raises(MessageError, match="not valid msgpack"):
        unpack(b"\x91" * 100_000 + b"\xc0")


def test_a_message_over_the_limit_is_refused_with_both_sizes() -> None:
    with pytest.raises(MessageError, match="over the limit of 8,388,608"):
        unpack(bytes(MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x03",
        b"\x03\x01<f4" + (2**63).to_bytes(8, "little"),
        b"\x03\x01<O8" + (1).to_bytes(8, "little") + bytes(8),
        b"\x03\x09<f4" + bytes(72),
        b"\x03\x01<f4" + (3).to_bytes(8, "little") + bytes(8),
    ],
)
def test_a_broken_array_is_refused_before_anything_is_allocated(body: bytes) -> None:
    with pytest.raises(MessageError, match="array"):
        unpack(cast("bytes", msgpack.packb(msgpack.ExtType(ARRAY_EXT, body))))


def test_an_integer_beyond_64_bits_is_named_with_its_place() -> None:
    deep: Any = 1 << 80
    for _ in range(600):
        deep = [deep]
    for value, message in (
        ({"env": {"seeds": [1, 1 << 70]}}, f"env.seeds[1] is an integer of 71 bits, {1 << 70}"),
        (-(1 << 64), "the value is an integer of 65 bits"),
        ({"a": 10**5000}, "a is an integer of 16610 bits, too long to be shown"),
        (deep, "cannot pack a list"),
    ):
        with pytest.raises(MessageError) as refused:
            pack(value)
        assert message in refused.value.message
    assert unpack(pack([(1 << 64) - 1, -(1 << 63)])) == [(1 << 64) - 1, -(1 << 63)]


def test_what_has_no_form_is_refused_by_its_type() -> None:
    with pytest.raises(MessageError, match="cannot pack a set"):
        pack({1, 2})
    with pytest.raises(MessageError, match="complex128"):
        pack(np.zeros(2, complex))


@pytest.mark.parametrize("empty", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_a_payload_of_single_bytes_that_each_become_an_object_is_refused(empty: bytes) -> None:
    few = b"\xdd" + (1000).to_bytes(4, "big") + empty * 1000
    assert len(unpack(few)) == 1000
    inner = b"\xdd" + (900_000).to_bytes(4, "big") + empty * 900_000
    for payload in (inner, b"\x98" + inner * 8):
        with pytest.raises(MessageError, match=f"more than {MAX_CONTAINERS:,} lists and maps"):
            unpack(payload)


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[1", "", "nul", "9" * 5000, "[" + "1," * MAX_JSON_COMMAS],
)
def test_json_that_cannot_be_read_is_a_message_error(text: str) -> None:
    for one in (text, text.encode()):
        with pytest.raises(MessageError) as raised:
            read_json(one)
        assert len(raised.value.message) < 500
    with pytest.raises(MessageError):
        read_json(b"\xff\xfe" + text.encode())


# -- Whatever a user writes has a bound: every key of a configuration, every field of a request ----


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


# -- No pattern of a name lets a line break pass: `$` alone matches before the last one ------------


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
    key = new_api_key("ada")
    process = job_key(JobIdentity("ada", "j", "learner", "learner", 1), b"s")
    for text in (f"ada{more}", f"{more}ada"):
        for check in (lambda one: token(one, what="user"), user_name):
            with pytest.raises(TinkermqError):
                check(text)
    for text in (key.replace("ada", f"ada{more}"), key + more):
        with pytest.raises(TinkermqError):
            user_of_key(text)
    assert read_job_key(process.replace(".j.", f".j{more}.")) is None
    with pytest.raises(TinkermqError):
        number_of(f"a.b.1{more}")


# -- The texts below fields are read when somebody asks, and are in the JSON schema ----------------


class Parent(Message):
    """A message with texts."""

    first: int = 0
    """The first,
    on two lines."""
    second: int = 0
    "In other quotes."
    third: int = Field(default=0, ge=0)


class Child(Parent):
    """A message that says more of one field, and has one more."""

    second: int = 1
    """Another meaning."""
    fourth: int = 0
    """Its own."""


def test_each_field_has_the_text_below_it_also_an_inherited_one() -> None:
    assert field_docs(Parent) == {
        "first": "The first,\non two lines.",
        "second": "In other quotes.",
        "third": "",
    }
    assert field_docs(Child) == {
        **field_docs(Parent),
        "second": "Another meaning.",
        "fourth": "Its own.",
    }


def test_the_schema_of_a_configuration_tells_them_at_every_depth() -> None:
    schema = JobConfig.model_json_schema()
    learner = schema["$defs"]["LearnerConfig"]["properties"]
    assert (
        learner["lr"]["description"]
        == field_docs(JobConfig.model_fields["learner"].annotation)["lr"]
    )
    assert schema["properties"]["seed"]["description"]


def test_a_class_that_has_no_file_has_no_texts() -> None:
    made: dict[str, Any] = {"Section": Section}
    exec("class Made(Section):\n    one: int = 0\n    '''Text.'''\n", made)
    assert field_docs(made["Made"]) == {"one": ""}
    assert "description" not in made["Made"].model_json_schema()["properties"]["one"]


def test_making_a_class_reads_no_source() -> None:
    """pydantic would read the module of each for its texts, in every process that starts."""
    assert not any(
        model.model_config.get("use_attribute_docstrings") for model in (JobRecord, JobConfig)
    )


# -- Log lines are shown as people read them -------------------------------------------------------


def test_a_structured_line_becomes_text_and_others_stay_as_they_are() -> None:
    assert readable("[1, 2]") == "[1, 2]"
    assert readable("{broken") == "{broken"
    assert readable('{"event": "a", "level": "info", "step": 3}') == "info a step=3"
