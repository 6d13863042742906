"""Answers in parts: their order, their end, signs of life, and callers who go away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.faults import ConnectionLost
from tinkermq.broker.client.parts import PartsService, Tell, ask_parts, last_part
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.infer import CancelInference, InferPart, PlayRequest
from tinkermq.schemas.wire.errors import (
    BrokerError,
    BusyError,
    DeadlineError,
    InternalError,
    MessageError,
    NobodyAnswersError,
    NotFoundError,
)
from tinkermq.schemas.wire.message import ErrorReply
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until


class Counter:
    """Tells the numbers up to the request's `sample`."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.cancelled = asyncio.Event()
        self.error: BaseException | None = None
        self.num_asked = 0

    async def count(self, request: PlayRequest, tell: Tell[InferPart]) -> InferPart:
        """Count."""
        self.num_asked += 1
        try:
            for number in range(request.sample or 0):
                await tell(InferPart(deltas=[Delta(choice=number)]))
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        return InferPart(model="done")


@pytest.fixture
async def counter(broker: Broker, scope: JobScope) -> AsyncIterator[Counter]:
    """A service in parts, with `cancel`."""
    counter = Counter()
    async with await Service.start(broker, name="counter", description="counts") as service:
        served = PartsService(broker, service, alive_s=0.1)
        subject = scope.infer("play")
        await served.endpoint("count", subject, PlayRequest, InferPart, counter.count)
        listening = await broker.listen(
            scope.infer("cancel"),
            lambda message: served.cancel(CancelInference.from_bytes(message.data).request),
        )
        yield counter
        counter.go_on.set()
        await listening.stop()


def asking(broker: Broker, scope: JobScope, sample: int = 0, name: str = "one", **options: Any):
    return ask_parts(
        broker,
        scope.infer("play"),
        PlayRequest(request=name, sample=sample),
        InferPart,
        waiting_for="the counter",
        cancel=(scope.infer("cancel"), CancelInference(request=name)),
        **options,
    )


async def test_parts_come_in_order_and_the_last_one_says_so(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    found = [part async for part in asking(broker, scope, 50)]
    assert [part.index for part in found] == list(range(51))
    assert [part.deltas[0].choice for part in found[:-1]] == list(range(50))
    assert found[-1].last
    assert found[-1].model == "done"


async def test_a_service_that_takes_its_time_gives_signs_of_life(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    counter.go_on.clear()
    task = asyncio.create_task(last_part(asking(broker, scope, silence_s=3.0)))
    await asyncio.sleep(4)  # longer than the silence that is borne
    assert not task.done()
    counter.go_on.set()
    assert (await task).model == "done"


async def test_a_service_that_has_died_is_found_out(broker: Broker, scope: JobScope) -> None:
    heard = await broker.listen(scope.infer("play"), lambda _: None)
    with pytest.raises(DeadlineError, match="nothing was heard of the counter"):
        await last_part(asking(broker, scope, silence_s=0.2))
    await heard.stop()


async def test_nobody_there_is_told_at_once(broker: Broker, scope: JobScope) -> None:
    with pytest.raises(NotFoundError, match="the counter does not answer"):
        await last_part(asking(broker, scope, silence_s=AFTER_PATIENCE_S))


async def test_an_error_ends_the_answer_as_the_class_it_was(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    counter.error = BusyError("full", hint="later")
    with pytest.raises(BusyError, match="full"):
        await last_part(asking(broker, scope))
    counter.error = RuntimeError("secret")
    with pytest.raises(Exception, match="the service failed: RuntimeError") as caught:
        await last_part(asking(broker, scope, name="two"))
    assert "secret" not in str(caught.value)


class NoException(BaseException):
    """What `except Exception` does not catch."""


@pytest.mark.parametrize(
    "raised",
    [KeyboardInterrupt(), SystemExit(2), NoException("x"), asyncio.CancelledError()],
    ids=lambda raised: type(raised).__name__,
)
async def test_whatever_a_handler_raises_ends_its_answer_alone(
    broker: Broker, scope: JobScope, counter: Counter, raised: BaseException
) -> None:
    counter.error = raised
    with pytest.raises(InternalError, match=f"the service failed: {type(raised).__name__}"):
        await last_part(asking(broker, scope))
    counter.error = None
    assert (await last_part(asking(broker, scope, name="two"))).model == "done"


async def test_a_part_that_no_message_holds_is_told_as_such(
    broker: Broker, scope: JobScope
) -> None:
    async def answer(request: PlayRequest, tell: Tell[InferPart]) -> InferPart:
        await tell(InferPart(model="first"))
        return InferPart(model="x" * broker.max_payload_bytes)

    async with await Service.start(broker, name="large", description="tells much") as service:
        subject = scope.infer("play")
        parts = PartsService(broker, service)
        await parts.endpoint("large", subject, PlayRequest, InferPart, answer)
        with pytest.raises(MessageError, match="a part of an answer has"):
            await last_part(asking(broker, scope))


async def test_a_caller_who_goes_away_ends_the_work(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    counter.go_on.clear()
    async with aclosing(asking(broker, scope, 1)) as parts:
        assert (await anext(parts)).index == 0
    await asyncio.wait_for(counter.cancelled.wait(), PATIENCE_S)


@pytest.mark.parametrize("sample", [0, 1], ids=["before its first part", "behind a part"])
async def test_the_work_for_a_caller_who_has_died_ends(
    broker: Broker, scope: JobScope, counter: Counter, nats_server: NatsServer, sample: int
) -> None:
    counter.go_on.clear()
    caller = await connect(nats_server.url, name="caller")
    parts = asking(caller, scope, sample)
    waiting = asyncio.ensure_future(anext(parts))
    await until(lambda: counter.num_asked == 1, "the request to arrive")
    await caller.close()
    await asyncio.wait_for(counter.cancelled.wait(), PATIENCE_S)
    waiting.cancel()
    await asyncio.wait({waiting})
    await parts.aclose()


class SmallRoom:
    """Room for a few parts."""

    def __init__(self) -> None:
        self.held = 0
        self.was_full = asyncio.Event()

    def hold(self, num_bytes: int) -> None:
        """Take some."""
        if self.held + num_bytes > 1000:
            self.was_full.set()
            raise BusyError("the reader is slow")
        self.held += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give some back."""
        self.held -= num_bytes


async def test_parts_that_wait_for_a_slow_reader_are_bounded_and_what_is_lost_is_told(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    room = SmallRoom()

    async def read_slowly() -> None:
        async with aclosing(asking(broker, scope, 500, room=room)) as parts:
            async for _ in parts:
                await asyncio.wait_for(room.was_full.wait(), PATIENCE_S)

    with pytest.raises(BusyError, match="the reader is slow"):
        await read_slowly()
    assert room.held == 0


async def test_one_who_reads_as_fast_as_parts_come_needs_no_room(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    room = SmallRoom()
    for number in range(30):
        found = [part async for part in asking(broker, scope, 3, f"n{number}", room=room)]
        assert len(found) == 4
    assert room.held == 0


async def test_one_id_is_one_request(broker: Broker, scope: JobScope, counter: Counter) -> None:
    counter.go_on.clear()
    first = asking(broker, scope, 1)
    await anext(first)
    with pytest.raises(MessageError, match="request one runs already"):
        await last_part(asking(broker, scope))
    counter.go_on.set()
    assert (await last_part(first)).model == "done"


async def test_a_payload_that_is_no_request_gets_an_error(
    broker: Broker, scope: JobScope, counter: Counter
) -> None:
    request = CancelInference(request="not a play")
    for payload in (b"\xc1", request.to_bytes()[:-3]):
        reply = await broker.request(scope.infer("play"), payload)
        part = InferPart.from_bytes(reply.data)
        assert part.last
        assert part.error is not None
        assert part.error.code == "message"


async def test_a_lost_part_is_noticed(broker: Broker, scope: JobScope) -> None:
    async def answer(reply: str) -> None:
        for index in (0, 2):
            part = InferPart(index=index, model="x", last=index == 2)
            await broker.publish(reply, part.to_bytes())

    tasks: list[asyncio.Task[None]] = []
    heard = await broker.listen(
        scope.infer("play"),
        lambda message: tasks.append(asyncio.create_task(answer(message.reply))),
    )
    with pytest.raises(ConnectionLost, match="was lost"):
        await last_part(asking(broker, scope))
    await heard.stop()


async def test_a_subject_is_listened_to_without_sharing_and_only_for_a_while(
    broker: Broker, scope: JobScope
) -> None:
    some, other = Counter(), Counter()
    async with await Service.start(broker, name="counter", description="counts") as service:
        served = PartsService(broker, service)
        twice = PartsService(broker, service)
        subject = scope.infer("play")
        listening = await served.listen(subject, PlayRequest, InferPart, some.count, max_running=1)
        assert (await last_part(asking(broker, scope, 2))).model == "done"
        some.go_on.clear()
        first = asking(broker, scope, 1)
        await anext(first)
        with pytest.raises(BusyError, match="1 requests on"):
            await last_part(asking(broker, scope, name="two"))
        also = await twice.listen(subject, PlayRequest, InferPart, other.count)
        other.go_on.clear()
        again = asyncio.create_task(last_part(asking(broker, scope, name="three")))
        await until(lambda: twice.num_running == 1, "both to hear it")
        again.cancel()
        for each in (listening, also):
            await each.stop()
        with pytest.raises(NobodyAnswersError, match="the counter does not answer"):
            await last_part(asking(broker, scope, name="four"))
        some.go_on.set()
        assert (await last_part(first)).model == "done"
        other.go_on.set()


async def test_requests_of_users_have_their_own_names_and_bounds(
    broker: Broker, scope: JobScope
) -> None:
    running, cancelled = list[str](), list[str]()

    async def hang(_: PlayRequest, tell: Tell[InferPart], user: str) -> InferPart:
        running.append(user)
        try:
            await tell(InferPart(model=user))
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(user)
            raise
        return InferPart()

    def ask(user: str, name: str):
        subject = rpc(user, scope.job, "play")
        request = PlayRequest(request=name)
        return last_part(ask_parts(broker, subject, request, InferPart, waiting_for="it"))

    async with await Service.start(broker, name="hangs", description="hangs") as service:
        served = PartsService(broker, service)
        subject = rpc("*", scope.job, "play")
        await served.user_endpoint("p", subject, PlayRequest, InferPart, hang, max_running=1)
        asked = [asyncio.create_task(ask(user, "same")) for user in ("ada", "bob")]
        await until(lambda: len(running) == 2, "both to run")
        with pytest.raises(BusyError, match="1 requests of user 'ada'"):
            await ask("ada", "another")
        served.cancel("same")
        served.cancel("same", "bob")
        with pytest.raises(BrokerError, match="was cancelled"):
            await asked[1]
        assert cancelled == ["bob"]
        served.cancel("same", "ada")
        await asyncio.wait(asked)
        again = asyncio.create_task(ask("ada", "another"))
        await until(lambda: len(running) == 3, "another one to run")
        served.cancel("another", "ada")
        with pytest.raises(BrokerError, match="was cancelled"):
            await again
    assert asked[0].exception() is not None


async def test_a_reply_goes_to_inboxes_only(broker: Broker, scope: JobScope) -> None:
    counter = Counter()
    async with await Service.start(broker, name="counter", description="counts") as service:
        served = PartsService(broker, service)
        listening = await served.listen(scope.infer("play"), PlayRequest, InferPart, counter.count)
        heard: list[bytes] = []
        elsewhere = await broker.listen(
            scope.infer("elsewhere"), lambda message: heard.append(message.data)
        )
        request = PlayRequest(request="one", sample=1).to_bytes()
        await broker.send(scope.infer("play"), request, reply=scope.infer("elsewhere"))
        assert (await last_part(asking(broker, scope, name="two"))).model == "done"
        assert not heard
        await elsewhere.stop()
        await listening.stop()


async def test_of_two_who_answer_the_one_of_the_higher_rank_is_heard(
    broker: Broker, scope: JobScope
) -> None:
    """The rank is in `prompt_tokens` here: each numbers its parts by itself."""

    async def answer(reply: str) -> None:
        for rank, index, last in ((1, 0, 0), (2, 0, 0), (1, 1, 1), (2, 1, 0), (2, 2, 1)):
            error = ErrorReply.of("busy", "overtaken") if last and rank == 1 else None
            part = InferPart(index=index, prompt_tokens=rank, last=bool(last), error=error)
            await broker.publish(reply, part.to_bytes())

    tasks: list[asyncio.Task[None]] = []
    heard = await broker.listen(
        scope.infer("play"),
        lambda message: tasks.append(asyncio.create_task(answer(message.reply))),
    )
    parts = ask_parts(
        broker,
        scope.infer("play"),
        PlayRequest(request="one").to_bytes(),
        InferPart,
        waiting_for="the counter",
        rank=lambda part: part.prompt_tokens,
    )
    found = [(part.prompt_tokens, part.index) async for part in parts]
    assert found == [(1, 0), (2, 0), (2, 1), (2, 2)]
    await heard.stop()


async def test_signs_of_life_and_errors_say_whose_they_are(broker: Broker, scope: JobScope) -> None:
    mine = Counter()
    mine.go_on.clear()
    mine.error = BusyError("full", hint="later")
    async with await Service.start(broker, name="counter", description="counts") as service:
        served = PartsService(broker, service, alive_s=0.05)
        subject = scope.infer("mine")
        listening = await served.listen(
            subject, PlayRequest, InferPart, mine.count, blank=InferPart(prompt_tokens=7)
        )
        request = PlayRequest(request="one", sample=0)
        parts = ask_parts(broker, subject, request, InferPart, waiting_for="the counter")
        assert (await anext(parts)).prompt_tokens == 7
        mine.go_on.set()
        with pytest.raises(BusyError, match="full"):
            await last_part(parts)
        await listening.stop()
