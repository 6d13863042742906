"""The secrets of jobs: stored sealed, opened for processes that need them, removed at the end.

The key is derived from the scheduler's credentials, so every scheduler of a pool with users has the
same. Without credentials it is created at start and kept in memory: after a restart, such a
scheduler cannot open earlier secrets.
"""

import contextlib
import secrets
from collections.abc import Mapping

import structlog

from ....broker.client.connection import Broker
from ....broker.client.rpc import RequestContext
from ....broker.credentials import Seal, close_seal
from ....broker.jetstream.kv import Bucket
from ....broker.jobs import is_final
from ....schemas.job import (
    JobRecord,
    JobSecrets,
    OpenedSecrets,
    OpenRequest,
    SealedSecrets,
    SealingKey,
    SecretName,
)
from ....schemas.wire.errors import AuthError, ConflictError, MessageError
from ....schemas.wire.subjects import BUCKET_SECRETS, JobScope
from .states import ACTIVE, secrets_of
from .view import JobsView

_PURPOSE = "secrets of jobs"
_unsaved = secrets.token_bytes(32)
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class SecretStore:
    """Keeps the secrets that users submit with their jobs."""

    def __init__(self, broker: Broker, view: JobsView) -> None:
        """Derive or create the key."""
        self._bucket = Bucket(broker, BUCKET_SECRETS, SealedSecrets)
        self._view = view
        self._seal = Seal(broker.derived_key(_PURPOSE) or _unsaved)

    @property
    def key(self) -> SealingKey:
        """The key with which clients seal secrets."""
        return SealingKey(public=self._seal.public)

    def names(self, user: str, sealed: bytes) -> list[SecretName]:
        """Return a user's opened secrets, by name; raises AuthError if they cannot be opened."""
        return sorted(self._seal.open(sealed, user).values) if sealed else []

    async def add_sealed(self, scope: JobScope, sealed: bytes) -> list[SecretName]:
        """Store a user's sealed secrets with earlier ones; return all names.

        Raises AuthError if they cannot be opened.
        """
        fresh = self._seal.open(sealed, scope.user)
        values: dict[SecretName, str] = {**await self.values(scope), **fresh.values}
        both = close_seal(self._seal.public, JobSecrets(user=scope.user, values=values))
        await self._bucket.put(scope.key, SealedSecrets(sealed=both))
        return sorted(values)

    async def values(self, scope: JobScope) -> Mapping[SecretName, str]:
        """Return the secrets of a job; empty if they were sealed with another scheduler's key."""
        entry = await self._bucket.find(scope.key)
        if entry is None:
            return {}
        try:
            return self._seal.open(entry.value.sealed, scope.user).values
        except AuthError as error:
            _log.warning("secrets_unreadable", job=scope.job, error=error.message)
            return {}

    async def revision(self, scope: JobScope) -> int:
        """Return the revision of a job's secrets; 0 without secrets."""
        entry = await self._bucket.find(scope.key)
        return 0 if entry is None else entry.revision

    async def forget(self, scope: JobScope, revision: int | None = None) -> None:
        """Remove the secrets of a job, if it has any.

        With a `revision`, they are kept if the owner has since submitted others for the next
        attempt.
        """
        if revision != 0 and scope.key in await self._bucket.keys(scope.user):
            with contextlib.suppress(ConflictError):
                await self._bucket.delete(scope.key, revision=revision)

    async def left_behind(self) -> list[JobRecord | JobScope]:
        """Return the ended or deleted jobs that still have secrets."""
        collected: list[JobRecord | JobScope] = []
        for key in await self._bucket.keys():
            user, _, job = key.partition(".")
            with contextlib.suppress(MessageError):  # not the key of a job
                scope = JobScope(user, job)
                record = self._view.find(user, job)
                if record is None or is_final(record):
                    collected.append(record or scope)
        return collected

    async def open_for(self, request: OpenRequest, _: RequestContext) -> OpenedSecrets:
        """Return to a node the secrets that a process of a job needs.

        Raises NotFoundError for an unknown job, AuthError for a process that is not the job's.
        """
        record = await self._view.get(request.user, request.job)
        if record.state not in ACTIVE or record.attempt != request.attempt:
            raise AuthError(f"job {record.job} does not run attempt {request.attempt}")
        actor = next((item for item in record.actors if item.name == request.actor), None)
        if actor is None or actor.node is None:
            return OpenedSecrets(values={})
        names, values = secrets_of(record, actor), await self.values(record.scope)
        return OpenedSecrets(values={name: values[name] for name in names if name in values})
