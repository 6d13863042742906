"""The caller's side of the door: where a connection asks for what is stored.

Services and connections without authentication ask JetStream itself. Guests ask the door for
everything, processes of a job for the buckets that all jobs share; see `permissions.py` for why.
"""

from ..schemas.errors import BrokerError
from ..schemas.subjects import BUCKET_ACTORS, BUCKET_EVALS, BUCKET_JOBS

_SHARED = frozenset(f"KV_{bucket}" for bucket in (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS))
_INFO = "STREAM.INFO."


class Door:
    """Chooses the subject of each kind of request."""

    def __init__(self, subject: str, *, is_guest: bool) -> None:
        """`subject` is that of the door, empty for those who ask JetStream itself."""
        self.subject = subject
        self.is_guest = is_guest and bool(subject)

    def direct_get(self, stream: str) -> str:
        """Subject on which stored messages of a stream are asked for."""
        if self.is_guest or (self.subject and stream in _SHARED):
            return f"{self.subject}.get.{stream}"
        return f"$JS.API.DIRECT.GET.{stream}"

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
