"""Users of the pool: their records, what admins ask for, and what is written down about it."""

from typing import Literal

from pydantic import Field

from .job import MAX_PRIORITY, Priority
from .message import Message, with_last
from .subjects import user_name

UserRole = Literal["user", "admin"]


class Quota(Message):
    """What a user may hold of the pool; one who is not in the bucket of users has the defaults."""

    max_slots: int | None = Field(default=None, ge=0)
    """Slots that the user's jobs may hold at once; null: no bound."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the pool in relation to the other users that wait."""
    max_priority: Priority = MAX_PRIORITY
    """Highest priority that the user's jobs may have."""


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


class AddUser(Message):
    """Make a user: `rpc.<admin>.users.add`."""

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


class NameUser(Message):
    """Name one user: `revoke`."""

    user: str
    """Name."""


class RotateKey(Message):
    """Replace a user's key by a new one: `rotate`; a user may do so with the own key."""

    user: str
    """Name."""
    days: float = Field(default=365.0, ge=0)
    """Life of the new key in days; 0: for ever."""


class SetQuota(Message):
    """Change a user's share of the pool: `quota`; null leaves a value as it is."""

    user: str
    """Name."""
    max_slots: int | None = Field(default=None, ge=-1)
    """Slots that the user's jobs may hold at once; -1: no bound."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the pool."""
    max_priority: Priority | None = None
    """Highest priority that the user's jobs may have."""


class Invite(Message):
    """Make an invitation: `invite`."""

    uses: int = Field(default=1, ge=1, le=10_000)
    """How many may register with it."""
    days: float = Field(default=7.0, gt=0)
    """Its life in days."""
    key_days: float = Field(default=365.0, ge=0)
    """Life of the keys of those who register."""
    max_slots: int | None = Field(default=None, ge=0)
    """Quota of those who register."""


class Register(Message):
    """Become a user by an invitation: `rpc.invited.users.register`."""

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


class AuditRequest(Message):
    """Ask what was written down last: `audit`."""

    limit: int = Field(default=200, ge=1, le=2000)
    """At most so many records."""


class AuditList(Message):
    """What was written down, newest first."""

    records: list[AuditRecord]
    """The records."""
