"""The socket at which a game behind walls has programs of a model run: outside of its walls."""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import structlog

from ...broker.service_process import die_with
from ...envs.sandbox.served import listen_at
from .command import ENVIRONMENT

_PAUSE_S = 1.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class SandboxSocket:
    """Listens for one game; what runs its programs starts with the first, and again if it ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Listen from now on; `environment` is that of the process that will run the programs.

        Raises OSError where no socket can be made, with what is to be done.
        """
        self._environment = environment
        self._folder = Path(tempfile.mkdtemp(prefix="tinkermq-"))
        self.path = self._folder / "socket"
        try:
            self._listening = listen_at(self.path)
            self.path.chmod(0o666)  # the game is somebody else, and alone is shown it
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._task = asyncio.create_task(self._serve())
        self._task.add_done_callback(lambda _: self._listening.close())

    async def close(self) -> None:
        """Listen no more, and end every program."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _serve(self) -> None:
        while True:
            await self._asked()
            server = await self._start()
            try:
                exit_code = await server.wait()
            finally:
                if server.returncode is None:
                    server.kill()
                    await server.wait()
            _log.warning("sandbox_server_ended", exit_code=exit_code, restart_in_s=_PAUSE_S)
            await asyncio.sleep(_PAUSE_S)

    async def _asked(self) -> None:
        """Wait until the game connects."""
        asked, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._listening, asked.set)
        try:
            await asked.wait()
        finally:
            loop.remove_reader(self._listening)

    async def _start(self) -> asyncio.subprocess.Process:
        listening = self._listening.fileno()
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tinkermq.envs.sandbox.server", str(listening)),
            stdin=asyncio.subprocess.DEVNULL,
            env={**self._environment, **ENVIRONMENT},
            pass_fds=[listening],
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
