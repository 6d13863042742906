"""Gymnasium environments whose actions and observations can be written as text.

An observation is shown as the environment renders it in mode `ansi`, else as a text or as plain
values. The policy writes an action between `<action>` and `</action>`: one of the listed names, a
number of a discrete space, a text, or JSON for any other space. An invalid action is not played;
the policy reads that it is invalid.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np

from ...schemas.chat_messages import plain
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..reasoning import tagged_or_last_line
from ..registry import extra, import_quietly
from ..running.global_random import GlobalRandom

_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
_COLOURED = re.compile(r"\x1b\[([0-9;]+)m(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumGame(AbstractGame):
    """Play a Gymnasium environment, its actions and observations written as text."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    needs = extra("gymnasium", "gymnasium")

    def __init__(
        self,
        env_id: str,
        kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] | Mapping[str, Any] | None = None,
        instructions: str = "",
        invalid_reward: float = 0.0,
    ) -> None:
        """Choose an environment.

        `env_id` is a registered id, or `module:id` with the module that registers it; `kwargs` go
        to its constructor. `actions` names the actions: a list for the numbers of a discrete space,
        or a map from names to actions. `instructions` precede the first observation.
        """
        self._gym = self.needs.load()
        self._spec = self._find(env_id)
        self._kwargs = {**self._text_mode(), **(kwargs or {})}
        self._named = _named(actions)
        self._instructions = instructions
        self._invalid_reward = invalid_reward
        self._total = 0.0
        self._dice: GlobalRandom
        self._env: Any = None

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw the seed of the environment."""
        return {"seed": self.rng.getrandbits(31)}

    def reset(self, *, seed: int = 0, **_: Any) -> str:
        """Make the environment, reset it, and show its first observation."""
        self._total = 0.0
        self._dice = GlobalRandom(seed)
        with self._dice.lent():
            self._env = self._gym.make(self._spec, disable_env_checker=True, **self._kwargs)
            observation, _info = self._env.reset(seed=seed)
            return self._show(observation)

    def step(self, action: str) -> StepResult:
        """Play an action; for an invalid one, return a message instead."""
        action_value = self._action(self.parse_action(action))
        if action_value is None:
            message = f"That is not an action. {self._say_actions()}"
            info = {**self._info({}, done=False), "invalid": True}
            return StepResult(message, self._invalid_reward, done=False, info=info)
        with self._dice.lent():
            observation, reward, terminated, truncated, info = self._env.step(action_value[0])
            shown = self._show(observation)
        self._total += float(reward)
        done = bool(terminated or truncated)
        info = {**self._info(info, done=done), "invalid": False}
        return StepResult(shown, float(reward), done, info)

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()

    def parse_action(self, raw: str) -> str:
        """Return the text between `<action>` and `</action>`, or else the last line."""
        return tagged_or_last_line(raw, "action")

    def get_initial_user_message(self) -> str:
        """Return the instructions, and how to answer."""
        how = "Answer with one action between <action> and </action>."
        text = self._instructions or f"You act in the environment {self._spec.id}."
        return f"{text}\n{how} {self._say_actions()}"

    def get_interaction_name(self) -> str:
        """Return the environment's id."""
        return str(self._spec.id)

    def get_state(self) -> dict[str, Any]:
        """Return the id and the return so far."""
        return {"env_id": self._spec.id, "return": self._total}

    def _find(self, env_id: str) -> Any:
        """Return the specification of an id, importing the module before its colon."""
        module, _, name = env_id.rpartition(":")
        try:
            if module:
                import_quietly(module)
            return self._gym.spec(name)
        except (self._gym.error.Error, ImportError) as error:
            raise GameError(
                f"Gymnasium has no environment {env_id!r}: {error}",
                hint="give a registered id, or module:id with the module that registers it",
            ) from error

    def _text_mode(self) -> dict[str, str]:
        creator = self._spec.entry_point
        if isinstance(creator, str):
            creator = self._gym.envs.registration.load_env_creator(creator)
        modes = getattr(creator, "metadata", {}).get("render_modes", ())
        return {"render_mode": "ansi"} if "ansi" in modes else {}

    def _show(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return name_colours(str(self._env.render())).strip("\n")
        return f"Observation: {plain(observation)}"

    def _action(self, text: str) -> tuple[Any] | None:
        """Return the action of a text, in a tuple since an action may be None."""
        if text.casefold() in self._named:
            return (self._named[text.casefold()],)
        spaces, space = self._gym.spaces, self._env.action_space
        if isinstance(space, spaces.Text):
            return (text,) if space.contains(text) else None
        try:
            action = self._read(space, read_json(text))
        except (ValueError, TypeError, LookupError, OverflowError):
            return None
        return (action,) if space.contains(action) else None

    def _read(self, space: Any, value: Any) -> Any:
        """Return the value of a space for a JSON value; raises an error for an invalid one."""
        spaces = self._gym.spaces
        if isinstance(space, spaces.Dict | spaces.Tuple):
            inner: Any = space.spaces  # gymnasium reads these from one list per value
            if len(value) != len(inner):
                raise ValueError
            if isinstance(inner, Mapping):
                named = cast("Mapping[str, Any]", inner)
                return {name: self._read(part, value[name]) for name, part in named.items()}
            return tuple(self._read(part, value[number]) for number, part in enumerate(inner))
        action = space.from_jsonable([value])[0]
        is_whole = space.dtype is not None and np.issubdtype(space.dtype, np.integer)
        if is_whole and not np.array_equal(action, value):  # 1.5 is not 1
            raise ValueError
        return action

    def _say_actions(self) -> str:
        if self._named:
            return f"Actions: {', '.join(self._named)}."
        if self._env is None:
            return ""
        spaces, space = self._gym.spaces, self._env.action_space
        if isinstance(space, spaces.Text):
            return ""
        if isinstance(space, spaces.Discrete):
            return f"Actions: the numbers {space.start} to {space.start + space.n - 1}."
        return f"Actions are JSON in {space}."

    def _info(self, info: Mapping[str, Any], *, done: bool) -> dict[str, Any]:
        """Return the `info` of a turn; with success if the environment defines it."""
        facts: dict[str, Any] = {"type": self._spec.id}
        threshold = self._spec.reward_threshold
        if "is_success" in info:
            facts["success"] = bool(info["is_success"])
        elif threshold is not None:
            facts["success"] = done and self._total >= threshold
        return facts


def name_colours(text: str) -> str:
    """Write a terminal's colours as tags: `<red>S</red>`."""
    return _ESCAPE.sub("", _COLOURED.sub(_tag, text))


def _tag(match: re.Match[str]) -> str:
    codes = [int(code) for code in match[1].split(";") if code]
    names = [_COLOURS[code % 10] for code in codes if code // 10 in (3, 4) and code % 10 < 8]
    inside = _ESCAPE.sub("", match[2])
    return f"<{names[0]}>{inside}</{names[0]}>" if names else inside


def _named(actions: Sequence[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    if actions is None:
        return {}
    pairs = (
        actions.items()
        if isinstance(actions, Mapping)
        else ((name, number) for number, name in enumerate(actions))
    )
    return {str(name).casefold(): action for name, action in pairs}
