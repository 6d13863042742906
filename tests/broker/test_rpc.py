"""Typed services and calls, new endpoints, repeated requests and inboxes."""

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nats.aio.msg import Msg
from tinkermq.broker.calls import ask_users, repeated_call, write_checkpoint
from tinkermq.broker.client.connection import Broker, connect, flush
from tinkermq.broker.client.faults import ConnectionLost
from tinkermq.broker.client.parts import Inbox
from tinkermq.broker.client.rpc import MAX_RUNNING, RequestContext, Service, call
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas import control, env, job
from tinkermq.schemas.env import CloseRequest
from tinkermq.schemas.user import UserReply
from tinkermq.schemas.wire.errors import (
    BrokerError,
    BusyError,
    DeadlineError,
    FencedError,
    GameError,
    MessageError,
    NotFoundError,
    StateError,
    TinkermqError,
)
from tinkermq.schemas.wire.message import Empty, ErrorReply, Message
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.clients.conftest import new_record
from tests.support.processes import halt
from tests.support.strategies import hostile_payloads
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually, until


class Question(Message):
    """A request of the size of most."""

    episode: str
    turn: int
    action: str


class Answer(Message):
    """A reply of the size of most."""

    observation: str
    reward: float
    done: bool


QUESTION = Question(episode="e", turn=0, action="left")


class NoException(BaseException):
    """What `except Exception` does not catch."""


FOREIGN = {
    "interrupt": KeyboardInterrupt(),
    "exit": SystemExit(3),
    "own": NoException("mine"),
    "cancelled": asyncio.CancelledError(),
    "group": BaseExceptionGroup("g", [NoException("x")]),
    "close": GeneratorExit(),
}
"""What a handler, or code of others that it calls, may raise as well."""


class Echo:
    """Handlers that a test can steer by the action of a step."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.release = asyncio.Event()

    async def step(self, request: Question) -> Answer:
        if request.action == "missing":
            raise NotFoundError("there is no episode 'e'", hint="reset it first")
        if request.action == "crash":
            raise RuntimeError("the password is swordfish")
        if request.action in FOREIGN:
            raise FOREIGN[request.action]
        if request.action == "huge":
            return Answer(observation="x" * (9 << 20), reward=0, done=False)
        if request.action == "wait":
            self.running += 1
            self.most = max(self.most, self.running)
            await self.release.wait()
            self.running -= 1
        return Answer(observation=request.action, reward=1.0, done=False)


@pytest.fixture
async def service(broker: Broker) -> AsyncIterator[Service]:
    async with await Service.start(
        broker, name="test-service", description="A service under test"
    ) as started:
        yield started


@pytest.fixture
async def echo(service: Service) -> Echo:
    handlers = Echo()
    await service.endpoint("step", "test.step", Question, handlers.step)
    return handlers


async def _step(broker: Broker, action: str = "left", timeout_s: float = PATIENCE_S) -> Answer:
    request = Question(episode="e", turn=0, action=action)
    return await call(
        broker, "test.step", request, Answer, timeout_s=timeout_s, waiting_for="host h"
    )


async def test_a_call_returns_the_reply(broker: Broker, echo: Echo) -> None:
    assert (await _step(broker)).observation == "left"


async def test_an_unexpected_error_is_reported_without_its_details(
    broker: Broker, echo: Echo
) -> None:
    with pytest.raises(TinkermqError, match=r"failed on test.step: RuntimeError") as raised:
        await _step(broker, "crash")
    assert raised.value.code == "internal"
    assert "swordfish" not in str(raised.value)
    assert (await _step(broker)).observation == "left"


@pytest.mark.parametrize("action", FOREIGN)
async def test_whatever_a_handler_raises_is_answered_and_the_service_goes_on(
    broker: Broker, echo: Echo, action: str
) -> None:
    with pytest.raises(TinkermqError, match=type(FOREIGN[action]).__name__) as raised:
        await _step(broker, action)
    assert raised.value.code == "internal"
    assert (await _step(broker)).observation == "left"


async def test_a_handler_is_still_cancelled_with_its_service(broker: Broker) -> None:
    echo = Echo()
    service = await Service.start(broker, name="cancelled", description="d")
    await service.endpoint("step", "test.step", Question, echo.step)
    running = asyncio.create_task(_step(broker, "wait", timeout_s=1))
    await until(lambda: bool(echo.running), "the request to run")
    async with asyncio.timeout(PATIENCE_S):
        await service.stop(drain_s=0.01)
    with pytest.raises(TinkermqError):
        await running


async def test_a_reply_that_is_too_large_becomes_an_error_and_the_service_goes_on(
    broker: Broker, echo: Echo
) -> None:
    with pytest.raises(MessageError, match=r"the reply to test\.step has"):
        await _step(broker, "huge")
    assert (await _step(broker)).observation == "left"


async def test_a_late_answer_is_a_deadline_that_names_who_was_waited_for(
    broker: Broker, echo: Echo
) -> None:
    with pytest.raises(DeadlineError, match=r"host h did not answer on test.step within 0.1 s"):
        await _step(broker, "wait", timeout_s=0.1)
    echo.release.set()


async def test_nobody_there_is_said_at_once(broker: Broker) -> None:
    asking = call(
        broker,
        "test.nobody",
        Empty(),
        Empty,
        timeout_s=AFTER_PATIENCE_S,
        waiting_for="the scheduler",
    )
    with pytest.raises(NotFoundError, match="the scheduler does not answer"):
        await asyncio.wait_for(asking, PATIENCE_S)


async def test_requests_of_one_endpoint_run_beside_each_other(broker: Broker, echo: Echo) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(50):
            group.create_task(_step(broker, "wait"))
        await until(lambda: echo.running >= 50, "all requests to run")
        echo.release.set()
    assert echo.most == 50


async def test_a_service_that_calls_itself_does_not_deadlock(
    broker: Broker, service: Service
) -> None:
    async def down(request: Question) -> Answer:
        if request.turn == 0:
            return Answer(observation="bottom", reward=0, done=True)
        return await call(
            broker,
            "test.down",
            request.model_copy(update={"turn": request.turn - 1}),
            Answer,
            timeout_s=PATIENCE_S,
            waiting_for="myself",
        )

    await service.endpoint("down", "test.down", Question, down)
    request = Question(episode="e", turn=5, action="")
    reply = await call(
        broker, "test.down", request, Answer, timeout_s=PATIENCE_S, waiting_for="the service"
    )
    assert reply.observation == "bottom"


async def test_requests_of_one_user_that_wait_take_no_place_of_others(
    broker: Broker, service: Service
) -> None:
    released = asyncio.Event()

    async def answer(_: Empty, context: RequestContext) -> Answer:
        if context.user == "eve":
            await released.wait()
        return Answer(observation=context.user, reward=0.0, done=True)

    await service.endpoint("wait", rpc("*", "waiting", "wait"), Empty, answer)
    inbox, payload = broker.nc.new_inbox(), Empty().to_bytes()
    for _ in range(MAX_RUNNING + 1):
        await broker.nc.publish(rpc("eve", "waiting", "wait"), payload, reply=inbox)

    async def ask(user: str, timeout_s: float) -> Answer:
        subject = rpc(user, "waiting", "wait")
        return await call(broker, subject, Empty(), Answer, timeout_s=timeout_s, waiting_for="it")

    assert (await ask("ada", PATIENCE_S)).observation == "ada"

    async def refusal() -> BusyError | None:
        try:
            await ask("eve", 0.5)
        except BusyError as error:
            return error
        except DeadlineError:  # refusals are bounded, too
            return None
        return None

    refused = await eventually(refusal, "a refusal")
    assert "user 'eve' has too many requests under way" in refused.message
    released.set()

    async def is_free() -> bool:
        try:
            return (await ask("eve", 0.5)).observation == "eve"
        except (BusyError, DeadlineError):
            return False

    await eventually(is_free, "the user's requests to have been answered")


@pytest.mark.parametrize("subject", ["large", rpc("eve", "large", "ask")])
async def test_requests_that_run_at_once_are_bounded_in_bytes(broker: Broker, subject: str) -> None:
    released, running = asyncio.Event(), list[int]()

    async def answer(request: Question) -> Empty:
        running.append(len(request.action))
        await released.wait()
        return Empty()

    async def ask(num_bytes: int) -> Empty:
        request = Question(episode="e", turn=0, action="a" * num_bytes)
        return await call(broker, subject, request, Empty, timeout_s=PATIENCE_S, waiting_for="it")

    started = await Service.start(broker, name="large", description="", running_bytes=300)
    async with started as service, asyncio.TaskGroup() as group:
        listening = subject.replace(".eve.", ".*.")
        await service.endpoint("ask", listening, Question, answer)
        first = group.create_task(ask(200))
        await until(lambda: running == [200], "the first request")
        second = group.create_task(_busy_or_none(ask(201)))
        small = group.create_task(_busy_or_none(ask(10)))
        if subject == "large":
            await broker.nc.flush()
            assert running == [200], "the second waits, and what is behind it"
        else:
            assert isinstance(await second, BusyError)
            await until(lambda: running == [200, 10], "the small one")
        released.set()
        assert await first == Empty()
        assert await small is None
    assert running[1:] == ([201, 10] if subject == "large" else [10])


async def _busy_or_none(asked: Awaitable[Empty]) -> BusyError | None:
    try:
        await asked
    except BusyError as error:
        return error
    return None


async def test_the_user_is_taken_from_the_subject(broker: Broker, service: Service) -> None:
    async def who(request: env.CloseRequest, context: RequestContext) -> env.CloseRequest:
        return env.CloseRequest(episode=context.user)

    await service.endpoint("who", "tmq.v1.rpc.*.test.who", env.CloseRequest, who)
    reply = await call(
        broker,
        "tmq.v1.rpc.ann.test.who",
        env.CloseRequest(episode="bob"),
        env.CloseRequest,
        timeout_s=PATIENCE_S,
        waiting_for="the service",
    )
    assert reply.episode == "ann"


async def test_an_endpoint_never_gives_up_a_subscription_while_it_opens(
    own_server: NatsServer, own_broker: Broker
) -> None:
    """A request that the server is handing to a subscription which ends just then is lost."""

    def ended() -> int:
        with urllib.request.urlopen(f"{own_server.monitor_url}/subsz") as reply:
            return json.load(reply)["num_removes"]

    async def nothing(_: Empty) -> Empty:
        return Empty()

    async with await Service.start(own_broker, name="test", description="Tests") as service:
        before = ended()
        await service.endpoint("fair", "tmq.v1.rpc.*.test.fair", Empty, nothing, fair=True)
        assert ended() == before
    await own_broker.nc.flush()
    await until(lambda: ended() > before, "the end of a subscription")


async def test_services_in_one_queue_share_the_requests(
    broker: Broker, nats_server: NatsServer
) -> None:
    async def serve(name: str) -> AsyncGenerator[None, None]:
        async def where(_: Empty) -> env.CloseRequest:
            return env.CloseRequest(episode=name)

        async with (
            await connect(nats_server.url, name=name) as connection,
            await Service.start(connection, name="shared", description="Shares") as service,
        ):
            await service.endpoint("where", "test.where", Empty, where, queue="hosts")
            yield

    first, second = serve("one"), serve("two")
    await anext(first)
    await anext(second)
    replies = [
        await call(
            broker,
            "test.where",
            Empty(),
            env.CloseRequest,
            timeout_s=PATIENCE_S,
            waiting_for="hosts",
        )
        for _ in range(60)
    ]
    assert {reply.episode for reply in replies} == {"one", "two"}
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("overheard", [False, True])
async def test_a_silent_service_is_told_from_an_absent_one(
    own_broker: Broker, own_server: NatsServer, overheard: bool
) -> None:
    async def never(_: Empty) -> Empty:
        return await asyncio.Future()

    async def ask(subject: str) -> str:
        with pytest.raises(TinkermqError) as told:
            await call(own_broker, subject, Empty(), Empty, timeout_s=0.2, waiting_for="it")
        return f"{type(told.value).__name__}: {told.value.message}"

    async with (
        await connect(own_server.url, name="tool") as tool,
        await Service.start(own_broker, name="mute", description="Is silent") as service,
    ):
        if overheard:  # nats sub '>'
            await tool.listen(">", lambda _: None)
            await flush(tool, waiting_for="test")
        await service.endpoint("mute", "test.*.mute", Empty, never)
        await until(lambda: own_broker.settled, "time for services to reconnect")
        assert (await ask("test.a.mute")).endswith("; a service listens there, but is silent")
        absent = await ask("test.a.absent")
        assert absent.startswith("DeadlineError" if overheard else "NobodyAnswersError")
        assert ("none of the 1 endpoints that services list is there" in absent) == overheard


async def test_ping_info_and_stats_are_answered_as_the_tools_ask(
    broker: Broker, echo: Echo
) -> None:
    await _step(broker)
    with pytest.raises(NotFoundError):
        await _step(broker, "missing")
    ping = json.loads((await broker.request("$SRV.PING.test-service")).data)
    info = json.loads((await broker.request("$SRV.INFO.test-service")).data)
    stats = json.loads((await broker.request("$SRV.STATS.test-service")).data)
    assert ping["type"] == "io.nats.micro.v1.ping_response"
    assert info["description"] == "A service under test"
    assert info["endpoints"][0]["subject"] == "test.step"
    assert stats["endpoints"][0]["num_requests"] == 2
    assert stats["endpoints"][0]["num_errors"] == 1
    assert stats["endpoints"][0]["last_error"] == "not_found: there is no episode 'e'"
    assert stats["endpoints"][0]["processing_time"] > 0


async def test_a_request_in_flight_at_a_restart_is_lost_or_repeated_as_the_caller_says(
    own_server: NatsServer, own_broker: Broker
) -> None:
    echo = Echo()
    service = await Service.start(own_broker, name="test-service", description="d")
    await service.endpoint("step", "test.step", Question, echo.step)
    request = Question(episode="e", turn=0, action="wait")
    async with await connect(own_server.url, name="caller") as caller:

        def ask(idempotent: bool) -> "asyncio.Task[Answer]":
            return asyncio.create_task(
                call(
                    caller,
                    "test.step",
                    request,
                    Answer,
                    timeout_s=AFTER_PATIENCE_S,
                    waiting_for="host h",
                    idempotent=idempotent,
                )
            )

        once, again = ask(idempotent=False), ask(idempotent=True)
        await until(lambda: echo.running >= 2, "both requests to run")
        own_server.kill()
        own_server.start()
        with pytest.raises(ConnectionLost):
            await once
        echo.release.set()
        assert (await asyncio.wait_for(again, PATIENCE_S)).observation == "wait"
    await service.stop()


async def test_a_service_stops_while_the_server_is_gone(
    own_server: NatsServer, own_broker: Broker
) -> None:
    async def step(_: Empty) -> Empty:
        return Empty()

    service = await Service.start(own_broker, name="test-service", description="d")
    await service.endpoint("step", rpc("*", "test", "step"), Empty, step, fair=True)
    own_server.kill()
    await service.stop()
    own_server.start()


async def test_stopping_lets_running_requests_finish(broker: Broker) -> None:
    echo = Echo()
    service = await Service.start(broker, name="stopping", description="d")
    await service.endpoint("step", "test.step", Question, echo.step)
    running = asyncio.create_task(_step(broker, "wait"))
    await until(lambda: bool(echo.running), "the request to run")
    stopping = asyncio.create_task(service.stop())
    await asyncio.sleep(0.05)
    echo.release.set()
    await stopping
    assert (await running).observation == "wait"
    with pytest.raises(NotFoundError):
        await _step(broker)


REQUESTS: list[Message] = [
    QUESTION,
    env.ResetRequest(episodes=["e"], split="train", sample=1, seed=2, kwargs={"a": [1]}),
    env.CloseRequest(episode="e"),
    control.ControlRequest(verb="stop", reason="enough"),
    control.ReserveRequest(count=3, source="agent"),
    control.PublishTasksRequest(tasks=[control.TaskSpec(seed=1)]),
    job.SubmitRequest(request_id="r", config={"model": {"path": "p"}}),
    job.StopRequest(job="j", now=True),
]


@pytest.mark.parametrize("valid", REQUESTS, ids=lambda message: type(message).__name__)
async def test_no_payload_ends_a_service(nats_server: NatsServer, valid: Message) -> None:
    """Every hostile payload is answered, with an error or as the request it happens to be."""
    async with (
        await connect(nats_server.url, name="hostile") as broker,
        await Service.start(broker, name="hostile", description="d") as service,
    ):

        async def handler(_: Message) -> Empty:
            return Empty()

        await service.endpoint("any", "test.any", type(valid), handler)
        loop = asyncio.get_running_loop()

        async def ask(payload: bytes) -> None:
            reply = await broker.request("test.any", payload)
            if "Nats-Service-Error-Code" in (reply.headers or {}):
                error = ErrorReply.from_bytes(reply.data)
                assert error.code in {"message", "release"}
                assert error.message
            else:
                type(valid).from_bytes(payload)

        @settings(
            max_examples=40,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(payloads=st.lists(hostile_payloads(valid), min_size=1, max_size=5))
        def send_all(payloads: list[bytes]) -> None:
            for payload in payloads:
                asyncio.run_coroutine_threadsafe(ask(payload), loop).result(PATIENCE_S)

        await asyncio.to_thread(send_all)
        reply = await broker.request("test.any", valid.to_bytes())
        assert Empty.from_bytes(reply.data) == Empty()


@pytest.mark.parametrize("kind", [GameError, DeadlineError, BrokerError, FencedError])
async def test_each_kind_of_error_arrives_as_itself(
    broker: Broker, service: Service, kind: type[TinkermqError]
) -> None:
    async def fail(_: Empty) -> Empty:
        raise kind("it broke", hint="mend it")

    subject = f"test.fail.{kind.code}"
    await service.endpoint("fail", subject, Empty, fail)
    with pytest.raises(TinkermqError, match="it broke") as raised:
        await call(broker, subject, Empty(), Empty, timeout_s=PATIENCE_S, waiting_for="the service")
    assert type(raised.value) is kind
    assert raised.value.hint == "mend it"


async def test_text_that_has_no_utf8_form_still_arrives_as_an_error(
    broker: Broker, service: Service
) -> None:
    async def fail(_: Empty) -> Empty:
        raise GameError("odd \ud800 text", hint="\udfff")

    await service.endpoint("fail", "test.odd", Empty, fail)
    with pytest.raises(GameError, match=r"odd \? text"):
        await call(
            broker, "test.odd", Empty(), Empty, timeout_s=PATIENCE_S, waiting_for="the service"
        )


async def test_a_malformed_reply_is_a_message_error(broker: Broker) -> None:
    async def junk(message: Msg) -> None:
        await message.respond(b"junk")

    await broker.nc.subscribe("test.junk", cb=junk)
    with pytest.raises(MessageError):
        await call(
            broker, "test.junk", Empty(), Empty, timeout_s=PATIENCE_S, waiting_for="the service"
        )


# What is asked of an endpoint while it is being made, and what happens to the server meanwhile.


NUM_ENDPOINTS = 60
NUM_CALLERS = 4


async def who(_: Empty, context: RequestContext) -> CloseRequest:
    return CloseRequest(episode=context.user)


async def ask(broker: Broker, subject: str) -> CloseRequest:
    return await call(
        broker, subject, Empty(), CloseRequest, timeout_s=PATIENCE_S, waiting_for="the service"
    )


async def ask_from_the_start(broker: Broker, subject: str) -> CloseRequest:
    """Ask again and again until somebody is there to answer."""
    while True:
        try:
            return await ask(broker, subject)
        except NotFoundError:
            await asyncio.sleep(0)


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_the_first_request_that_reaches_a_new_endpoint_is_answered(
    broker: Broker, nats_server: NatsServer, fair: bool
) -> None:
    async with (
        await connect(nats_server.url, name="serving") as serving,
        await Service.start(serving, name="new", description="d") as service,
    ):
        for number in range(NUM_ENDPOINTS):
            subject = rpc("ann", "test", f"new-{fair:d}-{number}")
            callers = [
                asyncio.create_task(ask_from_the_start(broker, subject)) for _ in range(NUM_CALLERS)
            ]
            await service.endpoint("who", subject, Empty, who, fair=fair)
            replies = await asyncio.gather(*callers)
            assert {reply.episode for reply in replies} == {"ann"}


@pytest.mark.parametrize("fair", [False, True], ids=["plain", "fair"])
async def test_a_server_that_dies_while_an_endpoint_is_made_is_waited_for(
    own_server: NatsServer, own_broker: Broker, fair: bool
) -> None:
    subject = rpc("ann", "test", "who")
    service = await Service.start(own_broker, name="test-service", description="d")
    assert own_server.pid is not None
    halt(own_server.pid)  # nobody answers, and then nobody is there
    making = asyncio.create_task(service.endpoint("who", subject, Empty, who, fair=fair))
    for _ in range(20):
        await asyncio.sleep(0)
    own_server.kill()
    own_server.start()
    await asyncio.wait_for(making, PATIENCE_S)
    async with await connect(own_server.url, name="caller") as caller:
        assert (await ask(caller, subject)).episode == "ann"
    await service.stop()


# -- Requests that are sent again: one that is lost costs an attempt, not the whole deadline -------


SUBJECT = rpc("local", "behind", "look")


async def test_a_request_that_is_lost_is_sent_again_long_before_its_deadline(
    nats_server: NatsServer, broker: Broker
) -> None:
    heard: list[Msg] = []
    answered: list[asyncio.Task[None]] = []

    def take(message: Msg) -> None:
        heard.append(message)
        if len(heard) == 3:  # two are lost
            payload = Empty().to_bytes()
            answered.append(asyncio.create_task(service.publish(message.reply, payload)))

    async with await connect(nats_server.url, name="service") as service:
        await service.listen(SUBJECT, take)
        await service.nc.flush()
        deadline = time.monotonic() + AFTER_PATIENCE_S
        asking = repeated_call(
            broker,
            SUBJECT,
            Empty(),
            Empty,
            deadline=deadline,
            waiting_for="the service",
            attempt_s=0.05,
        )
        assert await asyncio.wait_for(asking, PATIENCE_S) == Empty()
    assert len({one.reply for one in heard}) == len(heard) >= 3


async def test_the_users_of_a_pool_without_users_are_not_waited_for(broker: Broker) -> None:
    with pytest.raises(BrokerError, match="has no users"):
        await ask_users(broker, "me", Empty(), UserReply)


# -- A job that does not train is not asked for a checkpoint ---------------------------------------


@pytest.mark.parametrize(
    ("kind", "state", "told"),
    [
        ("infer", "RUNNING", "trains nothing"),
        ("train", "QUEUED", "is QUEUED"),
        ("sft", "COMPLETED", "is COMPLETED"),
    ],
)
async def test_a_job_that_does_not_train_has_no_checkpoint_to_write(
    broker: Broker, kind: str, state: str, told: str
) -> None:
    changes = {"kind": kind, "state": state}
    record = new_record(JobScope("local", "a")).model_copy(update=changes)
    with pytest.raises(StateError, match=f"run run-of-a {told}"):
        await write_checkpoint(broker, record)


# -- An inbox hands out what comes in order, and ends a wait that nobody will answer ---------------


def _answering(broker: Broker, *answers: bytes) -> Callable[[Msg], None]:
    """Return what answers a request with several messages, in tasks that the loop keeps."""
    tasks: list[asyncio.Task[None]] = []

    async def send(reply: str) -> None:
        for answer in answers:
            await broker.publish(reply, answer)

    return lambda message: tasks.append(asyncio.create_task(send(message.reply)))


async def test_all_answers_to_a_request_come_in_order_and_say_which_it_was(broker: Broker) -> None:
    await broker.listen("free.several", _answering(broker, b"a", b"b"))
    inbox = Inbox(broker)
    for _ in range(2):
        subject = await inbox.ask("free.several", b"")
        received = [await inbox.next(PATIENCE_S), await inbox.next(PATIENCE_S)]
        assert [message.data for message in received] == [b"a", b"b"]
        assert {message.subject for message in received} == {subject}
    with pytest.raises(TimeoutError):
        await inbox.next(0.05)
    await inbox.close()


async def test_a_lost_connection_ends_the_wait_unless_answers_may_still_come(
    own_server: NatsServer, own_broker: Broker
) -> None:
    ends, goes_on = Inbox(own_broker), Inbox(own_broker, ends_with_connection=False)
    await own_broker.listen("free.silent", lambda _: None)
    for inbox in (ends, goes_on):
        await inbox.ask("free.silent", b"")
    own_server.kill()
    with pytest.raises(ConnectionLost, match=r"broke during a request on free\.silent"):
        await ends.next(PATIENCE_S)
    with pytest.raises(TimeoutError):
        await goes_on.next(0.3)
    own_server.start()
    await ends.close()
    await goes_on.close()
