"""Requests of many users: in turn, bounded for each, whatever one of them sends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tinkermq.broker.fair_queue import MAX_BYTES, FairLock, FairQueue

from tests.support.waiting import until


class Requests:
    """Work that waits to be let go, and says who began in which order."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go = asyncio.Event()

    def of(self, user: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def work() -> None:
            self.began.append(user)
            await self.go.wait()

        return work


async def test_users_take_turns_however_many_requests_one_has() -> None:
    queue, requests = FairQueue(max_running=1), Requests()
    queue.bound = lambda _: 1
    assert queue.submit("first", requests.of("first"))
    taken = [queue.submit("many", requests.of("many")) for _ in range(5)]
    assert all(taken)
    assert queue.submit("one", requests.of("one"))
    requests.go.set()
    await until(lambda: len(requests.began) == 7, "all to have run")
    assert requests.began[:3] == ["first", "many", "one"]


async def test_one_user_runs_and_waits_up_to_his_bound_and_the_next_is_refused() -> None:
    queue, requests = FairQueue(), Requests()
    queue.bound = lambda user: 2 if user == "many" else None
    taken = [queue.submit("many", requests.of("many")) for _ in range(30)]
    assert taken.count(True) == 2 + 8 * 2
    assert queue.submit("one", requests.of("one"))
    await until(lambda: len(requests.began) == 3, "three to run")
    assert sorted(requests.began) == ["many", "many", "one"]
    requests.go.set()
    await until(lambda: len(requests.began) == 19, "the others to run")
    assert queue.submit("many", requests.of("many"))
    await queue.settle(10)


async def test_what_a_users_requests_hold_in_memory_is_bounded() -> None:
    queue, requests = FairQueue(), Requests()
    half = MAX_BYTES // 2
    assert queue.submit("large", requests.of("large"), half)
    assert queue.submit("large", requests.of("large"), half)
    assert not queue.submit("large", requests.of("large"), 1)
    assert queue.submit("one", requests.of("one"), half)
    requests.go.set()
    await queue.settle(10)
    assert queue.submit("large", requests.of("large"), MAX_BYTES * 2), "one alone is always taken"
    await queue.settle(10)


async def test_what_waits_is_dropped_at_the_end_and_what_runs_is_ended() -> None:
    queue, requests = FairQueue(max_running=1), Requests()
    for _ in range(3):
        queue.submit("ada", requests.of("ada"))
    await until(lambda: requests.began == ["ada"], "the first to run")
    await queue.settle(0)
    assert requests.began == ["ada"]


async def test_users_take_turns_in_what_one_at_a_time_may_do() -> None:
    turns, had = FairLock(), list[str]()

    async def pieces(user: str) -> None:
        for _ in range(4):
            async with turns.turn(user):
                had.append(user)
                await asyncio.sleep(0)

    many = [asyncio.create_task(pieces("many")) for _ in range(16)]
    await asyncio.sleep(0)
    await asyncio.gather(pieces("one"), pieces("another"))
    ahead = had[: max(n for n, user in enumerate(had) if user != "many")]
    assert ahead.count("many") <= 9, "two for each piece of another, at most"
    await asyncio.gather(*many)
    assert [had.count(user) for user in ("many", "one", "another")] == [64, 4, 4]


async def test_a_turn_that_nobody_waits_for_any_more_is_passed_on() -> None:
    turns = FairLock()
    held = asyncio.Event()

    async def hold(user: str, until: asyncio.Event) -> None:
        async with turns.turn(user):
            await until.wait()

    first = asyncio.create_task(hold("first", held))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(hold(f"u{n}", held)) for n in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # while it waits
    held.set()
    await asyncio.sleep(0)
    waiting[1].cancel()  # it may just have been given the turn
    await asyncio.gather(first, *waiting, return_exceptions=True)
    async with asyncio.timeout(5), turns.turn("late"):
        pass


async def test_a_piece_that_fails_passes_the_turn_on() -> None:
    turns = FairLock()
    with pytest.raises(ValueError, match="wrong"):
        async with turns.turn("one"):
            raise ValueError("wrong")
    async with asyncio.timeout(5), turns.turn("one"):
        pass
