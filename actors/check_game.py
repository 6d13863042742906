"""Check a game where an environment host would run it: what `tinkermq env check --on-node` runs.

A process of its own, which a node starts as it does a host, in the same sandbox. The
configuration comes in by the environment, since a host has no input; lines of JSON go out, between
whatever the game prints.
"""

import json
import os
import sys

from ..envs.check import check_game
from ..schemas.config.job import EnvConfig
from ..schemas.node import MAX_TEXT_CHARS

VARIABLE = "TINKERMQ_GAME_CHECK"
"""Holds `{"env": {...}, "seed": 0}` as JSON."""
PREFIX = "checked-game "
"""Begins each line that holds what was found."""
END = "checked-game"
"""The last line."""


def main() -> None:
    """Check the game that the environment names."""
    asked = json.loads(os.environ.pop(VARIABLE))
    results = check_game(EnvConfig.model_validate(asked["env"]), seed=asked["seed"])
    for one in results:
        found = {"name": one.name, "ok": one.ok, "detail": cut(one.detail), "hint": cut(one.hint)}
        sys.stdout.write(f"\n{PREFIX}{json.dumps(found, ensure_ascii=False)}")
    sys.stdout.write(f"\n{END}\n")


def cut(text: str) -> str:
    """Return a text, cut where it is longer than a message of a check takes."""
    return text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"


if __name__ == "__main__":
    main()
