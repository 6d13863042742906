"""Many questions in one message: what is asked for within one turn of the event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ...schemas.wire.errors import TinkermqError

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q")
R = TypeVar("R")


class Together(Generic[K, Q, R]):
    """Gathers, by key, what is asked for within one turn of the event loop."""

    def __init__(
        self, send: Callable[[K, list[Q]], Awaitable[Sequence[R | TinkermqError]]]
    ) -> None:
        """`send(key, questions)` returns an answer or an error for each question, in order."""
        self._send = send
        self._asked: dict[K, list[tuple[Q, asyncio.Future[R]]]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def ask(self, key: K, question: Q) -> "asyncio.Future[R]":
        """Return the future of the answer."""
        loop = asyncio.get_running_loop()
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = []
            loop.call_soon(self._go, key)
        future: asyncio.Future[R] = loop.create_future()
        asked.append((question, future))
        return future

    def _go(self, key: K) -> None:
        task = asyncio.create_task(self._answer(key, self._asked.pop(key)), name=f"ask {key}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _answer(self, key: K, asked: list[tuple[Q, "asyncio.Future[R]"]]) -> None:
        try:
            answers = await self._send(key, [question for question, _ in asked])
        except Exception as error:  # noqa: BLE001  handed on to those who asked
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, TinkermqError):
                future.set_exception(answer)
            else:
                future.set_result(answer)
