"""An evaluator tells what its episodes became, and nothing that its engine did not play."""

from pathlib import Path

import pytest
from tinkermq.actors.evaluator.evaluator import Evaluator
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.errors import EngineError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.playing import playing
from tests.support.contexts import job_context
from tests.support.models import make_tiny_model


async def test_an_engine_that_has_ended_ends_the_evaluator_instead_of_failing_every_episode(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", heads=2)
    async with playing(broker, scope, model, "EchoGame") as play:
        context = await job_context(broker, scope, "evaluator", play.config)
        evaluator = Evaluator(context, play.runner._players, play.hosts)
        await play.engine.close()
        with pytest.raises(ExceptionGroup) as raised:
            await evaluator._play(0)
        assert raised.group_contains(EngineError, match="was closed")
