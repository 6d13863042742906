"""Requests of many users: in turn, bounded for each, whatever one of them sends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tinkermq.broker.load.fair_queue import MAX_BYTES, FairQueue

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
