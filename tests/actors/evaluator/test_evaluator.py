"""An evaluator tells what its episodes became, and nothing that its engine did not play."""

import asyncio
from pathlib import Path

import pytest
import structlog
from tinkermq.actors.evaluator.evaluator import Evaluator
from tinkermq.actors.generator.episodes.players import Players
from tinkermq.actors.runtime import JobContext
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Presence
from tinkermq.schemas.wire.errors import EngineError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.playing import playing
from tests.models import make_tiny_model


async def evaluator_context(broker: Broker, scope: JobScope, config: JobConfig) -> JobContext:
    """Return the context of an evaluator of a job."""
    record = JobRecord(
        job=scope.job,
        name="run",
        user=scope.user,
        state="RUNNING",
        config=config.model_dump(mode="json"),
        created=0.0,
    )
    return JobContext(
        broker=broker,
        role="evaluator",
        name="evaluator",
        log=structlog.get_logger(),
        stopping=asyncio.Event(),
        service=await Service.start(broker, name="tinkermq-evaluator", description="evaluator"),
        presence=Presence(actor="evaluator", role="evaluator", host="h", pid=1, state="", time=0.0),
        scope=scope,
        record=record,
        config=config,
    )


async def test_an_engine_that_has_ended_ends_the_evaluator_instead_of_failing_every_episode(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=2)
    async with playing(broker, scope, model, "EchoGame") as play:
        context = await evaluator_context(broker, scope, play.config)
        players: Players = play.runner._players
        evaluator = Evaluator(context, players, play.hosts)
        await play.engine.close()
        with pytest.raises(ExceptionGroup) as raised:
            await evaluator._play(0)
        assert raised.group_contains(EngineError, match="was closed")
