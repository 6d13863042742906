"""What programs print: the last of it, read by one thread for all of a host's programs.

A program is never held up for long by what it prints and never costs more memory than its rings: a
flood is read a little more slowly than it could be, so that it costs a bounded part of a core.
"""

import os
import selectors
import threading
import time
from collections import deque
from dataclasses import dataclass, field

RING_BYTES = 256 << 10
"""What is kept of each stream."""
TAIL_BYTES = 8 << 10
"""What an episode reports."""
_CHUNK = 64 << 10
_PAUSE_S = 0.005


class Ring:
    """The last bytes of a stream."""

    def __init__(self, most: int = RING_BYTES) -> None:
        self._most = most
        self._bytes = bytearray()

    def add(self, chunk: bytes) -> None:
        """Add bytes, and forget the oldest of too many."""
        self._bytes += chunk
        if len(self._bytes) > 2 * self._most:  # seldom, since it moves what is kept
            del self._bytes[: -self._most]

    def end(self, most: int = RING_BYTES) -> bytes:
        """Return the end of it, at most so many bytes."""
        return bytes(self._bytes[-min(most, self._most) :])

    def text(self, most: int = RING_BYTES) -> str:
        """Return the end of it as text."""
        return self.end(most).decode("utf-8", "replace")


@dataclass(eq=False)
class Printed:
    """What one program has printed."""

    out: Ring = field(default_factory=Ring)
    """Its standard output."""
    errors: Ring = field(default_factory=lambda: Ring(TAIL_BYTES // 2))
    """The last of its errors."""
    both: Ring = field(default_factory=Ring)
    """Its standard output and its errors, as they came."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when both streams have ended."""
    num_open: int = 2
    """Streams that have not."""

    def tail(self) -> str:
        """Return the end of what it printed, for people.

        Two pipes have no common order: errors that a flood of output has pushed out stand first.
        """
        errors, tail = self.errors.end(), self.both.end(TAIL_BYTES)
        if errors not in tail:
            tail = errors + tail[len(errors) - TAIL_BYTES :]
        return tail.decode("utf-8", "replace")


@dataclass(frozen=True, eq=False)
class _Stream:
    printed: Printed
    is_out: bool

    def take(self, chunk: bytes) -> None:
        (self.printed.out if self.is_out else self.printed.errors).add(chunk)
        self.printed.both.add(chunk)


class OutputReader:
    """The thread that reads what all programs print."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._new: deque[tuple[int, _Stream]] = deque()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._read, name="program-output", daemon=True)
        self._thread.start()

    def follow(self, out: int, errors: int) -> Printed:
        """Read two pipes to their end and close them."""
        printed = Printed()
        for file, is_out in ((out, True), (errors, False)):
            os.set_blocking(file, False)
            self._new.append((file, _Stream(printed, is_out)))
        os.write(self._wake, b".")
        return printed

    def stop(self) -> None:
        """End the thread, and close what is still open."""
        self._stopping = True
        os.write(self._wake, b".")
        self._thread.join()
        for file in [file for file, _ in self._new] + [
            key.fd for key in self._selector.get_map().values()
        ]:
            os.close(file)
        self._selector.close()
        os.close(self._wake)

    def _read(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(key.fd, _CHUNK)
                else:
                    self._take(key.fd, key.data)
            while self._new:
                file, stream = self._new.popleft()
                self._selector.register(file, selectors.EVENT_READ, stream)
            time.sleep(_PAUSE_S)

    def _take(self, file: int, stream: _Stream) -> None:
        try:
            chunk = os.read(file, _CHUNK)
        except BlockingIOError:
            return
        if chunk:
            stream.take(chunk)
            return
        self._selector.unregister(file)
        os.close(file)
        stream.printed.num_open -= 1
        if not stream.printed.num_open:
            stream.printed.ended.set()
