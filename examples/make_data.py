"""Write the data of a game: `python examples/make_data.py calculator`.

Makes `train.parquet` and `val.parquet` in outputs/data/<game>, in verl's columns (alfworld:
`train.jsonl`, `seen.jsonl` and `unseen.jsonl`); the same seed always gives the same rows. Games
that generate their states need no data.
"""

import argparse
from pathlib import Path

from tinkermq.envs.registry import companion, load_game


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("game", help="registered name or package.module:Class")
    parser.add_argument("--folder", type=Path, help="default: outputs/data/<game>")
    parser.add_argument("--train", type=int, default=2048, help="rows to train on")
    parser.add_argument("--val", type=int, default=256, help="rows to validate on")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_data = companion(load_game(arguments.game), "make_data")
    folder = arguments.folder or Path("outputs/data") / arguments.game
    for path in make_data(folder, arguments.train, arguments.val, arguments.seed):
        print(path)


if __name__ == "__main__":
    main()
