"""URLs of clients: the broker's `nats://host:port`, and a job's `nats://host:port/<user>/<job>`.

A cluster's servers have commas between them: `tls://a:4222,b:4222,c:4222/<user>/<job>`.
"""

from dataclasses import dataclass
from urllib.parse import SplitResult

from ..broker.client.faults import shown_url, split_servers
from ..schemas.wire.errors import ConfigError
from ..schemas.wire.subjects import JobScope

_SCHEMES = frozenset({"nats", "tls", "ws", "wss"})


@dataclass(frozen=True)
class JobAddress:
    """Where a job is reached."""

    broker_url: str
    """URL of the broker."""
    scope: JobScope
    """The job's names."""

    @property
    def server_url(self) -> str:
        """The one URL that says all of it."""
        return f"{self.broker_url}/{self.scope.user}/{self.scope.job}"


def parse_broker_url(url: str) -> str:
    """Return the URL of a broker without a path.

    Raises ConfigError for another kind of URL, such as `http://…`.
    """
    servers = _split(url)
    return f"{servers[0].scheme}://{','.join(server.netloc for server in servers)}"


def parse_server_url(url: str) -> JobAddress:
    """Read a job's URL.

    Raises ConfigError when it names no job.
    """
    broker_url = parse_broker_url(url)
    tokens = [part for part in _split(url)[-1].path.split("/") if part]
    if len(tokens) != 2:
        raise ConfigError(
            f"{shown_url(url)!r} does not name a job",
            hint="use the server_url that submit_job returned: nats://host:port/<user>/<job>",
        )
    return JobAddress(broker_url, JobScope(*tokens))


def _split(url: str) -> list[SplitResult]:
    try:
        return split_servers(url if "//" in url else f"nats://{url}", _SCHEMES)
    except ValueError as error:
        raise ConfigError(
            f"{shown_url(url)!r} is not the URL of a broker",
            hint="write nats://host:port; `tinkermq up` prints it",
        ) from error
