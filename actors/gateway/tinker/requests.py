"""Read requests of the Tinker API, and write its results."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ....schemas.tinker.names import ModelName, OperationName
from ....schemas.tinker.operation import MAX_BODY_BYTES, OperationResult
from ....schemas.tinker.wire import RequestName, parse_request, plain_body
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError
from ..guard import HELD
from ..limits import content_length
from ..sessions import Visitor
from ..web import OF_TINKER_SDK, gateway_of

PROTOBUF = "application/x-protobuf"
LARGE = 64 << 10
"""Bytes from which a body is read in a thread."""
_NOT_READY = 408
_DETAIL_OF_POLL = {"queue_state": "paused_capacity"}


async def visitor_of_key(request: Request) -> Visitor:
    """Return the visitor, by a key `tml-tmq_<user>_<secret>`; raises LogInError."""
    key = request.headers.get("x-api-key", "")
    sessions = gateway_of(request).sessions
    if sessions.with_keys and key and not key.startswith(f"{OF_TINKER_SDK}tmq_"):
        raise HTTPException(
            401, "the API key of this service is tml- and then your key: tml-tmq_<user>_<secret>"
        )
    visitor = await sessions.visitor(session=None, key=key.removeprefix(OF_TINKER_SDK))
    request.scope[HELD].enter_context(visitor.held(content_length(request.headers) or 0))
    return visitor


def check_size(raw: bytes) -> None:
    """Raise HTTPException 413 for a body that is too large."""
    if len(raw) > MAX_BODY_BYTES:
        raise HTTPException(413, f"a request may have {MAX_BODY_BYTES:,} bytes: send fewer datums")


async def visitor_and_body(request: Request) -> tuple[Visitor, bytes, dict[str, Any]]:
    """Return the visitor, the body and its JSON object; see `visitor_of_key` and `json_body`."""
    return await visitor_of_key(request), *await json_body(request)


async def json_body(request: Request) -> tuple[bytes, dict[str, Any]]:
    """Return a body, and the JSON object in it.

    Raises MessageError, HTTPException 413 for a body that is too large.
    """
    raw = await request.body()
    check_size(raw)
    value = await in_thread(len(raw) > LARGE, lambda: read_json(raw))
    if not isinstance(value, dict):
        raise MessageError("the body must be a JSON object")
    return raw, cast("dict[str, Any]", value)


async def in_thread(is_large: bool, work: Callable[[], Any]) -> Any:
    """Process a body, in a thread if it is large."""
    return await asyncio.to_thread(work) if is_large else work()


def name_of_protobuf(raw: bytes, is_zstd: bool) -> OperationName:
    """Return the name of the operation in a protobuf body."""
    message = parse_request(plain_body(raw, is_zstd=is_zstd), RequestName)
    return OperationName(
        ModelName.parse(message.model_id), number_in_body(message.seq_id, "seq_id")
    )


def name_of_json(body: dict[str, Any]) -> OperationName:
    """Return the name of the operation in a JSON body; raises MessageError, NotFoundError."""
    model = ModelName.parse(text_in(body, "model_id"))
    return OperationName(model, number_in_body(body.get("seq_id"), "seq_id"))


def new_model(body: dict[str, Any]) -> ModelName:
    """Return the model that a body creates; raises MessageError, NotFoundError."""
    session = text_in(body, "session_id")
    number = number_in_body(body.get("model_seq_id"), "model_seq_id", 0)
    return ModelName.parse(f"{session}:train:{number}")


def text_in(body: dict[str, Any], key: str) -> str:
    """Return a text in a body; raises MessageError without one."""
    value = body.get(key)
    if not isinstance(value, str):
        raise MessageError(f"{key}={value!r} is not a text", hint=f"send {key}")
    return value


def number_in_body(value: Any, key: str, least: int = 1, below: int = 10**9) -> int:
    """Return an integer in a body; raises MessageError for another value."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < below:
        raise MessageError(f"{key}={value!r} must be an integer ≥ {least}")
    return value


def answered(name: str, result: OperationResult) -> Response:
    """Return a result in the API's format."""
    if result.state == "pending":
        return not_ready(name, result.queue_reason)
    if result.state == "failed":
        return JSONResponse({"error": result.error, "category": result.category})
    return Response(result.body, media_type=PROTOBUF if result.is_proto else "application/json")


def not_ready(name: str, reason: str) -> Response:
    """Return the response to a poll before the result; the client polls again at once."""
    fields = {**_DETAIL_OF_POLL, "queue_state_reason": reason}
    return JSONResponse({"type": "try_again", "request_id": name, **fields}, _NOT_READY)


# -- clients of untested SDK versions --------------------------------------------------------------

OLDEST, NEWEST = (0, 25), (0, 38)
"""Tested with: make test-tinker."""
_EXTERNAL = (0, 28)
_AGENT = re.compile(r"Tinker/Python ([0-9]{1,4})\.([0-9]{1,4})")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(\..*)?")


def note_to(version: str) -> dict[str, str]:
    """Return a note that clients show their user; empty for a tested SDK version."""
    match = _VERSION.fullmatch(version)
    tested = f"{_shown(OLDEST)} to {_shown(NEWEST)}"
    if match is None:
        return {"warning_message": f"this service was tested with tinker {tested}"}
    number = int(match[1]), int(match[2])
    if number < OLDEST:
        return {
            "error_message": f"tinker {version} sends requests that this service does not accept: "
            f"install tinker>={_shown(OLDEST)}"
        }
    if number > NEWEST:
        return {
            "warning_message": f"this service was tested with tinker {tested}, not with {version}: "
            "if a call fails, install a tested one, or a newer tinkermq"
        }
    return {}


def supports_external_weights(user_agent: str) -> bool:
    """Return whether a client can read lists with external checkpoints; only old SDKs cannot."""
    match = _AGENT.search(user_agent)
    return match is None or (int(match[1]), int(match[2])) >= _EXTERNAL


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
