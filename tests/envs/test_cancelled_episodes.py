"""Episodes that are cancelled at any await leave nothing at their hosts."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable

import pytest
from hosting import hosting
from tinkermq.envs import host_client
from tinkermq.envs.host import HostGone
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig

from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import until

KINDS = pytest.mark.parametrize(
    ("game", "isolation"),
    [("OwningGame", "thread"), ("OwningGame", "process"), ("WaitingOwner", None)],
    ids=["thread", "process", "async"],
)


@pytest.fixture
def given_back(tmp_path) -> Callable[..., Callable[[], Awaitable[None]]]:
    """Wait until a host and its games own nothing."""

    def make(client):
        async def check() -> None:
            await until(
                lambda: not client.host.num_running and not list(tmp_path.iterdir()),
                "the host and its games to own nothing",
            )

        return check

    return make


@KINDS
@pytest.mark.parametrize("holds", ["until it has begun", "shortly"])
async def test_an_episode_cancelled_at_any_await_of_its_start_or_step_owns_nothing(
    broker, scope, tmp_path, monkeypatch, given_back, game, isolation, holds
):
    if holds == "shortly":
        monkeypatch.setattr(host_client, "_HOLD_S", 0.005)
    numbers = itertools.count()
    async with hosting(
        broker,
        scope,
        f"owning_games:{game}",
        isolation=isolation,
        workers=1,
        kwargs={"folder": str(tmp_path)},
    ) as client:
        environments = Environments(broker, scope, EnvConfig(game="any"))

        async def play() -> None:
            episode = f"e{next(numbers)}"
            started = await environments.reset(episode, Start("train", None, 0))
            try:
                await environments.step(started.host, episode, 0, "go")
            finally:
                environments.close(started.host, episode)

        assert await cancel_everywhere(play, given_back(client)) > 2
        assert client.host.counts.failures == 0


async def test_an_episode_whose_host_ends_in_its_start_begins_at_another(
    broker, scope, tmp_path, monkeypatch
):
    monkeypatch.setattr(host_client, "_HOLD_S", 0.005)
    environments = Environments(broker, scope, EnvConfig(game="any"))
    start = Start("train", None, 0)
    async with contextlib.AsyncExitStack() as hosts:
        first = await hosts.enter_async_context(
            hosting(broker, scope, "broken_games:HangsInReset", drain_s=0)
        )
        resetting = asyncio.create_task(environments.reset("e-1", start))
        await until(lambda: first.host.num_running == 1, "the first host to begin it")
        first.stopping.set()
        with pytest.raises(HostGone):
            await resetting
        second = await hosts.enter_async_context(
            hosting(broker, scope, "owning_games:OwningGame", kwargs={"folder": str(tmp_path)})
        )
        assert (await environments.reset("e-2", start)).host == second.host.name
