"""A run is followed and shown; clients attach to it, publish into it, host its games."""

import argparse
import asyncio
import io
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.feed import ValidationScore, publish_event, publish_metric, run_row
from tinkermq.broker.jetstream.streams import delete_job_streams
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.presence import presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.clients import (
    AsyncServiceClient,
    AsyncTrajectoryPublisher,
    GameEnvironment,
    ServiceClient,
    TrajectoryPublisher,
    make_trajectory,
)
from tinkermq.clients.base import JobAddress, listed
from tinkermq.clients.cli.live import LineDisplay, render, step_line
from tinkermq.clients.cli.runs import _cells
from tinkermq.clients.cli.sweep import _ranked
from tinkermq.clients.follow import (
    QUIET_S,
    RunProgress,
    Update,
    follow_run,
    sparkline,
    text_plot,
)
from tinkermq.clients.opentinker import NeedlessWarning, as_tree
from tinkermq.clients.pool import Pool
from tinkermq.clients.run import Run, as_numbers
from tinkermq.schemas.control import (
    PublishTasksReply,
    PublishTasksRequest,
    ReserveReply,
    ReserveRequest,
)
from tinkermq.schemas.job import JobRecord, JobState
from tinkermq.schemas.metric import Event, Metric, Presence
from tinkermq.schemas.rollout import Trajectory
from tinkermq.schemas.wire.errors import (
    BrokerError,
    ConfigError,
    DeadlineError,
    JobFailedError,
    MessageError,
    NotFoundError,
    StateError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record
from tests.clients.test_inference_client import EchoGame
from tests.support.waiting import PATIENCE_S, until


async def followed(broker: Broker, record: JobRecord) -> list[Update]:
    async with asyncio.timeout(PATIENCE_S), aclosing(follow_run(Pool(broker), record)) as updates:
        return [update async for update in updates]


async def tell(broker: Broker, scope: JobScope, step: int) -> None:
    values = {"training_step_reward": step / 10}
    await publish_metric(broker, scope, Metric(step=step, values=values, time=time.time()))


async def test_updates_come_in_order_and_end_with_the_last_state(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    await tell(broker, scope, 1)
    following = asyncio.create_task(followed(broker, record))
    await asyncio.sleep(0.3)
    await tell(broker, scope, 2)
    await JobStore(broker).transition(record, "COMPLETED", "done", "test")
    await tell(broker, scope, 3)
    updates = await following
    assert [one.step for one in updates if isinstance(one, Metric)] == [1, 2, 3]
    last = updates[-1]
    assert isinstance(last, JobRecord)
    assert last.state == "COMPLETED"


async def test_a_slow_follower_of_a_run_that_is_over_gets_every_update(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    num_steps = 2000  # more than wait at a time
    await asyncio.gather(*(tell(broker, scope, step) for step in range(num_steps)))
    await JobStore(broker).transition(record, "COMPLETED", "done", "test")
    record = record.model_copy(update={"state": "COMPLETED"})
    steps: list[int] = []
    async with asyncio.timeout(PATIENCE_S), aclosing(follow_run(Pool(broker), record)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                steps.append(update.step)
            if len(steps) == 1:
                await asyncio.sleep(3 * QUIET_S)
    assert sorted(steps) == list(range(num_steps))


async def test_who_wants_them_is_told_of_the_actors(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    presence = Presence(
        actor="generator-0", role="generator", host="h", pid=1, state="working", time=time.time()
    )
    await presences(broker).put(f"{scope.key}.generator-0", presence)
    updates = follow_run(Pool(broker), record, with_actors=True)
    async with asyncio.timeout(PATIENCE_S), aclosing(updates):
        crew = await anext(update async for update in updates if isinstance(update, tuple))
    assert [one.actor for one in crew] == ["generator-0"]


async def test_followers_that_share_a_connection_are_patient_until_the_last_has_left(
    broker: Broker, record: JobRecord
) -> None:
    first, second = follow_run(Pool(broker), record), follow_run(Pool(broker), record)
    async with asyncio.timeout(PATIENCE_S):
        await anext(first)
        await anext(second)
        await first.aclose()
        assert broker.is_patient
        await second.aclose()
        assert not broker.is_patient


def test_one_name_alone_is_one_and_not_its_letters() -> None:
    numbers = as_numbers([Metric(step=1, values={"reward": 0.5, "lr": 1.0}, time=0.0)], "reward")
    assert list(numbers) == ["step", "reward"]
    assert listed("baseline") == ["baseline"]
    assert listed(("a", "b")) == ["a", "b"]


async def test_a_notebook_shows_a_run_whose_metrics_are_archived(
    nats_server: NatsServer, broker: Broker, scope: JobScope
) -> None:
    record = await JobStore(broker).create(new_record(scope, started=time.time()), "test")
    await delete_job_streams(broker, scope)
    with Run(record.name, nats_server.url) as run:
        assert "no numbers yet" in await asyncio.to_thread(run._repr_html_)


async def test_a_run_that_has_ended_is_shown_from_its_start(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    await tell(broker, scope, 1)
    await publish_event(
        broker, scope, Event(kind="checkpoint_saved", source="learner", time=time.time())
    )
    ended = await JobStore(broker).transition(record, "FAILED", "no disk", "test")
    updates = await followed(broker, ended)
    assert [one.step for one in updates if isinstance(one, Metric)] == [1]
    assert "checkpoint_saved" in [one.kind for one in updates if isinstance(one, Event)]
    assert updates[-1] == ended


async def test_whoever_reads_slowly_hears_all_before_the_last_state(
    broker: Broker, scope: JobScope, record: JobRecord
) -> None:
    steps, wanted = list[int](), list(range(1, 400))
    for step in wanted:
        await tell(broker, scope, step)
    ended = await JobStore(broker).transition(record, "COMPLETED", "done", "test")
    async with asyncio.timeout(PATIENCE_S), aclosing(follow_run(Pool(broker), ended)) as updates:
        async for update in updates:
            if isinstance(update, Metric):
                steps.append(update.step)
            await asyncio.sleep(2 * QUIET_S if len(steps) == 1 else 0)
    assert steps == wanted


async def test_a_run_that_vanishes_ends_the_following_with_an_error(
    broker: Broker, record: JobRecord
) -> None:
    following = asyncio.create_task(followed(broker, record))
    await asyncio.sleep(0.3)
    await JobStore(broker)._jobs.delete(f"local.{record.job}")
    with pytest.raises(NotFoundError):
        await following


async def test_a_run_is_found_by_name_and_by_id_and_a_wrong_name_names_the_closest(
    broker: Broker, record: JobRecord
) -> None:
    pool = Pool(broker)
    assert await pool.find(record.job) == record
    assert await pool.find(record.name) == record
    with pytest.raises(NotFoundError) as caught:
        await pool.find(record.name[:-1] + "x9")
    assert "did you mean" in caught.value.hint
    with pytest.raises(NotFoundError):
        await pool.find("Not A Run!")


# -- What a display shows is computed from metrics and events alone --------------------------------


def metric(step: int, time: float = 0.0, **values: float) -> Metric:
    return Metric(step=step, values={"training_step_reward": step / 10, **values}, time=time)


@pytest.fixture
def progress() -> RunProgress:
    return RunProgress(new_record(JobScope("local", "a")))


def test_the_time_left_follows_the_pace_of_the_last_steps(progress: RunProgress) -> None:
    progress.total_steps = 10
    assert progress.seconds_left is None
    for step in (1, 2, 3, 4):
        progress.add_metric(metric(step, time=2.0 * step))
    assert progress.seconds_left == pytest.approx(12.0)


def test_the_total_comes_from_the_learner_or_else_from_the_configuration(
    progress: RunProgress,
) -> None:
    assert progress.total_steps == 3
    progress.add_metric(metric(1, **{"training/total_steps": 40.0}))
    assert progress.total_steps == 40


def test_a_validation_alone_is_no_step(progress: RunProgress) -> None:
    assert not progress.add_metric(Metric(step=0, values={"val/mean_score": 0.25}, time=0))
    assert progress.add_metric(metric(1))
    assert progress.last_validation() == (0, 0.25)
    assert progress.step == 1


def test_failed_episodes_stand_beside_the_validation(progress: RunProgress) -> None:
    values = {"val/mean_score": 1.0, "val/num_episodes": 7.0, "val/failed_episodes": 3.0}
    progress.add_metric(Metric(step=0, values=values, time=0))
    progress.add_metric(metric(1))
    assert "validation 1.000 (3 of 10 failed)" in step_line(progress)
    row = {**run_row(progress.record, values), "run": "a", "total_steps": None}
    assert "1.000 (3 failed)" in _cells({**row, "tokens_per_s": None})


def test_a_sweep_ranks_failed_episodes_as_the_worst() -> None:
    def row(run: str, *numbers: float) -> dict[str, Any]:
        mean, worst, num, failed = numbers
        score = ValidationScore(mean, worst, num, failed)
        return {"run": run, "val/mean_score": mean, "failed_episodes": failed, "score": score}

    rows = [row("a", 1.0, 1.0, 2, 8), row("b", 0.9, 0.0, 10, 0), row("c", 0.1, 0.0, 10, 0)]
    assert [item["run"] for item in _ranked(rows, "val/mean_score")] == ["b", "a", "c"]
    rows = [{**item, "other": number} for number, item in enumerate(rows)]
    assert [item["run"] for item in _ranked(rows, "other")] == ["c", "b", "a"]


def test_numbers_that_could_not_be_computed_are_left_out(progress: RunProgress) -> None:
    progress.add_metric(metric(1, **{"staleness/lag_mean": math.nan}))
    assert progress.value("staleness/lag_mean") is None
    assert "lag" not in step_line(progress)


def test_the_end_of_a_run_of_equal_rewards_says_that_nothing_was_learnt(
    progress: RunProgress,
) -> None:
    equal = {"rollout/equal_reward_share": 1.0, "actor/grad_norm": 0.0}
    for step in (1, 2, 3):
        progress.add_metric(metric(step, **equal))
        progress.add_metric(metric(step, **equal))  # sent again after a reconnection
    assert progress.unlearnt == ""  # it may still learn
    progress.add_record(progress.record.model_copy(update={"state": "COMPLETED"}))
    assert progress.unlearnt.startswith("3 of 3 steps learnt nothing: all groups had equal rewards")
    for step in range(4, 8):
        progress.add_metric(metric(step, **equal | {"actor/grad_norm": 0.1}))
    assert progress.unlearnt == ""


def test_success_entropy_and_length_stand_before_the_speed(progress: RunProgress) -> None:
    numbers = {
        "game/success_rate": 0.25,
        "val/success_rate": 0.5,
        "actor/entropy": 0.731,
        "response_length/mean": 212.4,
        "perf/throughput": 10.0,
    }
    progress.add_metric(metric(2, **numbers))
    assert step_line(progress) == (
        "step 2/3  reward 0.200  success 25%  validated success 50%  entropy 0.73  length 212  "
        "tokens/s 10"
    )


def test_the_best_validation_is_told_where_it_is_not_the_last(progress: RunProgress) -> None:
    for step, score in ((0, 0.1), (1, 0.8), (2, 0.8)):
        progress.add_metric(Metric(step=step, values={"val/mean_score": score}, time=0))
    assert progress.best_validation() == (1, 0.8)
    out = io.StringIO()
    Console(file=out, width=120).print(render(progress, []))
    assert "0.800 at step 2, best 0.800 at 1" in out.getvalue()


def test_a_line_tells_the_step_and_its_figures(progress: RunProgress) -> None:
    progress.add_metric(Metric(step=0, values={"val/mean_score": 0.25}, time=0))
    progress.add_metric(metric(2, **{"staleness/lag_mean": 1.5, "perf/throughput": 12345.0}))
    expected = "step 2/3  reward 0.200  validation 0.250  lag 1.50  tokens/s 12,345"
    assert step_line(progress) == expected


def test_the_live_display_shows_bar_curves_figures_and_bottleneck(progress: RunProgress) -> None:
    for step in (1, 2):
        progress.add_metric(metric(step, time=step, **{"staleness/lag_mean": 0.5}))
    hint = "the learner waits 71 % of the time: add generators"
    progress.add_event(Event(kind="bottleneck", source="learner", message=hint, time=0))
    text = shown(progress)
    assert "run-of-a  RUNNING" in text
    assert "2/3" in text
    assert "▁" in text
    assert "lag 0.50" in text
    assert hint in text


def test_the_live_display_shows_lags_and_episodes_by_phase(progress: RunProgress) -> None:
    shares = {"0": 0.75, "1": 0.25, "2": 0.0}
    progress.add_metric(
        metric(1, **{f"staleness/lag_share/{lag}": share for lag, share in shares.items()})
    )
    progress.add_actors(
        [
            presence("generator", running=5.0, waiting=2.0),
            presence("evaluator", running=1.0),
            presence("environment", episodes=10.0),
        ]
    )
    text = shown(progress)
    assert "0 ████████ 75%  1 ██ 25%" in text
    assert "6 generating   2 waiting for the engine   2 in the environment" in text


def presence(role: str, **numbers: float) -> Presence:
    return Presence(
        actor=role, role=role, host="h", pid=1, state="working", numbers=numbers, time=0.0
    )


def shown(progress: RunProgress) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(progress, []))
    return console.export_text()


def test_a_bottleneck_that_stays_the_same_is_told_once(
    progress: RunProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    display = LineDisplay(progress)
    for share, change in ((61, "ranks"), (63, "ranks"), (60, "ranks"), (20, "generators")):
        told = {"message": f"the learner waited {share}%", "data": {"change": [change]}}
        display.show(Event(kind="bottleneck", source="learner", time=0, **told))
    shown = "bottleneck: the learner waited 61%\nbottleneck: the learner waited 20%\n"
    assert capsys.readouterr().out == shown


def test_a_change_of_state_is_one_line(
    progress: RunProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    display = LineDisplay(progress)
    queued = progress.record.model_copy(update={"state": "QUEUED", "reason": "waits to be placed"})
    full = queued.model_copy(update={"reason": "is next; other holds 2"})
    running = queued.model_copy(update={"state": "RUNNING", "reason": "all actors run"})
    told: list[Event | JobRecord] = []
    for record in (queued, full, running):
        kind = f"job_{record.state.lower()}"
        event = Event(kind=kind, source="scheduler", time=0, message=record.reason)
        told += [record, event] if record is queued else [event, record, record]
    for update in told:
        display.show(update)
    states = ("QUEUED waits to be placed", "QUEUED is next; other holds 2", "RUNNING all actors run")
    shown = "".join(f"{queued.name} {state}\n" for state in states)
    assert capsys.readouterr().out == shown


def test_rewards_are_averaged_to_the_width_of_the_display(progress: RunProgress) -> None:
    for step in range(1, 101):
        progress.add_metric(metric(step))
    smoothed = progress.smoothed_rewards(10)
    assert len(smoothed) == 10
    assert smoothed == sorted(smoothed)
    assert sum(smoothed) / 10 == pytest.approx(5.05)


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([]) == ""


def test_a_text_plot_has_its_curve_from_corner_to_corner() -> None:
    rows = text_plot({"o": [(0, 0.0), (10, 1.0)]}, width=20, height=5).splitlines()
    assert rows[0].startswith("  1.00 │")
    assert rows[0].endswith("o")
    assert rows[4] == "  0.00 │o" + " " * 19
    assert rows[6].split() == ["0", "10"]


# -- `fit` attaches to a run, logs its metrics, and ends as the run ends ---------------------------


@pytest.fixture
def url(broker: Broker, scope: JobScope) -> str:
    return JobAddress(broker.url, scope).server_url


async def run_job(
    broker: Broker, scope: JobScope, record: JobRecord, state: JobState, reason: str = ""
) -> None:
    """Do what the pool does to a run of three steps."""
    for step in (1, 2, 3):
        values = {"training_step_reward": step / 4, "actor/lr": 1e-3}
        await publish_metric(broker, scope, Metric(step=step, values=values, time=time.time()))
    score = Metric(step=3, values={"val/mean_score": 0.9}, time=time.time())
    await publish_metric(broker, scope, score)
    await JobStore(broker).transition(record, state, reason, "test")


async def test_fit_returns_the_last_training_metrics_of_a_run_it_attached_to(
    broker: Broker,
    scope: JobScope,
    record: JobRecord,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    async with AsyncServiceClient(url, "project", "experiment", ["jsonl"]) as client:
        fitting = asyncio.create_task(client.fit(num_steps=3))
        await run_job(broker, scope, record, "COMPLETED")
        last = await asyncio.wait_for(fitting, PATIENCE_S)
    assert last["training_step_reward"] == 0.75
    assert "step 1  training_step_reward 0.25" in capsys.readouterr().out
    lines = (tmp_path / "outputs" / record.name / "client" / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [1, 2, 3, 3]


async def test_a_failed_run_raises_with_the_pools_reason(
    broker: Broker, scope: JobScope, record: JobRecord, url: str
) -> None:
    await run_job(broker, scope, record, "FAILED", "learner failed: the disk is full")
    async with AsyncServiceClient(url) as client:
        with pytest.raises(JobFailedError, match="the disk is full") as caught:
            await client.fit(verbose=False)
    assert "tinkermq logs" in caught.value.hint
    assert isinstance(caught.value, RuntimeError)


async def test_the_sync_client_works_inside_a_running_loop(
    broker: Broker, scope: JobScope, record: JobRecord, url: str
) -> None:
    with ServiceClient(url) as client:
        future = client.fit_future(verbose=False)
        await run_job(broker, scope, record, "COMPLETED")
        assert future.result(PATIENCE_S)["training_step_reward"] == 0.75
        # Blocking calls do, too: their work is done in another thread's loop.
        assert client.fit(verbose=False)["training_step_reward"] == 0.75


async def test_a_game_whose_host_ends_ends_the_fit(
    record: JobRecord, url: str, own_broker: Broker
) -> None:
    env = GameEnvironment(EchoGame)
    async with AsyncServiceClient(url) as client:
        fitting = asyncio.create_task(client.fit(env, verbose=False))
        await until(lambda: env.hosting is not None, "the host")
        fitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fitting
    env.cleanup()


async def test_a_job_of_another_user_is_not_taken_for_an_own_one_of_that_name(
    record: JobRecord, url: str, broker: Broker
) -> None:
    other = JobAddress(broker.url, JobScope("bob", record.job)).server_url
    refused = pytest.raises(NotFoundError, match="belongs to user 'bob', and you are 'local'")
    async with AsyncServiceClient(other) as client, AsyncTrajectoryPublisher(other) as publisher:
        with refused:
            await client.status()
        with refused:
            await publisher.publish_tasks([])
    with GameEnvironment(EchoGame) as env, refused:
        await asyncio.to_thread(env.setup, other)


def test_uploading_a_reward_is_refused_with_the_remedy() -> None:
    client = ServiceClient("nats://127.0.0.1:4222/local/a")
    with pytest.raises(ConfigError, match="cannot be uploaded") as caught:
        client.upload_reward_function("my_reward", "def my_reward(): ...")
    assert "reward_function" in caught.value.hint


async def test_game_stats_come_with_the_metrics_and_a_client_of_them_is_left_out(url: str) -> None:
    async with AsyncServiceClient(url, config={"any": "thing"}) as client:
        with (
            pytest.warns(NeedlessWarning, match=r"game_stats_client: .* metrics game/\*"),
            pytest.raises(NotFoundError),  # there is no such job, which comes after
        ):
            await client.fit(game_stats_client=object(), game_stats_log_freq=5)


def test_configurations_come_as_maps_namespaces_and_nested_objects() -> None:
    nested = argparse.Namespace(batch_size=4, multi_turn=argparse.Namespace(max_user_turns=2))
    expected = {"batch_size": 4, "multi_turn": {"max_user_turns": 2}}
    assert as_tree(nested) == expected
    assert as_tree(expected) == expected
    assert as_tree(None) == {}
    with pytest.raises(ConfigError, match="named values"):
        as_tree([1, 2])


# -- External agents publish trajectories and tasks, checked before they leave ---------------------


class Reservations:
    """What a learner answers, without the learner: numbers while the gate is open."""

    def __init__(self, scope: JobScope) -> None:
        self.scope = scope
        self.given = 0
        self.gate = 100
        self.tasks: list[object] = []

    async def reserve(self, request: ReserveRequest) -> ReserveReply:
        if self.given >= self.gate:
            raise StateError("the staleness bound is reached", hint="try again")
        self.given += 1
        return ReserveReply(
            tasks=[self.given - 1], group_size=2, version=3, vocab_size=100, max_tokens=8
        )

    async def take(self, request: PublishTasksRequest) -> PublishTasksReply:
        room = self.gate - len(self.tasks)
        self.tasks += request.tasks[:room]
        return PublishTasksReply(queued=min(room, len(request.tasks)))


@pytest.fixture
async def learner(broker: Broker, scope: JobScope) -> AsyncIterator[Reservations]:
    reservations = Reservations(scope)
    subject = scope.control("learner")
    async with await Service.start(broker, name="learner", description="reserves") as service:
        await service.endpoint(
            "reserve", f"{subject}.reserve", ReserveRequest, reservations.reserve
        )
        await service.endpoint("tasks", f"{subject}.tasks", PublishTasksRequest, reservations.take)
        yield reservations


@pytest.fixture
async def publisher(broker: Broker, scope: JobScope) -> AsyncIterator[AsyncTrajectoryPublisher]:
    url = JobAddress(broker.url, scope).server_url
    async with AsyncTrajectoryPublisher(url, source="my-agent") as made:
        yield made


def episode(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "token_ids": [1, 2, 3, 4, 5],
        "mask": [0, 1, 1, 0, 1],
        "logprobs": [0, -0.5, -1.0, 0, -0.1],
        "rewards": 1.0,
        "version": 3,
    }
    return make_trajectory(**{**fields, **changes})


def test_a_trajectory_is_made_from_plain_lists() -> None:
    made = episode()
    assert made.turn_ends.tolist() == [2, 4]
    assert made.rewards.tolist() == [0.0, 1.0]
    assert made.versions.tolist() == [-1, 3, 3, -1, 3]
    assert made.logprobs.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": [0, 0, 0, 0, 0]}, "no generated token"),
        ({"logprobs": [0.0]}, "logprobs 1"),
        ({"rewards": [1.0, 2.0, 3.0]}, "turn_ends has 2 entries and rewards 3"),
        ({"token_ids": [1, 2]}, "token_ids has 2"),
        ({"token_ids": [1.5, 2, 3, 4, 5]}, "token_ids holds values that are not int32"),
        ({"token_ids": ["a"] * 5}, "token_ids cannot be an array"),
        ({"token_ids": [[1]] * 5}, "must have 1 dimension"),
        ({"version": 1.5}, "version holds values that are not int32"),
        ({"version": 2**40}, "version holds values that are not int32"),
        ({"version": "3"}, "version cannot be an array of numbers: it is str '3'"),
        ({"version": None}, "version cannot be an array of numbers: it is NoneType None"),
        ({"token_ids": [math.nan] * 5}, "token_ids holds values that are not int32"),
        ({"mask": [1j] * 5}, r"mask cannot be an array of numbers: it is list \[1j, 1j"),
        ({"logprobs": [None] * 5}, r"logprobs cannot be an array of numbers: it is list \[None"),
        ({"rewards": None}, "rewards cannot be an array of numbers: it is NoneType None"),
        ({"rewards": 10**400}, "rewards cannot be an array of numbers: it is int 1000"),
        ({"rewards": [1, [2]]}, "rewards cannot be an array of numbers: setting an array element"),
        ({"messages": None}, "messages must be a list, is NoneType None"),
        ({"messages": "hi"}, "messages must be a list, is str 'hi'"),
        ({"messages": ["hi"]}, "a message must be a map, is str 'hi'"),
        ({"finish_reasons": 5}, "finish_reasons must be a list, is int 5"),
        ({"info": [1]}, r"info must be a map, is list \[1\]"),
    ],
)
def test_what_is_wrong_with_a_trajectory_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        episode(**changes)


async def test_a_group_enters_the_log_under_a_reserved_number(
    broker: Broker, scope: JobScope, learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    assert await publisher.publish_group([episode(), episode(rewards=0.0)], sample=7) == 0
    assert await publisher.publish_group([episode(), episode()]) == 1
    entry = await RolloutLog(broker, scope).find(0)
    assert entry is not None
    assert entry.group is not None
    assert (entry.group.source, entry.group.task.sample) == ("my-agent", 7)
    assert [one.reward for one in entry.group.trajectories] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ([episode()], "2 trajectories, this has 1"),
        ([], "a group of this run has"),
        ([episode(token_ids=[1, 2, 3, 4, 100])] * 2, "token_ids must be from 0 to 99"),
        ([episode(version=9)] * 2, "versions of generated tokens must be from 0 to 3"),
        ([episode(logprobs=[0, 0.5, -1, 0, -1])] * 2, "logprobs of generated tokens"),
        ([episode(rewards=float("nan"))] * 2, "rewards must be finite"),
        ([episode(mask=[1, 1, 1, 0, 1])] * 2, "turns must end, in order, on generated tokens"),
    ],
)
async def test_a_bad_group_is_refused_with_its_rule_and_nothing_is_appended(
    broker: Broker,
    scope: JobScope,
    learner: Reservations,
    publisher: AsyncTrajectoryPublisher,
    group: list[Trajectory],
    message: str,
) -> None:
    with pytest.raises(MessageError, match=message):
        await publisher.publish_group(group)
    assert await RolloutLog(broker, scope).numbers() == set()


async def test_a_reservation_that_ran_out_is_told(
    broker: Broker, scope: JobScope, learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    await publisher.publish_group([episode(), episode()])
    learner.given = 0  # the same number again: its place in the log is taken
    with pytest.raises(StateError, match="reservation of task 0 ran out"):
        await publisher.publish_group([episode(), episode()])


async def test_a_closed_gate_is_waited_for_and_then_told(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    learner.gate = 0
    with pytest.raises(DeadlineError, match="staleness bound"):
        await publisher.publish_group([episode(), episode()], timeout_s=1)


async def test_tasks_are_issued_as_the_gate_opens(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    learner.gate = 2
    with pytest.raises(DeadlineError, match="1 of 3 tasks wait"):
        await publisher.publish_tasks([{"sample": 1}, {"seed": 2}, {}], timeout_s=1)
    assert len(learner.tasks) == 2


async def test_a_malformed_task_is_named(publisher: AsyncTrajectoryPublisher) -> None:
    with pytest.raises(MessageError, match="a task has no 'prompt'"):
        await publisher.publish_tasks([{"prompt": "x"}])
    with pytest.raises(MessageError, match="sample"):
        await publisher.publish_tasks([{"sample": -1}])


async def test_without_a_learner_the_error_says_so(publisher: AsyncTrajectoryPublisher) -> None:
    with pytest.raises(BrokerError, match=r"the learner of job .* is not there"):
        await publisher.publish_group([episode(), episode()])


async def test_the_sync_publisher_gives_futures(
    broker: Broker, scope: JobScope, learner: Reservations
) -> None:
    url = JobAddress(broker.url, scope).server_url
    with TrajectoryPublisher(url) as publisher:
        future = publisher.publish_group_future([episode(), episode()])
        # The test's own loop must run: it answers for the learner.
        assert await asyncio.wrap_future(future) == 0


async def test_a_group_over_the_limit_is_refused_before_a_number_is_taken(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    long = episode(messages=[{"role": "user", "content": "x" * 9_000_000}])
    with pytest.raises(MessageError, match=r"the largest are messages of episode 1 \(9,000,0"):
        await publisher.publish_group([episode(), long])
    assert learner.given == 0


async def test_tasks_go_in_as_many_messages_as_their_arguments_need(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    sizes = [3_000_000, 3_000_000, 3_000_000, 10, 8_000_000, 10]
    tasks = [{"seed": n, "reset_kwargs": {"board": "x" * n}} for n in sizes]
    assert await publisher.publish_tasks(tasks) == 6
    assert [task.seed for task in learner.tasks] == sizes  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_task_over_the_limit_is_refused_before_any_is_issued(
    learner: Reservations, publisher: AsyncTrajectoryPublisher
) -> None:
    large = {"seed": 1, "reset_kwargs": {"board": "x" * 9_000_000}}
    with pytest.raises(MessageError, match="task 1 of 2 has 9,000,"):
        await publisher.publish_tasks([{"seed": 0}, large])
    assert learner.tasks == []
