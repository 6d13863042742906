"""What must not happen to jobs and to those who ask for them, each shown by its absence."""

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.node.children import programs
from tinkermq.actors.node.node import Node
from tinkermq.actors.runtime import ActorContext
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.feed import follow, publish_log, publish_metric
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.schemas.job import JobRecord, JobReply, JobRequest, ListRequest, StopRequest
from tinkermq.schemas.metric import LogLines, Metric
from tinkermq.schemas.node import NodeStatus, NodeSync
from tinkermq.schemas.wire.errors import (
    ConfigError,
    NotFoundError,
    PlacementError,
    StateError,
)
from tinkermq.schemas.wire.message import new_id
from tinkermq.schemas.wire.subjects import BUCKET_NODES, JobScope, rpc
from tinkermq.schemas.wire.subjects import node as node_subject
from ulid import ULID

from tests.actors.scheduler.conftest import FAST, Inside, Stack
from tests.actors.scheduler.toy_node import toy_command
from tests.support.processes import alive
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually

pytestmark = pytest.mark.full

HOUR_S = 3600.0


def scope_of(job: JobRecord) -> JobScope:
    return JobScope(job.user, job.job)


# -- clients are answered --------------------------------------------------------------------------


async def deaf_node(stack: Stack, asked: asyncio.Event, heard: asyncio.Event) -> Service:
    """Add a node of four slots that takes what it is asked, and answers nothing until `heard`."""

    async def sync(_: NodeSync) -> NodeStatus:
        asked.set()
        await heard.wait()
        return status

    service = await Service.start(stack.broker, name="deaf-node", description="a deaf node")
    status = NodeStatus(node="deaf", host="h", slots=4, actors=[], time=0.0)
    await service.endpoint("sync", node_subject("deaf", "sync"), NodeSync, sync)
    await Bucket(stack.broker, BUCKET_NODES, NodeStatus).put("deaf", status)
    return service


async def test_a_start_that_hangs_holds_up_neither_clients_nor_other_jobs(stack: Stack) -> None:
    late = AFTER_PATIENCE_S
    await stack.scheduler(replace(FAST, silent_s=late, sync_s=late, resync_s=late))
    asked, heard = asyncio.Event(), asyncio.Event()
    service = await deaf_node(stack, asked, heard)
    await stack.until_nodes(1)
    hanging = await stack.submit(generator={"count": 3})
    async with asyncio.timeout(PATIENCE_S):
        await asked.wait()
    await stack.node(slots=2)
    await stack.until_nodes(2)
    others = await asyncio.gather(*(stack.submit() for _ in range(8)))
    assert len(await stack.list_jobs(ListRequest())) == 9
    await stack.until(hanging, "STARTING")
    await stack.until(others[0], "RUNNING")
    stopped = await stack.ask("stop", StopRequest(job=hanging.job, now=True))
    await stack.until(stopped, "CANCELLED")
    heard.set()
    await service.stop()


async def test_a_lost_answer_and_a_new_scheduler_make_no_second_job(stack: Stack) -> None:
    first = await stack.scheduler()
    request = stack.request(request_id="again")
    job = await stack.ask("submit", request)
    await first.drain()
    await stack.scheduler()
    assert (await stack.ask("submit", request)).job == job.job
    assert [one.job for one in await stack.jobs.list_jobs()] == [job.job]


async def test_what_no_pool_can_give_is_refused_at_once(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node(slots=2)
    await stack.until_nodes(1)
    impossible: list[dict[str, Any]] = [
        {"generator": {"count": -1}},
        {"generator": {"slots": 0}},
        {"generator": {"slots": -1}},
        {"learner": {"slots": 0}},
        {"learner": {"slots": -1}},
        {"env": {"game": "bandit", "hosts": -1}},
    ]
    for changes in impossible:
        with pytest.raises(ConfigError, match=r"=(0|-1)"):
            await stack.submit(**changes)
    for changes in ({"generator": {"count": 2}}, {"learner": {"slots": 3}}):
        with pytest.raises(PlacementError, match="the pool has 2"):
            await stack.submit(**changes)
    assert await stack.jobs.list_jobs() == []


# -- the queue -------------------------------------------------------------------------------------


async def test_a_new_job_does_not_jump_over_an_older_one_of_equal_rank(stack: Stack) -> None:
    first = await stack.running(slots=4)
    large = await stack.submit(generator={"count": 3})
    await stack.until(large, lambda now: "is next" in now.reason)
    small = await stack.submit()  # would fit beside the first, and hold up the large one
    await stack.until(small, lambda now: "behind runs before it" in now.reason)
    stack.do(first, "learner", "done")
    await stack.until(large, "RUNNING")
    assert (await stack.get(small)).state == "QUEUED"
    stack.do(large, "learner", "done")
    await stack.until(small, "RUNNING")


async def test_the_queue_goes_on_by_itself_though_nobody_wakes_the_scheduler(
    stack: Stack,
) -> None:
    await stack.scheduler(replace(FAST, hurries=False))
    await stack.node()
    await stack.until_nodes(1)
    first = await stack.until(await stack.submit(), "RUNNING")
    second = await stack.submit()
    stack.do(first, "learner", "done")
    await stack.until(second, "RUNNING")


async def test_a_job_whose_start_fails_has_failed_and_is_not_queued(stack: Stack) -> None:
    await stack.scheduler()
    job, next_one = await stack.submit(), await stack.submit()
    stack.do(job, "learner", "fail")
    await stack.node()
    await stack.until(job, "FAILED")
    await stack.until(next_one, "RUNNING")
    kinds = [event.kind for event in await stack.events(job)]
    assert kinds.count("job_queued") == 1
    assert kinds[-1] == "job_failed"
    listed = await stack.list_jobs(ListRequest())
    assert [one.job for one in listed] == [next_one.job]


# -- ends ------------------------------------------------------------------------------------------


async def test_a_finished_job_is_completed_though_its_client_has_left(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node()
    await stack.until_nodes(1)
    await stack.list_jobs(ListRequest())
    async with await connect(stack.broker.url, name="client") as client:
        reply = await call(
            client,
            rpc("local", "scheduler", "submit"),
            stack.request(),
            JobReply,
            timeout_s=PATIENCE_S,
            waiting_for="the scheduler",
        )
    job = await stack.until(reply.record, "RUNNING")
    stack.do(job, "learner", "done")
    ended = await stack.until(job, lambda now: now.finished is not None)
    assert ended.state == "COMPLETED"


async def test_stopping_an_ended_job_takes_nothing_from_the_one_in_its_place(
    stack: Stack,
) -> None:
    first = await stack.running()
    await stack.ask("stop", StopRequest(job=first.job, now=True))
    first = await stack.until(first, lambda now: now.state == "CANCELLED" and not now.untold)
    second = await stack.until(await stack.submit(), "RUNNING")
    third = await stack.until(await stack.submit(), lambda now: "is next" in now.reason)
    before = await stack.until_actors("learner", "generator-0")
    for how in ({"complete": True}, {"now": True}, {}):
        told = await stack.ask("stop", StopRequest.model_validate({"job": first.job, **how}))
        assert told == first
    pids = {actor.pid for actor in (await stack.actors()).values()}
    assert pids == {actor.pid for actor in before.values()}
    assert (await stack.get(second)).state == "RUNNING"
    assert (await stack.get(third)).state == "QUEUED"


async def test_a_run_whose_client_died_holds_its_slots_no_longer_than_it_is_wanted(
    stack: Stack,
) -> None:
    abandoned = await stack.running()  # its game was hosted by a client: the learner just waits
    other = await stack.submit()
    await stack.ask("stop", StopRequest(job=abandoned.name))
    await stack.ask("stop", StopRequest(job=abandoned.name, now=True))
    await stack.until(abandoned, "CANCELLED")
    await stack.until(other, "RUNNING")


async def test_what_a_job_told_can_be_read_when_it_and_its_scheduler_are_gone(
    stack: Stack,
) -> None:
    first = await stack.scheduler()
    await stack.node()
    await stack.until_nodes(1)
    job = await stack.until(await stack.submit(), "RUNNING")
    await publish_metric(stack.broker, scope_of(job), Metric(step=1, values={"r": 1.0}, time=1.0))
    line = LogLines(actor="learner", attempt=1, lines=["told"], time=1.0)
    await publish_log(stack.broker, scope_of(job), line)
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    await first.drain()
    await stack.scheduler()

    async def listed() -> list[JobRecord]:
        try:
            return await stack.list_jobs(ListRequest(all=True))
        except NotFoundError:
            return []

    assert [one.state for one in await eventually(listed, "the history")] == ["COMPLETED"]
    events = await stack.events(job)
    assert [event.kind for event in events][-1] == "job_completed"
    found: set[str] = set()
    async with asyncio.timeout(PATIENCE_S):
        async for message in follow(stack.broker, scope_of(job), ("metric", "log")):
            found.add("metric" if isinstance(message, Metric) else "")
            found |= set(message.lines) if isinstance(message, LogLines) else set()
            if {"metric", "told"} <= found:
                break
    await stack.until_logged(job, "learner", ["up"])


async def test_actors_of_a_job_are_not_left_behind_by_a_scheduler_that_restarts(
    stack: Stack,
) -> None:
    job, first = await stack.running_under_process()
    pids = [actor.pid for actor in (await stack.actors()).values()]
    first.kill()
    await first.wait()
    await stack.scheduler()
    await stack.ask("stop", StopRequest(job=job.job, now=True))
    await stack.until(job, "CANCELLED")
    await stack.until_actors()
    assert not [pid for pid in pids if pid and alive(pid)]


# -- jobs apart ------------------------------------------------------------------------------------


async def test_equal_names_of_two_users_do_not_collide(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node(slots=4)
    await stack.until_nodes(1)
    jobs = [
        await stack.ask("submit", stack.request(name="mine"), user=user) for user in ("ada", "eve")
    ]
    ada, eve = [await stack.until(job, "RUNNING") for job in jobs]
    assert Path(ada.run_dir) != Path(eve.run_dir)
    assert not Path(ada.run_dir).is_relative_to(eve.run_dir)
    assert scope_of(ada).stream_rollout != scope_of(eve).stream_rollout
    assert (await stack.ask("get", JobRequest(job="mine"), user="eve")).job == eve.job
    await stack.ask("stop", StopRequest(job="mine", now=True), user="eve")
    await stack.until(eve, "CANCELLED")
    assert (await stack.ask("get", JobRequest(job="mine"), user="ada")).state == "RUNNING"


async def test_two_jobs_of_one_user_share_neither_streams_nor_folder(stack: Stack) -> None:
    await stack.scheduler()
    first, second = await stack.submit(), await stack.submit()
    assert first.run_dir != second.run_dir
    names = ("stream_task", "stream_rollout", "stream_feed", "stream_log", "bucket_weights")
    for name in names:
        assert getattr(scope_of(first), name) != getattr(scope_of(second), name)


def test_no_id_of_a_job_follows_from_that_of_another() -> None:
    """A ULID has 80 random bits, and here they are drawn anew within one millisecond, too."""
    ids = [ULID.from_str(new_id().upper()) for _ in range(2000)]
    tails = sorted(int.from_bytes(one.bytes[6:], "big") for one in ids)
    assert len(set(tails)) == len(tails)
    assert min(b - a for a, b in itertools.pairwise(tails)) > 1 << 32


# -- nodes -----------------------------------------------------------------------------------------


@pytest.mark.faults
async def test_a_job_that_keeps_losing_its_nodes_fails_in_the_end(stack: Stack) -> None:
    await stack.scheduler(replace(FAST, silent_s=5.0))
    job = await stack.submit(limits={"max_node_failures": 1})
    for name in ("n1", "n2"):
        node = await stack.node_process(name)
        await stack.until(
            job, lambda now, on=name: now.state == "RUNNING" and now.actors[0].node == on
        )
        node.kill()
        await node.wait()
    failed = await stack.until(job, "FAILED")
    assert failed.losses == 2
    assert failed.reason.startswith("lost its node 2 times: node 'n2' of the learner was silent")
    moves = [event.kind for event in await stack.events(job)]
    moves = [kind for kind in moves if kind in {"job_lost", "job_queued", "job_failed"}]
    assert moves == ["job_queued", "job_lost", "job_queued", "job_lost", "job_failed"]
    again = await stack.ask("resume", JobRequest(job=job.job))
    assert (again.state, again.losses, again.attempt) == ("QUEUED", 0, 2)


class SkewedNode(Node):
    """A node whose clock is wrong by `offset_s`."""

    offset_s = 0.0

    def status(self) -> NodeStatus:
        """What the node is and runs, at a wrong time."""
        told = super().status()
        return told.model_copy(update={"time": told.time + self.offset_s})


async def skewed(broker: Broker, name: str, offset_s: float) -> tuple[Inside, SkewedNode]:
    """Start a node with a wrong clock; the caller drains it."""
    made: list[SkewedNode] = []

    async def main(context: ActorContext) -> None:
        node = SkewedNode(
            context.broker, name, 2, start=programs(toy_command), stop_deadline_s=AFTER_PATIENCE_S
        )
        node.offset_s = offset_s
        made.append(node)
        await node.run(context.service, context.stopping)

    actor = await Inside.start(broker.url, f"node-{name}", main)

    async def there() -> bool:
        return bool(made)

    await eventually(there, "the node to start")
    return actor, made[0]


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S], ids=["ahead", "behind"])
async def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(
    stack: Stack, offset_s: float
) -> None:
    await stack.scheduler()
    actor, node = await skewed(stack.broker, "n1", offset_s)
    try:
        await stack.until_nodes(1)
        job = await stack.until(await stack.submit(), "RUNNING")
        node.offset_s = -offset_s  # its clock is set while the job runs
        second = await stack.submit()
        stack.do(job, "learner", "done")
        await stack.until(job, "COMPLETED")
        second = await stack.until(second, "RUNNING")
        assert second.losses == 0
    finally:
        await actor.drain()


async def test_a_stop_that_comes_late_does_not_reach_the_next_attempt(stack: Stack) -> None:
    job = await stack.running()
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    with pytest.raises(StateError, match="is COMPLETED"):
        await stack.ask("pause", JobRequest(job=job.job))
    assert (await stack.ask("stop", StopRequest(job=job.job, now=True))).stop == "no"
    resumed = await stack.ask("resume", JobRequest(job=job.job))
    assert resumed.stop == "no"
    await stack.until(job, "RUNNING")
