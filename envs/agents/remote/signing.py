"""The keys of one job's episodes, as their host makes them for programs elsewhere."""

from typing import Self

from ....broker.client.connection import Broker
from ....broker.client.keys import EpisodeIdentity, episode_key
from ....broker.client.rpc import call
from ....schemas.agent import EpisodeSecret
from ....schemas.wire.message import Empty
from ....schemas.wire.subjects import JobScope

_PATIENCE_S = 60.0


class EpisodeSigner:
    """Makes keys by which the broker lets a program in, and the host knows it."""

    def __init__(self, scope: JobScope, secret: bytes | None) -> None:
        """`secret` is the job's; None: nobody asks for keys but the host."""
        self._scope = scope
        self._secret = secret

    @classmethod
    async def of_job(cls, broker: Broker, scope: JobScope) -> Self:
        """Ask the auth service, once, for what keys are signed with, where there is one.

        Raises AuthError for a job that does not run, DeadlineError and NobodyAnswersError when the
        auth service is away.
        """
        if not broker.is_guest:
            return cls(scope, None)
        reply = await call(
            broker,
            scope.episode_keys,
            Empty(),
            EpisodeSecret,
            timeout_s=_PATIENCE_S,
            waiting_for="the auth service",
            idempotent=True,
        )
        return cls(scope, reply.secret)

    def key(self, episode: str) -> str:
        """Return the key of an episode."""
        return episode_key(
            EpisodeIdentity(self._scope.user, self._scope.job, episode), self._secret
        )
