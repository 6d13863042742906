"""A host's proxy, leases and calls that are cancelled at any await leave nothing open."""

import asyncio
import contextlib
import itertools
import socket

from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.leases import EpisodeLease, LeaseRunner
from tinkermq.envs.agents.local_run import SCOPE, LocalModel
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.envs.running.episodes import Opening
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import PATIENCE_S, until


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


async def test_a_proxy_cancelled_at_any_await_of_its_start_or_end_stops_listening(
    broker: Broker, scope: JobScope
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])

    async def play() -> None:
        async with ModelProxy(broker, scope, port=port, gateway="https://pool") as proxy:
            proxy.open(ProgramEpisode("t1-0", {}, job=scope.job, key="a key"))

    async def given_back() -> None:
        await until(lambda: is_free(port), "the port to be free")

    assert await cancel_everywhere(play, given_back) > 3


async def test_a_lease_cancelled_or_dropped_at_any_moment_frees_its_place(
    broker: Broker, scope: JobScope
) -> None:
    given: list[EpisodeLease] = []
    numbers = itertools.count()
    async with ModelProxy(broker, scope) as proxy:
        runner = LeaseRunner(AgentConfig(client=True, per_host=1), proxy, given.append)

        async def play() -> None:
            name = f"e{next(numbers)}"
            await runner.reset(Opening(name, 0))
            runner.drop(name)  # before its task has begun to run

        async def wait_and_play() -> None:
            await runner.reset(Opening("held", 0))
            asyncio.get_running_loop().call_later(0.01, runner.drop, "held")
            await play()

        async def given_back() -> None:
            for name in ("held", *(lease.episode.episode for lease in given)):
                runner.drop(name)
            await until(lambda: not proxy.num_episodes, "the keys to be given back")
            async with asyncio.timeout(PATIENCE_S):
                await play()

        for work in (play, wait_and_play):
            await cancel_everywhere(work, given_back)


async def test_a_model_cancelled_at_any_await_of_its_start_no_longer_answers(
    broker: Broker,
) -> None:
    async def answer() -> None:
        async with LocalModel(broker, lambda _: asyncio.sleep(0, "yes"), 1).answering("t1-0"):
            pass

    async def nobody_listens() -> None:
        mine = SCOPE.episode("t1-0", "*").removesuffix("*")
        subjects = [sub.subject for sub in broker.nc._subs.values()]
        assert not [subject for subject in subjects if subject.startswith(mine)]

    assert await cancel_everywhere(answer, nobody_listens) > 1
