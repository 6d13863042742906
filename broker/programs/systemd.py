"""What a service tells systemd: that it is ready, that its loop still turns, that it stops.

The protocol is that of sd_notify(3): a datagram to the socket that `NOTIFY_SOCKET` names. Without
that variable nothing is told.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator


@contextlib.asynccontextmanager
async def told_to_systemd() -> AsyncGenerator[None, None]:
    """Tell systemd READY now and STOPPING at the end, and WATCHDOG twice in each interval.

    A loop that is blocked for longer than the unit's WatchdogSec ends as a restart.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")  # it is for this process only
    if not address:
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.setblocking(False)
        channel.connect("\0" + address[1:] if address.startswith("@") else address)
        _tell(channel, "READY=1")
        beating = asyncio.create_task(_beat(channel), name="systemd watchdog")
        try:
            yield
        finally:
            beating.cancel()
            _tell(channel, "STOPPING=1")


async def _beat(channel: socket.socket) -> None:
    interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    while interval_s:
        _tell(channel, "WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)


def _tell(channel: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # systemd restarts, or its queue is full: the next one does
        channel.send(text.encode())
