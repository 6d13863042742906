"""Write a tiny random model to try things with: `python -m tinkermq.actors.make_tiny FOLDER`.

It is a real model of a real class that knows nothing; a CPU core trains it in seconds.
"""

import argparse
from pathlib import Path
from typing import get_args

from .models.tiny_model import CHAT_TEMPLATE, TOOLS_TEMPLATE, TinyKind, save_tiny_model


def main() -> None:
    """Make the folder that the command line names."""
    options = argparse.ArgumentParser(
        prog="python -m tinkermq.actors.make_tiny", description="Write a tiny random model."
    )
    options.add_argument("folder", type=Path)
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--layers", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kind", choices=get_args(TinyKind), default="qwen3")
    options.add_argument("--tools", action="store_true", help="its template names a game's tools")
    given = options.parse_args()
    save_tiny_model(
        given.folder,
        width=given.width,
        layers=given.layers,
        seed=given.seed,
        kind=given.kind,
        template=TOOLS_TEMPLATE if given.tools else CHAT_TEMPLATE,
    )


if __name__ == "__main__":
    main()
