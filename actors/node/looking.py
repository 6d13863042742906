"""Whether data files and a game are where a node's actors would look for them.

Asked by the scheduler when a client only tries a job. No code of the game runs: a node is no place
for that, its environment hosts are.
"""

import asyncio
from pathlib import Path

from ...envs.dataset import is_dataset_name
from ...envs.registry import find_game
from ...schemas.node import LookAnswer, LookQuestion
from ...schemas.wire.errors import TinkermqError

ANSWER_S = 10.0
"""A file system that takes longer is left for the job to find out."""


async def look(question: LookQuestion) -> LookAnswer:
    """Say what is there, as far as that is known in time."""
    looking = asyncio.ensure_future(asyncio.to_thread(look_now, question))
    await asyncio.wait({looking}, timeout=ANSWER_S)
    return looking.result() if looking.done() else LookAnswer(known=False)


def look_now(question: LookQuestion) -> LookAnswer:
    """Look at the files, and for the game's package."""
    missing = [one for one in question.files if not _is_there(Path(one).expanduser())]
    if not question.game:
        return LookAnswer(missing=missing)
    try:
        return LookAnswer(missing=missing, game=find_game(question.game))
    except TinkermqError as error:
        return LookAnswer(missing=missing, lacks_game=error.message, hint=error.hint)


def _is_there(path: Path) -> bool:
    """Whether a dataset is there; of other files nobody is told whether they are."""
    return is_dataset_name(path) and path.is_file()
