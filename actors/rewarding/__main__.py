"""Serve a reward model: `python -m tinkermq.actors.rewarding outputs/RUN/latest --port 8790`.

`env.reward` of another job asks it: `{source: endpoint, url: "http://127.0.0.1:8790"}`.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from ...schemas.wire.errors import ConfigError, TinkermqError


def serve(folder: str, host: str, port: int, key_variable: str | None) -> None:
    """Load the model and answer until told to stop.

    Raises ModelError for a folder without a reward model, ConfigError for a key that is not set.
    """
    key = None if key_variable is None else os.environ.get(key_variable)
    if key_variable is not None and not key:
        raise ConfigError(
            f"--key-variable={key_variable} is not set", hint="set it in the environment"
        )
    import uvicorn

    from .http import RewardApp
    from .judge import Judge

    uvicorn.run(RewardApp(Judge(folder), key), host=host, port=port, log_level="warning")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; return the exit code."""
    options = argparse.ArgumentParser(
        prog="python -m tinkermq.actors.rewarding", description="Serve a reward model over HTTP."
    )
    options.add_argument("folder", help="checkpoint of a job with sft.objective=reward")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8790)
    options.add_argument("--key-variable", help="environment variable of a key to ask for")
    given = options.parse_args(argv)
    try:
        serve(given.folder, given.host, given.port, given.key_variable)
    except TinkermqError as error:
        Console(stderr=True, emoji=False).print(str(error), style="red", markup=False)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
