"""`fit` attaches to a run, logs its metrics, and ends as the run ends."""

import argparse
import asyncio
import json
import time
from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_metric
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import AsyncServiceClient, GameEnvironment, ServiceClient
from tinkermq.clients.address import JobAddress
from tinkermq.clients.opentinker import NeedlessWarning, as_tree
from tinkermq.schemas.job import JobRecord, JobState
from tinkermq.schemas.metric import Metric
from tinkermq.schemas.wire.errors import ConfigError, JobFailedError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.test_game_environment import EchoGame
from tests.support.waiting import PATIENCE_S


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
        assert future.result(20)["training_step_reward"] == 0.75
        # Blocking calls do, too: their work is done in another thread's loop.
        assert client.fit(verbose=False)["training_step_reward"] == 0.75


async def test_a_game_whose_host_ends_ends_the_fit(
    record: JobRecord, url: str, own_broker: Broker
) -> None:
    env = GameEnvironment(EchoGame)
    async with AsyncServiceClient(url) as client:
        fitting = asyncio.create_task(client.fit(env, verbose=False))
        async with asyncio.timeout(PATIENCE_S):
            while env.hosting is None:
                await asyncio.sleep(0.05)
        fitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fitting
    env.cleanup()


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
