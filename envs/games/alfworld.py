"""ALFWorld: household tasks as text, on the packages alfworld and textworld.

The environment host chooses each episode's game from its own list, and the same instance makes the
prompt: prompt and game are one. A dataset may name the games instead (`make_data`), row by row, for
a fixed order and for validation on other splits than that of training.

The policy reads the task, what it sees, and the commands that are possible; it answers with one of
them between `<action>` and `</action>`. Rewards are those of OpenTinker: 10 for the task done, −1
when the steps are used up, −0.1 for a command that does nothing, −0.01 for any other step.
"""

import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...schemas.wire.errors import GameError
from ..action_text import tagged_or_last_line
from ..extra import extra
from ..game import AbstractGame, StepResult
from ..write_data import write_rows
from .alfworld_games import GAME_FILE, GameFile, data_folder, list_games

SYSTEM_PROMPT = """\
You act in a household. Each turn you are told what you see and which actions are possible.
Think between <thinking> and </thinking>, then write exactly one of the possible actions between \
<action> and </action>."""
_GREETING = "-= Welcome to TextWorld, ALFRED! =-"
_TASK = "Your task is to:"
_NOTHING = "Nothing happens."


class ALFWorldGame(AbstractGame):
    """Do a household task in ALFWorld's text world."""

    isolation: ClassVar[Literal["thread", "process"]] = "process"
    needs = extra("alfworld", "alfworld")

    def __init__(
        self,
        data: str | None = None,
        split: str = "train",
        task_types: Sequence[str] | None = None,
        num_games: int = -1,
        max_steps: int = 20,
        success_reward: float = 10.0,
        failure_reward: float = -1.0,
        invalid_reward: float = -0.1,
        step_reward: float = -0.01,
    ) -> None:
        """Choose the games.

        `data` is the folder with ALFWorld's games, by default $ALFWORLD_DATA or
        ~/.cache/alfworld; `split` is train, seen or unseen; `task_types` some of the six, by
        default all; `num_games` a fixed subset of that size, -1 for all. `max_steps` must not be
        above rollout.max_turns, or the reward of a failure never comes.
        """
        if not self.needs.installed:
            raise self.needs.missing()
        if max_steps < 1:
            raise GameError(f"max_steps={max_steps} must be at least 1")
        self._folder = data_folder(data)
        self._split = split
        self._task_types = task_types
        self._num_games = num_games
        self._max_steps = max_steps
        self._rewards = (success_reward, failure_reward, invalid_reward, step_reward)
        self._game = GameFile("", "")
        self._task = ""
        self._state: Any = None
        self._walkthrough: list[str] = []
        self._steps = 0
        self._env: Any = None

    def generate_initial_state(self) -> dict[str, Any]:
        """Draw a game from the list."""
        games = list_games(self._folder, self._split, self._task_types, self._num_games)
        game = games[self.rng.randrange(len(games))]
        return {"ground_truth": game.name, "data_source": game.task_type}

    def reset(self, *, ground_truth: str, data_source: str = "", **_: Any) -> str:
        """Start the game of a folder within the data and show its task and first room."""
        self._game = GameFile(ground_truth, data_source)
        self._steps = 0
        file = self._folder / ground_truth / GAME_FILE
        if not file.is_file():
            raise GameError(
                f"there is no game {file}",
                hint="all hosts of a job must have the same games as those its data names",
            )
        self._env = _borrow(self)
        game = json.loads(file.read_text(encoding="utf-8"))
        self._walkthrough = game.get("walkthrough") or []
        self._env.load(game)
        self._state = self._env.reset()
        intro = self._state.feedback.replace(_GREETING, "").strip()
        room, _, task = intro.partition(_TASK)
        self._task = task.strip()
        return self._show(room.strip())

    def step(self, action: str) -> StepResult:
        """Play one command."""
        command = self.parse_action(action)
        self._steps += 1
        self._state, _, done = self._env.step(command)
        won = bool(self._state["won"])
        feedback = self._state.feedback.strip()
        invalid = feedback == _NOTHING
        over = won or bool(done) or self._steps >= self._max_steps
        info = {
            "type": self._game.task_type,
            "success": won,
            "invalid": invalid,
            "steps": self._steps,
            "game": self._game.name,
        }
        return StepResult(self._show(feedback), self._reward(won, over, invalid), over, info)

    def parse_action(self, raw: str) -> str:
        """Return what stands between `<action>` and `</action>`, or else the last line."""
        return " ".join(tagged_or_last_line(raw, "action").split()).lower()

    def get_system_prompt(self) -> str:
        """Return how to act and to answer."""
        return SYSTEM_PROMPT

    def get_initial_user_message(self) -> str:
        """Return nothing: the game words its task."""
        return ""

    def get_interaction_name(self) -> str:
        """Return the game's name."""
        return "alfworld"

    def get_state(self) -> dict[str, Any]:
        """Return the game, its task and where the episode is."""
        return {
            "game": self._game.name,
            "task": self._task,
            "task_type": self._game.task_type,
            "step": self._steps,
            "max_steps": self._max_steps,
        }

    def gold_action(self) -> str:
        """Return the next command of the game's walkthrough."""
        if self._steps >= len(self._walkthrough):
            raise GameError(
                f"the walkthrough of {self._game.name} has {len(self._walkthrough)} steps",
                hint="`alfworld-generate` adds walkthroughs to games",
            )
        return f"<action>{self._walkthrough[self._steps]}</action>"

    def _reward(self, won: bool, over: bool, invalid: bool) -> float:
        success, failure, invalid_reward, step = self._rewards
        if over:
            return success if won else failure
        return invalid_reward if invalid else step

    def _show(self, text: str) -> str:
        """Return an observation; each restates the task, so that each can stand alone."""
        commands = "\n".join(f"- {command}" for command in self._state["admissible_commands"])
        return (
            f"{_TASK} {self._task}\n\n=== Current State ===\n{text}\n\n"
            f"=== Available Actions ===\n{commands}"
        )


_idle: list[Any] = []
"""Text worlds that no episode uses: each holds a planner of many megabytes."""


def _borrow(game: ALFWorldGame) -> Any:
    """Return a text world for as long as the game lives."""
    world = _idle.pop() if _idle else _new_world()
    weakref.finalize(game, _idle.append, world)
    return world


def _new_world() -> Any:
    textworld = extra("textworld", "alfworld").load()
    pddl = extra("textworld", "alfworld").load("envs.pddl")
    alfred = extra("alfworld", "alfworld").load("agents.environment.alfred_tw_env")
    wanted = textworld.EnvInfos(won=True, admissible_commands=True)
    return alfred.AlfredDemangler(pddl.PddlEnv(wanted))


def make_data(
    folder: str | Path, num_train: int = -1, num_val: int = -1, seed: int = 0, data: str = ""
) -> tuple[Path, Path]:
    """Write `train.jsonl`, `seen.jsonl` and `unseen.jsonl`; return the first two.

    Each row names a game, in a fixed order that `seed` does not change; the game words the prompt.
    `num_train` and `num_val` bound the games of training and of each other split, -1 for all.
    """
    del seed
    root = data_folder(data or None)
    limits = {"train": num_train, "seen": num_val, "unseen": num_val}
    train, seen, _ = (
        write_rows(Path(folder) / f"{split}.jsonl", _rows(list_games(root, split, num_games=limit)))
        for split, limit in limits.items()
    )
    return train, seen


def _rows(games: Sequence[GameFile]) -> Iterator[dict[str, Any]]:
    for index, game in enumerate(games):
        yield {
            "data_source": game.task_type,
            "prompt": [],
            "reward_model": {"style": "game", "ground_truth": game.name},
            "extra_info": {"index": index},
        }
