"""The second rank of several learners, one after the other, in one process.

Most of a rank's time is its start. An empty message ends one learner.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Connection

from tinkermq.actors.learner.ranks.worker import serve
from tinkermq.actors.training.ranks import Order, Ranks
from tinkermq.schemas.config.job import JobConfig


class SecondRank(Ranks):
    """Orders to the process."""

    def __init__(self, config: JobConfig, orders: Connection) -> None:
        """Use the process for one learner."""
        super().__init__(config)
        self._orders = orders

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Send an order."""
        order.send(self._orders)
        yield

    def close(self) -> None:
        """End this learner."""
        self._orders.send_bytes(b"")
        super().close()


@contextlib.contextmanager
def second_rank() -> Iterator[Connection]:
    """Start the process; it ends with the block."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "tests.support.second_rank"]
    process = subprocess.Popen(command, stdin=reading)
    os.close(reading)
    orders = Connection(writing, readable=False)
    try:
        yield orders
    finally:
        orders.close()
        process.kill()
        process.wait()


class _Orders(Connection):
    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        received = super().recv_bytes(maxlength)
        if not received:
            raise EOFError
        return received


if __name__ == "__main__":
    given = _Orders(sys.stdin.fileno(), writable=False)
    with contextlib.suppress(EOFError):
        while True:
            serve(1, given)
