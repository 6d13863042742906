"""Helpers of the handlers of pages and of the REST interface."""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import parse_qsl

from jinja2 import Environment
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...broker.client.connection import Broker
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import BrokerError, DeadlineError, MessageError, TinkermqError
from .data.jobs import Figures
from .data.metrics import Histories
from .guard import HELD
from .limits import TAKEN, Counters, body_bytes, max_body_bytes
from .operations import Scheduler
from .programs import ProgramEpisodes
from .sessions import COOKIE, LogInError, Sessions, Visitor
from .tinker.trainers import Trainers

OF_TINKER_SDK = "tml-"
"""Prefix of keys in Tinker's SDK; a key of the pool follows."""

MAX_NAMES, MAX_NAME_CHARS = 512, 256
"""Bounds on the metrics that one request names."""


@dataclass
class Gateway:
    """The parts that handlers work with."""

    sessions: Sessions
    templates: Environment
    programs: ProgramEpisodes
    counters: Counters = field(default_factory=Counters)
    histories: Histories = field(default_factory=Histories)
    figures: Figures = field(default_factory=Figures)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    trainers: Trainers = field(default_factory=Trainers)
    own: Broker | None = None
    """The gateway's own connection, which has few rights if the broker requires keys."""
    secure: bool = False
    """Served over TLS: cookies are for TLS only."""


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that answers a request."""
    return cast("Gateway", request.app.state.gateway)


async def visitor_of(request: Request) -> Visitor:
    """Return the visitor, with a connection that is kept until the request is answered.

    The key is a bearer token, or in `x-api-key` as Anthropic's clients send it; the prefix of
    Tinker's SDK is allowed. Raises LogInError.
    """
    visitor = await _let_in(request)
    held = visitor.held(body_bytes(request.headers, max_body_bytes(request.url.path)))
    request.scope[TAKEN] = request.scope[HELD].enter_context(held)
    return visitor


async def _let_in(request: Request) -> Visitor:
    """Return the visitor; raises LogInError, BrokerError."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key")
    return await gateway_of(request).sessions.visitor(
        session=request.cookies.get(COOKIE),
        key=key if key is None else key.removeprefix(OF_TINKER_SDK),
    )


async def why_it_failed(request: Request, error: TinkermqError) -> TinkermqError:
    """Return the error to show for one of the broker: that of a revoked key, if it caused it."""
    of_broker = isinstance(error, BrokerError | DeadlineError)
    if not of_broker or not gateway_of(request).sessions.with_keys:
        return error
    try:
        await _let_in(request)
    except LogInError as refused:
        return refused
    except TinkermqError:
        return error  # the broker is away, as the first error says
    return error


async def scheduler_of(request: Request) -> Scheduler:
    """Return the scheduler as seen by the visitor."""
    return Scheduler(await visitor_of(request))


def error_fields(error: TinkermqError) -> dict[str, Any]:
    """Return the JSON of an error."""
    code = "unauthorized" if isinstance(error, LogInError) else error.code
    return {"error": {"code": code, "message": error.message, "hint": error.hint}}


class Json(Response):
    """A JSON reply; pydantic models become maps, NaN and infinity null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the bytes of a value."""
        return to_json(content).encode("utf-8", "replace")


def to_json(value: Any) -> str:
    """Return a value as JSON text; see `Json`."""
    try:
        return json.dumps(value, default=_plain, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if hasattr(value, "tolist"):
        return value.tolist()
    return repr(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in cast("list[Any]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return _finite(_plain(value))


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form; the last of each name counts.

    Raises MessageError for another content type.
    """
    kind = request.headers.get("content-type", "").split(";")[0]
    if kind != "application/x-www-form-urlencoded":
        raise MessageError(f"the body must be a form, and is {kind or 'empty'}")
    body = (await request.body()).decode("utf-8", "replace")
    return dict(parse_qsl(body, keep_blank_values=True, max_num_fields=64))


async def json_of(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; an empty body is an empty one.

    Raises MessageError for anything else.
    """
    body = await request.body()
    if not body:
        return {}
    kind = request.headers.get("content-type", "").split(";")[0]
    try:
        value = read_json(body)
    except MessageError as error:
        raise MessageError(f"the body cannot be read: {error.message}", hint=error.hint) from error
    if kind != "application/json" or not isinstance(value, dict):
        raise MessageError(
            "the body must be a JSON object, sent as application/json; it is a JSON "
            f"{type(value).__name__}, sent as {kind or 'nothing'}",
            hint="with curl: -H 'content-type: application/json' -d '{…}'",
        )
    return cast("dict[str, Any]", value)


def number_in(
    request: Request, name: str, default: int | None = None, *, least: int = 0
) -> int | None:
    """Return an integer of the query; raises MessageError."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 15 or int(text) < least:
        raise MessageError(f"{name}={text!r} must be an integer ≥ {least}")
    return int(text)


def real_in(request: Request, name: str) -> float | None:
    """Return a number of the query, None without one; raises MessageError."""
    text = request.query_params.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise MessageError(f"{name}={text[:40]!r} must be a number")
    return value


_FLAGS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
MAX_TEXT_CHARS = 200


def flag_in(request: Request, name: str) -> bool:
    """Return a boolean of the query, False without one; raises MessageError."""
    return _FLAGS[choice_in(request, name, tuple(_FLAGS), "no")]


def choice_in(request: Request, name: str, choices: Sequence[str], default: str) -> str:
    """Return one of `choices` from the query, in lower case; raises MessageError for others.

    A missing or empty value is the default, which need not be one of them.
    """
    text = request.query_params.get(name, "")
    if not text:
        return default
    if text.lower() not in choices:
        raise MessageError(
            f"{name}={text[:40]!r} is not a value of {name}",
            hint=f"use one of {', '.join(choices)}",
        )
    return text.lower()


def text_in(request: Request, name: str) -> str:
    """Return a text of the query; raises MessageError for one that is too long."""
    text = request.query_params.get(name, "")
    if len(text) > MAX_TEXT_CHARS:
        raise MessageError(
            f"{name}= has {len(text)} characters; at most {MAX_TEXT_CHARS} are allowed",
            hint="use fewer words",
        )
    return text


def names_in(request: Request) -> list[str]:
    """Return the names or patterns in the query; empty for all.

    Raises MessageError for too many or too long ones.
    """
    parts = request.query_params.get("names", "").split(",")
    names = [name.strip() for name in parts if name.strip()]
    if len(names) > MAX_NAMES or any(len(name) > MAX_NAME_CHARS for name in names):
        raise MessageError(
            f"names= holds {len(names)} names; at most {MAX_NAMES} are allowed, of "
            f"{MAX_NAME_CHARS} characters each",
            hint="leave it out for all metrics, or use patterns: `critic/*`",
        )
    return names
