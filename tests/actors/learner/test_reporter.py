"""Numbers reach the run's own file whole, and trackers that fail are told once and end nothing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from tinkermq.actors.learner.reporter import (
    Reporter,
    last_reported_step,
    restore_reported,
    store_reported,
)
from tinkermq.actors.training.state import Waste
from tinkermq.actors.training.step import StepReport
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_metric, read_events, read_metrics
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.local.tracking import GuardedTracker, JsonlTracker, Tracker
from tinkermq.schemas.metric import Event, Metric
from tinkermq.schemas.plan.model_shape import find_shape
from tinkermq.schemas.plan.plan import ModelUse
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.contexts import job_context
from tests.support.groups import make_group, make_trajectory

CONFIG = JobConfig.model_validate({"model": {"path": "none"}, "env": {"game": "none"}})


class Dead(Tracker):
    """A library whose service has died."""

    def log(self, metrics: object, step: int) -> None:
        raise ConnectionResetError("Connection lost")


async def reporter_of(broker: Broker, scope: JobScope, trackers: Sequence[Tracker]) -> Reporter:
    context = await job_context(broker, scope, "learner", CONFIG)
    return Reporter(context=context, trackers=trackers, total_steps=100)


async def events(broker: Broker, scope: JobScope) -> list[Event]:
    return await read_events(broker, scope)


def steps_in(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


async def test_a_dead_tracker_is_one_event_and_the_runs_own_file_is_whole(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    dead = GuardedTracker("wandb", Dead)
    reporter = await reporter_of(broker, scope, [JsonlTracker(tmp_path), dead])
    for step in range(1, 6):
        await reporter.log_evaluation(step, {"val/mean_score": 0.5})
        await reporter.close(None)
    await reporter.finish()
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5]
    (event,) = await events(broker, scope)
    assert event.kind == "tracker_lost"
    assert "tracker wandb: ConnectionResetError: Connection lost at step 1" in event.message
    assert event.data["tracker"] == "wandb"


async def test_a_file_that_cannot_be_written_for_a_while_gets_its_numbers_later(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    reporter = await reporter_of(broker, scope, [JsonlTracker(tmp_path)])
    file = tmp_path / "metrics.jsonl"
    file.rename(tmp_path / "aside")
    file.mkdir()
    for step in (1, 2):
        await reporter.log_evaluation(step, {"a": 1.0})
    file.rmdir()
    await reporter.log_evaluation(3, {"a": 1.0})
    assert steps_in(tmp_path) == [1, 2, 3]
    (event,) = await events(broker, scope)
    assert event.kind == "metrics_unwritable"
    assert "the metrics of step 1 cannot be written, and wait" in event.message


async def test_a_file_that_can_never_be_written_is_told_at_the_end(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    reporter = await reporter_of(broker, scope, [JsonlTracker(tmp_path)])
    file = tmp_path / "metrics.jsonl"
    file.unlink()
    file.mkdir()
    for step in (1, 2):
        await reporter.log_evaluation(step, {"a": 1.0})
    await reporter.finish()
    told = [event.kind for event in await events(broker, scope)]
    assert told == ["metrics_unwritable", "metrics_lost"]


async def test_steps_in_a_row_that_learn_nothing_are_told_once(
    broker: Broker, scope: JobScope
) -> None:
    reporter = await reporter_of(broker, scope, [])
    norms = [0.0] * 4 + [0.5] + [0.0] * 12
    for step, norm in enumerate(norms, 1):
        values = {"rollout/equal_reward_share": 1.0, "actor/grad_norm": norm}
        await reporter._report_unlearnt(Metric(step=step, values=values, time=0))
    (event,) = await events(broker, scope)
    assert event.kind == "nothing_learnt"
    assert event.message.startswith("nothing was learnt in steps 6 to 10: the gradient is 0")


async def test_a_lost_run_folder_gets_the_numbers_of_all_steps_and_none_is_reported_again(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    context = await job_context(broker, scope, "learner", CONFIG)
    context.record = context.record.model_copy(update={"run_dir": str(tmp_path)})
    context.config = CONFIG.model_copy(update={"logger_backends": ["tensorboard"]})
    await restore_reported(context)
    assert last_reported_step(context.run_dir) == 0
    for step in (1, 2, 3, 3):
        values = {"training/global_step": float(step), "actor/lr": 0.5}
        await publish_metric(broker, scope, Metric(step=step, values=values, time=1.0))
    for _ in range(2):
        await restore_reported(context)
        assert steps_in(context.run_dir) == [1, 2, 3]
        assert last_reported_step(context.run_dir) == 3
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [scalar.step for scalar in events.Scalars("actor/lr")] == [1, 2, 3]


async def test_numbers_that_the_store_lost_are_stored_again_from_the_run_folder(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    context = await job_context(broker, scope, "learner", CONFIG)
    context.record = context.record.model_copy(update={"run_dir": str(tmp_path)})
    await store_reported(context)
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2, 3):
        numbers = {"training/global_step": float(step), "actor/kl": math.nan}
        tracker.log(numbers, step)
        tracker.log({"val/mean_score": 0.5}, step)
    for values in ({"training/global_step": 1.0}, {"val/mean_score": 0.5}):
        await publish_metric(broker, scope, Metric(step=1, values=values, time=1.0))
    for _ in range(2):
        await store_reported(context)
        stored = [(one.step, *one.values) for one in await read_metrics(broker, scope)]
        training, validation = ("training/global_step", "actor/kl"), ("val/mean_score",)
        assert stored[2:] == [(n, *names) for n in (2, 3) for names in (training, validation)]


async def test_a_step_on_known_gpus_has_the_mfu_of_its_tokens(
    broker: Broker, scope: JobScope
) -> None:
    reporter = await reporter_of(broker, scope, [])
    episodes = [make_trajectory([1] * 5, [([2] * n, [])], [1.0]) for n in (3, 7)]
    step = [make_group(episodes, 0)], 1, StepReport({}, model_s=0.5), Waste(), 0
    assert "perf/mfu" not in reporter._numbers(*step)
    shape = find_shape("Qwen/Qwen3-8B")
    assert shape is not None
    reporter.use = ModelUse(shape, flops=1e12, shares_prompts=True, epochs=1)
    expected = reporter.use.mfu([[(5, 3), (5, 7)]], 0.5)
    assert reporter._numbers(*step)["perf/mfu"] == pytest.approx(expected)
    assert expected > 0
