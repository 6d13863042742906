"""The calls of one episode that are being answered, and those whose answer has not arrived."""

import asyncio
from collections.abc import Iterator

from ....schemas.wire.errors import TinkermqError
from ..episode import EpisodeOver
from .running_call import RunningCall

MAX_LEFT = 64
"""Calls of one episode whose programs have gone, and that are kept for a while."""


class ProgramCalls:
    """Finds the call that a repeated request means.

    A request repeats another if it says so, or if nobody waits for the other any more, whose
    program has gone before it had the whole answer. All others are new samples.
    """

    def __init__(self, adopt_s: float) -> None:
        """Keep a call `adopt_s` for a program that comes back."""
        self._adopt_s = adopt_s
        self._calls: dict[bytes, list[RunningCall]] = {}
        self._left: dict[RunningCall, asyncio.TimerHandle] = {}

    def __iter__(self) -> Iterator[RunningCall]:
        """Yield all."""
        return iter([call for calls in self._calls.values() for call in calls])

    def join(self, digest: bytes, *, is_marked: bool) -> RunningCall | None:
        """Return the call that a request with this digest repeats, if there is one."""
        waiting = [call for call in self._calls.get(digest, ()) if call.error is None]
        left = [call for call in waiting if not call.num_listeners]
        joined = left or (waiting if is_marked else [])
        if not joined:
            return None
        if timer := self._left.pop(joined[-1], None):
            timer.cancel()
        return joined[-1]

    def add(self, digest: bytes, call: RunningCall) -> None:
        """Take a new call."""
        self._calls.setdefault(digest, []).append(call)

    def leave(self, digest: bytes, call: RunningCall) -> None:
        """Forget a call that has arrived or failed; keep another one, if nobody waits for it."""
        if call.is_delivered or call.error is not None:
            self._forget(digest, call)
        elif not call.num_listeners and call in self._calls.get(digest, ()):
            loop = asyncio.get_running_loop()
            self._left[call] = loop.call_later(self._adopt_s, self._give_up, digest, call)
            if len(self._left) > MAX_LEFT:
                oldest = next(iter(self._left))
                self._left[oldest].cancel()
                self._give_up(_digest_of(self._calls, oldest), oldest)

    def end(self, error: TinkermqError) -> list[RunningCall]:
        """End all of them; return them."""
        for timer in self._left.values():
            timer.cancel()
        ended = list(self)
        for call in ended:
            call.end(error)
        self._left.clear()
        self._calls.clear()
        return ended

    def _give_up(self, digest: bytes, call: RunningCall) -> None:
        call.end(EpisodeOver("its program has gone"))
        self._forget(digest, call)

    def _forget(self, digest: bytes, call: RunningCall) -> None:
        self._left.pop(call, None)
        calls = self._calls.get(digest, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            self._calls.pop(digest, None)


def _digest_of(calls: dict[bytes, list[RunningCall]], call: RunningCall) -> bytes:
    return next(digest for digest, same in calls.items() if call in same)
