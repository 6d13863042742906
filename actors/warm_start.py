"""Make a tiny model that half knows a game: `python -m tinkermq.actors.warm_start GAME FOLDER`.

Reinforcement learning selects among habits that a policy has already; a random model has none.
So the model is first trained on the game's demonstrations by supervised learning, for some
seconds. The demonstrations mix in a wrong habit on purpose (see the game's module), which leaves
the reward low and gives reinforcement something to select. The result is a Hugging Face folder,
the same for the same seed.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ..schemas.errors import ConfigError, TinkermqError

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a game's warm start is."""

    steps: int
    lr: float = 2e-3
    batch: int = 64
    width: int = 128
    layers: int = 2


RECIPES = {
    "addition": Recipe(steps=600),
    "calculator": Recipe(steps=300),
    "guess": Recipe(steps=150),
    "bandit": Recipe(steps=60, width=64),
}


def warm_start(game: str, folder: Path, *, seed: int = 0, steps: int | None = None) -> float:
    """Write a warm-started tiny model to `folder`; return the last training loss.

    Raises ConfigError for a game without a recipe.
    """
    import torch

    from .tiny_model import save_tiny_model

    recipe = RECIPES.get(game)
    if recipe is None:
        raise ConfigError(
            f"there is no warm start for game {game!r}", hint=f"there is one for {list(RECIPES)}"
        )
    torch.manual_seed(seed)
    temporary = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(temporary, ignore_errors=True)
    save_tiny_model(temporary, width=recipe.width, layers=recipe.layers, seed=seed)
    loss = _train(game, temporary, recipe, steps or recipe.steps, seed)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return loss


def _train(game: str, folder: Path, recipe: Recipe, steps: int, seed: int) -> float:
    import torch
    from torch.nn.functional import cross_entropy

    from .generator.chat import ChatTokenizer
    from .model_folder import load_causal_lm, load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    chat = ChatTokenizer(tokenizer)
    model: Any = load_causal_lm(str(folder), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    conversations = _conversations(game, seed)
    loss = torch.zeros(())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for _ in progress.track(range(steps), description=f"warm start of {game}"):
            rows = [_tokens(chat, next(conversations)) for _ in range(recipe.batch)]
            ids, labels = _pad(rows)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.save_pretrained(folder)
    return float(loss.detach())


def _conversations(game: str, seed: int) -> Iterator[list[ChatMessage]]:
    module = import_module(f"tinkermq.envs.games.{game}")
    rng = random.Random(seed)  # noqa: S311  data, not secrets
    while True:
        yield module.demonstrations(rng)


def _tokens(chat: Any, messages: list[ChatMessage]) -> tuple[list[int], list[int]]:
    """Tokenise a conversation as the agent loop would; label what the assistant says."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    ids: list[int] = chat.first_prompt(messages[:first]).tolist()
    labels = [-100] * len(ids)
    for index in range(first, len(messages), 2):
        said = [*chat.encode(messages[index]["content"]), chat.stop_token_ids[0]]
        ids += said
        labels += said
        if index + 1 < len(messages):
            between: list[int] = chat.next_turn(said, [messages[index + 1]]).tolist()
            ids += between
            labels += [-100] * len(between)
    return ids, labels


def _pad(rows: list[tuple[list[int], list[int]]]) -> Any:
    import torch

    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full((len(rows), longest), -100)
    for row, (row_ids, row_labels) in enumerate(rows):
        ids[row, : len(row_ids)] = torch.tensor(row_ids)
        labels[row, : len(row_labels)] = torch.tensor(row_labels)
    return ids, labels


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and make the model."""
    parser = argparse.ArgumentParser(prog="python -m tinkermq.actors.warm_start")
    parser.add_argument("game", help=f"one of {', '.join(RECIPES)}")
    parser.add_argument("folder", type=Path, help="folder of the model to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the game's recipe")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    started = time.perf_counter()
    try:
        loss = warm_start(
            arguments.game, arguments.folder, seed=arguments.seed, steps=arguments.steps
        )
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    took = time.perf_counter() - started
    console.print(f"warm start: {arguments.folder} in {took:.0f} s, loss {loss:.3f}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
