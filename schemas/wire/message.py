"""Base of all messages: a pydantic model that travels as a msgpack map with a version."""

import re
import reprlib
import secrets
import time
from typing import Any, ClassVar, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails
from ulid import ULID

from ..version import VERSION
from .bounds import bounded
from .codec import MAX_MESSAGE_BYTES, pack, unpack
from .errors import MessageError, ReleaseError, TinkermqError, error_from_reply
from .field_docs import described

SCHEMA_VERSION = 1
_MOST_ERRORS = 100
_MOST_CHARS = 200


class Message(BaseModel):
    """Base of all messages.

    Unknown keys are ignored, so that older actors understand newer ones; an unknown `v` is refused.
    Field docstrings become docs/messages.md.
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
        """Pack to a msgpack map with the key `v`; `instead` replaces fields."""
        return pack({"v": SCHEMA_VERSION, **vars(self), **instead}, plain=_fields_of)

    def to_map(self) -> dict[str, Any]:
        """Return the plain map to pack; arrays stay NumPy arrays."""
        return {"v": SCHEMA_VERSION, **_plain_fields(self)}

    @classmethod
    def from_bytes(cls, payload: bytes | memoryview, *, at: str | None = None) -> Self:
        """Unpack and validate a payload stored under key or subject `at`.

        Raises MessageError, naming the field, for an invalid message, or one whose fields
        contradict `at`.
        """
        message = cls.from_map(unpack(payload, max_bytes=cls.max_bytes))
        return message if at is None else message.check_at(at)

    def named_at(self, at: str) -> str:
        """Return the key or subject that the message's fields name.

        `at` is its actual key or subject, for the parts that the fields do not name. Raises
        MessageError for a field that cannot be part of a name.
        """
        return at

    def check_at(self, at: str) -> Self:
        """Return the message if its fields match its key or subject.

        The broker guards keys and subjects only, so names in a payload are untrusted. Raises
        MessageError.
        """
        named = self.named_at(at)
        if named != at:
            raise MessageError(
                f"the {type(self).__name__} under {at!r} says that it is {named!r}",
                hint="it is ignored; its writer must use its own name",
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
            raise _of_another_release(cls.__name__, version)
        try:
            return cls.__pydantic_validator__.validate_python(fields)  # as `model_validate` does
        except ValidationError as error:
            raise MessageError(
                f"{cls.__name__} is malformed: {summarize(error)}", hint="see docs/messages.md"
            ) from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise MessageError(
                f"{cls.__name__} is malformed: {type(error).__name__}", hint="see docs/messages.md"
            ) from error


def _of_another_release(name: str, version: object) -> MessageError:
    """Return the error for a message of another schema version: which side is to be updated."""
    has = f"{name} has schema version {_short.repr(version)}"
    if not isinstance(version, int):
        return MessageError(f"{has}, tinkermq {VERSION} reads {SCHEMA_VERSION}")
    whose, side = ("a newer", "this") if version > SCHEMA_VERSION else ("an older", "the other")
    return ReleaseError(
        f"{has}, of {whose} tinkermq; {VERSION} reads {SCHEMA_VERSION}",
        hint=f"update {side} side (docs/stability.md)",
    )


class Request(Message):
    """Base of users' requests to the pool's services: every field is bounded."""

    max_bytes: ClassVar[int] = 64 << 10

    def __init__(self, **values: Any) -> None:
        """Make a request; raises MessageError, since a user typed the values."""
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
    """Return a model's fields for the packer; anything else unchanged."""
    return vars(value) if isinstance(value, BaseModel) else value


def _plain_fields(model: BaseModel) -> dict[str, Any]:
    """Return a validated model's fields as plain values, four times as fast as a dump."""
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
    """Describe each pydantic error in one clause: where, what, which value."""
    if error.error_count() > _MOST_ERRORS:  # listing all takes longer than finding them
        return f"{error.error_count():,} of its values are wrong"
    clauses: list[str] = []
    for problem in error.errors()[:5]:
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, MessageError):  # raised during validation
            clauses.append(cause.message)
            continue
        where = ".".join(str(part)[:_MOST_CHARS] for part in problem["loc"]) or "value"
        shown = _short.repr(problem.get("input"))
        clauses.append(f"{where}: {requirement(problem)[:_MOST_CHARS]} (got {shown})")
    return "; ".join(clauses)


_WORDS = (
    (r"^\w+ should ", "must "),
    (", unable to (parse|interpret).*", ""),
    ("a valid dictionary.*", "a map"),
    ("a valid integer", "an integer"),
    ("a valid string", "a text"),
    (" valid ", " "),
    ("greater than or equal to", "≥"),
    ("less than or equal to", "≤"),
    ("greater than", ">"),
    ("less than", "<"),
    ("^Field required", "is missing"),
    ("^Extra inputs are not permitted", "is not a known key"),
)


def requirement(problem: ErrorDetails) -> str:
    """Return what one of pydantic's errors asks of a value, such as `must be an integer`."""
    if problem["type"] == "value_error":  # a text of our own
        return problem["msg"].removeprefix("Value error, ")
    text = problem["msg"]
    for theirs, ours in _WORDS:
        text = re.sub(theirs, ours, text)
    value = problem.get("input")
    if problem["type"] == "list_type" and isinstance(value, str) and len(value) < _MOST_CHARS:
        text += f", as in [{value}]"
    return text


class _Short(reprlib.Repr):
    """Short forms of values; NumPy's own takes seconds for many dimensions."""

    def repr_ndarray(self, array: Any, _: int) -> str:
        return f"{array.dtype} array of {array.shape}"


_short = _Short()


# Replies: errors and parts.

MAX_CHARS = 8000
"""Length of a message or hint."""


class ErrorReply(Message):
    """Reply to a request that failed. The headers `Nats-Service-Error-Code` and
    `Nats-Service-Error` repeat it for NATS tools."""

    code: str
    """Stable error code."""
    message: str
    """What happened, with which value."""
    hint: str = ""
    """What to do about it."""

    @classmethod
    def of(cls, code: str, message: str, hint: str = "") -> Self:
        """Make a reply of any text, also invalid Unicode from games and models.

        Long texts are cut, so that the reply fits a message.
        """
        return cls(code=code, message=_clean(message), hint=_clean(hint))

    def to_error(self) -> TinkermqError:
        """Return the error that the peer raised, as the same class."""
        return error_from_reply(self.code, self.message, self.hint)


class Part(Message):
    """One of several messages that answer a request. A part without content says that the service
    is still working."""

    index: int = Field(default=0, ge=0)
    """Number of the part, from 0; a gap means a loss."""
    last: bool = False
    """No part follows."""
    error: ErrorReply | None = None
    """Why the answer ends here; in the last part only."""


def _clean(value: object) -> str:
    text = value if isinstance(value, str) else str(type(value))
    cut = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
    return cut.encode(errors="replace").decode()


def new_id() -> str:
    """Return a ULID in lower case: milliseconds, and 80 random bits.

    The bits are new for each id. The library increments them within a millisecond, which would make
    ids predictable.
    """
    milliseconds = int(time.time() * 1000).to_bytes(6, "big")
    return str(ULID.from_bytes(milliseconds + secrets.token_bytes(10))).lower()
