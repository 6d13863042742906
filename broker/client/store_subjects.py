"""Where a connection asks for what is stored.

Services and connections without authentication ask JetStream itself. Guests ask the auth service's
store proxy for everything, processes of a job for the buckets that all jobs share; see
`broker/users/permissions.py` for why.
"""

import json

from ...schemas.wire.errors import BrokerError
from ...schemas.wire.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS

_SHARED = frozenset(f"KV_{bucket}" for bucket in (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS))
_INFO = "STREAM.INFO."


class StoreSubjects:
    """Chooses the subject of each kind of request."""

    def __init__(self, subject: str, *, is_guest: bool) -> None:
        """`subject` is that of the store proxy, empty for those who ask JetStream itself."""
        self.subject = subject
        self.is_guest = is_guest and bool(subject)

    def passes(self, stream: str) -> bool:
        """Whether requests for what a stream holds go through the store proxy."""
        return self.is_guest or (bool(self.subject) and stream in _SHARED)

    def direct_get(self, stream: str) -> str:
        """Subject on which stored messages of a stream are asked for."""
        if self.passes(stream):
            return f"{self.subject}.get.{stream}"
        return f"$JS.API.DIRECT.GET.{stream}"

    def last_get(self, stream: str, subject: str, *, of_leader: bool) -> tuple[str, bytes]:
        """Subject and payload of the request for the last message on `subject`.

        In a cluster the stream's leader is asked: replicas may lag behind what was written.
        """
        if of_leader and not self.passes(stream):
            request = json.dumps({"last_by_subj": subject}).encode()
            return f"$JS.API.STREAM.MSG.GET.{stream}", request
        return f"{self.direct_get(stream)}.{subject}", b""

    def api(self, verb: str) -> str:
        """Subject of another request to JetStream.

        Raises BrokerError for one that a guest cannot make.
        """
        if not self.is_guest:
            return f"$JS.API.{verb}"
        if not verb.startswith(_INFO):
            raise BrokerError(
                f"users may not ask for {verb} at the broker",
                hint="only the pool makes, changes and removes streams",
            )
        return f"{self.subject}.info.{verb.removeprefix(_INFO)}"

    def store(self, subject: str) -> str:
        """Subject to which a message is sent that shall be stored on `subject`."""
        return f"{self.subject}.put.{subject}" if self.is_guest else subject
