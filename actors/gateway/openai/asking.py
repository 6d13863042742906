"""How the model endpoints read a body, and give up when nobody waits for an answer any more."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ....envs.agents.dialects.request import RequestError
from ....schemas.infer import InferPart
from ..limits import MAX_INFERENCE_BYTES

T = TypeVar("T")

LARGE = 64 << 10
"""Bytes of a body that is read in a thread: the loop answers others meanwhile."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GONE_S = 0.5
_CLIENT_CLOSED = 499


def refuse_stateful(request: Request) -> None:
    """Raise RequestError for the header of stateful chats, which were removed."""
    if "x-tinkermq-stateful" in request.headers:
        raise _stateful_error("the header 'x-tinkermq-stateful'", "")


def refuse_stateful_body(body: Mapping[str, Any]) -> None:
    """Raise RequestError for a body that names `stateful`, which was removed."""
    if body.get("stateful") is not None:
        raise _stateful_error("the parameter 'stateful'", "stateful")


def _stateful_error(name: str, param: str) -> RequestError:
    return RequestError(
        f"{name} was removed: a served model continues the text of a conversation, not its tokens",
        param=param,
        hint="leave it out; an agent's episodes continue by tokens, for others send token ids to "
        "/v1/completions",
    )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await something, but give it up when the client has gone away."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_GONE_S)
            if not task.done() and await request.is_disconnected():
                raise HTTPException(_CLIENT_CLOSED, "the client has gone")
        return task.result()
    finally:
        task.cancel()


async def first_of(parts: AsyncGenerator[InferPart, None]) -> InferPart:
    """Return the first part, so that what is refused at once gets a status of its own."""
    try:
        return await anext(parts)
    except BaseException:
        await parts.aclose()
        raise


async def read_body(request: Request) -> bytes:
    """Return a body; HTTPException 413 for one that is too large."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_INFERENCE_BYTES:
            raise HTTPException(413, f"the body is over {MAX_INFERENCE_BYTES:,} bytes")
    return bytes(raw)
