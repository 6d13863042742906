"""AndroidWorld: tasks on a phone, on the package android_world and a device.

Tasks come from the package's registry; goal and screen come from the episode's device. Without the
package or a device the game raises GameError. Rewards are those of OpenTinker: 10 if the task is
done when the policy says so, −1 if it is not, if the policy calls it infeasible, or when the steps
are used up, −0.1 for an invalid action, −0.01 for any other step.
"""

import ast
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, Protocol, cast

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..reasoning import behind_reasoning
from ..registry import Extra, import_object, refuse_unknown
from ..running.global_random import GlobalRandom

# Emulators: number i of a machine has console port `console_port + 2·i` and gRPC port `grpc_port +
# i`. An episode leases one with a file lock, which ends with its process.

ANDROID_WORLD = Extra(
    "android_world", "pip install git+https://github.com/google-research/android_world.git"
)
_ANSWER_S = 2.0


class Devices(Protocol):
    """Interface to the devices: all calls of android_world."""

    def check(self, number: int) -> None:
        """Raise GameError with the reason if a device cannot be used."""
        ...

    def name(self, number: int) -> str:
        """Return a device's unique key on this machine."""
        ...

    def connect(self, number: int) -> Any:
        """Return android_world's AsyncEnv of a device."""
        ...

    def tasks(self, family: str) -> Mapping[str, Any]:
        """Return the TaskEval classes of a family, by name."""
        ...

    def action(self, fields: Mapping[str, Any]) -> Any:
        """Return a JSONAction; raises ValueError or TypeError for invalid fields."""
        ...


class Emulators:
    """Emulators that run on this machine."""

    def __init__(self, console_port: int, grpc_port: int, adb_path: str = "") -> None:
        self._console_port = console_port
        self._grpc_port = grpc_port
        self._adb_path = adb_path
        self._envs: dict[int, Any] = {}

    def check(self, number: int) -> None:
        """Raise GameError unless package, adb and emulator exist."""
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
        """Return the path of adb: the configured one, that of the PATH, or of Android's SDK."""
        sdk = Path(os.environ.get("ANDROID_HOME", "~/Android/Sdk")).expanduser()
        path = self._adb_path or shutil.which("adb") or str(sdk / "platform-tools" / "adb")
        if not Path(path).is_file():
            raise GameError(
                f"there is no adb at {path}",
                hint="install Android's platform-tools, or set the game's argument adb_path",
            )
        return path


class DeviceLease:
    """The right to use one device, until it is released."""

    def __init__(self, number: int, file: IO[str]) -> None:
        self.number = number
        self._file = file

    def give_back(self) -> None:
        """Release the device."""
        self._file.close()


def lease(devices: Devices, num_devices: int) -> DeviceLease:
    """Return a free device; GameError if all are in use."""
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


# The text of a screen for the policy, and the parsing of its answer.

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
    """Return the visible elements line by line, each with its index for actions."""
    lines = [
        f"{index}: {_describe(element)}"
        for index, element in enumerate(elements)
        if _is_visible(element, screen_size)
    ]
    return "\n".join(lines) or "(nothing)"


def parse_answer(text: str) -> dict[str, Any] | None:
    """Return the fields of the action in an answer, or None.

    The action follows the last `Action:`, or else is the last `{…}` of the text; JSON or a Python
    literal.
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
    """Return why fields are not an action on this screen; empty if they are."""
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
    is_listed = (
        isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(elements)
    )
    return "" if is_listed else f"There is no element {index!r} to {kind}."


def _is_visible(element: Any, screen_size: tuple[int, int]) -> bool:
    """Return whether an element is visible: not hidden, not empty, and on the screen."""
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


DONE_SCORE = 0.5
"""Score above which a task is done, as in android_world."""


class AndroidWorldGame(AbstractGame):
    """Do a task of AndroidWorld on an emulator."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    named_arguments: ClassVar[tuple[str, ...]] = ("devices",)
    needs = ANDROID_WORLD

    def __init__(
        self,
        tasks: Sequence[str] | None = None,
        family: str = "android_world",
        emulators: int = 1,
        console_port: int = 5554,
        grpc_port: int = 8554,
        adb_path: str = "",
        max_steps: int = 20,
        screenshots: bool = False,
        devices: str = "",
    ) -> None:
        """Choose tasks and devices.

        `tasks` are names of the family's registry, by default all. Emulator i of this machine, of
        `emulators`, has console port `console_port` + 2·i and gRPC port `grpc_port` + i.
        `max_steps` must not be above rollout.max_turns, or the reward of a failure is never given.
        `screenshots` puts the screen's pixels into info. `devices` is `package.module:Class` of
        another interface to devices than this machine's emulators.
        """
        self._devices = _edge(devices, console_port, grpc_port, adb_path)
        for number in range(emulators):
            self._devices.check(number)
        self._tasks = self._devices.tasks(family)
        self._names = sorted(self._tasks if tasks is None else tasks)
        what = f"the family {family} of android_world has no task"
        refuse_unknown(self._names, self._tasks, what, "see its registry")
        self._num_devices = emulators
        self._max_steps = max_steps
        self._screenshots = screenshots
        self._dice: GlobalRandom
        self._name = ""
        self._steps = 0
        self._elements: Sequence[Any] = ()
        self._running: _Running | None = None

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a task and the seed of its parameters."""
        name = self._names[self.rng.randrange(len(self._names))]
        return {"task": name, "seed": self.rng.getrandbits(31)}

    def reset(self, *, task: str = "", seed: int = 0, **_: Any) -> str:
        """Set up a task on a free device and show its goal and the screen."""
        self._name, self._steps = task, 0
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._running = _Running(self._devices, self._num_devices, self._tasks[task], seed)
            return self._read_screen()[0]

    def step(self, action: str) -> StepResult:
        """Play one action."""
        assert self._running is not None
        self._steps += 1
        fields = parse_answer(action)
        with self._dice.lent():
            wrong = what_is_wrong(fields, self._elements)
            if not wrong and fields is not None and fields["action_type"] == "status":
                return self._judge(fields["goal_status"] == "complete")
            if not wrong and fields is not None:
                wrong = self._play(fields)
            if self._steps >= self._max_steps:
                return self._end(-1.0, success=False, text="")
            shown, info = self._read_screen()
        message = f"{wrong}\n\n{shown}" if wrong else shown
        info |= {"type": self._name, "success": False, "invalid": bool(wrong)}
        return StepResult(message, -0.1 if wrong else -0.01, done=False, info=info)

    def close(self) -> None:
        """Tear the task down and release the device."""
        if self._running is not None:
            with self._dice.lent():
                self._running.end()

    def get_system_prompt(self) -> str:
        """Return the actions and how to answer."""
        return SYSTEM_PROMPT

    def get_interaction_name(self) -> str:
        """Return the game's name."""
        return "android_world"

    def get_state(self) -> dict[str, Any]:
        """Return the task, its goal and the step."""
        goal = self._running.goal if self._running else ""
        return {"task": self._name, "goal": goal, "step": self._steps}

    def _play(self, fields: Mapping[str, Any]) -> str:
        """Play an action on the device; return the problem of an invalid one."""
        assert self._running is not None
        try:
            action = self._devices.action(fields)
        except (ValueError, TypeError) as error:
            return f"That is not an action: {error}."
        self._running.env.execute_action(action)
        return ""

    def _judge(self, complete: bool) -> StepResult:
        """End the episode, since the policy has declared the task done or impossible."""
        assert self._running is not None
        done = complete and self._running.score() > DONE_SCORE
        return self._end(
            10.0 if done else -1.0, success=done, text="complete" if complete else "infeasible"
        )

    def _end(self, reward: float, *, success: bool, text: str) -> StepResult:
        info = {"type": self._name, "success": success, "steps": self._steps, "said": text}
        return StepResult("", reward, done=True, info=info)

    def _read_screen(self) -> tuple[str, dict[str, Any]]:
        """Return the observation, with the goal, and the pixels if requested."""
        assert self._running is not None
        state = self._running.env.get_state(wait_to_stabilize=True)
        self._elements = state.ui_elements
        screen = describe_screen(state.ui_elements, self._running.env.logical_screen_size)
        info = {"screenshot": state.pixels} if self._screenshots else {}
        return f"Goal: {self._running.goal}\n\nScreen:\n{screen}", info


class _Running:
    """A task on a leased device, until it is torn down."""

    def __init__(self, devices: Devices, num_devices: int, task_class: Any, seed: int) -> None:
        self._lease: DeviceLease | None = lease(devices, num_devices)
        try:
            self.env = devices.connect(self._lease.number)
            if hasattr(task_class, "set_device_time"):
                task_class.set_device_time(self.env)
            self._task = task_class({**task_class.generate_random_params(), "seed": seed})
            self._task.initialize_task(self.env)
            self.env.reset(go_home=self._task.start_on_home_screen)
        except BaseException:
            self._lease.give_back()
            raise
        self.goal = str(self._task.goal)

    def score(self) -> float:
        """Return the progress of the task, from 0 to 1, by android_world's own score."""
        return float(self._task.is_successful(self.env))

    def end(self) -> None:
        """Tear the task down and release the device; harmless when repeated."""
        if self._lease is None:
            return
        held, self._lease = self._lease, None
        try:
            self._task.tear_down(self.env)
        finally:
            held.give_back()


@functools.lru_cache(maxsize=4)
def _edge(target: str, console_port: int, grpc_port: int, adb_path: str) -> Devices:
    """Return the interface to the devices, one per process and configuration."""
    if not target:
        return Emulators(console_port, grpc_port, adb_path)
    _, devices = import_object(target)
    if not callable(devices):
        raise GameError(f"devices {target!r} is not a class", hint="give package.module:Class")
    return cast("Devices", devices())
