"""Gives each process of a job a key of its own, at each start anew.

The key travels in the environment of the process, which takes it out of there once it is connected.
"""

import asyncio
from collections.abc import Mapping

from ...broker.connection import Broker
from ...broker.login import KEY_VARIABLE
from ...broker.rpc import call
from ...schemas.errors import AuthError, TinkermqError
from ...schemas.node import WantedActor
from ...schemas.subjects import rpc
from ...schemas.user import JobKeyRequest, NewKey
from .children import Child, StartChild

_TIMEOUT_S = 5.0
_DEADLINE_S = 60.0
_PAUSE_S = 0.5


def with_job_keys(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with a key that the auth service has signed."""

    async def start_with_key(
        wanted: WantedActor, environment: Mapping[str, str], output: int
    ) -> Child:
        key = await _fetch(broker, wanted)
        return await start(wanted, {**environment, KEY_VARIABLE: key}, output)

    return start_with_key


async def _fetch(broker: Broker, wanted: WantedActor) -> str:
    """Ask for a key until the auth service answers; raises OSError when there is none to be had."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _DEADLINE_S
    request = JobKeyRequest(
        user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
    )
    while True:
        try:
            reply = await call(
                broker,
                rpc("node", "keys", "job"),
                request,
                NewKey,
                timeout_s=_TIMEOUT_S,
                waiting_for="the auth service",
                idempotent=True,
            )
        except TinkermqError as error:
            if isinstance(error, AuthError) or loop.time() > deadline:
                raise OSError(f"no key for {wanted.name}: {error.message}") from error
            await asyncio.sleep(_PAUSE_S)
        else:
            return reply.secret
