"""The base of every message: a pydantic model that travels as a msgpack map with its version."""

import reprlib
from typing import Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema

from ..bounds.defaults import bounded
from .codec import MAX_MESSAGE_BYTES, pack, unpack
from .errors import MessageError
from .field_docs import described

SCHEMA_VERSION = 1
_MOST_ERRORS = 100
_MOST_CHARS = 200


class Message(BaseModel):
    """A message of the system.

    Unknown keys are ignored, so that an older actor understands a newer one; an unknown `v` is
    refused. Field docstrings become docs/messages.md.
    """

    model_config = ConfigDict(
        extra="ignore",
        frozen=True,
        arbitrary_types_allowed=True,
        ser_json_inf_nan="constants",
        defer_build=True,
    )

    max_bytes: ClassVar[int] = MAX_MESSAGE_BYTES

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return described(cls, core_schema, handler)

    def to_bytes(self, **instead: Any) -> bytes:
        """Pack to a msgpack map with the key `v`; `instead` are fields that are told otherwise."""
        return pack({"v": SCHEMA_VERSION, **vars(self), **instead}, plain=_fields_of)

    def to_map(self) -> dict[str, Any]:
        """Return the plain map that is packed; arrays stay NumPy arrays."""
        return {"v": SCHEMA_VERSION, **_plain_fields(self)}

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview, *, at: str | None = None) -> Self:
        """Unpack and validate a payload; `at` is the key or subject under which it was stored.

        Raises MessageError, naming the field, for anything that is not this message, or that
        names itself otherwise than its key or subject does.
        """
        message = cls.from_map(unpack(payload, max_bytes=cls.max_bytes))
        return message if at is None else message.check_at(at)

    def named_at(self, at: str) -> str:
        """Return the key or subject that the message's own fields name.

        `at` is the one under which it was found: what the fields do not tell is taken from it.
        Raises MessageError for a field that cannot be part of a name.
        """
        return at

    def check_at(self, at: str) -> Self:
        """Return the message if it names itself as its key or subject does.

        Who may write where is the broker's to guard, and it sees keys and subjects only: a name
        within a payload is anybody's word. Raises MessageError.
        """
        named = self.named_at(at)
        if named != at:
            raise MessageError(
                f"the {type(self).__name__} under {at!r} says that it is {named!r}",
                hint="it is ignored; whoever wrote it there must write it under its own name",
            )
        return self

    @classmethod
    def from_map(cls, value: Any) -> Self:
        """Validate an unpacked map; see `from_bytes`."""
        if not isinstance(value, dict):
            raise MessageError(
                f"a {cls.__name__} is a map, this is a {type(value).__name__}",
                hint="see docs/messages.md",
            )
        fields = cast("dict[str, Any]", value)
        version = fields.get("v")
        if not isinstance(version, int) or version != SCHEMA_VERSION:
            raise MessageError(
                f"{cls.__name__} has schema version {_short.repr(version)}, this actor speaks "
                f"{SCHEMA_VERSION}",
                hint="run the same tinkermq release on both sides",
            )
        try:
            return cls.__pydantic_validator__.validate_python(fields)  # as model_validate does
        except ValidationError as error:
            raise MessageError(
                f"{cls.__name__} is malformed: {summarize(error)}", hint="see docs/messages.md"
            ) from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise MessageError(
                f"{cls.__name__} is malformed: {type(error).__name__}", hint="see docs/messages.md"
            ) from error


class Request(Message):
    """What users ask the pool's own services: every field is bounded, by itself or by default."""

    max_bytes: ClassVar[int] = 64 << 10

    def __init__(self, **values: Any) -> None:
        """Make a request; raises MessageError: what is wrong is what somebody has typed."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise MessageError(summarize(error)) from error

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source))


class Empty(Request):
    """A message without content."""

    max_bytes: ClassVar[int] = 1 << 10


def with_last(at: str, name: str | int) -> str:
    """Return a key or subject with another last token."""
    head, dot, _ = at.rpartition(".")
    return f"{head}{dot}{name}"


def _fields_of(value: Any) -> Any:
    """Return a model's fields, which the packer itself goes through; anything else as it is."""
    return vars(value) if isinstance(value, BaseModel) else value


def _plain_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields of a validated model as plain values; four times as fast as a dump."""
    return {name: _plain(value) for name, value in vars(model).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain_fields(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def summarize(error: ValidationError) -> str:
    """Say each problem of a pydantic error in one short clause: where, what, which value."""
    if error.error_count() > _MOST_ERRORS:  # to list them takes longer than to find them
        return f"{error.error_count():,} of its values are wrong"
    clauses: list[str] = []
    for problem in error.errors()[:5]:
        told = problem.get("ctx", {}).get("error")
        if isinstance(told, MessageError):  # one that was made while this was being checked
            clauses.append(told.message)
            continue
        where = ".".join(str(part)[:_MOST_CHARS] for part in problem["loc"]) or "value"
        shown = _short.repr(problem.get("input"))
        clauses.append(f"{where}: {problem['msg'][:_MOST_CHARS]} (got {shown})")
    return "; ".join(clauses)


class _Short(reprlib.Repr):
    """Short forms of values; NumPy's own of an array of many dimensions takes seconds to make."""

    def repr_ndarray(self, array: Any, _: int) -> str:
        return f"{array.dtype} array of {array.shape}"


_short = _Short()
