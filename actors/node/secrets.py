"""Gives the first process of a job the secrets that its owner has handed over, by its environment.

They are asked for at each start and are kept nowhere on the node.
"""

from collections.abc import Mapping

from ...broker.connection import Broker
from ...broker.rpc import call
from ...schemas.errors import TinkermqError
from ...schemas.node import WantedActor
from ...schemas.secret import OpenedSecrets, OpenRequest
from ...schemas.subjects import rpc
from .children import Child, StartChild

_TIMEOUT_S = 5.0


def with_secrets(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with the secrets that are for it."""

    async def start_with_secrets(
        wanted: WantedActor, environment: Mapping[str, str], output: int
    ) -> Child:
        if wanted.secrets:
            environment = {**environment, **await _fetch(broker, wanted)}
        return await start(wanted, environment, output)

    return start_with_secrets


async def _fetch(broker: Broker, wanted: WantedActor) -> Mapping[str, str]:
    """Ask the scheduler; raises OSError, upon which the actor is started again later."""
    request = OpenRequest(
        user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
    )
    try:
        reply = await call(
            broker,
            rpc("node", "secrets", "open"),
            request,
            OpenedSecrets,
            timeout_s=_TIMEOUT_S,
            waiting_for="the scheduler",
            idempotent=True,
        )
    except TinkermqError as error:
        raise OSError(f"no secrets for {wanted.name}: {error.message}") from error
    return {str(name): value for name, value in reply.values.items()}
