"""The operation log: users' training operations for a trainer, each with its own number.

Only the first append of a number is stored; a repeated one finds it. So a confirmed operation takes
effect once, whatever process dies meanwhile. Results have the same numbers.

One trainer at a time writes results: it claims them when it starts, and each append names the
expected last sequence, so that an earlier trainer is fenced off and must end.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ..schemas.tinker.names import ModelName, OperationName
from ..schemas.tinker.operation import ModelOperation, OperationResult
from ..schemas.wire.errors import FencedError, MessageError, NotFoundError
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .jetstream.appending import Overtaken, append_as_owner, append_once
from .jetstream.direct_get import StoredMessage, get_all, get_last
from .jetstream.streams import purge, stream_info

T = TypeVar("T")
_APPEND_DEADLINE_S = 20.0
_READ_DEADLINE_S = 60.0
_FULL_HINT = "the trainer trims it behind its checkpoints; raise limits.operation_bytes"


class OperationLog:
    """Operations and results of one trainer's models, by user and model."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._last = self._claimed = 0

    async def append(self, user: str, operation: ModelOperation) -> bool:
        """Append an operation; return False if its number is taken already.

        Raises BrokerError when the log stays full, DeadlineError, NotFoundError.
        """
        name = operation.name
        return await append_once(
            self._broker,
            self._scope.operation(user, name.model.session, name.model.number, name.seq),
            operation.to_bytes(),
            traceparent="",
            deadline_s=_APPEND_DEADLINE_S,
            what=f"operation {name}",
            place="the operation log",
            full_hint=_FULL_HINT,
        )

    async def read_all(self) -> tuple[list[tuple[str, ModelOperation]], list["Unreadable"]]:
        """Return all stored operations with their users, in order of arrival, and unreadable
        entries.

        A model cannot be rebuilt beyond an unreadable operation.
        """
        messages = await self._retry(
            lambda: get_all(self._broker, self._scope.stream_operation, self._scope.all_operations),
            "the operation log",
        )
        operations, unreadable = list[tuple[str, ModelOperation]](), list[Unreadable]()
        for message in messages:
            try:
                operations.append(_read(message))
            except MessageError as error:
                unreadable.append(Unreadable.found(message, error))
        return operations, unreadable

    async def find(self, user: str, name: OperationName) -> ModelOperation | None:
        """Return an operation, or None if it is not there (any more).

        Raises MessageError for an unreadable one.
        """
        subject = self._scope.operation(user, name.model.session, name.model.number, name.seq)
        message = await self._retry(
            lambda: get_last(self._broker, self._scope.stream_operation, subject),
            f"operation {name}",
        )
        return None if message is None else _read(message)[1]

    async def trim(self, user: str, model: ModelName, through_seq: int, since_seq: int) -> None:
        """Remove a model's operations `since_seq` to `through_seq`, which a checkpoint covers."""
        for seq in range(since_seq, through_seq + 1):
            subject = self._scope.operation(user, model.session, model.number, seq)
            await purge(self._broker, self._scope.stream_operation, subject)

    async def forget(self, user: str, model: ModelName) -> None:
        """Remove all operations and results of a model."""
        names = (user, model.session, model.number, "*")
        await purge(self._broker, self._scope.stream_operation, self._scope.operation(*names))
        await purge(self._broker, self._scope.stream_result, self._scope.result(*names))

    async def claim(self) -> None:
        """Claim the right to write results; this fences off earlier trainers."""
        stream, subject = self._scope.stream_result, self._scope.claim_of_results
        while True:
            last = await self._last_of_results()
            try:
                claimed = await append_as_owner(
                    self._broker,
                    stream,
                    subject,
                    b"",
                    last,
                    is_first=False,
                    deadline_s=_READ_DEADLINE_S,
                    waiting_for=f"the results of job {self._scope.job} to be claimed",
                )
            except Overtaken:  # an earlier trainer has just written a result
                continue
            assert claimed is not None
            self._last = self._claimed = claimed
            return

    async def check_claim(self) -> None:
        """Raise FencedError if another trainer has claimed the results since."""
        stream, subject = self._scope.stream_result, self._scope.claim_of_results
        claim = await self._retry(lambda: get_last(self._broker, stream, subject), stream)
        if (newest := 0 if claim is None else claim.seq) > self._claimed:
            raise self._fenced(newest)

    async def put_result(self, user: str, name: OperationName, result: OperationResult) -> bool:
        """Store a result; return False if there is one already.

        Concurrent calls are not supported. Raises FencedError once another trainer has claimed the
        results.
        """
        while True:
            try:
                seq = await append_as_owner(
                    self._broker,
                    self._scope.stream_result,
                    self._scope.result(user, name.model.session, name.model.number, name.seq),
                    result.to_bytes(),
                    self._last,
                    deadline_s=_READ_DEADLINE_S,
                    waiting_for=f"the result of operation {name} to be stored",
                )
            except Overtaken:  # by a trainer with a later claim, or another program
                await self.check_claim()
                self._last = await self._last_of_results()
                continue
            self._last = seq or self._last
            return seq is not None

    async def _last_of_results(self) -> int:
        stream = self._scope.stream_result
        info = await self._retry(lambda: stream_info(self._broker, stream), stream)
        return int(info["state"]["last_seq"])

    def _fenced(self, last: int) -> FencedError:
        return FencedError(
            f"another trainer of job {self._scope.job} has claimed its results: entry {last} is "
            f"behind our own claim {self._claimed}",
            hint="only one trainer may run for a job: end this one",
        )

    async def result(self, user: str, name: OperationName) -> OperationResult | None:
        """Return the result of an operation, or None if there is none (any more).

        Raises MessageError for an unreadable one.
        """
        subject = self._scope.result(user, name.model.session, name.model.number, name.seq)
        message = await self._retry(
            lambda: get_last(self._broker, self._scope.stream_result, subject),
            f"the result of operation {name}",
        )
        if message is None:
            return None
        try:
            return OperationResult.from_bytes(message.payload)
        except MessageError as error:
            place = f"entry {message.seq} of the results, {message.subject}"
            raise MessageError(f"{place}, cannot be read: {error.message}") from error

    async def _retry(self, attempt: Callable[[], Awaitable[T]], waiting_for: str) -> T:
        return await self._broker.retry(
            attempt, deadline_s=_READ_DEADLINE_S, waiting_for=waiting_for
        )


@dataclass(frozen=True)
class Unreadable:
    """An entry under an operation's subject that is not a valid operation."""

    user: str
    name: OperationName | None
    """Name of the operation, if its subject has it."""
    reason: str

    @classmethod
    def found(cls, message: StoredMessage, error: MessageError) -> "Unreadable":
        """Record a log entry and why it cannot be read."""
        parts = message.subject.split(".")[-4:]
        user, session, number, seq = parts if len(parts) == 4 else ("", "", "", "")
        name: OperationName | None = None
        with suppress(NotFoundError):
            name = OperationName.parse(f"{session}:train:{number}:{seq}")
        return cls(user, name, error.message)


def _read(message: StoredMessage) -> tuple[str, ModelOperation]:
    """Return an operation and its user, from its subject; raises MessageError."""
    place = f"entry {message.seq} of the operation log, {message.subject}"
    hint = "it was not written by tinkermq, which only a pool without users permits"
    try:
        operation = ModelOperation.from_bytes(message.payload)
        name = operation.name
        operation.check_place()
    except (MessageError, NotFoundError) as error:
        raise MessageError(f"{place}, cannot be read: {error.message}", hint=hint) from error
    user, *named = message.subject.split(".")[-4:]
    if named != [name.model.session, str(name.model.number), str(name.seq)]:
        raise MessageError(f"{place}, says that it is {name}", hint=hint)
    return user, operation
