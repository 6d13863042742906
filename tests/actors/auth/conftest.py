"""A pool with authentication for the tests of a module, a job in it, and somebody else."""

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from tinkermq.actors.storage.access import ROOTS_VARIABLE
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_event, publish_log, publish_metric
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.broker.tasks import TaskQueue
from tinkermq.schemas.metric import Event, LogLines, Metric
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.auth.submitting import a_scheduler
from tests.support.secured import SecuredPool, environment, secured
from tests.support.strategies import make_group, make_task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredPool]:
    """A pool that the tests of a module share."""
    async with secured(tmp_path_factory.mktemp("secured")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def job(pool: SecuredPool) -> JobScope:
    """Ada's job, written to by its own processes."""
    await pool.user("ada")
    scope = await pool.job("ada", "01adasjob")
    learner, node = await pool.process(scope, "learner"), await pool.service("node")
    generator = await pool.process(scope, "generator-0")
    await publish_metric(learner, scope, Metric(step=1, values={"reward": 1.0}, time=1.0))
    await publish_event(learner, scope, Event(kind="started", source="learner", time=1.0))
    await publish_log(node, scope, LogLines(actor="learner", attempt=1, lines=["x"], time=1.0))
    await TaskQueue(learner, scope).publish(make_task(0))
    assert await RolloutLog(generator, scope).append(make_group(0))
    tensors = {"w": TensorBytes("float32", (4,), np.ones(4, np.float32).data)}
    await WeightStore(learner, scope).publish(1, tensors)
    return scope


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mallory(pool: SecuredPool) -> Broker:
    """Somebody else, with a job of his own."""
    broker = await pool.user("mallory")
    await pool.job("mallory", "01mine")
    return broker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scheduled(
    pool: SecuredPool, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SecuredPool]:
    """The pool with a scheduler, and no node: jobs wait."""
    with environment(**{ROOTS_VARIABLE: str(tmp_path_factory.getbasetemp())}):
        async with a_scheduler(pool):
            yield pool
