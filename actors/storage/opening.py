"""Opens stores by URL, those in the broker through the connection of whoever asks."""

import asyncio

from ...broker.client.connection import Broker
from ...schemas.config.sections import BROKER
from ...schemas.wire.errors import StorageError
from ...schemas.wire.subjects import JobScope
from .broker_store import BrokerStore
from .url_store import UrlStore

Store = UrlStore | BrokerStore

_RUNS, _CHECKPOINTS = f"{BROKER}runs/", "checkpoints"


class Stores:
    """What opens stores.

    `broker:runs/<user>/<job>/checkpoints/<name>` is a checkpoint in the bucket of that job, and
    another word than `checkpoints` what the job keeps of others there.
    """

    def __init__(self, broker: Broker, own: JobScope | None = None) -> None:
        """To be made on the loop of `broker`; an actor of a job reads the bucket of its `own`."""
        self._broker = broker
        self._own = own
        self._loop = asyncio.get_running_loop()

    def open(self, url: str, *, tries: int = 6) -> Store:
        """Return a store whose names are relative to a URL. Raises StorageError."""
        if not url.startswith(_RUNS):
            return UrlStore(url, tries=tries)
        return self.bucket(url)

    def bucket(self, url: str) -> BrokerStore:
        """Return what lies below a URL in the broker. Raises StorageError."""
        user, _, rest = url.removeprefix(_RUNS).partition("/")
        job, _, below = rest.partition("/")
        scope = JobScope(user, job)
        below = f"{below}/".removeprefix(f"{_CHECKPOINTS}/").rstrip("/")
        if self._own not in (None, scope):
            raise StorageError(
                f"{url} is of another job, and a job reads only its own checkpoints in the broker",
                hint="begin with that checkpoint: fork_of, or `--from RUN@STEP`",
            )
        return BrokerStore(self._broker, scope, below, self._loop)
