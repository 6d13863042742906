"""Write conversations to learn a game from: `python examples/make_chats.py calculator`.

The game is played with its own gold answers (`gold_action`), on the rows of its training data or
on seeds; each episode is one line of outputs/data/<game>/chats.jsonl, in the column `messages`.
What you have instead, chats of people or of a larger model, goes into the same column.

With `--pairs` the lines are pairs, in pairs.jsonl and, of the validation data, in pairs_val.jsonl:
`chosen` is such an episode, `rejected` one that begins alike, and in which the policy at once says
what is the last gold answer elsewhere.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinkermq.envs.dataset import Dataset
from tinkermq.envs.prompt import open_game
from tinkermq.envs.registry import load_game
from tinkermq.envs.write_data import write_rows

MAX_TURNS = 100
NUM_VAL = 128
VAL_SEED = 1_000_000
"""Seeds of held-out episodes of a game without data begin here."""


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("game", help="registered name or package.module:Class")
    parser.add_argument("--folder", type=Path, help="default: outputs/data/<game>")
    parser.add_argument("--rows", type=int, default=1024, help="conversations, or pairs, to write")
    parser.add_argument("--pairs", action="store_true", help="write pairs of answers")
    arguments = parser.parse_args()
    game, folder = arguments.game, arguments.folder or Path("outputs/data") / arguments.game
    train = (game, folder / "train.parquet", arguments.rows)
    if not arguments.pairs:
        rows = ({"messages": messages} for messages, _ in conversations(*train))
        print(write_rows(folder / "chats.jsonl", rows))
        return
    print(write_rows(folder / "pairs.jsonl", pairs(*train)))
    held_out = pairs(game, folder / "val.parquet", NUM_VAL, first_seed=VAL_SEED)
    print(write_rows(folder / "pairs_val.jsonl", held_out))


def conversations(
    name: str, file: Path, count: int, first_seed: int = 0
) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """Play the game with gold answers, on the rows of a file if it is there.

    Each conversation comes with the number of messages before the first answer.
    """
    game_class = load_game(name)
    data = Dataset([file]) if file.is_file() else None
    for number in range(count):
        record = data.record(number % len(data)) if data is not None else None
        game: Any = game_class()
        messages = open_game(game, seed=first_seed + number, record=record, kwargs={})
        num_before = len(messages)
        for _ in range(MAX_TURNS):
            action = game.gold_action()
            messages.append({"role": "assistant", "content": action})
            result = game.step(action)
            if result.done:
                break
            messages.append({"role": "user", "content": result.observation})
        yield messages, num_before


def pairs(name: str, file: Path, count: int, first_seed: int = 0) -> Iterator[dict[str, Any]]:
    """Put an episode beside one that ends at once, with the last answer of the episode before."""
    played = list(conversations(name, file, count, first_seed))
    for place, (messages, num_before) in enumerate(played):
        wrong = played[place - 1][0][-1]
        if messages[num_before:] != [wrong]:
            yield {"chosen": messages, "rejected": [*messages[:num_before], wrong]}


if __name__ == "__main__":
    main()
