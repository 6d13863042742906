"""A TCP proxy on loopback between processes and their broker that cuts some of them off.

While a process is cut off, the bytes of its connections, those it has and those it makes, are held
back in both directions: neither side learns of it, as in a partition of the network. Afterwards
what was held back arrives late, or is lost with its connection.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Self

import psutil

_CHUNK_BYTES = 65536


@dataclass(eq=False)
class _Link:
    """One connection that is passed on."""

    port: int
    """Port of the client's end."""
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    may_receive: asyncio.Event = field(default_factory=asyncio.Event)

    def hold(self, *, sent: bool = True) -> None:
        """Hold back what the broker says, and what the client says."""
        self.may_receive.clear()
        if sent:
            self.may_send.clear()

    def let_go(self) -> None:
        """Pass on what was held back."""
        self.may_send.set()
        self.may_receive.set()


class Partitions:
    """Passes connections on to a broker, but not those of processes that are cut off."""

    def __init__(self, broker_port: Callable[[], int | None]) -> None:
        """`broker_port` tells the broker's port on loopback, None while it has none."""
        self._broker_port = broker_port
        self._links: set[_Link] = set()
        self._cut: set[int] = set()
        self._all_cut = False
        self._behind: tuple[bytes, asyncio.Event] | None = None
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def cut_all(self) -> None:
        """Cut everybody off who comes through here."""
        self._all_cut = True
        for link in self._links:
            link.hold()

    def cut(self, pids: Iterable[int]) -> None:
        """Cut some processes off."""
        self._cut |= (pids := set(pids))
        ports = _ports(pids)
        for link in self._links:
            if link.port in ports:
                link.hold()

    async def cut_behind(self, subject: str) -> None:
        """Wait until a message to `subject` passes; its sender hears nothing from then on.

        The broker gets the message, and what its sender says on that connection. Ended early,
        nobody is cut off.
        """
        passed = asyncio.Event()
        self._behind = (b"PUB " + subject.encode() + b" ", passed)
        try:
            await passed.wait()
        finally:
            self._behind = None

    def heal(self, pids: Iterable[int] | None = None, *, lost: bool = False) -> None:
        """End the partition of some processes, None: of all.

        What was held back arrives, or is `lost`, as are the connections then.
        """
        if pids is None:
            self._cut, self._all_cut, ports = set(), False, None
        else:
            self._cut -= (pids := set(pids))
            ports = _ports(pids)
        for link in list(self._links):
            if ports is None or link.port in ports:
                if lost and not (link.may_send.is_set() and link.may_receive.is_set()):
                    for writer in link.writers:
                        writer.transport.abort()
                link.let_go()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            port = self._broker_port()
            if port is not None:
                with contextlib.suppress(OSError):
                    await self._pass_on(reader, writer, port)
        except asyncio.CancelledError:
            pass
        finally:
            self._passing.discard(task)
            writer.transport.abort()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        broker_reader, broker_writer = await asyncio.open_connection("127.0.0.1", port)
        link = _Link(writer.get_extra_info("peername")[1], (writer, broker_writer))
        link.let_go()
        if self._all_cut or link.port in _ports(self._cut):
            link.hold()
        self._links.add(link)
        ways = [
            asyncio.create_task(self._send(reader, broker_writer, link)),
            asyncio.create_task(_receive(broker_reader, writer, link)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            broker_writer.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _send(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link
    ) -> None:
        """Pass on what a client says; hold its answers back once the looked-for message passes."""
        before = b""
        while data := await reader.read(_CHUNK_BYTES):
            await link.may_send.wait()
            if self._behind is not None and self._behind[0] in before + data:
                link.hold(sent=False)
                self._behind[1].set()
                self._behind = None
            before = data[-256:]
            writer.write(data)
            await writer.drain()


async def _receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        await link.may_receive.wait()
        writer.write(data)
        await writer.drain()


def _ports(pids: Iterable[int]) -> set[int]:
    """Return the local ports of the connections of some processes."""
    found: set[int] = set()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found |= {one.laddr.port for one in psutil.Process(pid).net_connections("tcp")}
    return found
