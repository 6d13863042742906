"""Lines that are typed, or stand in a pipe or a file, while an event loop goes on."""

import asyncio
import os
import sys

_CHUNK = 64 << 10


class TypedLines:
    """The lines of the standard input; use it inside of a running loop."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self.is_terminal = sys.stdin.isatty()
        self._file = sys.stdin.fileno()
        self._unread = b""
        self._ended = False

    async def next(self, prompt: str = "") -> str | None:
        """Return the next line without its end; None when there is no more."""
        if prompt and self.is_terminal:
            sys.stdout.write(prompt)
            sys.stdout.flush()
        while b"\n" not in self._unread and not self._ended:
            chunk = await self._chunk()
            self._ended = not chunk
            self._unread += chunk
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")

    async def _chunk(self) -> bytes:
        """Return more of the input, once there is some; b"" at its end."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._file, readable.set)
        except PermissionError:
            return os.read(self._file, _CHUNK)  # a file: there is nothing to wait for
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._file)
        return os.read(self._file, _CHUNK)
