"""Where a connection asks for what is stored, and how far that may be behind.

Services and connections without authentication ask JetStream itself, and processes of a job the
auth service's store proxy for the buckets that all jobs share (`StoreSubjects`). Guests ask the
proxy for everything (`GuestStoreSubjects`); see `broker/users/permissions.py` for why. What may be
behind differs between one server and a cluster (`Replication`).
"""

import json
from dataclasses import dataclass
from typing import ClassVar

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS

_SHARED = frozenset(f"KV_{bucket}" for bucket in (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS))
_INFO = "STREAM.INFO."


@dataclass(frozen=True)
class Replication:
    """How far what is stored may be behind what was confirmed."""

    reads_leader: bool
    """Whether the newest is asked of a stream's leader: a replica may not have it."""
    lag_s: float
    """How long what was confirmed may be missing where it is read."""
    absent_s: float
    """How long a stream may be without anybody who answers for it, though it is there."""


SINGLE = Replication(reads_leader=False, lag_s=0.0, absent_s=2.0)
"""One server. While it is being stopped its streams end some time before its connections."""
CLUSTER = Replication(reads_leader=True, lag_s=3.0, absent_s=20.0)
"""Several. Replicas lag behind their leader, and a stream may be about to elect one."""


class StoreSubjects:
    """Chooses the subject of each kind of request for who may ask JetStream."""

    asks_jetstream: ClassVar[bool] = True

    def __init__(self, subject: str = "") -> None:
        """`subject` is that of the store proxy, empty for those who ask JetStream for all."""
        self.subject = subject

    def passes(self, stream: str) -> bool:
        """Whether requests for what a stream holds go through the store proxy."""
        return bool(self.subject) and stream in _SHARED

    def direct_get(self, stream: str) -> str:
        """Subject on which stored messages of a stream are asked for."""
        if self.passes(stream):
            return f"{self.subject}.get.{stream}"
        return f"$JS.API.DIRECT.GET.{stream}"

    def last_get(self, stream: str, subject: str, *, of_leader: bool) -> tuple[str, bytes]:
        """Subject and payload of the request for the last message on `subject`."""
        if of_leader and not self.passes(stream):
            request = json.dumps({"last_by_subj": subject}).encode()
            return f"$JS.API.STREAM.MSG.GET.{stream}", request
        return f"{self.direct_get(stream)}.{subject}", b""

    def api(self, verb: str) -> str:
        """Subject of another request to JetStream; raises BrokerError for one that is denied."""
        return f"$JS.API.{verb}"

    def store(self, subject: str) -> str:
        """Subject to which a message is sent that shall be stored on `subject`."""
        return subject

    def absent_s(self, replication: Replication) -> float:
        """Return for how long silence does not tell that a stream is gone."""
        return replication.absent_s


class GuestStoreSubjects(StoreSubjects):
    """Chooses them for guests: all goes through the store proxy, which knows what is not there."""

    asks_jetstream = False

    def passes(self, stream: str) -> bool:
        """Whether requests for what a stream holds go through the store proxy: all do."""
        del stream
        return True

    def api(self, verb: str) -> str:
        """Subject of a request about a stream; raises BrokerError for any other."""
        if not verb.startswith(_INFO):
            raise BrokerError(
                f"users may not ask for {verb} at the broker",
                hint="only the pool makes, changes and removes streams",
            )
        return f"{self.subject}.info.{verb.removeprefix(_INFO)}"

    def store(self, subject: str) -> str:
        """Subject of the proxy that stores a message on `subject`."""
        return f"{self.subject}.put.{subject}"

    def absent_s(self, replication: Replication) -> float:
        """Return 0: the proxy knows what is not there."""
        del replication
        return 0.0
