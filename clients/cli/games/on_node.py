"""`tinkermq env check --on-node`: a game is played where a job would play it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....envs.check import CheckResult
from ....schemas.config.load_config import apply_override, load_config
from ....schemas.node import GameCheckReply
from ....schemas.wire.errors import ConfigError
from ...home import find_url
from ...pool import Pool
from ...validation.paths import resolve_paths
from ..output import note
from ..session import with_pool

_NO_MODEL = "none"
"""A job has one; to play its game takes none, and nobody looks for it."""


def checks_of_node(
    game: str,
    arguments: Sequence[str],
    train_data: Sequence[str],
    val_data: Sequence[str],
    nats_url: str | None,
) -> tuple[str, list[CheckResult]]:
    """Return the node that played the game, and what it found.

    Raises ConfigError, DataError, GameError, BusyError, BrokerError.
    """
    config = _job(game, arguments, train_data, val_data)
    url = find_url(nats_url)

    async def work(pool: Pool) -> GameCheckReply:
        note("a node plays the game: a minute at most")
        return await pool.check_game(resolve_paths(config, url, has_users=pool.has_users))

    reply = with_pool(url, work)
    return reply.node, [CheckResult(**check.model_dump()) for check in reply.checks]


def _job(
    game: str, arguments: Sequence[str], train_data: Sequence[str], val_data: Sequence[str]
) -> dict[str, Any]:
    """Return the configuration of a job that plays the game which a command line means."""
    if game.endswith((".yaml", ".yml")):
        if train_data or val_data:
            raise ConfigError("a YAML file names its own data", hint="leave --train-data out")
        return load_config(Path(game), arguments).model_dump(exclude_unset=True)
    kwargs: dict[str, Any] = {}
    for argument in arguments:
        apply_override(kwargs, argument, None)
    env = {"game": game, "kwargs": kwargs, "train_data": train_data, "val_data": val_data}
    return {"model": {"path": _NO_MODEL}, "env": env}
