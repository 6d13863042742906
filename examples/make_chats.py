"""Write conversations to learn a game from: `python examples/make_chats.py calculator`.

The script plays the game's gold answers (`gold_action`), on the rows of its training data or on
seeds; for a game without them it uses its module's `demonstrations(rng)`. Each episode is one line
of outputs/data/<game>/chats.jsonl, in the column `messages`, with the game's tools, if any, in
`tools`. Use the same column for your own chats, of people or of a larger model.
"""

import argparse
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.prompt import open_game
from tinkermq.envs.registry import companion, load_game
from tinkermq.envs.write_data import write_rows

MAX_TURNS = 100


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("game", help="registered name or package.module:Class")
    parser.add_argument("keys", nargs="*", help="arguments of the game: win_length=3")
    parser.add_argument("--folder", type=Path, help="default: outputs/data/<game>")
    parser.add_argument("--rows", type=int, default=1024, help="conversations to write")
    arguments = parser.parse_args()
    game, folder = arguments.game, arguments.folder or Path("outputs/data") / arguments.game
    pairs = (key.partition("=") for key in arguments.keys)
    kwargs = {name: yaml.safe_load(value) for name, _, value in pairs}
    if hasattr(load_game(game), "gold_action"):
        chats = conversations(game, kwargs, folder / "train.parquet", arguments.rows)
    else:
        chats = demonstrations(game, kwargs, arguments.rows)
    with closing(load_game(game)(**kwargs)) as trial:
        tools = trial.get_tools()
    shown = {"tools": tools} if tools else {}
    rows = ({"messages": messages, **shown} for messages in chats)
    print(write_rows(folder / "chats.jsonl", rows))


def demonstrations(name: str, kwargs: dict[str, Any], count: int) -> Iterator[list[dict[str, Any]]]:
    """Demonstrate the game as its module does for the warm start of a tiny model."""
    rng = random.Random(0)  # noqa: S311  data, not secrets
    for _ in range(count):
        yield companion(load_game(name), "demonstrations")(rng, **kwargs)


def conversations(
    name: str, kwargs: dict[str, Any], file: Path, count: int
) -> Iterator[list[dict[str, Any]]]:
    """Play the game with gold answers, on the rows of a file if it is there."""
    game_class = load_game(name)
    data = Dataset([file]) if file.is_file() else None
    for number in range(count):
        record = data.record(number % len(data)) if data is not None else None
        with closing(game_class(**kwargs)) as opened:
            game: Any = opened
            messages = open_game(game, seed=number, record=record, kwargs={})
            for _ in range(MAX_TURNS):
                action = game.gold_action()
                messages.append({"role": "assistant", "content": action})
                result = game.step(action)
                if result.done:
                    break
                messages += result.messages()
        yield messages


if __name__ == "__main__":
    main()
