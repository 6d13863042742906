"""The programs of an environment host, with the proxy at which they find the model."""

from collections.abc import Sequence
from pathlib import Path

from ....broker.client.connection import Broker
from ....schemas.config.agent import AgentConfig
from ....schemas.wire.subjects import JobScope
from ..asked_for import AskedEpisodes
from ..given_out import GivenOutRunner
from .runner import ProgramRunner

_ANYWHERE = "http://gateway"
"""Programs find the gateway by the address at which their user has asked for them."""


def program_runner(
    config: AgentConfig,
    broker: Broker,
    scope: JobScope,
    *,
    max_tries: int = 1,
    private: Sequence[Path] = (),
) -> ProgramRunner:
    """Return what runs the programs of a job; see `ProgramRunner`.

    Raises ConfigError where the packages of the proxy are not installed.
    """
    from ..proxy.proxy import ModelProxy  # hosts of games need no HTTP server

    proxy = ModelProxy(broker, scope)
    return ProgramRunner(config, proxy, max_tries=max_tries, job=scope.job, private=private)


def asked_runner(
    config: AgentConfig, broker: Broker, scope: JobScope, *, max_tries: int = 1
) -> tuple[GivenOutRunner, AskedEpisodes]:
    """Return what gives the episodes of a job to those who ask for them, and who does."""
    from ..proxy.proxy import ModelProxy  # hosts of games need no HTTP server

    asked = AskedEpisodes(config.per_host)
    proxy = ModelProxy(broker, scope, gateway=_ANYWHERE)
    runner = GivenOutRunner(
        config, proxy, asked.give, max_tries=max_tries, job=scope.job, places=asked
    )
    return runner, asked
