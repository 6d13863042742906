"""Metrics, events and log lines, followed live."""

import asyncio
from contextlib import aclosing

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import (
    ALL_KINDS,
    FeedKind,
    FeedMessage,
    ValidationScore,
    best_of,
    follow,
    publish_dead,
    publish_event,
    publish_log,
    publish_metric,
    read_dead,
    read_events,
    read_metrics,
    stored_lines,
    whole_means,
)
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
    stream_info,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.evaluation import validation_metrics
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.metric import EpisodeScore, Event, LogLines, Metric
from tinkermq.schemas.task import Blame, DeadLetter
from tinkermq.schemas.wire.errors import NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_task
from tests.support.waiting import PATIENCE_S, until


def _metric(step: int) -> Metric:
    return Metric(step=step, values={"reward/mean": step / 10}, time=1.0)


def _event(kind: str) -> Event:
    return Event(kind=kind, source="test", time=1.0)


def _lines(*lines: str) -> LogLines:
    return LogLines(actor="generator-0", attempt=1, lines=list(lines), time=1.0)


class Follower:
    """Collects what `follow` yields, until it is stopped."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        kinds: tuple[FeedKind, ...] = ALL_KINDS,
    ) -> None:
        self.messages: list[FeedMessage] = []
        self.stop = asyncio.Event()
        self._feed = follow(broker, scope, kinds, stop=self.stop)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Follower":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop.set()
        assert self._task is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._task

    async def _run(self) -> None:
        async with aclosing(self._feed) as feed:
            async for message in feed:
                self.messages.append(message)

    async def reach(self, count: int) -> None:
        await until(lambda: len(self.messages) >= count, "messages")


async def test_all_kinds_are_followed_from_the_start_and_live(
    broker: Broker, scope: JobScope
) -> None:
    await publish_event(broker, scope, _event("job_started"))
    await publish_metric(broker, scope, _metric(0))
    async with Follower(broker, scope) as follower:
        await follower.reach(2)
        await publish_log(broker, scope, _lines("hello"))
        await publish_metric(broker, scope, _metric(1))
        await follower.reach(4)
    assert [m.step for m in follower.messages if isinstance(m, Metric)] == [0, 1]
    assert [m.kind for m in follower.messages if isinstance(m, Event)] == ["job_started"]
    assert [m.lines for m in follower.messages if isinstance(m, LogLines)] == [["hello"]]


async def test_a_stop_ends_it_behind_all_that_is_stored(broker: Broker, scope: JobScope) -> None:
    for step in range(100):
        await publish_metric(broker, scope, _metric(step))
        await publish_log(broker, scope, _lines(str(step)))
    async with Follower(broker, scope) as follower:
        follower.stop.set()
    assert [m.step for m in follower.messages if isinstance(m, Metric)] == list(range(100))
    assert len(follower.messages) == 200


async def test_only_the_wanted_kinds_are_followed(broker: Broker, scope: JobScope) -> None:
    async with Follower(broker, scope, ("metric",)) as follower:
        await publish_event(broker, scope, _event("unwanted"))
        await publish_metric(broker, scope, _metric(1))
        await follower.reach(1)
    assert [m.step for m in follower.messages if isinstance(m, Metric)] == [1]
    assert len(follower.messages) == 1


async def test_following_goes_on_across_a_kill_without_gap_or_repetition(
    own_server: NatsServer, own_broker: Broker, own_scope: JobScope
) -> None:
    async with Follower(own_broker, own_scope, ("metric", "log")) as follower:
        for step in range(30):
            await publish_metric(own_broker, own_scope, _metric(step))
            if step % 10 == 5:
                own_server.kill()
                own_server.start()
        await follower.reach(30)
    assert [m.step for m in follower.messages if isinstance(m, Metric)] == list(range(30))


async def test_malformed_entries_are_passed_over(broker: Broker, scope: JobScope) -> None:
    for subject in (scope.metric, scope.event, scope.log("generator-0")):
        await broker.append(subject, b"junk", deadline_s=PATIENCE_S, waiting_for="test")
    await publish_metric(broker, scope, _metric(1))
    await publish_log(broker, scope, _lines("fine"))
    async with Follower(broker, scope) as follower:
        await follower.reach(2)
    assert await read_metrics(broker, scope) == [_metric(1)]
    assert await read_events(broker, scope) == []
    await broker.append(
        scope.log("generator-0"), b"junk", deadline_s=PATIENCE_S, waiting_for="test"
    )
    async with asyncio.timeout(PATIENCE_S):
        assert [lines async for lines in stored_lines(broker, scope)] == [_lines("fine")]


async def test_what_is_stored_is_read_at_once(broker: Broker, scope: JobScope) -> None:
    for step in range(5):
        await publish_metric(broker, scope, _metric(step))
    await publish_event(broker, scope, _event("checkpoint_saved"))
    blame = Blame(boundary="environment", code="game", message="it raised")
    letter = DeadLetter(task=make_task(3), blame=blame, num_attempts=3, source="g", time=1.0)
    await publish_dead(broker, scope, letter)
    assert [metric.step for metric in await read_metrics(broker, scope)] == [0, 1, 2, 3, 4]
    assert [event.kind for event in await read_events(broker, scope)] == ["checkpoint_saved"]
    assert await read_dead(broker, scope) == [letter]


async def test_the_oldest_lines_go_first_when_the_log_is_full_and_a_follower_is_told(
    broker: Broker, scope: JobScope
) -> None:
    await create_job_streams(broker, scope, LimitsConfig(log_bytes=1 << 16))
    for number in range(100):
        await publish_log(broker, scope, _lines(f"{number} " + "x" * 2000))
    info = await stream_info(broker, scope.stream_log)
    assert info["state"]["bytes"] <= 1 << 16
    assert info["state"]["last_seq"] == 100
    async with Follower(broker, scope, ("log",)) as follower:
        await follower.reach(2)
        first, *lines = follower.messages
    assert isinstance(first, Event)
    assert first.kind == "entries_discarded"
    oldest = lines[0]
    assert isinstance(oldest, LogLines)
    assert first.message.startswith(f"{oldest.lines[0].split()[0]} entries had been discarded")


async def test_following_makes_no_consumer(broker: Broker, scope: JobScope) -> None:
    async with Follower(broker, scope) as follower:
        await publish_metric(broker, scope, _metric(1))
        await follower.reach(1)
    for stream in (scope.stream_feed, scope.stream_log):
        assert (await stream_info(broker, stream))["state"]["consumer_count"] == 0


async def test_following_a_removed_job_says_so(broker: Broker, scope: JobScope) -> None:
    async def follow_all() -> None:
        async with aclosing(follow(broker, scope)) as feed:
            async for _ in feed:
                pass

    following = asyncio.create_task(follow_all())
    await asyncio.sleep(0.1)
    await delete_job_streams(broker, scope)
    with pytest.raises(NotFoundError, match="there is no stream"):
        await asyncio.wait_for(following, PATIENCE_S)


def _validation(*rewards: float | None) -> ValidationScore:
    """Return the score of a validation with an episode each; None: it had not ended."""
    episodes = [
        None
        if reward is None
        else EpisodeScore(reward=reward, success=True, num_tokens=1, num_turns=1)
        for reward in rewards
    ]
    score = ValidationScore.of(validation_metrics([[episode] for episode in episodes], 1))
    assert score is not None
    return score


def test_a_validation_that_was_cut_off_is_the_best_only_if_the_rest_would_not_change_that() -> None:
    scores = {
        1: _validation(0.0, 0.5, 1.0, 1.0),
        2: _validation(1.0, None, None, None),
        3: _validation(1.0, 1.0, 1.0, None),
        4: _validation(-1.0, 0.0, 0.0, 0.0),
    }
    assert best_of(scores, scores) == 1
    assert best_of(scores, [2, 4]) == 4
    assert best_of({1: scores[1], 3: scores[3]}, [1, 3]) == 3


def test_missing_episodes_stand_beside_their_mean_and_count_as_the_worst_of_all() -> None:
    scores = {
        "whole": _validation(0.5, 0.5),
        "cut": _validation(1.0, None),
        "low": _validation(0.0),
    }
    assert [score.text for score in scores.values()] == ["0.500", "1.000 (1 of 2 failed)", "0.000"]
    assert whole_means(scores) == {"whole": 0.5, "cut": 0.5, "low": 0.0}
