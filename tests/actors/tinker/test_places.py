"""Places in a sampler's engine: by turns, whoever asks for how many."""

import asyncio
import contextlib

from tinkermq.actors.tinker.sampling.engines import FairSlots

from tests.support.cancelling import cancel_everywhere


class Engine:
    """Notes who comes in, and keeps everybody until told."""

    def __init__(self, most: int) -> None:
        self.places = FairSlots(most, quantum=10)
        self.order: list[str] = []
        self.ends = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    async def one(self, user: str, tokens: int, used: int) -> None:
        async with self.places.place(user, tokens) as place:
            self.order.append(user)
            await self.ends.wait()
            place.tokens = used

    async def ask(self, user: str, times: int, tokens: int = 10, used: int = 10) -> None:
        self.tasks += [asyncio.create_task(self.one(user, tokens, used)) for _ in range(times)]
        await asyncio.sleep(0)

    async def finish(self) -> list[str]:
        self.ends.set()
        await asyncio.gather(*self.tasks)
        return self.order


async def test_one_who_comes_late_waits_for_nobody() -> None:
    engine = Engine(4)
    await engine.ask("ada", 100)
    await engine.ask("bob", 2)
    assert engine.order == ["ada"] * 3 + ["bob"]
    await engine.finish()
    assert engine.order.count("ada") == 100
    assert [at for at, user in enumerate(engine.order) if user == "bob"][1] <= 7


async def test_users_leave_places_free_and_one_without_others_does_not() -> None:
    alone, two, without_users = Engine(16), Engine(16), Engine(16)
    await alone.ask("ada", 100)
    await two.ask("ada", 7)
    await two.ask("bob", 100)
    await without_users.ask("local", 100)
    assert [len(engine.order) for engine in (alone, two, without_users)] == [14, 14, 16]
    await two.ask("eve", 1)
    assert two.order[-1] == "eve"
    for engine in (alone, two, without_users):
        await engine.finish()


async def test_places_follow_weights_and_what_was_computed() -> None:
    engine = Engine(1)
    engine.places.turns.weights["ada"] = 2.0
    await engine.ask("eve", 1)
    await engine.ask("ada", 60)
    await engine.ask("bob", 60)
    assert 36 <= (await engine.finish())[1:61].count("ada") <= 44
    engine = Engine(1)
    await engine.ask("eve", 1)
    await engine.ask("ada", 60, tokens=100, used=10)  # most of what they ask for is not drawn
    await engine.ask("bob", 60)
    assert 25 <= (await engine.finish())[1:61].count("ada") <= 35


async def test_who_no_longer_waits_takes_no_place() -> None:
    engine = Engine(1)
    await engine.ask("ada", 5)
    for task in engine.tasks[1:3]:
        task.cancel()
    engine.ends.set()
    await asyncio.wait(engine.tasks)
    assert engine.order == ["ada"] * 3
    leaving = asyncio.create_task(engine.one("ada", 10, 10))
    await engine.ask("ada", 1)
    leaving.cancel()  # it was let in and has not run since
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    await engine.ask("bob", 1)
    await asyncio.gather(*engine.tasks[-2:])
    assert engine.order[-2:] == ["ada", "bob"]


async def test_a_request_cancelled_at_any_await_gives_its_place_back() -> None:
    places = FairSlots(2)

    async def hold() -> None:
        async with places.place("ada", 5):
            await asyncio.sleep(0)

    async def wait_and_hold() -> None:
        async with contextlib.AsyncExitStack() as held:
            other = await held.enter_async_context(places.place("bob", 5))
            asyncio.get_running_loop().call_soon(setattr, other, "tokens", 1)
            await hold()

    async def all_are_free() -> None:
        async with asyncio.timeout(60):
            async with places.place("local", 1), places.place("local", 1):
                pass

    for work in (hold, wait_and_hold):
        await cancel_everywhere(work, all_are_free)
