"""A pool on a real Ray: machines come for what waits, and go when nothing does."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.machines.ray import RaySource
from tinkermq.actors.scheduler.machines.source import Machine, MachineNames
from tinkermq.broker.nats_server import NatsServer
from tinkermq.clients.pool import Pool
from tinkermq.schemas.machines import machines_config

from tests.support.on_cluster import OnCluster, machines
from tests.support.ray import Ray, lacking
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(lacking()), reason=f"Ray cannot be had: {lacking()}"),
]


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    with Ray(tmp_path_factory.mktemp("ray") / "cluster") as cluster:
        yield cluster


@pytest.fixture
async def on_ray(ray: Ray, tmp_path: Path) -> AsyncIterator[OnCluster]:
    """A pool without a node; after the test it is down and nothing runs on Ray."""
    pool = OnCluster(tmp_path, {"kind": "ray", "address": ray.address}, {})
    yield pool
    await pool.down()
    assert [name for name, status in ray.jobs() if status == "RUNNING"] == []


async def test_a_machine_is_asked_for_once_found_given_back_and_asked_for_again(
    ray: Ray, nats_server: NatsServer
) -> None:
    source = RaySource(machines_config(f"ray:{ray.address}"), nats_server.url)
    (name,) = MachineNames(nats_server.url).free([], 1)

    async def started() -> Machine | None:
        return next((one for one in await source.list_machines() if one.state == "started"), None)

    async def ended() -> bool:
        return await source.list_machines() == []

    for _ in range(2):
        await asyncio.gather(*(source.request_machine(name) for _ in range(4)))
        found = await eventually(started, "a machine of Ray")
        assert (found.name, len(ray.jobs())) == (name, 1)
        await source.request_machine(name)
        assert await started() == found
        await source.release_machine(found, drain=True)
        await eventually(ended, "its end")
        await source.release_machine(found, drain=True)  # harmless


async def test_what_ray_has_no_room_for_waits_in_its_words_and_is_dropped(
    on_ray: OnCluster, model: Path
) -> None:
    async with await on_ray.up(slots=64, most=1) as broker:
        pool = Pool(broker)
        job = await on_ray.submit(pool, model)
        [asked] = (await machines(pool, "asked")).machines
        assert "waiting for resources" in asked.why
        await pool.stop(job.job)
