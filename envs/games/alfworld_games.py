"""The list of ALFWorld's games: which there are in a folder, by split and type of task.

The list is in the order of the files' names, so that all hosts with the same files have the same.
Listed are the games that ALFWorld itself plays: of a known type, without sliced or movable objects,
and known to be solvable.
"""

import functools
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.wire.errors import GameError

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
    """Its folder within the data, which is the same on every host."""
    task_type: str
    """Which of the six types it is of."""


def data_folder(data: str | None) -> Path:
    """Return the folder with the splits: `data`, $ALFWORLD_DATA, or where ALFWorld downloads to.

    Raises GameError naming where it was looked for.
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

    Which ones are left out is always the same. Raises GameError for what does not exist, and when
    there are none.
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
    found = (_read(path.parent, folder.parent) for path in folder.rglob(GAME_FILE))
    return tuple(sorted((game for game in found if game), key=lambda game: game.name))


def _read(folder: Path, root: Path) -> GameFile | None:
    name = folder.relative_to(root).as_posix()
    trajectory = folder / "traj_data.json"
    if "movable" in name or "Sliced" in name or not trajectory.is_file():
        return None
    task_type = _TYPE.search(trajectory.read_bytes())
    if task_type is None or not _SOLVABLE.search((folder / GAME_FILE).read_bytes()):
        return None
    return GameFile(name, task_type[1].decode())
