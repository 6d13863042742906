"""A rank of a learner as an actor: it takes the learner's orders, a process of its own does them.

Each process of the learner that begins gets a new process here, so that nothing of one that has
died, or hangs in a collective, is in the way. The batch of a step is read from the rollout log.
"""

import asyncio
import contextlib
from functools import partial
from typing import Any

from ....broker.rollouts import RolloutLog
from ....schemas.control import RankOrder, RankState, rank_of
from ....schemas.rollout import Group
from ....schemas.wire.errors import NotFoundError, StateError, TinkermqError
from ....schemas.wire.ids import new_id
from ....schemas.wire.message import Empty
from ...runtime import JobContext
from ..training.orders import Order
from .child_ranks import RankProcess
from .placed_ranks import ANSWER_S

_LOOK_S = 0.5


class RankActor:
    """Serves one process of the learner after the other."""

    def __init__(self, context: JobContext) -> None:
        """Serve none yet."""
        self._context = context
        self._rank = rank_of(context.name)
        self._id = new_id()
        self._log = RolloutLog(context.broker, context.scope)
        self._learner = ""
        self._num_taken = 0
        self._taking = asyncio.Lock()
        self._asked = context.broker.clock()
        self._error = ""
        self._process: RankProcess | None = None
        self._orders: asyncio.Queue[RankOrder] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Take orders until the context is stopping."""
        service, name = self._context.service, self._context.name
        subject = partial(self._context.scope.rank, name)
        await service.endpoint("begin", subject("begin"), RankOrder, self._take)
        await service.endpoint("order", subject(f"order-{self._id}"), RankOrder, self._take)
        await service.endpoint("look", subject(f"look-{self._id}"), Empty, self._look)
        self._context.set_state("waiting")
        try:
            await self._context.stopping.wait()
            await self._until_let_go()
        finally:
            await self._end_process()

    async def _until_let_go(self) -> None:
        """Stay while the learner, which sees that this one drains, writes its last checkpoint."""
        clock = self._context.broker.clock
        while self._state().works and clock() - self._asked < ANSWER_S:  # noqa: ASYNC110  its process ends in its own time
            await asyncio.sleep(_LOOK_S)

    async def _take(self, order: RankOrder) -> RankState:
        """Take an order; one of another process of the learner than the last is refused."""
        async with self._taking:
            return await self._take_next(order)

    async def _take_next(self, order: RankOrder) -> RankState:
        if order.learner == self._learner and order.number < self._num_taken:
            return self._state()
        if order.do == "begin":
            await self._end_process()
            self._learner, self._num_taken, self._error = order.learner, 0, ""
            self._orders = asyncio.Queue()
            self._process = RankProcess.start(self._rank)
            self._work = asyncio.create_task(self._do_all(self._process), name="orders of a rank")
        elif (order.learner, order.number) != (self._learner, self._num_taken):
            raise StateError(
                f"{self._context.name} serves another process of the learner",
                hint="a learner that has been replaced ends by itself",
            )
        self._num_taken += 1
        if order.do == "end":
            await self._end_process(politely=True)
        else:
            self._orders.put_nowait(order)
        return self._state()

    async def _look(self, _: Empty) -> RankState:
        self._asked = self._context.broker.clock()
        return self._state()

    def _state(self) -> RankState:
        process = self._process
        if not self._error and process is not None and process.has_ended:
            self._error = process.why_ended()
        return RankState(
            rank=self._rank,
            process=self._id,
            learner=self._learner,
            host=self._context.presence.host,
            works=process is not None and not self._error,
            error=self._error,
            draining=self._context.stopping.is_set(),
        )

    async def _do_all(self, process: RankProcess) -> None:
        """Pass orders on to the process, with what they need of the log."""
        try:
            while True:
                order = await self._orders.get()
                groups = [await self._group(seq) for seq in order.seqs]
                self._context.set_state("working", version=order.fields.get("step"))
                told = Order(order.do, self._fields(order), groups)
                await asyncio.to_thread(told.send, process.orders)
                self._context.progressed()
        except TinkermqError as error:
            self._error = str(error)
        except OSError as error:
            self._error = self._error or f"its process takes no orders: {error}"

    def _fields(self, order: RankOrder) -> dict[str, Any]:
        """Return what the process must know; models may lie elsewhere on this machine."""
        if order.do != "begin":
            return order.fields
        return {
            **order.fields,
            "config": self._context.config.model_dump_json(exclude_unset=True),
        }

    async def _group(self, seq: int) -> Group:
        entry = await self._log.get(seq)
        if entry is None or entry.group is None:
            raise NotFoundError(f"entry {seq} of the rollout log, which a step trains, is gone")
        return entry.group

    async def _end_process(self, *, politely: bool = False) -> None:
        process, self._process = self._process, None
        if self._work is not None:
            self._work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._work
        if process is not None:
            if not politely:
                process.process.kill()
            await asyncio.to_thread(process.close)


async def run_rank(context: JobContext) -> int | None:
    """Be a rank of the job's learner until told to stop."""
    await context.serve_control()
    await RankActor(context).serve()
    return None
