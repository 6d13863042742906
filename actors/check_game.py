"""Check a game on a node, for `tinkermq env check --on-node`.

The node starts this process as an environment host's, in the same sandbox (see
`schemas/checks.py`). A host has no standard input, so the request is in the environment.
"""

import json
import os

from ..envs.check import check_game
from ..schemas.checks import write_results
from ..schemas.config.job import EnvConfig
from ..schemas.local.process import leave

VARIABLE = "TINKERMQ_GAME_CHECK"
"""Environment variable with `{"env": {...}, "seed": 0}` as JSON."""


def main() -> None:
    """Print the results for the game that the environment names."""
    request = json.loads(os.environ.pop(VARIABLE))
    write_results(check_game(EnvConfig.model_validate(request["env"]), seed=request["seed"]))
    leave(0)  # a thread may still run a game that hangs


if __name__ == "__main__":
    main()
