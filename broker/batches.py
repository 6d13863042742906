"""The batch log: which groups each optimiser step trains, written before it trains them.

An append names its writer's last sequence. If another writer has appended since, this
learner is no longer the one that owns the job: it is fenced off and must end.
"""

from collections.abc import Iterable
from functools import partial

from ..schemas.task import BatchRecord
from ..schemas.wire.errors import FencedError
from ..schemas.wire.subjects import JobScope
from .client.connection import Broker
from .jetstream.appending import Overtaken, append_behind
from .jetstream.direct_get import StoredMessage, get_all, get_seq
from .jetstream.streams import stream_info

DEADLINE_S = 60.0


class BatchLog:
    """Appends to and reads the batch records of one job."""

    def __init__(self, broker: Broker, scope: JobScope) -> None:
        """Name the log; `streams` has made it."""
        self._broker = broker
        self._scope = scope
        self._stream = self.stream = scope.stream_batch

    async def append(self, record: BatchRecord, expected_last_seq: int) -> int:
        """Append a record behind `expected_last_seq` (0: it is the first); return its sequence.

        Raises FencedError when another learner has written since, BrokerError, DeadlineError,
        NotFoundError when the job is gone.
        """
        try:
            return await append_behind(
                self._broker,
                self._stream,
                self._scope.batch,
                record.to_bytes(),
                expected_last_seq,
                deadline_s=DEADLINE_S,
                waiting_for=f"the batch record of step {record.step}",
            )
        except Overtaken as error:
            raise FencedError(
                f"another learner of job {self._scope.job} has written to the batch log: step "
                f"{record.step} was to come after entry {expected_last_seq}, the last is "
                f"{error.last or 'gone'}",
                hint="only one learner may run for a job: end this one",
            ) from error

    async def check_owner(self, last_seq: int) -> None:
        """Raise FencedError if another learner has written since `last_seq` (0: nothing was).

        Raises DeadlineError, NotFoundError when the job is gone.
        """
        info = await self._broker.retry(
            lambda: stream_info(self._broker, self._stream),
            deadline_s=DEADLINE_S,
            waiting_for=f"the batch log of job {self._scope.job}",
        )
        if (stored_seq := int(info["state"]["last_seq"])) != last_seq:
            raise FencedError(
                f"another learner of job {self._scope.job} has written to the batch log: its last "
                f"entry is {stored_seq}, this learner's last one is {last_seq}",
                hint="only one learner may run for a job: end this one",
            )

    async def read_all(self) -> list[tuple[int, BatchRecord]]:
        """Return all records with their sequences, in order.

        Raises MessageError for one that cannot be read: without it a run cannot be repeated.
        """
        messages = await self._broker.retry(
            self._all,
            deadline_s=DEADLINE_S,
            waiting_for=f"the batch records of job {self._scope.job}",
        )
        return [(message.seq, BatchRecord.from_bytes(message.payload)) for message in messages]

    async def read_some(self, seqs: Iterable[int]) -> list[BatchRecord]:
        """Return the records at some sequences, those left out that are not there (any more)."""
        records = [
            await self._broker.retry(
                partial(get_seq, self._broker, self._stream, seq),
                deadline_s=DEADLINE_S,
                waiting_for=f"the batch records of job {self._scope.job}",
            )
            for seq in seqs
        ]
        return [BatchRecord.from_bytes(record.payload) for record in records if record is not None]

    async def _all(self) -> list[StoredMessage]:
        """Read all records; in a cluster until a replica has as many as the leader."""
        last = 0
        if self._broker.replication.reads_leader:
            last = int((await stream_info(self._broker, self._stream))["state"]["last_seq"])
        messages = await get_all(self._broker, self._stream, self._scope.batch)
        if (messages[-1].seq if messages else 0) < last:
            raise TimeoutError  # of this attempt: another follows
        return messages
