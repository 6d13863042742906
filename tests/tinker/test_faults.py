"""A run of sixty steps with the SDK while what it uses is killed, or answers to it are lost.

Its adapter has the bits of an undisturbed run, and the program hears of nothing.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from tinkermq.broker.nats_server import NatsServer

from tests.support.gateway import start
from tests.support.waiting import eventually, until
from tests.tinker.dropping import DroppingProxy
from tests.tinker.sdks import BASE, PROGRAMS, SdkProgram, lacking
from tests.tinker.service import TinkerService, adapter_digest, tinker_service

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(lacking("newest")), reason=lacking("newest")),
]
LOOP = str(PROGRAMS / "loop_with_samples.py")
_PATIENCE_S = 600.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TinkerService]:
    async with tinker_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(service: TinkerService) -> str:
    told = await run(service, service.gateway.url, pause_s=0).done(_PATIENCE_S)
    return adapter_digest(service, told)


def run(service: TinkerService, url: str, *, pause_s: float) -> SdkProgram:
    return SdkProgram.start("newest", url, service.folder, LOOP, BASE, "60", str(pause_s))


class Kills:
    """Kills what a program uses, and starts again what no node looks after."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service
        self.by_name: dict[str, Callable[[], Awaitable[object]]] = {
            "trainer": lambda: service.job.kill("trainer"),
            "sampler": lambda: service.job.kill("sampler-0"),
            "gateway": self._gateway,
            "scheduler": lambda: self._of_pool("scheduler"),
            "node": lambda: self._of_pool("node"),
            "nats-server": self._nats,
        }

    async def _gateway(self) -> None:
        gateway, stack = self._service.gateway, self._service.stack
        gateway.process.kill()
        await asyncio.to_thread(gateway.process.wait)
        port = gateway.url.rpartition(":")[2]
        gateway.process = start(stack.server.url, gateway.log.parent, "--port", port)
        await eventually(gateway.alive, "the gateway to answer")

    async def _of_pool(self, role: str) -> None:
        self._service.stack.kill(role)
        self._service.stack.start(role)

    async def _nats(self) -> None:
        server: NatsServer = self._service.stack.server
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)


async def test_whatever_is_killed_in_a_run_changes_no_bit_of_its_adapter(
    service: TinkerService, undisturbed: str
) -> None:
    seed = int(os.environ.get("TINKERMQ_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"TINKERMQ_KILL_SEED={seed}")
    rng, kills = random.Random(seed), Kills(service)
    names = [*kills.by_name, *rng.choices(list(kills.by_name), k=2)]
    rng.shuffle(names)
    steps = sorted(rng.sample(range(2, 56), len(names)))
    program = run(service, service.gateway.url, pause_s=0.02)
    for name, step in zip(names, steps, strict=True):
        await until_step(program, step)
        await asyncio.sleep(rng.random() * 0.2)  # anywhere within a step
        print(f"step {step}: {name}")
        await kills.by_name[name]()
    told = await program.done(_PATIENCE_S)
    assert "Traceback" not in told
    assert adapter_digest(service, told) == undisturbed
    assert await service.job.events("replay_differs") == []


async def test_answers_that_are_lost_change_no_bit_either(
    service: TinkerService, undisturbed: str
) -> None:
    async with DroppingProxy(int(service.gateway.url.rpartition(":")[2])).running() as proxy:
        told = await run(service, proxy.url, pause_s=0).done(_PATIENCE_S)
        assert proxy.num_dropped > 50
    assert "Traceback" not in told
    assert adapter_digest(service, told) == undisturbed


async def until_step(program: SdkProgram, step: int) -> None:
    def there() -> bool:
        assert program.process.poll() in (None, 0), program.told
        return f"step {step}\n" in program.told

    await until(there, f"step {step}")
