"""A host knows for how long all of its workers play, some, and none."""

import asyncio
import threading

from tinkermq.broker.metering import TimeUse
from tinkermq.envs import StepResult
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.envs.running.episodes import Opening
from tinkermq.envs.running.runners import TimedRunner, make_runner
from tinkermq.schemas.config.job import EnvConfig

from tests.support.waiting import PATIENCE_S


class HeldBandit(BanditGame):
    """A bandit that answers when the test says so."""

    released = threading.Semaphore(0)

    def step(self, action: str) -> StepResult:
        """Wait, then pull the arm."""
        assert self.released.acquire(timeout=PATIENCE_S)
        return super().step(action)


async def test_the_workers_of_a_host_are_all_at_work_some_or_none() -> None:
    now = 0.0
    use = TimeUse("full", "play", rest="idle", clock=lambda: now)
    config = EnvConfig(game="none", workers=2)
    games = make_runner(config, HeldBandit)
    timed = TimedRunner(games, config, 2, use)
    await timed.start()
    for episode in "abc":
        await timed.reset(Opening(episode, seed=0))
    now = 1.0
    steps = [asyncio.ensure_future(timed.step(episode, "1")) for episode in "abc"]
    now = 3.0  # all three were asked; two play, and one waits for a worker
    HeldBandit.released.release()
    await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
    now = 7.0  # the two others play
    HeldBandit.released.release()
    await asyncio.wait([step for step in steps if not step.done()], return_when="FIRST_COMPLETED")
    now = 15.0  # the last one plays alone
    HeldBandit.released.release()
    await asyncio.wait(steps)
    now = 31.0
    assert use.totals() == {"full": 6.0, "play": 8.0, "idle": 17.0}
    await games.stop()
