"""The engine of a sampler as its users share it: places by turns, and each one's tokens counted."""

import asyncio
import contextlib
from collections.abc import Sequence

import numpy as np

from ....schemas.wire.errors import TinkermqError
from ...generator.engine.engine import (
    AdapterEngine,
    Generation,
    IntVector,
    OnToken,
    PromptScores,
    Sampling,
)
from .places import FairPlaces


class MeteredEngine:
    """An engine whose places users get by turns, by tokens and weights."""

    def __init__(self, engine: AdapterEngine, max_requests: int) -> None:
        """Let `max_requests` compute at a time."""
        self._engine = engine
        self._places = FairPlaces(max_requests)
        self.weights = self._places.turns.weights
        """Of users, in relation to each other."""
        self.tokens: dict[str, int] = {}
        """Computed for each user, prompts included."""

    def count(self, user: str, tokens: int) -> None:
        """Count tokens that were computed for a user."""
        self.tokens[user] = self.tokens.get(user, 0) + tokens

    def cancel(self, request_id: str) -> None:
        """End a request: it has what was drawn so far."""
        self._engine.cancel(request_id)

    async def generate(
        self,
        user: str,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        adapter: str,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate for a user as `AdapterEngine.generate` does, and count what was drawn.

        A task that is cancelled while it waits cancels the request, and what was drawn by then
        counts as well.
        """
        num_prompt = len(prompt_ids)
        async with self._places.place(user, num_prompt + sampling.max_new_tokens) as place:
            generating = asyncio.ensure_future(
                self._engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=request_id,
                    on_token=on_token,
                    images=images,
                    adapter=adapter,
                )
            )
            try:
                made = await asyncio.shield(generating)
            except asyncio.CancelledError:
                self._engine.cancel(request_id)
                with contextlib.suppress(TinkermqError):  # within a step it has what there is
                    self.count(user, len((await generating).token_ids))
                raise
            place.tokens = num_prompt + len(made.token_ids)
            self.count(user, len(made.token_ids))
        return made

    async def score(
        self, user: str, prompt_ids: IntVector, *, request_id: str, top_k: int, adapter: str
    ) -> PromptScores:
        """Score a prompt for a user as `AdapterEngine.score` does; counts nothing."""
        async with self._places.place(user, len(prompt_ids)):
            return await self._engine.score(
                prompt_ids, request_id=request_id, top_k=top_k, adapter=adapter
            )


class EngineOfUser:
    """What one request of a user is answered with: an adapter in the engine."""

    def __init__(self, engine: MeteredEngine, user: str, adapter: str) -> None:
        self._engine = engine
        self._user = user
        self._adapter = adapter
        self._prompts = set[int]()

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate; the same prompt is counted once, however many answers it has."""
        made = self._engine.generate(
            self._user,
            prompt_ids,
            sampling,
            request_id=self._name(request_id),
            adapter=self._adapter,
            on_token=on_token,
            images=images,
        )
        if id(prompt_ids) not in self._prompts:
            self._prompts.add(id(prompt_ids))
            self._engine.count(self._user, len(prompt_ids))
        return await made

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Score a prompt, whose tokens are counted."""
        scores = await self._engine.score(
            self._user,
            np.asarray(prompt_ids, np.int32),
            request_id=self._name(request_id),
            top_k=top_k,
            adapter=self._adapter,
        )
        if id(prompt_ids) not in self._prompts:
            self._prompts.add(id(prompt_ids))
            self._engine.count(self._user, len(prompt_ids))
        return scores

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._engine.cancel(self._name(request_id))

    def _name(self, request_id: str) -> str:
        """Return how a request is called in the engine: its user has chosen its name."""
        return f"{self._user}/{request_id}"
