"""Android emulators, as the package android_world drives them, one episode at a time on each.

Emulators of a machine are numbered from 0: emulator i has console port `console_port + 2·i` and
gRPC port `grpc_port + i`. An episode leases one with a file lock, whichever process it is played
in, so that a process that dies gives its emulator back.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from ....schemas.wire.errors import GameError
from ...extra import extra

ANDROID_WORLD = extra("android_world", "android-world")
_ANSWER_S = 2.0


class Devices(Protocol):
    """The edge to the devices: everything that android_world does for the game."""

    def check(self, number: int) -> None:
        """Raise GameError with the reason when a device cannot be used."""
        ...

    def name(self, number: int) -> str:
        """Return what tells a device from all others of this machine."""
        ...

    def connect(self, number: int) -> Any:
        """Return android_world's AsyncEnv of a device."""
        ...

    def tasks(self, family: str) -> Mapping[str, Any]:
        """Return the TaskEval classes of a family, by name."""
        ...

    def action(self, fields: Mapping[str, Any]) -> Any:
        """Return a JSONAction; raises ValueError or TypeError for fields that make none."""
        ...


class Emulators:
    """Emulators that run on this machine."""

    def __init__(self, console_port: int, grpc_port: int, adb_path: str = "") -> None:
        self._console_port = console_port
        self._grpc_port = grpc_port
        self._adb_path = adb_path
        self._envs: dict[int, Any] = {}

    def check(self, number: int) -> None:
        """Raise GameError unless package, adb and emulator are there."""
        if not ANDROID_WORLD.installed:
            raise ANDROID_WORLD.missing()
        self._adb()
        for what, port in zip(("console", "gRPC"), self._ports(number), strict=True):
            try:
                socket.create_connection(("127.0.0.1", port), _ANSWER_S).close()
            except OSError as error:
                console, grpc = self._ports(number)
                raise GameError(
                    f"no emulator answers on {what} port {port}: {error}",
                    hint=f"start emulator {number}: emulator -avd NAME -no-window -no-snapshot "
                    f"-port {console} -grpc {grpc}",
                ) from error

    def name(self, number: int) -> str:
        """Return the emulator's name, as adb calls it."""
        return f"emulator-{self._ports(number)[0]}"

    def connect(self, number: int) -> Any:
        """Connect to an emulator, once per process."""
        if number not in self._envs:
            console, grpc = self._ports(number)
            launcher = ANDROID_WORLD.load("env.env_launcher")
            self._envs[number] = launcher.load_and_setup_env(
                console_port=console, grpc_port=grpc, adb_path=self._adb()
            )
        return self._envs[number]

    def tasks(self, family: str) -> Mapping[str, Any]:
        """Return android_world's own registry of a family."""
        return ANDROID_WORLD.load("registry").TaskRegistry().get_registry(family)

    def action(self, fields: Mapping[str, Any]) -> Any:
        """Return android_world's JSONAction."""
        return ANDROID_WORLD.load("env.json_action").JSONAction(**fields)

    def _ports(self, number: int) -> tuple[int, int]:
        return self._console_port + 2 * number, self._grpc_port + number

    def _adb(self) -> str:
        """Return the path of adb: the one given, the one on the PATH, or that of Android's SDK."""
        sdk = Path(os.environ.get("ANDROID_HOME", "~/Android/Sdk")).expanduser()
        found = self._adb_path or shutil.which("adb") or str(sdk / "platform-tools" / "adb")
        if not Path(found).is_file():
            raise GameError(
                f"there is no adb at {found}",
                hint="install Android's platform-tools, or set the game's argument adb_path",
            )
        return found


class DeviceLease:
    """The right to play on one device, until it is given back."""

    def __init__(self, number: int, file: IO[str]) -> None:
        self.number = number
        self._file = file

    def give_back(self) -> None:
        """Let others play on the device."""
        self._file.close()


def lease(devices: Devices, num_devices: int) -> DeviceLease:
    """Return a free device; GameError when all are in use."""
    for number in range(num_devices):
        file = Path(tempfile.gettempdir()) / f"tinkermq-{devices.name(number)}.lock"
        with contextlib.suppress(BlockingIOError):
            return DeviceLease(number, _lock(file))
    raise GameError(
        f"all {num_devices} emulators play an episode each",
        hint=f"set generator.count × generator.max_episodes to {num_devices} at most, or start "
        "more emulators and raise the game's argument emulators",
    )


def _lock(path: Path) -> IO[str]:
    with _closed_on_error(path.open("w", encoding="utf-8")) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file


@contextlib.contextmanager
def _closed_on_error(file: IO[str]) -> Iterator[IO[str]]:
    try:
        yield file
    except BaseException:
        file.close()
        raise
