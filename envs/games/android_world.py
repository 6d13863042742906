"""AndroidWorld: tasks on a phone, on the package android_world and a device.

Tasks come from the package's registry; goal and screen come from the device that the episode is
played on. Without the package or a device the game refuses with the reason: there is no stand-in to
train on by mistake. Rewards are those of OpenTinker: 10 for a task that is done when the policy
says so, −1 when it is not, or is called infeasible, or the steps are used up, −0.1 for what is no
action, −0.01 for any other step.
"""

import difflib
import functools
import importlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..running.global_random import GlobalRandom
from .android_device import (
    ANDROID_WORLD,
    SYSTEM_PROMPT,
    DeviceLease,
    Devices,
    Emulators,
    describe_screen,
    lease,
    parse_answer,
    what_is_wrong,
)

DONE_SCORE = 0.5
"""A task is done when its own score is above this, as android_world counts it."""


class AndroidWorldGame(AbstractGame):
    """Do a task of AndroidWorld on an emulator."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
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
        `max_steps` must not be above rollout.max_turns, or the reward of a failure never comes.
        `screenshots` puts the screen's pixels into info. `devices` is `package.module:Class` of
        another edge to devices than this machine's emulators.
        """
        self._devices = _edge(devices, console_port, grpc_port, adb_path)
        for number in range(emulators):
            self._devices.check(number)
        self._tasks = self._devices.tasks(family)
        self._names = sorted(self._tasks if tasks is None else tasks)
        self._check_names(family)
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
        """Set a task up on a free device and show its goal and the device's screen."""
        self._name, self._steps = task, 0
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._running = _Running(self._devices, self._num_devices, self._tasks[task], seed)
            weakref.finalize(self, self._running.end)
            return self._look()[0]

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
                return self._end(-1.0, success=False, said="")
            shown, info = self._look()
        told = f"{wrong}\n\n{shown}" if wrong else shown
        info |= {"type": self._name, "success": False, "invalid": bool(wrong)}
        return StepResult(told, -0.1 if wrong else -0.01, done=False, info=info)

    def get_system_prompt(self) -> str:
        """Return the actions and how to answer."""
        return SYSTEM_PROMPT

    def get_initial_user_message(self) -> str:
        """Return nothing: goal and screen say it all."""
        return ""

    def get_interaction_name(self) -> str:
        """Return the game's name."""
        return "android_world"

    def get_state(self) -> dict[str, Any]:
        """Return the task, its goal and the step."""
        goal = self._running.goal if self._running else ""
        return {"task": self._name, "goal": goal, "step": self._steps}

    def _play(self, fields: Mapping[str, Any]) -> str:
        """Play an action on the device; say what is wrong with it if it is none."""
        assert self._running is not None
        try:
            action = self._devices.action(fields)
        except (ValueError, TypeError) as error:
            return f"That is no action: {error}."
        self._running.env.execute_action(action)
        return ""

    def _judge(self, complete: bool) -> StepResult:
        """End the episode: the policy says that the task is done, or cannot be."""
        assert self._running is not None
        done = complete and self._running.score() > DONE_SCORE
        return self._end(
            10.0 if done else -1.0, success=done, said="complete" if complete else "infeasible"
        )

    def _end(self, reward: float, *, success: bool, said: str) -> StepResult:
        assert self._running is not None
        self._running.end()
        info = {"type": self._name, "success": success, "steps": self._steps, "said": said}
        return StepResult("", reward, done=True, info=info)

    def _look(self) -> tuple[str, dict[str, Any]]:
        """Return what the policy sees, the goal restated, and the pixels where asked for."""
        assert self._running is not None
        state = self._running.env.get_state(wait_to_stabilize=True)
        self._elements = state.ui_elements
        screen = describe_screen(state.ui_elements, self._running.env.logical_screen_size)
        info = {"screenshot": state.pixels} if self._screenshots else {}
        return f"Goal: {self._running.goal}\n\nScreen:\n{screen}", info

    def _check_names(self, family: str) -> None:
        for name in self._names:
            if name not in self._tasks:
                near = difflib.get_close_matches(name, self._tasks, n=3)
                raise GameError(
                    f"the family {family} of android_world has no task {name!r}",
                    hint=f"did you mean {' or '.join(near)}?" if near else "see its registry",
                )


class _Running:
    """A task that is set up on a leased device, until it is torn down."""

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
        """Return how far the task is done, from 0 to 1, by android_world's own judgement."""
        return float(self._task.is_successful(self.env))

    def end(self) -> None:
        """Tear the task down and give the device back; again is harmless."""
        if self._lease is None:
            return
        held, self._lease = self._lease, None
        try:
            self._task.tear_down(self.env)
        finally:
            held.give_back()


@functools.lru_cache(maxsize=4)
def _edge(target: str, console_port: int, grpc_port: int, adb_path: str) -> Devices:
    """Return the edge to the devices, one per process and configuration."""
    if not target:
        return Emulators(console_port, grpc_port, adb_path)
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError) as error:
        raise GameError(
            f"devices {target!r} cannot be imported: {error}", hint="give package.module:Class"
        ) from error
