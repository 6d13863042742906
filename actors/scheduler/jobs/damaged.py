"""Finds the records of the pool that cannot be read, or that belie their key.

Whoever reads one passes it over and logs it; here they are looked for, so that somebody can be told
of them by name. Looking reads whole buckets, so what was found is told for a while.
"""

import asyncio
import time

from ....broker.client.connection import Broker
from ....broker.jetstream.kv import Bucket
from ....broker.users.records import USER
from ....schemas.job import JobRecord, RequestRecord
from ....schemas.machines.status import MachineSpending
from ....schemas.metric import EvalRecord, Presence
from ....schemas.node import DamagedRecord, DamagedRecords, NodeStatus, SchedulerLease
from ....schemas.secret import SealedSecrets
from ....schemas.user import UserRecord
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_ARCHIVE,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_LEASES,
    BUCKET_MACHINES,
    BUCKET_NODES,
    BUCKET_REQUESTS,
    BUCKET_SECRETS,
    BUCKET_USERS,
)

_BUCKETS: tuple[tuple[str, type[Message], str], ...] = (
    (BUCKET_JOBS, JobRecord, ""),
    (BUCKET_ARCHIVE, JobRecord, ""),
    (BUCKET_NODES, NodeStatus, ""),
    (BUCKET_ACTORS, Presence, ""),
    (BUCKET_EVALS, EvalRecord, ""),
    (BUCKET_REQUESTS, RequestRecord, ""),
    (BUCKET_SECRETS, SealedSecrets, ""),
    (BUCKET_LEASES, SchedulerLease, ""),
    (BUCKET_MACHINES, MachineSpending, ""),
    (BUCKET_USERS, UserRecord, USER),
)
_TOLD_FOR_S = 10.0
_MAX_TOLD = 100
_MAX_TEXT = 500


class DamageReport:
    """What is damaged, as of some seconds ago."""

    def __init__(self, broker: Broker) -> None:
        """Have looked at nothing yet."""
        self._broker = broker
        self._found: list[DamagedRecord] = []
        self._looked = float("-inf")
        self._lock = asyncio.Lock()

    async def read(self, user: str = "") -> DamagedRecords:
        """Return what is damaged among the keys of a user, or in the whole pool."""
        async with self._lock:
            if time.monotonic() - self._looked >= _TOLD_FOR_S:
                self._found = await self._look()
                self._looked = time.monotonic()
        found = [one for one in self._found if not user or one.key.startswith(f"{user}.")]
        return DamagedRecords(records=found[:_MAX_TOLD], total=len(found))

    async def _look(self) -> list[DamagedRecord]:
        found: list[DamagedRecord] = []
        for name, model, prefix in _BUCKETS:
            try:
                _, damaged = await Bucket(self._broker, name, model).read_all(prefix)
            except NotFoundError:  # a pool without users has no bucket of users
                continue
            found += [
                DamagedRecord(bucket=name, key=error.key, why=error.message[:_MAX_TEXT])
                for error in damaged
            ]
        return found
