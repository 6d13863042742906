"""How the tiny models of the examples are warm-started, and whether a folder holds such a one.

Nothing here needs torch, so that whoever only asks need not wait for it:
`python -m tinkermq.actors.recipes GAME FOLDER` ends with 0 where the folder holds the game's model.
"""

import hashlib
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ..schemas.wire.errors import ConfigError

_STAMP = "warm_start.txt"


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a game's warm start is."""

    steps: int
    lr: float = 2e-3
    batch: int = 64
    width: int = 128
    layers: int = 2
    init_std: float = 0.02
    """Standard deviation of the weights that it begins with."""
    conversations: int = 8192
    """Different demonstrations at most."""
    sees: bool = False
    """The model is a vision-language model."""


RECIPES = {
    "addition": Recipe(steps=600),
    "calculator": Recipe(steps=640),
    "guess": Recipe(steps=150),
    "bandit": Recipe(steps=60, width=64),
    "tictactoe": Recipe(steps=300, batch=32, width=64),
    "gomoku": Recipe(steps=800, lr=1e-2, batch=128, width=64, init_std=0.1, conversations=12_288),
    "negotiation": Recipe(steps=200, batch=32, width=64),
    "math": Recipe(steps=300, width=64),
    "math_code": Recipe(steps=640),
    "geo3k": Recipe(steps=300, lr=3e-3, width=64, conversations=2048, sees=True),
}


OWN = Recipe(steps=300, lr=3e-3, width=64, conversations=2048)
"""Of a module of the user's; it sees where the module's `VISION` is true."""


def module_of(game: str) -> str:
    """Return the module whose `demonstrations(rng)` returns a conversation of the game."""
    return game if "." in game else f"tinkermq.envs.games.{game}"


def find_recipe(game: str) -> Recipe:
    """Return the recipe of a game, or of a module of the user's (`package.module`).

    Raises ConfigError for a game without one.
    """
    if "." in game:
        return replace(OWN, sees=getattr(import_module(game), "VISION", False))
    if game not in RECIPES:
        raise ConfigError(
            f"there is no warm start for game {game!r}",
            hint=f"there is one for {list(RECIPES)}; or name a module of yours, package.module",
        )
    return RECIPES[game]


def is_made(folder: Path, game: str, *, seed: int = 0, steps: int | None = None) -> bool:
    """Whether `folder` holds the model that the recipe makes, as recipe and game are now."""
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text() == _digest(game, seed, steps)


def mark_made(folder: Path, game: str, *, seed: int = 0, steps: int | None = None) -> None:
    """Note in `folder` by which recipe its model was made."""
    (folder / _STAMP).write_text(_digest(game, seed, steps))


def _digest(game: str, seed: int, steps: int | None) -> str:
    """Digest all sources that decide what the model is."""
    rooms = ["actors.recipes", "actors.warm_start", "actors.policy.tiny_models"]
    if find_recipe(game).sees:
        rooms.append("actors.policy.vision")
    names = [module_of(game), *(f"tinkermq.{room}" for room in rooms)]
    specs = [find_spec(name) for name in names]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    digest = hashlib.sha256(f"{game} {seed} {steps}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Say by the exit code whether FOLDER holds the model of GAME's recipe: 0, else 1."""
    game, folder = sys.argv[1:] if argv is None else argv
    return 0 if is_made(Path(folder), game) else 1


if __name__ == "__main__":
    sys.exit(main())
