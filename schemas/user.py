"""Users of the pool: their records, what admins ask for, and what is written down about it."""

from typing import Annotated, Literal

from pydantic import Field

from .job import MAX_PRIORITY, Priority
from .wire.ids import new_id
from .wire.message import Message, Request, with_last
from .wire.subjects import user_name

UserRole = Literal["user", "admin"]


Bound = Annotated[int, Field(ge=0)] | None
Wish = Annotated[int, Field(ge=-1, le=1 << 60)] | None


class Quota(Message):
    """What a user may hold of the pool; null: no bound.

    A user whose record names none has the defaults, a pool without users has `NO_BOUNDS`.
    """

    max_slots: Bound = None
    """Slots that the user's jobs may hold at once."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the pool in relation to the other users that wait."""
    max_priority: Priority = MAX_PRIORITY
    """Highest priority that the user's jobs may have."""
    max_jobs: Bound = 5000
    """Jobs that are kept, ended and archived ones included."""
    max_live_jobs: Bound = 64
    """Jobs that have not ended, those that wait included."""
    max_actors: Bound = 256
    """Processes that the user's jobs may have at once, environment hosts and evaluators, which
    hold no slot, included."""
    max_stored_bytes: Bound = 1 << 40
    """Bytes at the broker: what `limits` lets the streams of live jobs hold, and all that those of
    ended ones do hold."""
    max_record_bytes: Bound = 16 << 20
    """Bytes of the records of the user's jobs, archived ones included."""
    max_evaluations: Bound = 4096
    """Evaluations of the user's jobs that are kept."""
    max_tinker_tokens: Bound = None
    """Tokens that are computed for the user's programs that speak the Tinker API, in all."""
    max_requests: Bound = 16
    """Requests of the user that a service of the pool works on at once; eight times as many may
    wait."""
    max_connections: Bound = 64
    """Connections with the user's key."""
    max_subscriptions: Bound = 4096
    """Subscriptions of these connections together."""
    max_messages_s: Bound = 20_000
    """Messages a second that these connections may send, averaged over some seconds."""
    max_bytes_s: Bound = 128 << 20
    """Bytes a second that they may send, averaged so, too."""


BOUNDS = tuple(name for name in Quota.model_fields if name not in ("weight", "max_priority"))
"""The values of a quota that are bounds."""
NO_BOUNDS = Quota.model_validate(dict.fromkeys(BOUNDS))
"""What everybody has in a pool without users."""


class QuotaReply(Quota):
    """A user's quota, and what is held of it: reply of the scheduler's `quota`."""

    held: dict[str, int] = Field(default_factory=dict[str, int])
    """By the name of the bound, where the scheduler knows it."""


class UserInfo(Quota):
    """What is told of a user."""

    user: str
    """Name; also the token of the user's subjects."""
    role: UserRole = "user"
    """An admin manages users and may look at and stop everybody's jobs."""
    created: float
    """Seconds since the epoch."""
    expires: float | None = None
    """When the key ends, in seconds since the epoch; null: never."""
    revoked: float | None = None
    """When the user was shut out for good."""


class UserRecord(UserInfo):
    """A user, in the KV bucket of users; the key itself is kept nowhere."""

    key_hash: str
    """SHA-256 of the API key, hexadecimal."""

    def named_at(self, at: str) -> str:
        """Return the key of the user."""
        return with_last(at, user_name(self.user))


class Invitation(Message):
    """A right to register, in the KV bucket of users under `invitation.<id>`."""

    code_hash: str
    """SHA-256 of the code, hexadecimal."""
    uses_left: int = Field(ge=0)
    """How many may still register with it."""
    expires: float
    """When it ends, in seconds since the epoch."""
    key_days: float
    """Life of the keys of those who register; 0: for ever."""
    max_slots: int | None = None
    """Quota of those who register."""


RequestId = Annotated[str, Field(min_length=16, max_length=64)]


class AddUser(Request):
    """Make a user: `rpc.<admin>.users.add`."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client for itself alone: the same id returns the same key, for two minutes."""

    user: str
    """Name."""
    role: UserRole = "user"
    """What the user may do."""
    days: float = Field(default=365.0, ge=0)
    """Life of the key in days; 0: for ever."""
    max_slots: int | None = Field(default=None, ge=0)
    """Quota."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the pool."""


class NameUser(Request):
    """Name one user: `revoke`."""

    user: str
    """Name."""


class RotateKey(Request):
    """Replace a user's key by a new one: `rotate`; a user may do so with the own key."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client for itself alone: the same id returns the same key."""

    user: str
    """Name."""
    days: float = Field(default=365.0, ge=0)
    """Life of the new key in days; 0: for ever."""


class SetQuota(Request):
    """Change a user's share of the pool: `quota`; null leaves a value as it is."""

    user: str
    """Name."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the pool."""
    max_priority: Priority | None = None
    """Highest priority that the user's jobs may have."""
    max_slots: Wish = None
    """See Quota, as all below; -1: no bound."""
    max_jobs: Wish = None
    """Jobs that are kept."""
    max_live_jobs: Wish = None
    """Jobs that have not ended."""
    max_actors: Wish = None
    """Processes of jobs."""
    max_stored_bytes: Wish = None
    """Bytes of streams."""
    max_record_bytes: Wish = None
    """Bytes of records."""
    max_evaluations: Wish = None
    """Evaluations."""
    max_tinker_tokens: Wish = None
    """Tokens of programs that speak the Tinker API."""
    max_requests: Wish = None
    """Requests at once."""
    max_connections: Wish = None
    """Connections."""
    max_subscriptions: Wish = None
    """Subscriptions."""
    max_messages_s: Wish = None
    """Messages a second."""
    max_bytes_s: Wish = None
    """Bytes a second."""


class Invite(Request):
    """Make an invitation: `invite`."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client for itself alone: the same id returns the same invitation."""

    uses: int = Field(default=1, ge=1, le=10_000)
    """How many may register with it."""
    days: float = Field(default=7.0, gt=0)
    """Its life in days."""
    key_days: float = Field(default=365.0, ge=0)
    """Life of the keys of those who register."""
    max_slots: int | None = Field(default=None, ge=0)
    """Quota of those who register."""


class Register(Request):
    """Become a user by an invitation: `rpc.invited.users.register`."""

    request_id: RequestId = Field(default_factory=new_id)
    """Made by the client for itself alone: the same id returns the same key, for two minutes."""

    code: str = Field(max_length=200)
    """The invitation's code."""
    user: str
    """Wanted name."""


class NewKey(Message):
    """A key or code that is told once and kept nowhere."""

    secret: str
    """The API key, or the invitation's code."""
    user: str = ""
    """Whose key it is."""
    expires: float | None = None
    """When it ends; null: never."""


class UserReply(Message):
    """One user."""

    user: UserInfo
    """What is known."""


class UserList(Message):
    """All users, by name."""

    users: list[UserInfo]
    """What is known of each."""
    more: bool = False
    """Others follow: ask again with the last name as `after`."""


class ListUsers(Request):
    """List the users by name: `list`."""

    after: str = ""
    """Only those behind this name."""


class JobKeyRequest(Message):
    """A node asks for the credentials of one actor: `rpc.node.keys.job`."""

    user: str
    """Owner of the job."""
    job: str
    """Job id."""
    actor: str
    """Name of the actor."""
    attempt: int
    """Attempt of the job."""


class AuditRecord(Message):
    """Something that touches security, in the audit stream."""

    who: str
    """Who did or tried it."""
    what: str
    """`login`, `users.add`, `users.rotate`, `users.revoke` …"""
    target: str = ""
    """Whom it concerns."""
    outcome: str
    """`done`, or why it was refused."""
    detail: str = ""
    """Address and client of a log-in; how many like it were left out."""
    time: float
    """Seconds since the epoch."""


class AuditRequest(Request):
    """Ask what was written down last: `audit`."""

    limit: int = Field(default=200, ge=1, le=2000)
    """At most so many records."""


class AuditList(Message):
    """What was written down, newest first."""

    records: list[AuditRecord]
    """The records."""
