"""Requests of many users: in turn, bounded for each, whatever one of them sends."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, cast

import nats.errors
import pytest
from tinkermq.broker.client.connection import Broker, connect, drop_old_requests, request_connection
from tinkermq.broker.client.fair_queue import MAX_BYTES, FairLock, FairQueue, Rates
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import rpc

from tests.support.processes import halt
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until


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
    await queue.settle(PATIENCE_S)


async def test_what_a_users_requests_hold_in_memory_is_bounded() -> None:
    queue, requests = FairQueue(), Requests()
    half = MAX_BYTES // 2
    assert queue.submit("large", requests.of("large"), half)
    assert queue.submit("large", requests.of("large"), half)
    assert not queue.submit("large", requests.of("large"), 1)
    assert queue.submit("one", requests.of("one"), half)
    requests.go.set()
    await queue.settle(PATIENCE_S)
    assert queue.submit("large", requests.of("large"), MAX_BYTES * 2), "one alone is always taken"
    await queue.settle(PATIENCE_S)


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
    async with asyncio.timeout(PATIENCE_S), turns.turn("late"):
        pass


async def test_a_piece_that_fails_passes_the_turn_on() -> None:
    turns = FairLock()
    with pytest.raises(ValueError, match="wrong"):
        async with turns.turn("one"):
            raise ValueError("wrong")
    async with asyncio.timeout(PATIENCE_S), turns.turn("one"):
        pass


# -- How often something may happen: a burst, then a rate, for each key by itself ------------------


def test_a_burst_is_let_through_then_the_rate_and_what_was_left_out_is_told() -> None:
    rates = Rates(0.5, 2)
    assert [rates.take("ada", at) for at in (0.0, 0.1, 0.2, 0.3)] == [0, 0, None, None]
    assert [rates.take("ada", at) for at in (2.5, 2.6, 4.5)] == [2, None, 1]


def test_one_key_takes_nothing_from_another() -> None:
    rates = Rates(1, 1)
    assert rates.take("ada", 0.0) == 0
    assert rates.take("ada", 0.0) is None
    assert rates.take("bob", 0.0) == 0


def test_keys_that_are_made_up_do_not_fill_the_memory() -> None:
    rates = Rates(1, 1, max_keys=10)
    for number in range(1000):
        rates.take(str(number), 0.0)
        rates.take(str(number), 0.0)
    assert rates.num_keys <= 10


# -- A flood of one user before the requests of others: none of theirs is lost or left waiting -----


NUM_FLOODING = 30_000
NUM_BREAKS = 5


async def _work() -> None:
    await asyncio.sleep(AFTER_PATIENCE_S)


async def test_a_request_behind_a_flood_of_another_user_is_not_dropped(
    nats_server: NatsServer, broker: Broker
) -> None:
    async def answer(_: Empty) -> Empty:
        return Empty()

    async with (
        await connect(nats_server.url, name="service") as own,
        await Service.start(own, name="behind", description="test") as service,
        await connect(nats_server.url, name="flood") as flooding,
    ):
        await service.endpoint("look", rpc("*", "behind", "look"), Empty, answer, fair=True)
        for _ in range(NUM_FLOODING):
            await flooding.nc.publish(rpc("mallory", "behind", "look"), b"\x80", reply="_INBOX.no")
        subject = rpc("ada", "behind", "look")
        who = {"waiting_for": "the service", "timeout_s": PATIENCE_S}
        replies = [call(flooding, subject, Empty(), Empty, **who) for _ in range(10)]
        assert len(await asyncio.gather(*replies)) == 10
        assert service.share.num_refused > 0


async def test_a_connection_that_a_flood_has_left_behind_is_made_anew(
    own_server: NatsServer, own_broker: Broker
) -> None:
    share, lost, back = FairQueue(), asyncio.Event(), asyncio.Event()

    def flooded() -> bool:
        for _ in range(1000):
            share.submit("mallory", _work)
        return lost.is_set()

    async with request_connection(own_broker, asyncio.Event()) as own:
        assert own is not None
        own.on_disconnect(lost.set)
        own.on_reconnect(back.set)
        dropping = asyncio.create_task(drop_old_requests(own, share, look_s=0.01, late_s=0.1))
        assert own_server.pid is not None
        halt(own_server.pid)
        try:
            await until(flooded, "the connection to be dropped")
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        await asyncio.wait_for(back.wait(), PATIENCE_S)
        assert own_broker.is_connected
        dropping.cancel()
    await share.settle(0)


async def test_a_connection_that_is_made_anew_in_the_middle_of_a_message_hears_again(
    nats_server: NatsServer,
) -> None:
    heard = asyncio.Event()

    async def flood() -> None:
        while not flooding.nc.is_closed:
            for _ in range(100):
                await flooding.nc.publish("flood", b"x" * 3000)
            await flooding.nc.flush(cast("int", PATIENCE_S))

    async def something_is_unread(own: Broker) -> None:
        """Wait until something has come that is not read yet, at the connection that there is."""
        async with asyncio.timeout(PATIENCE_S):
            while not cast("Any", own.nc)._transport._io_reader._buffer:
                assert not task.done(), task.exception()
                await asyncio.sleep(0)

    async with (
        await connect(nats_server.url, name="listener") as own,
        await connect(nats_server.url, name="flood") as flooding,
    ):
        await own.listen("flood", lambda _: heard.set())
        task = asyncio.create_task(flood())
        for _ in range(NUM_BREAKS):
            await something_is_unread(own)
            await own.nc.force_reconnect()
            heard.clear()
            await asyncio.wait_for(heard.wait(), PATIENCE_S)
        task.cancel()


async def test_a_ping_that_is_answered_late_does_not_end_the_reading(
    own_server: NatsServer, own_broker: Broker
) -> None:
    lost = asyncio.Event()
    own_broker.on_disconnect(lost.set)
    assert own_server.pid is not None
    halt(own_server.pid)
    try:
        with pytest.raises(nats.errors.FlushTimeoutError):
            await own_broker.nc.flush(cast("int", 0.05))
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    await own_broker.nc.flush()
    assert not lost.is_set()
