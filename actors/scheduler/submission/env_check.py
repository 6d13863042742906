"""Having a node try a job that is not submitted: play its game (`tinkermq env check --on-node`), or
look into its model with the code of the run (`tinkermq train --dry-run` from a light client).

A node needs some seconds, and a request waits for less: the client asks again, by the same id,
until the check is done.
"""

import asyncio
from typing import NamedTuple

from ....broker.client.connection import Broker
from ....broker.client.rpc import RequestContext
from ....schemas.config.job import JobConfig
from ....schemas.job import ActorPlacement, JobRecord, SubmitRequest
from ....schemas.node import (
    GameCheckReply,
    GameCheckRequest,
    InspectQuestion,
    PlayAnswer,
    PlayQuestion,
)
from ....schemas.wire.errors import BusyError, ConfigError, GameError, ModelError
from ..jobs.actors import wanted_actor
from .dry_run import TrialSubmission
from .model_check import ask_node

ANSWER_S = 3.0
"""After which a client is told to ask again."""
KEPT_S = 60.0
"""How long an answer waits for a client that is away."""
_NODE_S = 90.0
_INSPECT_S = 150.0


class _Check(NamedTuple):
    request_id: str
    task: asyncio.Task[GameCheckReply]


class GameChecks:
    """The checks of all users, of each the last one."""

    def __init__(self, broker: Broker, trial: TrialSubmission) -> None:
        """Check nothing yet; `trial` says what a job would be, and who has its game."""
        self._broker = broker
        self._trial = trial
        self._checks: dict[str, _Check] = {}

    async def answer(self, request: GameCheckRequest, context: RequestContext) -> GameCheckReply:
        """Say how far a check is, which begins with the first request of its id.

        Raises what `Submission.submit` does for a job that would be refused, GameError where no
        node has the game, BusyError while a check of this user runs, or the nodes try others.
        """
        user = context.user
        check = self._checks.get(user)
        if check is None or (check.request_id != request.request_id and check.task.done()):
            task = asyncio.create_task(self._check(user, request), name=f"game check of {user}")
            check = self._checks[user] = _Check(request.request_id, task)
            task.add_done_callback(lambda _: self._forget_later(user, check))
        elif check.request_id != request.request_id:
            raise BusyError(f"another check of user {user!r} runs", hint="wait for its end")
        await asyncio.wait({check.task}, timeout=ANSWER_S)
        if not check.task.done():
            return GameCheckReply(done=False)
        return check.task.result()

    def _forget_later(self, user: str, check: _Check) -> None:
        """Keep an answer for a while; a failure is gone at once, so that it can be tried again."""

        def forget() -> None:
            if self._checks.get(user) is check:
                del self._checks[user]

        failed = check.task.cancelled() or check.task.exception() is not None
        asyncio.get_running_loop().call_later(0.0 if failed else KEPT_S, forget)

    async def _check(self, user: str, request: GameCheckRequest) -> GameCheckReply:
        submitted = SubmitRequest(request_id=request.request_id, config=request.config)
        record, config = await self._trial.submission.tried(user, submitted)
        if request.look == "model":
            return await self._look_into(record, config)
        host = _host(config, record.actors)
        for name in await self._trial.having_game(config):
            answer = await self._play(name, record, host, config)
            if answer.trouble:
                raise GameError(f"node {name}: {answer.trouble}", hint=answer.hint)
            if answer.known:
                return GameCheckReply(done=True, node=name, checks=answer.checks)
        raise BusyError(
            "the nodes that have the game try another one, or are leaving",
            hint="ask again in a minute",
        )

    async def _look_into(self, record: JobRecord, config: JobConfig) -> GameCheckReply:
        """Have a node that has a job's model look into it; nothing is told where none can."""
        having = await self._trial.having_model(record, config)
        question = InspectQuestion(config=config.model_dump(mode="json", exclude_unset=True))
        for name in having:
            unknown = PlayAnswer(known=False)
            answer = await ask_node(
                self._broker, name, "inspect", question, unknown, timeout_s=_INSPECT_S
            )
            if answer.trouble:
                raise ModelError(f"node {name}: {answer.trouble}", hint=answer.hint)
            if answer.known:
                return GameCheckReply(done=True, node=name, checks=answer.checks)
        return GameCheckReply(done=True)

    async def _play(
        self, name: str, record: JobRecord, host: ActorPlacement, config: JobConfig
    ) -> PlayAnswer:
        question = PlayQuestion(
            wanted=wanted_actor(record, host, config),
            env=config.env.model_dump(mode="json", exclude_unset=True),
            seed=config.seed,
        )
        unknown = PlayAnswer(known=False)
        return await ask_node(self._broker, name, "play", question, unknown, timeout_s=_NODE_S)


def _host(config: JobConfig, actors: list[ActorPlacement]) -> ActorPlacement:
    """Return the environment host that a job would have; ConfigError for one without."""
    if config.agent.runs_programs:
        raise ConfigError(
            "an agent job has no game", hint="try its program: `tinkermq agent check FILE`"
        )
    host = next((one for one in actors if one.role == "environment"), None)
    if host is None:
        raise ConfigError(
            "no node would play this game: env.hosts=0 leaves it to clients",
            hint="check it here, without --on-node",
        )
    return host
