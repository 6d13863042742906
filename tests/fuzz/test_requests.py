"""Whatever a user sends to any subject, each request is answered, and no actor dies or stalls.

The subjects are those of `docs/topics.py`, the messages are made from the schemas: a subject
that is new is tried, too. `TMQ_FUZZ_SEED` gives another order.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tinkermq.broker.calls import SchedulerCalls
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.faults import NoResponders
from tinkermq.broker.client.rpc import call
from tinkermq.broker.permissions import Guest, may_store
from tinkermq.broker.presence import list_presences
from tinkermq.clients.pool import Pool
from tinkermq.schemas.control import ControlRequest, PublishTasksRequest
from tinkermq.schemas.env import ResetReply, ResetRequest
from tinkermq.schemas.infer import InferPart
from tinkermq.schemas.job import FINAL_STATES
from tinkermq.schemas.node import NodeSync
from tinkermq.schemas.wire.codec import pack
from tinkermq.schemas.wire.errors import MessageError
from tinkermq.schemas.wire.message import ErrorReply, Message
from tinkermq.schemas.wire.subjects import JobScope

from docs.topics import TOPICS, Topic
from tests.fuzz.payloads import Hostile, Schemas
from tests.support.configs import small_job
from tests.support.jobs import Job
from tests.support.processes import peak_mb
from tests.support.secured import SecuredPool, secured
from tests.support.stack import Stack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

FEW, MANY = 12, 10_000
AT_ONCE = 16
ANSWER_S = 60.0
MAX_GROWTH_MB = 500
MAX_HEADERS_BYTES = 64 << 10
SEED = int(os.environ.get("TMQ_FUZZ_SEED", "1"))
ERROR_CODE = "Nats-Service-Error-Code"
NOBODY = frozenset(
    {
        *("weights.join", "episode.0.call", "episode.0.post", "episode.keys", "env.give"),
        "ctl.learner.turn",
        *(f"rank.rank-1.{verb}" for verb in ("begin", "order-p1", "look-p1")),
    }
)
"""Nobody answers there, as the weights of these runs travel through the broker, no program runs in
them, their learners have one rank and share no GPU, and there are no users."""
ENDS = frozenset({"stop", "hand_over", "profile", "checkpoint"})
"""Verbs that end an actor, or whose answer takes as long as training does."""
OF_USERS = tuple(topic for topic in TOPICS if ".users." in topic.subject)
OF_SERVICES = frozenset({"tmq.v1.rpc.node.keys.job"})
"""Asked by nodes, at a pool with users."""


def shown(topic: Topic) -> str:
    return topic.subject.removeprefix("tmq.v1.")


def is_asked(topic: Topic) -> bool:
    return topic.kind == "request" and topic not in OF_USERS and topic.subject not in OF_SERVICES


@dataclass
class Field:
    """The jobs, and what was seen of their actors before."""

    stack: Stack
    training: Job
    serving: JobScope
    tinkering: JobScope
    names: dict[str, str]
    actors: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])

    @property
    def broker(self) -> Broker:
        return self.stack.broker

    def subject(self, topic: Topic, rng: random.Random) -> str:
        """Return a subject of a topic, with names of what is there."""
        scope = self.serving if ".infer." in topic.subject else self.training.scope
        actor = rng.choice(("learner", "generator-0", "environment-0"))
        of_tinker = (".tinker-", "<session>", ".snapshot.")
        if any(one in topic.subject for one in of_tinker):
            scope, actor = self.tinkering, "sampler-0"
        actor = "rank-1" if ".rank." in topic.subject else actor
        filled = {
            "<u>": scope.user, "<j>": scope.job, "<n>": str(rng.randint(10**6, 10**9)),
            "<e>": "0", "<actor>": actor, "<host>": self.names["host"],
            "<node>": "node", "<user>": scope.user, "<session>": "s1", "<seq>": "1",
            "<process>": "p1", "<server>": "server-0",
        }  # fmt: skip
        subject = topic.subject
        for name, value in filled.items():
            subject = subject.replace(name, value)
        return subject

    async def beats(self) -> dict[str, tuple[int, float]]:
        """Return process id and time of the heartbeat of every actor."""
        found: dict[str, tuple[int, float]] = {}
        scopes = (self.training.scope, self.serving, self.tinkering)
        for prefix in (*(f"{scope.key}." for scope in scopes), "pool."):
            for entry in await list_presences(self.broker, prefix):
                found[entry.key] = (entry.value.pid, entry.value.time)
        return found

    async def check_all_live(self) -> None:
        """See each actor's heart beat once more, in the same process, and no memory filled."""
        began = time.time()

        async def all_beat() -> bool:
            now = await self.beats()
            return all(key in now and now[key][1] > began for key in self.actors)

        await eventually(all_beat, f"a heartbeat of each of {sorted(self.actors)}")
        now = await self.beats()
        died = [key for key, (pid, _) in self.actors.items() if now[key][0] != pid]
        assert not died, f"{died} were started again\n{await self.training.story()}"

    def memory_mb(self) -> dict[str, float]:
        """Return the largest memory that each actor ever had."""
        return {key: peak_mb(pid) for key, (pid, _) in self.actors.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def jobs(shared_stack: Stack, model: Path) -> AsyncIterator[Field]:
    """A job that trains for ever, one that serves and one for Tinker, with all their actors."""
    stack = shared_stack
    config = small_job(
        model,
        env={"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.5}, "num_val": 0},
        training={"num_steps": 10**6, "save_freq": 10**6, "keep_rollouts": False},
    )
    training = await stack.submit(config)
    served = await SchedulerCalls(stack.broker).submit(
        {
            "model": {"path": str(model)},
            "env": {"game": "bandit", "num_val": 0},
            "generator": {"max_requests": 64},
            "output_dir": str(stack.folder / "served"),
        },
        kind="infer",
    )
    tinkered = await SchedulerCalls(stack.broker).submit(
        {
            "model": {"path": str(model)},
            "tinker": {"base": "org/tiny"},
            "generator": {"max_context": 64},
            "output_dir": str(stack.folder / "tinkered"),
        },
        kind="tinker",
    )
    try:
        await training.until_step(1)
        pool = Pool(stack.broker)

        async def serves() -> bool:
            return (await pool.find(served.job)).state == "RUNNING"

        await eventually(serves, "the server to run")
        key = tinkered.scope.key

        async def trains() -> bool:
            found = await list_presences(stack.broker, f"{key}.")
            return sorted(one.value.state for one in found) == ["working", "working"]

        await eventually(trains, "trainer and sampler to work")

        opened = await call(
            stack.broker,
            training.scope.env_reset,
            ResetRequest(episodes=["probe"], split="train", sample=None, seed=1),
            ResetReply,
            timeout_s=ANSWER_S,
            waiting_for="an environment host",
        )
        serving = JobScope(served.user, served.job)
        made = Field(stack, training, serving, tinkered.scope, {"host": opened.host})
        made.actors = await made.beats()
        yield made
    finally:
        await training.stop(now=True)
        await training.until("CANCELLED")
        stack.jobs.remove(training)
        scheduler = SchedulerCalls(stack.broker)
        others = {job.scope.job for job in stack.jobs}
        for record in await scheduler.all_jobs():  # also what valid messages have submitted
            if record.state not in FINAL_STATES and record.job not in others:
                await scheduler.stop(record.job, now=True)


def does_harm(topic: Topic, payload: bytes) -> bool:
    """Whether a message asks for what would rightly end an actor or a job of this test."""
    try:
        message = topic.message.from_bytes(payload)
    except MessageError:
        return False
    if isinstance(message, ControlRequest):
        return message.verb in ENDS
    if isinstance(message, PublishTasksRequest):  # a game that fails at all of them fails the job
        return any(one.reset_kwargs or one.sample is not None for one in message.tasks)
    return isinstance(message, NodeSync)


def known(jobs: Field) -> dict[str, tuple[Any, ...]]:
    """Return what exists, by the names of fields; none of the jobs is this test's own."""
    return {
        "max_tokens": (1, 4),
        "deadline_s": (1.0, 20.0),
        "wait_s": (0.0, 0.2),
        "temperature": (0.0, 1.0),
        "messages": ([{"role": "user", "content": "hi"}], [{"role": "odd"}], [{}]),
        "prompts": (["2+2="], [[1, 2, 3]]),
        "max_turn_tokens": (1, 4),
        "max_response_tokens": (8,),
        "max_prompt_tokens": (32,),
        "count": (1, 2),
        "reset_kwargs": ({},),
        "sample": (None,),
        "widest": (False,),
        "limit": (1, 5),
    }


async def fuzz(broker: Broker, jobs: Field, topic: Topic, count: int) -> None:
    """Send `count` messages to a subject; each must be answered well."""
    rng = random.Random(f"{SEED} {topic.subject}")
    schemas, hostile = Schemas(rng, known(jobs)), Hostile(rng)
    free = asyncio.Semaphore(AT_ONCE)

    async def send(number: int) -> None:
        async with free:
            fields = schemas.valid(topic.message)
            payload = pack(fields) if number % 3 == 0 else hostile.payload(fields)
            if does_harm(topic, payload):
                payload = pack({"v": 1})
            await _one(broker, topic, jobs.subject(topic, rng), payload, hostile.headers())

    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            tasks.create_task(send(number))


async def _one(
    broker: Broker,
    topic: Topic,
    subject: str,
    payload: bytes,
    headers: dict[str, str] | None,
) -> None:
    told = f"{subject} {payload[:300]!r}"
    if len(payload) > broker.max_payload_bytes - MAX_HEADERS_BYTES:
        return  # the client itself sends none of that size
    if topic.reply is None:
        await broker.publish(subject, payload, headers)
        return
    try:
        reply = await broker.request(subject, payload, headers=headers, timeout_s=ANSWER_S)
    except TimeoutError:
        raise AssertionError(f"no answer to {told}") from None
    except NoResponders:
        assert any(subject.endswith(one) for one in NOBODY), told
        return
    if ERROR_CODE in (reply.headers or {}):
        error = ErrorReply.from_bytes(reply.data)
        assert error.code != "internal", f"{error.message} at {told}"
        assert error.message, told
    else:
        check_reply(topic.reply, reply.data, told)


def check_reply(model: type[Message], data: bytes, told: str) -> None:
    """See a reply that can be read, and of one in parts no error from the inside."""
    answer = model.from_bytes(data)
    error = getattr(answer, "error", None)
    if isinstance(answer, InferPart) and error is not None:
        assert error.code != "internal", f"{error.message} at {told}"


@pytest.mark.parametrize("topic", [one for one in TOPICS if is_asked(one)], ids=shown)
async def test_every_request_is_answered(jobs: Field, topic: Topic) -> None:
    await fuzz(jobs.broker, jobs, topic, FEW)


@pytest.mark.parametrize("topic", [one for one in TOPICS if one.reply is None], ids=shown)
async def test_what_is_sent_without_an_answer_ends_nobody(jobs: Field, topic: Topic) -> None:
    await fuzz_silent(jobs, topic, FEW)


async def fuzz_silent(jobs: Field, topic: Topic, count: int) -> None:
    """Send to a subject that a user may write to, and elsewhere what cannot be read."""
    subject = jobs.subject(topic, random.Random(0))
    by_user = topic.subject.endswith("infer.cancel") or may_store(Guest("local"), subject)
    if by_user:
        await fuzz(jobs.broker, jobs, topic, count)
        return
    if topic.subject.endswith((".batch", ".audit", ".appended")):
        return  # a foreign entry of the batch log rightly ends a learner; nobody else may write it
    rng = random.Random(f"{SEED} {topic.subject}")
    schemas, hostile = Schemas(rng, known(jobs)), Hostile(rng)
    for _ in range(count):
        payload = hostile.payload(schemas.valid(topic.message))
        try:
            topic.message.from_bytes(payload)
        except MessageError:
            await jobs.broker.publish(jobs.subject(topic, rng), payload)


async def test_after_all_of_it_every_actor_is_there_and_works(jobs: Field) -> None:
    before = jobs.memory_mb()
    await jobs.check_all_live()
    step = (await jobs.training.metrics())[-1].step
    await jobs.training.until_step(step + 2)
    grown = {key: mb for key, mb in jobs.memory_mb().items() if mb > before[key] + MAX_GROWTH_MB}
    assert not grown


async def test_every_subject_is_tried() -> None:
    asked = {one.subject for one in TOPICS if is_asked(one)}
    silent = {one.subject for one in TOPICS if one.reply is None}
    users = {one.subject for one in OF_USERS}
    assert asked | silent | users | OF_SERVICES == {one.subject for one in TOPICS}


# -- a pool with users -----------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredPool]:
    async with secured(tmp_path_factory.mktemp("fuzzed")) as made:
        yield made


async def fuzz_users(pool: SecuredPool, topic: Topic, count: int) -> None:
    """Ask the auth service as a user, as an admin, and as who they claim to be."""
    rng = random.Random(f"{SEED} {topic.subject}")
    schemas, hostile = Schemas(rng, {"limit": (1, 5), "user": ("nobody_here",)}), Hostile(rng)
    brokers = {name: await pool.user(name) for name in ("ada", "root")}
    brokers["node"] = await pool.service("node")
    if ".node." in topic.subject:
        brokers = {"node": brokers["node"]}
    for number in range(count):
        name, broker = rng.choice(list(brokers.items()))
        if name == "node" and "<u>" in topic.subject:
            continue  # has no right to publish there
        fields = schemas.valid(topic.message)
        payload = pack(fields) if number % 3 == 0 else hostile.payload(fields)
        subject = topic.subject.replace("<u>", name)
        await _one(broker, topic, subject, payload, hostile.headers())


@pytest.mark.parametrize(
    "topic",
    [one for one in TOPICS if one in OF_USERS or one.subject in OF_SERVICES],
    ids=shown,
)
async def test_the_auth_service_answers_whatever_it_is_asked(
    pool: SecuredPool, topic: Topic
) -> None:
    await fuzz_users(pool, topic, FEW)


VERBS = ("get", "info", "put", "purge", "", "*", "get.get")
STREAMS = ("tmq-ada-x-log", "KV_tmq-jobs", "KV_tmq-evals", "KV_tmq-actors", "tmq-audit", "a", "KV_")


async def fuzz_store(pool: SecuredPool, count: int) -> None:
    """Ask for what is stored, with every verb, stream and payload."""
    rng = random.Random(f"{SEED} store")
    ada, hostile = await pool.user("ada"), Hostile(rng)
    texts = (
        b"", b"{}", b"[]", b'{"seq":1}', b'{"seq":-1}', b'{"seq":1e400}', b'{"seq":' + b"9" * 4000,
        b'{"next_by_subj":"$KV.tmq-jobs.ada.>","seq":1,"batch":99999999999999999999}',
        b'{"next_by_subj":[]}', b"[" * 100_000, b"\xff", b'{"seq":true,"max_bytes":1e9}',
        b'{"next_by_subj":"$KV.tmq-jobs.ada.\\ud800","seq":1}',
    )  # fmt: skip
    for number in range(count):
        parts = (rng.choice(VERBS), rng.choice(STREAMS), rng.choice(("", "$KV.tmq-evals.ada.j.1")))
        subject = ".".join(["tmq.v1.rpc.ada.store", *(one for one in parts if one)])
        if "*" in subject:
            continue
        payload = rng.choice(texts) if number % 2 else hostile.payload({"v": 1, "a": 1})
        try:
            await ada.request(subject, payload, headers=hostile.headers(), timeout_s=ANSWER_S)
        except NoResponders:  # so the store proxy says that there is no such stream
            continue
        except TimeoutError:
            raise AssertionError(f"no answer to {subject} {payload[:200]!r}") from None


async def test_the_store_answers_whatever_it_is_asked(pool: SecuredPool) -> None:
    await fuzz_store(pool, 4 * FEW)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("topic", TOPICS, ids=shown)
async def test_ten_thousand_messages_on_every_subject(
    jobs: Field, pool: SecuredPool, topic: Topic
) -> None:
    if topic in OF_USERS or topic.subject in OF_SERVICES:
        await fuzz_users(pool, topic, MANY)
    elif topic.reply is None:
        await fuzz_silent(jobs, topic, MANY)
    else:
        await fuzz(jobs.broker, jobs, topic, MANY)
    before = jobs.memory_mb()
    await jobs.check_all_live()
    assert max(jobs.memory_mb().values()) < max(before.values()) + MAX_GROWTH_MB


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_ten_thousand_questions_to_the_store(pool: SecuredPool) -> None:
    await fuzz_store(pool, MANY)
