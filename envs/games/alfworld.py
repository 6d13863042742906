"""ALFWorld: household tasks as text, on the packages alfworld and textworld.

The environment host draws each episode's game from its own list. A dataset may name the games
instead (`make_data`), row by row, for a fixed order and for validation on other splits than
training. The policy reads the task, the room, and the possible commands; it answers with one
command between `<action>` and `</action>`. Rewards are those of OpenTinker: 10 for the task done,
−1 when the steps are used up, −0.1 for a command without effect, −0.01 for any other step.
"""

import functools
import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...schemas.wire.errors import GameError
from ..game import AbstractGame, StepResult
from ..reasoning import tagged_or_last_line
from ..registry import extra
from ..write_data import write_rows

# The list of ALFWorld's games in a folder, by split and type of task.
#
# The list is in the order of the files' names, so that all hosts with the same files have the
# same. Listed are the games that ALFWorld itself plays: of a known type, without sliced or
# movable objects, and known to be solvable.

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = {
    "train": "train",
    "seen": "valid_seen",
    "unseen": "valid_unseen",
    "valid_seen": "valid_seen",
    "valid_unseen": "valid_unseen",
    "eval_in_distribution": "valid_seen",
    "eval_out_of_distribution": "valid_unseen",
}
"""Names of the splits, ours and those of ALFWorld and OpenTinker, and their folders."""
GAME_FILE = "game.tw-pddl"

_DATASET = "json_2.1.1"
_SUBSET_SEED = 42
_TYPE = re.compile(rb'"task_type"\s*:\s*"(\w+)"')
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*true')


@dataclass(frozen=True)
class GameFile:
    """One game."""

    name: str
    """Its folder relative to the data, the same on every host."""
    task_type: str
    """Its type, one of six."""


def data_folder(data: str | None) -> Path:
    """Return the folder with the splits: `data`, $ALFWORLD_DATA, or ALFWorld's download folder.

    Raises GameError with the searched folders.
    """
    root = Path(data or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser()
    for folder in (root / _DATASET, root):
        if any((folder / split).is_dir() for split in SPLITS.values()):
            return folder
    raise GameError(
        f"there are no ALFWorld games in {root} or its folder {_DATASET}",
        hint="run `alfworld-download`, then set ALFWORLD_DATA or the game's argument data",
    )


def list_games(
    folder: Path,
    split: str,
    task_types: Iterable[str] | None = None,
    num_games: int = -1,
) -> Sequence[GameFile]:
    """Return the games of a split, of some types only, and only `num_games` of them unless -1.

    The selection is always the same. Raises GameError for unknown names, and without any game.
    """
    types = tuple(TASK_TYPES if task_types is None else task_types)
    unknown = [name for name in types if name not in TASK_TYPES]
    if unknown or split not in SPLITS:
        raise GameError(
            f"ALFWorld has no split {split!r}"
            if split not in SPLITS
            else f"ALFWorld has no task type {unknown[0]!r}",
            hint=f"splits are {', '.join(SPLITS)}; task types are {', '.join(TASK_TYPES)}",
        )
    games = [game for game in _scan(folder / SPLITS[split]) if game.task_type in types]
    if not games:
        raise GameError(
            f"{folder / SPLITS[split]} has no solvable game of {', '.join(types)}",
            hint=f"each game is a folder with {GAME_FILE} and traj_data.json, as "
            "`alfworld-download` and `alfworld-generate` make them",
        )
    if 0 <= num_games < len(games):
        chooser = random.Random(_SUBSET_SEED)  # noqa: S311 - a choice of games, not a secret
        games = [games[index] for index in sorted(chooser.sample(range(len(games)), num_games))]
    return games


@functools.lru_cache(maxsize=8)
def _scan(folder: Path) -> tuple[GameFile, ...]:
    """Return the games below a folder, once per process: the published split has thousands."""
    games = (_read(path.parent, folder.parent) for path in folder.rglob(GAME_FILE))
    return tuple(sorted((game for game in games if game), key=lambda game: game.name))


def _read(folder: Path, root: Path) -> GameFile | None:
    name = folder.relative_to(root).as_posix()
    trajectory = folder / "traj_data.json"
    if "movable" in name or "Sliced" in name or not trajectory.is_file():
        return None
    task_type = _TYPE.search(trajectory.read_bytes())
    if task_type is None or not _SOLVABLE.search((folder / GAME_FILE).read_bytes()):
        return None
    return GameFile(name, task_type[1].decode())


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

        `data` is the folder with ALFWorld's games, by default $ALFWORLD_DATA or ~/.cache/alfworld;
        `split` is train, seen or unseen; `task_types` some of the six, by default all; `num_games`
        a fixed subset of that size, -1 for all. `max_steps` must not be above rollout.max_turns, or
        the reward of a failure is never given.
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
                hint="all hosts of a run must have the same games as those its data names",
            )
        self._env = _idle.pop() if _idle else _new_world()
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

    def close(self) -> None:
        """Leave the text world to another game."""
        if self._env is not None:
            _idle.append(self._env)

    def parse_action(self, raw: str) -> str:
        """Return the text between `<action>` and `</action>`, or else the last line."""
        return " ".join(tagged_or_last_line(raw, "action").split()).lower()

    def get_system_prompt(self) -> str:
        """Return how to act and to answer."""
        return SYSTEM_PROMPT

    def get_state(self) -> dict[str, Any]:
        """Return the game, its task and the state of the episode."""
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
        """Return an observation; each repeats the task, so that it is complete."""
        commands = "\n".join(f"- {command}" for command in self._state["admissible_commands"])
        return (
            f"{_TASK} {self._task}\n\n=== Current State ===\n{text}\n\n"
            f"=== Available Actions ===\n{commands}"
        )


_idle: list[Any] = []
"""Unused text worlds, kept since each has a planner of many megabytes."""


def _new_world() -> Any:
    textworld = extra("textworld", "alfworld").load()
    pddl = extra("textworld", "alfworld").load("envs.pddl")
    alfred = extra("alfworld", "alfworld").load("agents.environment.alfred_tw_env")
    infos = textworld.EnvInfos(won=True, admissible_commands=True)
    return alfred.AlfredDemangler(pddl.PddlEnv(infos))


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
