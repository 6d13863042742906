"""Whether a node can have a model, asked by the scheduler before a job is queued."""

import asyncio

from ...schemas.node import ModelAnswer, ModelQuestion
from ...schemas.wire.errors import TinkermqError
from ..models.model_folder import check_model_alike, check_model_is_here

ANSWER_S = 10.0
"""What takes longer, such as a hub that does not answer, is left for the job to find out."""
_AT_ONCE = 8


class ModelLookout:
    """Answers questions after models, some at a time."""

    def __init__(self) -> None:
        """Have been asked nothing."""
        self._running: set[asyncio.Future[None]] = set()

    async def answer(self, question: ModelQuestion) -> ModelAnswer:
        """Say whether a model can be had, as far as that is known in time."""
        if len(self._running) >= _AT_ONCE:
            return ModelAnswer(known=False)
        check = check_model_alike if question.alike else check_model_is_here
        looking = asyncio.ensure_future(asyncio.to_thread(check, question.model))
        self._running.add(looking)
        looking.add_done_callback(self._ended)
        await asyncio.wait({looking}, timeout=ANSWER_S)
        if not looking.done():
            return ModelAnswer(known=False)
        error = looking.exception()
        if isinstance(error, TinkermqError):
            return ModelAnswer(known=True, missing=error.message, hint=error.hint)
        return ModelAnswer(known=error is None)

    def _ended(self, looking: "asyncio.Future[None]") -> None:
        self._running.discard(looking)
        looking.exception()  # seen, also where nobody waits for it any more
