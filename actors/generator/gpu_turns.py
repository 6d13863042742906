"""The generator's side of a GPU that it shares with the learner: its engines sleep when told to.

See `actors/learner/gpu_turns.py`. While the learner is away the engines stay as they are.
"""

import asyncio
from collections.abc import Iterable

from ...broker.client.rpc import call
from ...schemas.config.job import JobConfig
from ...schemas.control import GpuTurn, GpuTurnRequest
from ...schemas.wire.errors import BrokerError, DeadlineError, NotFoundError
from ..engine.engine import Engine
from ..engine.weight_updates import WeightFollower
from ..runtime import JobContext

_ANSWER_S = 10.0
_PAUSE_S = 0.2
_VERSION_S = 2.0
_NONE = -1
"""Number of no turn."""


class LearnerTurns:
    """What the learner on the same GPU asks for."""

    def __init__(self, context: JobContext) -> None:
        """Ask nothing yet."""
        self._context = context
        self._seen = _NONE
        self._asleep = True
        self._num_sleeps = 0

    async def begin(self) -> GpuTurn:
        """Wait until the engines may start, and return the turn.

        By then the learner has loaded its models.
        """
        with self._context.waiting("the learner to give the GPU"):
            while True:
                turn = await self._ask()
                if not turn.asleep:
                    self._asleep = False
                    return turn

    async def follow(self, engines: Iterable[Engine], follower: WeightFollower) -> None:
        """Let the engines sleep and wake as the learner asks, for ever.

        They wake with the version that the learner has trained meanwhile, or with the one at which
        they are kept. No weights are loaded while it trains.
        """
        engines = list(engines)
        while True:
            turn = await self._ask()
            if turn.asleep:
                follower.hold()
            else:
                follower.release()
            if turn.asleep and not self._asleep:
                for engine in engines:
                    # The version that the learner trains now will come before the engine wakes.
                    await engine.sleep(keep_weights=not follower.may_give_up(engine))
                self._asleep = True
                self._num_sleeps += 1
                self._context.numbers["sleeps"] = self._num_sleeps
                self._context.set_state("sleeping")
            elif not turn.asleep and self._asleep:
                if not follower.has_weights and turn.version < follower.version:
                    continue  # a learner that was started again has not come so far yet
                if not await _arrives(follower, turn.version) or not await follower.regain():
                    await asyncio.sleep(_PAUSE_S)
                    self._seen = _NONE  # to be answered at once
                    continue
                for engine in engines:
                    await engine.wake()
                self._asleep = False
                self._context.set_state("working")

    async def _ask(self) -> GpuTurn:
        """Ask for the turn; the answer comes with the next one, or after two seconds."""
        context = self._context
        while True:
            request = GpuTurnRequest(asleep=self._asleep, seen=self._seen)
            try:
                turn = await call(
                    context.broker,
                    context.scope.gpu_turn("learner"),
                    request,
                    GpuTurn,
                    timeout_s=_ANSWER_S,
                    waiting_for="the learner on this GPU",
                    idempotent=True,
                )
            except (NotFoundError, DeadlineError, BrokerError):
                await asyncio.sleep(_PAUSE_S)  # it is started again
                continue
            self._seen = turn.number
            return turn


async def _arrives(follower: WeightFollower, version: int) -> bool:
    """Wait a little for a version; False if the learner is to be asked again first."""
    try:
        async with asyncio.timeout(_VERSION_S):
            await follower.may_wake(version)
    except TimeoutError:
        return False
    return True


def with_share(config: JobConfig, turn: GpuTurn) -> JobConfig:
    """Return the configuration of engines that share a GPU as a turn says."""
    changes = {
        "memory_share": turn.memory_share,
        "sleep": "always" if turn.sleeps else "never",
    }
    return config.model_copy(update={"generator": config.generator.model_copy(update=changes)})
