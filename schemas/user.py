"""Users: records, quotas, requests of admins, and the audit."""

from typing import Annotated, Literal

from pydantic import Field

from .job import MAX_PRIORITY, Priority
from .wire.message import Message, Request, new_id, with_last
from .wire.subjects import user_name

UserRole = Literal["user", "admin"]


Bound = Annotated[int, Field(ge=0)] | None
Wish = Annotated[int, Field(ge=-1, le=1 << 60)] | None


class Quota(Message):
    """What a user may hold; null: no bound.

    A user without a value has the default. Pools without users have no bounds.
    """

    max_slots: Bound = None
    """Slots at once."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the pool among waiting users."""
    max_priority: Priority = MAX_PRIORITY
    """Highest priority of the user's jobs."""
    max_jobs: Bound = 5000
    """Jobs, ended and archived ones included."""
    max_live_jobs: Bound = 64
    """Jobs that have not ended."""
    max_actors: Bound = 256
    """Processes of jobs at once, also those without slots (environment hosts, evaluators)."""
    max_stored_bytes: Bound = 1 << 40
    """Bytes at the broker: what `limits` allows streams of live jobs, and what those of ended jobs
    hold."""
    max_record_bytes: Bound = 16 << 20
    """Bytes of the jobs' records, archived ones included."""
    max_evaluations: Bound = 4096
    """Evaluations kept of the user's jobs."""
    max_tinker_tokens: Bound = None
    """Tokens computed for the user's Tinker programs, in all."""
    max_requests: Bound = 16
    """Requests in progress at one service of the pool; eight times as many may wait."""
    max_connections: Bound = 64
    """Connections with the user's key."""
    max_subscriptions: Bound = 4096
    """Subscriptions of these connections."""
    max_messages_s: Bound = 20_000
    """Messages per second of these connections, averaged over some seconds."""
    max_bytes_s: Bound = 128 << 20
    """Bytes per second of these connections, averaged over some seconds."""


BOUNDS = tuple(name for name in Quota.model_fields if name not in ("weight", "max_priority"))
"""Names of the bounds of a quota."""
NO_BOUNDS = Quota.model_validate(dict.fromkeys(BOUNDS))
"""The quota in a pool without users."""


class QuotaReply(Quota):
    """A user's quota and its use: reply of the scheduler's `quota`."""

    held: dict[str, int] = Field(default_factory=dict[str, int])
    """Use by name of the bound, as far as the scheduler has it."""


class UserInfo(Quota):
    """Public information about a user."""

    user: str
    """Name, and token of the user's subjects."""
    role: UserRole = "user"
    """An admin manages users and may read and stop all jobs."""
    created: float
    expires: float | None = None
    """Expiry of the key; null: never."""
    revoked: float | None = None
    """When the user was revoked."""


class UserRecord(UserInfo):
    """A user, in the KV bucket of users, without the key."""

    key_hash: str
    """SHA-256 of the API key, hexadecimal."""

    def named_at(self, at: str) -> str:
        """Return the key of the user."""
        return with_last(at, user_name(self.user))


RequestId = Annotated[str, Field(min_length=16, max_length=64)]


class AddUser(Request):
    """Create a user: `rpc.<admin>.users.add`."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client; for two minutes a repeated id returns the same key."""

    user: str
    """Name."""
    role: UserRole = "user"
    days: float = Field(default=365.0, ge=0)
    """Lifetime of the key in days; 0: for ever."""
    max_slots: int | None = Field(default=None, ge=0)
    """Slots of the user's jobs at once."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the pool among waiting users."""


class NameUser(Request):
    """Name one user: `revoke`."""

    user: str
    """Name."""


class RotateKey(Request):
    """Replace a user's key: `rotate`; users may rotate their own."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client; for two minutes a repeated id returns the same key."""

    user: str
    """Name."""
    days: float = Field(default=365.0, ge=0)
    """Lifetime of the key in days; 0: for ever."""


class SetQuota(Request):
    """Change a user's quota: `quota`. The keys are those of `Quota`; null leaves a value as it is,
    -1 removes the bound."""

    user: str
    """Name."""
    weight: float | None = Field(default=None, gt=0)
    max_priority: Priority | None = None
    max_slots: Wish = None
    max_jobs: Wish = None
    max_live_jobs: Wish = None
    max_actors: Wish = None
    max_stored_bytes: Wish = None
    max_record_bytes: Wish = None
    max_evaluations: Wish = None
    max_tinker_tokens: Wish = None
    max_requests: Wish = None
    max_connections: Wish = None
    max_subscriptions: Wish = None
    max_messages_s: Wish = None
    max_bytes_s: Wish = None


class NewKey(Message):
    """A key, sent once and not stored."""

    secret: str
    """The API key."""
    user: str = ""
    expires: float | None = None
    """Expiry; null: never."""


class UserReply(Message):
    """One user."""

    user: UserInfo


class UserList(Message):
    """Users, by name."""

    users: list[UserInfo]
    more: bool = False
    """There are more: repeat with the last name as `after`."""


class ListUsers(Request):
    """List the users: `list`."""

    after: str = ""
    """Only names after this one."""


class JobKeyRequest(Message):
    """A node requests the credentials of an actor: `rpc.node.keys.job`."""

    user: str
    """Owner of the job."""
    job: str
    actor: str
    """Name of the actor."""
    attempt: int
    """Attempt of the job."""


class AuditRecord(Message):
    """A security event, in the audit stream."""

    who: str
    """User or service that did or tried it."""
    what: str
    """`login`, `users.add`, `users.rotate`, `users.revoke` …"""
    target: str = ""
    """User concerned."""
    outcome: str
    """`done`, or why it was refused."""
    detail: str = ""
    """Address and client of a log-in; number of similar entries left out."""
    time: float
    """Seconds since the epoch."""


class AuditRequest(Request):
    """Read the newest audit records: `audit`."""

    limit: int = Field(default=200, ge=1, le=2000)


class AuditList(Message):
    """Audit records, newest first."""

    records: list[AuditRecord]
