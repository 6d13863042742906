"""Android emulators, as the package android_world drives them, one episode at a time on each.

Emulators of a machine are numbered from 0: emulator i has console port `console_port + 2·i` and
gRPC port `grpc_port + i`. An episode leases one with a file lock, whichever process it is played
in, so that a process that dies gives its emulator back.
"""

import ast
import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, cast

from ...schemas.wire.errors import GameError
from ..reasoning import behind_reasoning
from ..registry import extra

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


# What the policy reads of an Android screen, and how its answer becomes an action.

ACTIONS = """\
{"action_type": "click", "index": 3} (also double_tap, long_press)
{"action_type": "input_text", "text": "what to type", "index": 3}
{"action_type": "keyboard_enter"}
{"action_type": "scroll", "direction": "up|down|left|right"} (with an index: within that element)
{"action_type": "open_app", "app_name": "name"}
{"action_type": "navigate_back"}, {"action_type": "navigate_home"}, {"action_type": "wait"}
{"action_type": "answer", "text": "the answer to a question of the goal"}
{"action_type": "status", "goal_status": "complete"} when the goal is reached, or "infeasible" when
it cannot be"""
SYSTEM_PROMPT = f"""\
You operate an Android phone to reach a goal. Each turn you get the goal and the elements of the
screen, numbered. Answer with one action, as JSON:
{ACTIONS}
Write in this form:
Reason: why
Action: {{"action_type": …}}"""

_POINTED = ("click", "double_tap", "long_press", "input_text")
_NEEDED = {
    "input_text": "text",
    "scroll": "direction",
    "swipe": "direction",
    "open_app": "app_name",
    "answer": "text",
    "status": "goal_status",
}
_STATUS = ("complete", "infeasible")
_FLAGS = (
    ("is_editable", "editable"),
    ("is_checked", "checked"),
    ("is_selected", "selected"),
    ("is_focused", "focused"),
    ("is_scrollable", "scrollable"),
    ("is_long_clickable", "long-clickable"),
)


def describe_screen(elements: Sequence[Any], screen_size: tuple[int, int]) -> str:
    """Return the visible elements line by line, each with the index that actions point with."""
    lines = [
        f"{index}: {_describe(element)}"
        for index, element in enumerate(elements)
        if _is_visible(element, screen_size)
    ]
    return "\n".join(lines) or "(nothing)"


def parse_answer(text: str) -> dict[str, Any] | None:
    """Return the fields of the action in an answer, or None.

    The action stands after the last `Action:`, or else is the last `{…}` of the text; JSON or a
    Python literal.
    """
    after = behind_reasoning(text).rpartition("Action:")[2]
    for part in (after.strip(), *reversed(re.findall(r"\{[^{}]*\}", after))):
        for read in (json.loads, ast.literal_eval):
            try:
                value: Any = read(part)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(value, dict):
                return cast("dict[str, Any]", value)
    return None


def what_is_wrong(fields: dict[str, Any] | None, elements: Sequence[Any]) -> str:
    """Say why fields make no action on this screen; empty when they do."""
    if fields is None:
        return "There is no action in your answer."
    kind = fields.get("action_type")
    needed = _NEEDED.get(str(kind))
    if needed is not None and not fields.get(needed):
        return f"The action {kind} needs {needed}."
    if kind == "status" and fields["goal_status"] not in _STATUS:
        return f"goal_status must be {' or '.join(_STATUS)}."
    if kind not in _POINTED or ("x" in fields and "y" in fields):
        return ""
    index = fields.get("index")
    known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(elements)
    return "" if known else f"There is no element {index!r} to {kind}."


def _is_visible(element: Any, screen_size: tuple[int, int]) -> bool:
    """Whether an element can be seen: not hidden, not empty, and on the screen."""
    box = element.bbox_pixels
    if element.is_visible is False or box is None:
        return False
    width, height = screen_size
    on_screen = box.x_min < width and box.x_max > 0 and box.y_min < height and box.y_max > 0
    return bool(box.x_min < box.x_max and box.y_min < box.y_max and on_screen)


def _describe(element: Any) -> str:
    kind = (element.class_name or "element").rpartition(".")[2]
    texts = [
        text for text in (element.text, element.content_description, element.hint_text) if text
    ]
    flags = [word for name, word in _FLAGS if getattr(element, name)]
    if element.is_enabled is False:
        flags.append("disabled")
    words = " / ".join(dict.fromkeys(texts))
    parts = [kind, *([repr(words)] if words else []), *([f"({', '.join(flags)})"] if flags else [])]
    return " ".join(parts)
