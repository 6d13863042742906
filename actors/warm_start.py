"""Make a tiny model that knows a game in part: `python -m tinkermq.actors.warm_start GAME FOLDER`.

Reinforcement learning selects among answers that a policy already gives; a random model gives none.
So the model is first trained on the game's demonstrations by supervised learning, for some
seconds. The demonstrations contain wrong answers on purpose (see the game's module), so that the
reward starts low. The result is a Hugging Face folder, the same for the same seed.

torch is imported only if the model has to be made.
"""

import argparse
import hashlib
import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.progress import Progress

from ..schemas.wire.errors import ConfigError, TinkermqError
from ..schemas.wire.images import images_of
from .policy.tiny_models import TinyKind, save_tiny_model, save_tiny_vision_model

if TYPE_CHECKING:
    from .policy.chat import ChatTokenizer
    from .training.micro_batch import TokenSequence

ChatMessage = dict[str, Any]
_ROW_CONVERSATIONS = 2
_BATCH_TOKENS = 1 << 16
_STAMP = "warm_start.txt"


@dataclass(frozen=True)
class Recipe:
    """Length, speed and size of a game's warm start."""

    steps: int
    lr: float = 2e-3
    batch: int = 64
    width: int = 128
    layers: int = 2
    init_std: float = 0.02
    """Standard deviation of the random weights."""
    conversations: int = 8192
    """Number of different demonstrations, at most."""
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
"""The recipe for a user's module; it makes a vision-language model if `VISION` is true there."""


def module_of(game: str) -> str:
    """Return the module whose `demonstrations(rng)` returns a conversation of the game."""
    return f"tinkermq.envs.games.{game}" if game in RECIPES else game


def find_recipe(game: str) -> Recipe:
    """Return the recipe of a game, or of a module of the user's, by its import path.

    Raises ConfigError for a game without one.
    """
    if game in RECIPES:
        return RECIPES[game]
    try:
        module = import_module(game)
    except ImportError as error:
        raise ConfigError(
            f"there is no warm start for game {game!r}: {error}",
            hint=f"there is one for {list(RECIPES)}; or name a module of yours that can be "
            "imported here and has demonstrations(rng)",
        ) from error
    return replace(OWN, sees=getattr(module, "VISION", False))


def is_made(folder: Path, digest: str) -> bool:
    """Return whether `folder` holds the model that `digest_of` says."""
    stamp = folder / _STAMP
    return stamp.is_file() and stamp.read_text() == digest


def mark_made(folder: Path, digest: str) -> None:
    """Record in `folder` the digest of its model."""
    (folder / _STAMP).write_text(digest)


def digest_of(
    game: str, *, seed: int = 0, steps: int | None = None, kind: TinyKind = "qwen3"
) -> str:
    """Return a digest of all sources and choices that determine the model."""
    rooms = ["actors.warm_start", "actors.policy.tiny_models"]
    if find_recipe(game).sees:
        rooms.append("actors.policy.vision")
    names = [module_of(game), *(f"tinkermq.{room}" for room in rooms)]
    specs = [find_spec(name) for name in names]
    files = [Path(spec.origin) for spec in specs if spec is not None and spec.origin]
    digest = hashlib.sha256(f"{game} {seed} {steps} {kind}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def warm_start(
    game: str, folder: Path, *, seed: int = 0, steps: int | None = None, kind: TinyKind = "qwen3"
) -> float | None:
    """Write a warm-started tiny model to `folder` and return the last training loss.

    A game with images has a vision-language model, whatever the kind.

    Does nothing and returns None if the same model is there already. Raises ConfigError for a game
    without a recipe.
    """
    recipe, digest = find_recipe(game), digest_of(game, seed=seed, steps=steps, kind=kind)
    if is_made(folder, digest):
        return None
    import torch

    torch.set_num_threads(1)  # more threads slow a tiny model down and change the order of sums
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]  # untyped in torch
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    _save(game, temporary, recipe, seed, kind)
    loss = _train(game, temporary, recipe, steps or recipe.steps, seed)
    mark_made(temporary, digest)
    if is_made(folder, digest):  # another process was faster
        shutil.rmtree(temporary)
        return loss
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return loss


def _save(game: str, folder: Path, recipe: Recipe, seed: int, kind: TinyKind) -> None:
    """Write the random model with which the warm start begins."""
    size: dict[str, Any] = {"width": recipe.width, "layers": recipe.layers, "seed": seed}
    if recipe.sees:
        save_tiny_vision_model(folder, **size)
        return
    words: Sequence[str] = getattr(import_module(module_of(game)), "TOKENS", ())
    save_tiny_model(folder, kind=kind, words=words, init_std=recipe.init_std, **size)


def _train(game: str, folder: Path, recipe: Recipe, steps: int, seed: int) -> float:
    import torch

    from .policy.chat import ChatTokenizer
    from .policy.model_folder import load_causal_lm, load_tokenizer, save_model
    from .policy.vision import load_image_reader
    from .storage.files import permit_as_folder
    from .training.model import Scorer
    from .training.packing import pack

    reader = load_image_reader(str(folder))
    chat = ChatTokenizer(load_tokenizer(str(folder)), image_reader=reader)
    model: Any = load_causal_lm(str(folder), dtype=torch.float32)
    scorer = Scorer(model, temperature=1.0)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=recipe.lr, betas=(0.9, 0.99), fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.lr, total_steps=steps)
    count = min(steps * recipe.batch, recipe.conversations)
    chats = itertools.islice(_conversations(game, seed), count)
    known = [_tokens(chat, messages) for messages in chats]
    max_row_tokens = _ROW_CONVERSATIONS * max(len(row.token_ids) for row in known)
    seen = {
        row.images: reader.read_images(model, row.token_ids, row.images)
        for row in known
        if reader is not None and row.images
    }
    rng = random.Random(seed)  # noqa: S311  data, not secrets
    loss: Any = torch.zeros(())
    console = Console(stderr=True, emoji=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for step in progress.track(range(steps), description=f"warm start of {game}"):
            if not console.is_terminal and step % max(steps // 5, 1) == 0:
                console.print(f"warm start of {game}: step {step} of {steps}", markup=False)
            rows = rng.choices(known, k=recipe.batch)
            micros = pack(
                rows,
                max_row_tokens=max_row_tokens,
                microbatch_tokens=_BATCH_TOKENS,
                one_per_row=scorer.one_per_row,
                see=lambda row: seen.get(row.images),
            )
            loss = -torch.cat([scorer.score(packed).logprobs_N for packed in micros]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    save_model(model, folder)
    permit_as_folder(folder)
    return float(loss.detach())


def _conversations(game: str, seed: int) -> Iterator[list[ChatMessage]]:
    module = import_module(module_of(game))
    rng = random.Random(seed)  # noqa: S311  data, not secrets
    while True:
        yield module.demonstrations(rng)


def _tokens(chat: "ChatTokenizer", messages: list[ChatMessage]) -> "TokenSequence":
    """Tokenise a conversation like the agent loop; mark the tokens of the assistant."""
    import numpy as np

    from .training.micro_batch import TokenSequence

    conversation = chat.conversation(messages)
    ids, mask = conversation.token_ids.astype(np.int64), conversation.mask.astype(np.int64)
    return TokenSequence(ids, mask, images_of(messages))


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and make the model."""
    parser = argparse.ArgumentParser(prog="python -m tinkermq.actors.warm_start")
    games = f"one of {', '.join(RECIPES)}, or a module with demonstrations(rng)"
    parser.add_argument("game", help=games)
    parser.add_argument("folder", type=Path, help="folder of the model to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: the game's recipe")
    kinds = get_args(TinyKind)
    parser.add_argument("--kind", choices=kinds, default=kinds[0], help="kind of model")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True, emoji=False)
    started = time.perf_counter()
    try:
        loss = warm_start(**vars(arguments))
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return 2
    took = f"made in {time.perf_counter() - started:.0f} s, loss {loss or 0:.3f}"
    outcome = "made before" if loss is None else took
    console.print(f"warm start: {arguments.folder} {outcome}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
