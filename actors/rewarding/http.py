"""The HTTP side of a reward model: what `env.reward.source: endpoint` posts, answered with a score.

Requests that come while the model computes are scored together afterwards.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Any, cast

from ...envs.chat_messages import Origin, read_conversation
from ...schemas.wire.errors import DataError, TinkermqError
from ..learner.packing.micro_batch import TokenSequence
from .judge import Judge

MAX_BODY_BYTES = 16 << 20
MAX_AT_ONCE = 256
"""Conversations that are scored in one go."""
MAX_WAITING = 16 * MAX_AT_ONCE
"""Conversations that wait; who comes then is told to come again."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class RewardApp:
    """An ASGI application: POST `{"messages": […]}`, and get `{"score": …}`."""

    def __init__(self, judge: Judge, key: str | None = None) -> None:
        """With a `key` it is asked for as a bearer token."""
        self._judge = judge
        self._key = key
        self._waiting: list[tuple[TokenSequence, asyncio.Future[float]]] = []
        self._computing = asyncio.Lock()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        status, answer = await self._answer(scope, receive)
        head = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _answer(self, scope: dict[str, Any], receive: Receive) -> tuple[int, dict[str, Any]]:
        if not self._is_allowed(dict(scope["headers"])):
            return 401, {"error": "the key is missing or another one"}
        if scope["method"] != "POST":
            return 405, {"error": "POST a conversation"}
        if len(self._waiting) >= MAX_WAITING:
            return 429, {"error": f"{MAX_WAITING} conversations wait already"}
        try:
            sequence = await asyncio.to_thread(self._judge.tokens, _messages(await _body(receive)))
        except TinkermqError as error:
            return 422, {"error": error.message, "hint": error.hint}
        return 200, {"score": await self._score(sequence)}

    def _is_allowed(self, headers: dict[bytes, bytes]) -> bool:
        told = headers.get(b"authorization", b"")
        return self._key is None or compare_digest(told, f"Bearer {self._key}".encode())

    async def _score(self, sequence: TokenSequence) -> float:
        """Wait for the score of a conversation; whoever finds the model free asks for all."""
        told = asyncio.get_running_loop().create_future()
        self._waiting.append((sequence, told))
        async with self._computing:
            if not told.done():
                await self._compute()
        return await told

    async def _compute(self) -> None:
        taken, self._waiting = self._waiting[:MAX_AT_ONCE], self._waiting[MAX_AT_ONCE:]
        try:
            scores = await asyncio.to_thread(self._judge.scores, [one for one, _ in taken])
        except Exception as error:  # noqa: BLE001  each of them hears why, as it would alone
            for _, told in taken:
                if not told.done():
                    told.set_exception(error)
            return
        for (_, told), score in zip(taken, scores, strict=True):
            if not told.done():  # who asked may have gone
                told.set_result(score)


async def _body(receive: Receive) -> bytes:
    """Read a request's body; DataError for one that is too long."""
    parts = bytearray()
    while True:
        message = await receive()
        parts += message.get("body", b"")
        if len(parts) > MAX_BODY_BYTES:
            raise DataError(f"a request has over {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return bytes(parts)


def _messages(body: bytes) -> list[dict[str, Any]]:
    """Read the conversation of a request; DataError for what is none."""
    try:
        told: Any = json.loads(body)
    except ValueError:
        told = None
    found: Any = cast("dict[str, Any]", told).get("messages") if isinstance(told, dict) else None
    if not found or not isinstance(found, list):
        raise DataError(
            "a request holds no messages",
            hint='post {"messages": [{"role": "user", "content": …}, …]}, as '
            "env.reward.source=endpoint does",
        )
    return read_conversation(found, Origin(is_request=True))
