"""Gives each process of a job what is for it alone: a key of its own, its owner's secrets.

Both are asked for at each start anew, are kept nowhere on the node, and travel in the environment
of the process, which takes them out of there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from ...broker.client.connection import Broker
from ...broker.client.login import KEY_VARIABLE
from ...broker.client.rpc import call
from ...schemas.job import OpenedSecrets, OpenRequest
from ...schemas.node import WantedActor
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.errors import AuthError, TinkermqError
from ...schemas.wire.message import Message
from ...schemas.wire.subjects import rpc
from .children import Child, NotStarted, StartChild

R = TypeVar("R", bound=Message)

_TIMEOUT_S = 5.0
_KEY_PATIENCE_S = 15.0
_PAUSE_S = 0.5


def with_job_keys(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with a key that the auth service has signed."""

    async def fetch(wanted: WantedActor) -> Mapping[str, str]:
        request = JobKeyRequest(
            user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
        )
        subject, patience_s = rpc("node", "keys", "job"), _KEY_PATIENCE_S
        reply = await _ask(broker, subject, request, NewKey, "the auth service", patience_s)
        return {KEY_VARIABLE: reply.secret}

    return _starting_with(fetch, start)


def with_secrets(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with the secrets that are for it."""

    async def fetch(wanted: WantedActor) -> Mapping[str, str]:
        if not wanted.secrets:
            return {}
        request = OpenRequest(
            user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
        )
        subject = rpc("node", "secrets", "open")
        reply = await _ask(broker, subject, request, OpenedSecrets, "the scheduler")
        return {str(name): value for name, value in reply.values.items()}

    return _starting_with(fetch, start)


def _starting_with(
    fetch: Callable[[WantedActor], Awaitable[Mapping[str, str]]], start: StartChild
) -> StartChild:
    async def start_with(wanted: WantedActor, environment: Mapping[str, str], output: int) -> Child:
        return await start(wanted, {**environment, **await fetch(wanted)}, output)

    return start_with


async def _ask(
    broker: Broker,
    subject: str,
    request: Message,
    reply: type[R],
    service: str,
    patience_s: float = 0.0,
) -> R:
    """Ask until `service` answers.

    Raises NotStarted while it does not, which is no failure of the actor, and OSError when it
    refuses.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await call(
                broker,
                subject,
                request,
                reply,
                timeout_s=_TIMEOUT_S,
                waiting_for=service,
                idempotent=True,
            )
        except TinkermqError as error:
            if isinstance(error, AuthError):
                raise OSError(f"{service} gave nothing: {error.message}") from error
            if loop.time() >= deadline:
                raise NotStarted(f"{service} gave nothing: {error.message}") from error
        await asyncio.sleep(_PAUSE_S)
