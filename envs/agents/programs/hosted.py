"""The programs of an environment host, with the proxy at which they find the model."""

from collections.abc import Sequence
from pathlib import Path

from ....broker.client.connection import Broker
from ....schemas.config.agent import AgentConfig
from ....schemas.wire.subjects import JobScope
from .runner import ProgramRunner


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
