"""How the model endpoints read a body, and give up when nobody waits for an answer any more."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ....schemas.infer import InferPart
from ..limits import MAX_INFERENCE_BYTES

T = TypeVar("T")

LARGE = 64 << 10
"""Bytes of a body that is read in a thread: the loop answers others meanwhile."""
STATEFUL = "x-tinkermq-stateful"
"""A header that says what `stateful` does in a body."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_GONE_S = 0.5
_CLIENT_CLOSED = 499


def is_stateful(request: Request) -> bool:
    """Whether a request's headers ask for a conversation that is continued by its tokens."""
    return request.headers.get(STATEFUL, "").lower() in ("1", "true")


def headers_of(part: InferPart) -> dict[str, str]:
    """Return what is told of a stateful answer: how much was continued, or why not all was."""
    if part.rendered is None:
        return {}
    told = {"x-tinkermq-reused": str(part.reused_tokens)}
    return {**told, "x-tinkermq-rendered": part.rendered} if part.rendered else told


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
