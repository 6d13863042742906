"""The ranks beside rank 0: child processes, or actors placed on nodes by the scheduler.

Orders are sent to actors as requests, without groups: each rank reads the batch from the rollout
log. The learner polls all ranks, because a broken connection is silent and a collective would wait
for it.

A rank is an actor that receives the learner's orders and runs them in a child process. Each new
process of the learner gets a new child process, so that one that has died, or hangs in a
collective, does no harm.
"""

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import structlog

from ....broker.client.rpc import call
from ....broker.rollouts import RolloutLog
from ....schemas.config.job import JobConfig
from ....schemas.control import RankOrder, RankState, rank_name, rank_of
from ....schemas.local.process import die_with
from ....schemas.rollout import Group
from ....schemas.wire.errors import (
    BrokerError,
    ConfigError,
    DeadlineError,
    EngineError,
    NobodyAnswersError,
    NotFoundError,
    OutOfMemoryError,
    StateError,
    TinkermqError,
)
from ....schemas.wire.message import Empty, new_id
from ...addresses import own_address, server_of
from ...runtime import EXIT_CRASHED, EXIT_FAILED, EXIT_OUT_OF_MEMORY, JobContext
from ...training.parallel import COLLECTIVE_DEADLINE_S, Meeting
from ...training.progress import RankProgress
from ...training.ranks import Order, Ranks

# -- ranks that are child processes of rank 0: for a replay, and to check a machine ----------------
# They receive each piece of work through a pipe. They end with rank 0; if one ends by itself, the
# work fails.

_CHILD_END_S = 5.0
"""Time for a rank to end on request; it has nothing to write then."""
_CHILD_SEEN_END_S = 5.0
"""Time after a failure here within which the end of another rank counts as its cause."""
_CHILD_LOOK_S = 0.2
_MOST_TOLD = 4096
_log = structlog.get_logger()


@dataclass(frozen=True)
class _RankProcess:
    """A process of a rank; it ends when the pipe closes."""

    rank: int
    process: subprocess.Popen[bytes]
    orders: Connection
    status_fd: int
    """Descriptor from which the reason for its end is read."""
    progress_fd: int
    """Descriptor from which its `RankProgress` is read."""

    @classmethod
    def start(cls, rank: int) -> "_RankProcess":
        """Start a process; call it on the main thread, as the process ends with the thread."""
        reading, writing = os.pipe()
        status_fd, telling = os.pipe()
        progress_fd = os.memfd_create(f"rank-{rank}")
        module = "tinkermq.actors.learner.ranks.worker"
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, (rank, telling, progress_fd))],
                stdin=reading,
                pass_fds=[telling, progress_fd],
                preexec_fn=die_with(os.getpid()),
            )
        finally:
            os.close(reading)
            os.close(telling)
        return cls(rank, process, Connection(writing, readable=False), status_fd, progress_fd)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def was_out_of_memory(self) -> bool:
        """Whether the process ended because a step did not fit on its GPU."""
        return self.process.poll() == EXIT_OUT_OF_MEMORY

    @property
    def was_final(self) -> bool:
        """Whether the process ended by an error that it would meet again."""
        return self.process.poll() == EXIT_FAILED

    @property
    def progress(self) -> RankProgress:
        """What the process last reported."""
        return RankProgress.read(self.progress_fd)

    def why_ended(self) -> str:
        """Return how the process ended; call it once."""
        last = os.read(self.status_fd, _MOST_TOLD).decode(errors="replace")
        return f"its process ended with code {self.process.returncode}" + (last and f": {last}")

    def close(self, patience_s: float = _CHILD_END_S) -> None:
        """End the process, by force after `patience_s`."""
        if not self.orders.closed:
            self.orders.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            _log.warning("rank_killed", rank=self.rank, after_s=patience_s)
            self.process.kill()
            self.process.wait()
        os.close(self.status_fd)
        os.close(self.progress_fd)


class ChildRanks(Ranks):
    """The ranks of one machine, as child processes."""

    def __init__(self, config: JobConfig, children: Sequence[_RankProcess]) -> None:
        """Send orders to started processes."""
        super().__init__(config)
        self._children = children

    @classmethod
    def start(cls, config: JobConfig) -> "ChildRanks":
        """Start the configured ranks; call it on the main thread, as they end with it."""
        return cls(config, [_RankProcess.start(rank) for rank in range(1, config.learner.ranks)])

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks from 1 on."""
        return [child.process.pid for child in self._children]

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Send an order to all ranks for the duration of the block, which does the same here.

        Raises EngineError if one of them has ended.
        """
        with self.explaining(order):
            for child in self._children:
                order.send(child.orders)
            yield

    @contextlib.contextmanager
    def explaining(self, order: Order) -> Iterator[None]:
        """Raise EngineError in place of another error in the block, if a rank has ended."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            if self._children and (ended := self._wait_for_end()) is not None:
                raise _ended(ended, order) from error
            raise

    async def watch(self) -> None:
        """Raise EngineError as soon as a rank ends."""
        while True:
            if (ended := self._first_ended()) is not None:
                raise _ended(ended, None)
            await asyncio.sleep(_CHILD_LOOK_S)

    def close(self) -> None:
        """End all ranks."""
        for child in self._children:
            child.orders.close()
        super().close()
        for child in self._children:
            child.close()

    def _first_ended(self) -> _RankProcess | None:
        return next((child for child in self._children if child.has_ended), None)

    def _wait_for_end(self) -> _RankProcess | None:
        """Wait for the end of a process whose connection has broken."""
        deadline = time.monotonic() + _CHILD_SEEN_END_S
        while (ended := self._first_ended()) is None and time.monotonic() < deadline:
            time.sleep(_CHILD_LOOK_S)
        return ended


def _ended(child: _RankProcess, order: Order | None) -> TinkermqError:
    place = f"(process {child.process.pid}) ended in {child.progress}"
    text = f"rank {child.rank} of the learner {place}: "
    if child.was_out_of_memory:
        return _rank_out_of_memory(f"{text}{child.why_ended()}", order)
    return (ConfigError if child.was_final else EngineError)(
        f"{text}{child.why_ended()}",
        hint="see its lines in the learner's log; code -9 without a line often means that the "
        "machine was out of memory",
    )


def _rank_out_of_memory(text: str, order: Order | None) -> OutOfMemoryError:
    """Return the error of a rank whose order did not fit on its GPU."""
    error = OutOfMemoryError(text, hint="lower learner.microbatch_tokens")
    if order is not None and order.do == "step":
        error.step = order.fields["step"]
        error.microbatch_tokens = order.fields["microbatch_tokens"]
    return error


# -- ranks that are actors -------------------------------------------------------------------------

T = TypeVar("T")

COME_S = 300.0
"""Time for a rank to start after the learner; its node may be starting others."""
ANSWER_S = 10.0
"""A rank without an answer for this long counts as ended."""
HANG_S = 45.0
"""A rank whose process has not run for this long has failed; one for which the others have waited
for this long is named."""
_LEAST_DEADLINE_S = 4 * HANG_S
_OF_LONGEST = 5
"""A rank for which others wait has failed after so many times the longest duration of its phase, at
least `_LEAST_DEADLINE_S` and at most `COLLECTIVE_DEADLINE_S`, the deadline of a phase's first time,
when weights are read or layers compiled."""
_LOOK_S = 1.0
_SEEN_END_S = 3.0
"""Time after a failure here within which the end of another rank counts as its cause."""
_END_S = 15.0
"""Time for this process to report a rank that has ended; a collective may block it."""


class _Waits:
    """Finds ranks for which others wait, by the numbers of collectives that they have begun."""

    def __init__(self) -> None:
        """No rank is known."""
        self._counts: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._named: set[str] = set()
        self.waited_s: dict[str, float] = {}
        """For how long others have waited for each."""

    def late(
        self, counts: Mapping[str, int], now: float, longest_s: Mapping[str, float] | None = None
    ) -> list[str]:
        """Return the ranks for which others have waited for `HANG_S`, each once until it goes on.

        A rank whose phase has lasted for longer before has that long. While all ranks have begun as
        many, each computes.
        """
        newest = max(counts.values())
        for name, count in counts.items():
            if count != self._counts.get(name) or count == newest:
                self._counts[name], self._since[name] = count, now
                self._named.discard(name)
        self.waited_s = {name: now - self._since[name] for name in counts}
        bounds = {name: max(HANG_S, (longest_s or {}).get(name, 0.0)) for name in counts}
        late = [name for name in counts if self.waited_s[name] > bounds[name]]
        new = [name for name in late if name not in self._named]
        self._named.update(new)
        return new


def deadline_s(longest_s: float | None) -> float:
    """Return for how long ranks wait for one in a phase whose longest duration is `longest_s`."""
    if longest_s is None:
        return COLLECTIVE_DEADLINE_S
    return min(COLLECTIVE_DEADLINE_S, max(_LEAST_DEADLINE_S, _OF_LONGEST * longest_s))


class PlacedRanks(Ranks):
    """The other ranks of a job's learner, each an actor."""

    def __init__(self, context: JobContext) -> None:
        """There is no connection yet; call it on the event loop."""
        super().__init__(context.config)
        self._context = context
        self._names = [rank_name(rank) for rank in range(1, context.config.learner.ranks)]
        self._learner = new_id()
        self._processes: dict[str, str] = {}
        self._loop = asyncio.get_running_loop()
        self._num_orders = 0
        self._begun = self._busy = False
        self._failure: TinkermqError | None = None
        self._order_now: Order | None = None
        self._waits, self._waits_in_saves = _Waits(), _Waits()
        self._seen: dict[str, RankState] = {}
        self._marks: object = None
        self._marked_at = 0.0

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Send an order to all ranks for the duration of the block, which does the same here.

        Raises EngineError if one of them has ended.
        """
        self._order_now = order
        self._wait(self._send_order(order))
        self._begun = self._busy = True
        try:
            with self.explaining(order), order.during(self._progress.training):
                yield
        finally:
            self._busy = False

    @contextlib.contextmanager
    def explaining(self, order: Order) -> Iterator[None]:
        """Raise EngineError in place of torch's error in the block, if a rank has ended."""
        try:
            yield
        except RuntimeError as error:  # torch.distributed raises nothing more specific
            if (ended := self._wait(self._find_ended())) is not None:
                raise ended from error
            raise

    async def watch(self) -> None:
        """Raise EngineError once a rank has ended or hangs; this process ends soon after that."""
        clock = self._context.broker.clock
        answered_at = dict.fromkeys(self._names, clock())
        while True:
            if not self._begun:
                answered_at = dict.fromkeys(self._names, clock())
            elif (failure := await self._check_all(answered_at)) is not None:
                raise failure
            await asyncio.sleep(_LOOK_S)

    async def _check_all(self, answered_at: dict[str, float]) -> TinkermqError | None:
        """Return the error of a rank that has ended or hangs; note who answers."""
        clock = self._context.broker.clock
        begun = clock()
        answers = await asyncio.gather(*map(self._read_state, self._names))
        if clock() - begun > ANSWER_S:  # this process itself was stopped
            answered_at |= dict.fromkeys(self._names, clock())
        there = {rank_name(status.rank): status for status in answers if status is not None}
        answered_at |= dict.fromkeys(there, clock())
        if any(status.draining for status in there.values()):
            if not self._context.stopping.is_set():
                self._context.log.info("learner_drains_with_its_ranks")
            self._context.stopping.set()
        if (failed := next((name for name in there if there[name].error), None)) is not None:
            return await self._fail(failed, self._ended(there[failed]))
        self._seen |= there
        if late := await self._overdue(there):
            return await self._fail(late, _rank_ended(self._why_late(late)))
        silent = next((name for name, at in answered_at.items() if clock() - at > ANSWER_S), None)
        if silent is None:
            return None
        silence = f"{self._place(silent)} has not answered for {ANSWER_S:g} s"
        return await self._fail(silent, _rank_ended(silence))

    async def _fail(self, name: str, error: TinkermqError) -> TinkermqError:
        """Report the first failure of a rank; end this process soon, which may hang."""
        if self._failure is None:
            self._failure = error
            _end_within(_END_S)
            with contextlib.suppress(TinkermqError):
                await self._context.event("rank_failed", error.message, actor=name)
        return self._failure

    async def _overdue(self, there: Mapping[str, RankState]) -> str:
        """Report ranks for which others wait in a collective; return one after its deadline.

        A save may wait for a disk for as long as it takes, while training goes on.
        """
        own, now = self._progress.read(), self._context.broker.clock()
        counts = {name: status.collectives for name, status in there.items()}
        counts["learner"] = own.collectives
        saves = {name: status.saves for name, status in there.items()} | {"learner": own.saves}
        phases = {name: status.phase for name, status in there.items()} | {"learner": own.phase}
        known_s = self._progress.training.longest_s
        longest_s = {name: known_s[phase] for name, phase in phases.items() if phase in known_s}
        write_s = self._progress.saving.longest_s.get("write", 0.0)
        late = self._waits_in_saves.late(saves, now, dict.fromkeys(saves, write_s))
        if self._busy:
            late += self._waits.late(counts, now, longest_s)
        else:
            self._waits = _Waits()
        for name in late:
            await self._context.event("rank_late", self._why_late(name), actor=name)
        marks = (self._num_orders, own.collectives, phases)
        all_wait = self._busy and {*counts.values()} == {own.collectives}
        if all_wait and self._stalls(marks, own.phase, now):
            places = ", ".join(map(self._place, ["learner", *self._names]))
            await self._context.event("rank_late", f"no rank of the learner goes on: {places}")
        for name, waited_s in self._waits.waited_s.items():
            if waited_s > deadline_s(longest_s.get(name)):
                return name
        return ""

    def _stalls(self, marks: object, phase: str, now: float) -> bool:
        """Return once that no rank goes on in a phase of known duration, by the marks of all."""
        if marks != self._marks:
            self._marks, self._marked_at = marks, now
        unknown_s = 0.0 if phase == "meet" else math.inf
        longest_s = self._progress.training.longest_s.get(phase, unknown_s)
        stalls = now - self._marked_at > max(HANG_S, _OF_LONGEST * longest_s)
        if stalls:
            self._marked_at = math.inf
        return stalls

    def _why_late(self, name: str) -> str:
        waits = (self._waits.waited_s, self._waits_in_saves.waited_s)
        seconds = max(waited_s.get(name, 0.0) for waited_s in waits)
        text = f"{self._place(name)} hangs or is slow: the other ranks of the learner have waited"
        return f"{text} for {seconds:.0f} s for it"

    def _place(self, name: str) -> str:
        """Return a rank with its host and what it was seen to do last."""
        if name == "learner":
            return f"learner on {self._context.presence.host} in {self._progress.read()}"
        seen = self._seen.get(name)
        return name if seen is None else f"{name} on {seen.host} in {seen.doing}"

    def close(self) -> None:
        """Leave the other ranks, which then end this process's work."""
        if self._failure is not None:
            return
        if self._begun:
            with contextlib.suppress(TinkermqError):
                self._wait(self._send_order(Order("end", {})))
        super().close()

    def _meet(self) -> Meeting:
        return Meeting.open(own_address(*server_of(self._context.broker)), apart=True)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Await something on the event loop, from the computing thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _send_order(self, order: Order) -> None:
        fields = {key: value for key, value in order.fields.items() if key != "config"}
        request = RankOrder(
            learner=self._learner,
            number=self._num_orders,
            do=order.do,
            fields=fields,
            seqs=list(order.seqs),
        )
        self._num_orders += 1
        begins = order.do == "begin"
        patience_s = COME_S if begins else ANSWER_S
        await asyncio.gather(*(self._order(name, request, patience_s) for name in self._names))

    async def _order(self, name: str, request: RankOrder, patience_s: float) -> None:
        """Send an order to one rank; the learner waits until the rank has started."""
        broker, scope = self._context.broker, self._context.scope
        deadline = broker.clock() + patience_s
        begins = request.do == "begin"
        subject = scope.rank(name, "begin" if begins else f"order-{self._processes[name]}")
        with self._context.waiting(name):
            while True:
                try:
                    reply = await call(
                        broker,
                        subject,
                        request,
                        RankState,
                        timeout_s=ANSWER_S,
                        waiting_for=name,
                    )
                except (NobodyAnswersError, DeadlineError, BrokerError) as error:
                    if broker.clock() > deadline:
                        text = f"{name} accepts no order ({request.do}): {error}"
                        raise _rank_ended(text) from error
                    await asyncio.sleep(_LOOK_S)
                except StateError as error:
                    raise _rank_ended(str(error)) from error
                else:
                    self._processes[name] = reply.process
                    return

    async def _read_state(self, name: str) -> RankState | None:
        """Return the state of a rank, None without an answer; a restarted rank has failed."""
        try:
            status = await call(
                self._context.broker,
                self._context.scope.rank(name, f"look-{self._processes[name]}"),
                Empty(),
                RankState,
                timeout_s=ANSWER_S / 2,
                waiting_for=name,
                idempotent=True,
            )
        except TinkermqError as error:
            _log.debug("rank_did_not_answer", rank=name, error=error.message)
            return None
        if status.learner != self._learner:
            return status.model_copy(update={"error": f"{self._place(name)} was started anew"})
        why = status.error
        if not why and status.silent_s > HANG_S:
            why = f"its process hangs: it has not run for {status.silent_s:.0f} s"
        error = f"{name} on {status.host} in {status.doing}: {why}" if why else ""
        return status.model_copy(update={"error": error})

    def _ended(self, status: RankState) -> TinkermqError:
        error = _rank_ended(status.error, is_final=status.is_final)
        return (
            _rank_out_of_memory(error.message, self._order_now) if status.out_of_memory else error
        )

    async def _find_ended(self) -> TinkermqError | None:
        """Wait for the end of a rank with a broken connection; return its error."""
        deadline, silent = self._loop.time() + _SEEN_END_S, ""
        while self._loop.time() < deadline:
            answers = await asyncio.gather(*map(self._read_state, self._names))
            states = dict(zip(self._names, answers, strict=True))
            for name, status in states.items():
                if status is not None and status.error:
                    return await self._fail(name, self._ended(status))
            silent = next((name for name in states if states[name] is None), "")
            await asyncio.sleep(_LOOK_S / 4)
        if not silent:
            return None
        why = f"a connection broke, and {self._place(silent)} does not answer"
        return await self._fail(silent, _rank_ended(why))


def _rank_ended(why: str, *, is_final: bool = False) -> TinkermqError:
    if is_final:
        return ConfigError(
            f"a rank of the learner has ended: {why}",
            hint="see its log (`tinkermq logs RUN --actor rank-1`)",
        )
    return EngineError(
        f"a rank of the learner has ended: {why}",
        hint="see its log (`tinkermq logs RUN --actor rank-1`); code -9 without a log line often "
        "means that the machine was out of memory. The run continues from its last checkpoint",
    )


def _end_within(seconds: float) -> None:
    """End this process even if one of its threads hangs in a collective."""
    timer = threading.Timer(seconds, os._exit, (EXIT_CRASHED,))
    timer.daemon = True
    timer.start()


# -- the actor of one rank -------------------------------------------------------------------------

_ORDERS_LOOK_S = 0.5


class RankActor:
    """Serves one process of the learner after another."""

    def __init__(self, context: JobContext) -> None:
        """There is no process to serve yet."""
        self._context = context
        self._rank = rank_of(context.name)
        self._id = new_id()
        self._log = RolloutLog(context.broker, context.scope)
        self._learner = ""
        self._num_taken = 0
        self._taking = asyncio.Lock()
        self._last_request = context.broker.clock()
        self._is_looked_at = False
        """Whether the learner has begun to look."""
        self._error = ""
        self._out_of_memory, self._is_final = False, False
        self._process: _RankProcess | None = None
        self._orders: asyncio.Queue[RankOrder] = asyncio.Queue()
        self._work: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Accept orders until the context is stopping."""
        service, name = self._context.service, self._context.name
        subject = partial(self._context.scope.rank, name)
        await service.endpoint("begin", subject("begin"), RankOrder, self._accept_order)
        await service.endpoint("order", subject(f"order-{self._id}"), RankOrder, self._accept_order)
        await service.endpoint("look", subject(f"look-{self._id}"), Empty, self._read_state)
        self._context.set_state("waiting")
        watching = asyncio.create_task(self._watch_learner(), name="looks of the learner")
        try:
            await self._context.stopping.wait()
            await self._wait_for_release()
        finally:
            watching.cancel()
            await self._end_process()

    async def _watch_learner(self) -> None:
        """Report a learner that stops looking for its ranks amid an order."""
        clock, reported = self._context.broker.clock, 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            last, state = self._last_request, self._state()
            is_silent = self._is_looked_at and clock() - last > HANG_S and last != reported
            if is_silent and state.works and state.phase:
                reported = last
                text = "learner hangs, or its machine is away: it has not looked for its ranks for "
                text += f"{HANG_S:g} s; {self._context.name} on {state.host} in {state.doing} waits"
                with contextlib.suppress(TinkermqError):
                    await self._context.event("rank_late", text, actor="learner")

    async def _wait_for_release(self) -> None:
        """Wait while the learner writes its last checkpoint because this rank drains."""
        clock = self._context.broker.clock
        while self._state().works and clock() - self._last_request < ANSWER_S:  # noqa: ASYNC110  its process ends in its own time
            await asyncio.sleep(_ORDERS_LOOK_S)

    async def _accept_order(self, order: RankOrder) -> RankState:
        """Accept an order; refuse one from a replaced process of the learner."""
        async with self._taking:
            return await self._take_next(order)

    async def _take_next(self, order: RankOrder) -> RankState:
        if order.learner == self._learner and order.number < self._num_taken:
            return self._state()
        if order.do == "begin":
            await self._end_process()
            self._learner, self._num_taken, self._error = order.learner, 0, ""
            self._out_of_memory = self._is_final = self._is_looked_at = False
            self._orders = asyncio.Queue()
            self._process = _RankProcess.start(self._rank)
            self._work = asyncio.create_task(self._do_all(self._process), name="orders of a rank")
        elif (order.learner, order.number) != (self._learner, self._num_taken):
            raise StateError(
                f"{self._context.name} serves another process of the learner",
                hint="a learner that was replaced ends by itself",
            )
        self._num_taken += 1
        if order.do == "end":
            await self._end_process(politely=True)
        else:
            self._orders.put_nowait(order)
        return self._state()

    async def _read_state(self, _: Empty) -> RankState:
        self._last_request, self._is_looked_at = self._context.broker.clock(), True
        return self._state()

    def _state(self) -> RankState:
        process = self._process
        if not self._error and process is not None and process.has_ended:
            self._out_of_memory, self._is_final = process.was_out_of_memory, process.was_final
            self._error = process.why_ended()
        progress = None if process is None else process.progress
        if progress is None or not progress.at:
            progress = RankProgress(0.0, 0, 0, "start", "", "")
        return RankState(
            rank=self._rank,
            process=self._id,
            learner=self._learner,
            host=self._context.presence.host,
            works=process is not None and not self._error,
            error=self._error,
            out_of_memory=self._out_of_memory,
            is_final=self._is_final,
            draining=self._context.stopping.is_set(),
            silent_s=time.monotonic() - progress.at if progress.at else 0.0,
            collectives=progress.collectives,
            saves=progress.saves,
            phase=progress.phase,
            doing=str(progress),
        )

    async def _do_all(self, process: _RankProcess) -> None:
        """Pass orders to the process, with their groups."""
        try:
            while True:
                order = await self._orders.get()
                groups = [await self._group(seq) for seq in order.seqs]
                self._context.set_state("working", version=order.fields.get("step"))
                rank_order = Order(order.do, self._fields(order), groups)
                await asyncio.to_thread(rank_order.send, process.orders)
                self._context.progressed()
        except TinkermqError as error:
            self._error = str(error)
        except OSError as error:
            self._error = self._error or f"its process accepts no orders: {error}"

    def _fields(self, order: RankOrder) -> dict[str, Any]:
        """Return the fields for the process; models may be at other paths on this machine."""
        if order.do != "begin":
            return order.fields
        own = self._context.config
        config = own.model_copy(
            update={"learner": own.learner.model_copy(update=order.fields["settings"])}
        )
        hidden = self._context.hidden
        return {
            **order.fields,
            "config": config.model_dump_json(exclude_unset=True),
            "hidden": None if hidden is None else str(hidden),
        }

    async def _group(self, seq: int) -> Group:
        entry = await self._log.get(seq)
        if entry is None or entry.group is None:
            raise NotFoundError(f"entry {seq} of the rollout log, which a step trains, is missing")
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
    """Run a rank of the job's learner until it is stopped."""
    await context.serve_control()
    await RankActor(context).serve()
    return None
