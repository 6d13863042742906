"""Checks of a job without submission: dry runs, and checks on one node.

To play a game or inspect a model takes a node longer than a request may wait. The client therefore
repeats its request with the same id until the check is done.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import NamedTuple

from ....broker.client.rpc import RequestContext
from ....schemas.checks import CheckReply, failed_check
from ....schemas.config.job import JobConfig
from ....schemas.job import ActorPlacement, JobRecord, SubmitRequest
from ....schemas.node import GameCheckRequest, InspectQuestion, PlayQuestion
from ....schemas.wire import errors
from ....schemas.wire.message import Message
from ..jobs.states import wanted_actor
from .submission import Submission

GAME_ANSWER_S = 3.0
"""Longest wait for a check in one request."""
KEPT_S = 60.0
"""Time for which a reply is kept for a client that does not ask."""
_PLAY_S = 90.0
_INSPECT_S = 150.0


class _Check(NamedTuple):
    request_id: str
    task: asyncio.Task[CheckReply]


class NodeTurns:
    """Nodes, each of which checks one job at a time, for users in the order of their requests."""

    def __init__(self) -> None:
        """All nodes are free."""
        self._busy = set[str]()
        self._freed = asyncio.Event()
        self._first = asyncio.Lock()

    @asynccontextmanager
    async def one_of(self, nodes: Collection[str]) -> AsyncIterator[str]:
        """Hold the first free one of some nodes."""
        async with self._first:
            while not (free := [node for node in nodes if node not in self._busy]):
                self._freed.clear()
                await self._freed.wait()
            self._busy.add(free[0])
        try:
            yield free[0]
        finally:
            self._busy.remove(free[0])
            self._freed.set()


class DryRuns:
    """Dry runs of all users, and each user's last check on a node."""

    def __init__(self, submission: Submission) -> None:
        """Check jobs as `submission` would create them."""
        self._submission = submission
        self._checks: dict[str, _Check] = {}
        self._playing, self._inspecting = NodeTurns(), NodeTurns()

    async def try_out(self, request: SubmitRequest, context: RequestContext) -> CheckReply:
        """Run the checks of a submission; nothing is created."""
        try:
            record, config = await self._submission.tried(context.user, request)
        except errors.TinkermqError as error:
            return CheckReply(results=[failed_check("job", error, "scheduler")])
        checks = self._submission.checks.run(record, config)
        return CheckReply(results=[result async for result in checks])

    async def check_on_node(self, request: GameCheckRequest, context: RequestContext) -> CheckReply:
        """Return the results of one node, once they are available.

        The check begins with the first request of its id. Raises what `Submission.submit` raises
        for a refused job, DataError or GameError if no node has the data or the game, BusyError
        while another check of this user runs, or if no node answers. Users take nodes in turn.
        """
        user = context.user
        check = self._checks.get(user)
        if check is None or (check.request_id != request.request_id and check.task.done()):
            task = asyncio.create_task(self._run(user, request), name=f"check of {user} on a node")
            check = self._checks[user] = _Check(request.request_id, task)
            task.add_done_callback(lambda _: self._forget_later(user, check))
        elif check.request_id != request.request_id:
            raise errors.BusyError(f"another check of user {user!r} runs", hint="wait for its end")
        await asyncio.wait({check.task}, timeout=GAME_ANSWER_S)
        return check.task.result() if check.task.done() else CheckReply(done=False)

    def _forget_later(self, user: str, check: _Check) -> None:
        """Keep a reply for a while; forget an error at once, so that the client can retry."""

        def forget() -> None:
            if self._checks.get(user) is check:
                del self._checks[user]

        failed = check.task.cancelled() or check.task.exception() is not None
        asyncio.get_running_loop().call_later(0.0 if failed else KEPT_S, forget)

    async def _run(self, user: str, request: GameCheckRequest) -> CheckReply:
        submitted = SubmitRequest(request_id=request.request_id, config=request.config)
        record, config = await self._submission.tried(user, submitted)
        return await (
            self._inspect(record, config) if request.look == "model" else self._play(record, config)
        )

    async def _inspect(self, record: JobRecord, config: JobConfig) -> CheckReply:
        """Request a node to inspect its model; without results if no node can."""
        question = InspectQuestion(config=config.model_dump(mode="json", exclude_unset=True))
        nodes = await self._submission.checks.nodes_with_model(record, config)
        reply = await self._ask_one(self._inspecting, nodes, "inspect", question, _INSPECT_S)
        return reply or CheckReply()

    async def _play(self, record: JobRecord, config: JobConfig) -> CheckReply:
        question = PlayQuestion(
            wanted=wanted_actor(record, _find_host(record, config), config),
            env=config.env.model_dump(mode="json", exclude_unset=True),
            seed=config.seed,
        )
        nodes = await self._submission.checks.nodes_with_inputs(record, config)
        reply = await self._ask_one(self._playing, nodes, "play", question, _PLAY_S)
        if reply is None:
            raise errors.BusyError(
                "the nodes that have the game are leaving, or do not answer",
                hint="ask again in a minute",
            )
        return reply

    async def _ask_one(
        self, turns: NodeTurns, nodes: list[str], verb: str, question: Message, timeout_s: float
    ) -> CheckReply | None:
        """Return the reply of the first node that does a check; None if none does."""
        while nodes:
            async with turns.one_of(nodes) as node:
                reply = await self._submission.checks.ask_node(
                    node, verb, question, timeout_s=timeout_s
                )
            if reply.done:
                by = {"by": f"node {node}"}
                return CheckReply(results=[item.model_copy(update=by) for item in reply.results])
            nodes = [other for other in nodes if other != node]
        return None


def _find_host(record: JobRecord, config: JobConfig) -> ActorPlacement:
    """Return the job's environment host; ConfigError if it has none."""
    if config.agent.runs_programs:
        raise errors.ConfigError(
            "an agent job has no game", hint="try its program: `tinkermq agent check FILE`"
        )
    host = next((actor for actor in record.actors if actor.role == "environment"), None)
    if host is None:
        raise errors.ConfigError(
            "no node would play this game: env.hosts=0 leaves it to clients",
            hint="check it here, without --on-node",
        )
    return host
