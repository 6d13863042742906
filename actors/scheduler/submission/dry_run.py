"""Checks of a job without submission: dry runs, and checks on one node.

To inspect a model takes a node longer than a request may wait. The client therefore repeats its
request with the same id until the check is done.
"""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import NamedTuple

from ....broker.client.rpc import RequestContext
from ....schemas.checks import CheckReply, failed_check
from ....schemas.job import SubmitRequest
from ....schemas.node import InspectQuestion, InspectRequest
from ....schemas.wire import errors
from .submission import Submission

_ANSWER_S = 3.0
"""Longest wait for a check in one request."""
KEPT_S = 60.0
"""Time for which a reply is kept for a client that does not ask."""
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
        self._turns = NodeTurns()

    async def try_out(self, request: SubmitRequest, context: RequestContext) -> CheckReply:
        """Run the checks of a submission; nothing is created."""
        try:
            record, config = await self._submission.tried(context.user, request)
        except errors.TinkermqError as error:
            return CheckReply(results=[failed_check("job", error, "scheduler")])
        checks = self._submission.checks.run(record, config)
        return CheckReply(results=[result async for result in checks])

    async def inspect_model(self, request: InspectRequest, context: RequestContext) -> CheckReply:
        """Return the results of one node, once they are available.

        The check begins with the first request of its id. Raises what `Submission.submit` raises
        for a refused job, BusyError while another check of this user runs. Users take nodes in
        turn.
        """
        user = context.user
        check = self._checks.get(user)
        if check is None or (check.request_id != request.request_id and check.task.done()):
            task = asyncio.create_task(self._run(user, request), name=f"check of {user} on a node")
            check = self._checks[user] = _Check(request.request_id, task)
            task.add_done_callback(lambda _: self._forget_later(user, check))
        elif check.request_id != request.request_id:
            raise errors.BusyError(f"another check of user {user!r} runs", hint="wait for its end")
        await asyncio.wait({check.task}, timeout=_ANSWER_S)
        return check.task.result() if check.task.done() else CheckReply(done=False)

    def _forget_later(self, user: str, check: _Check) -> None:
        """Keep a reply for a while; forget an error at once, so that the client can retry."""

        def forget() -> None:
            if self._checks.get(user) is check:
                del self._checks[user]

        failed = check.task.cancelled() or check.task.exception() is not None
        asyncio.get_running_loop().call_later(0.0 if failed else KEPT_S, forget)

    async def _run(self, user: str, request: InspectRequest) -> CheckReply:
        """Request a node to inspect its model; without results if no node can."""
        submitted = SubmitRequest(request_id=request.request_id, config=request.config)
        record, config = await self._submission.tried(user, submitted)
        question = InspectQuestion(config=config.model_dump(mode="json", exclude_unset=True))
        nodes = await self._submission.checks.nodes_with_model(record, config)
        reply = await self._ask_one(nodes, question)
        return reply or CheckReply()

    async def _ask_one(self, nodes: list[str], question: InspectQuestion) -> CheckReply | None:
        """Return the reply of the first node that does a check; None if none does."""
        while nodes:
            async with self._turns.one_of(nodes) as node:
                reply = await self._submission.checks.ask_node(
                    node, "inspect", question, timeout_s=_INSPECT_S
                )
            if reply.done:
                by = {"by": f"node {node}"}
                return CheckReply(results=[item.model_copy(update=by) for item in reply.results])
            nodes = [other for other in nodes if other != node]
        return None
