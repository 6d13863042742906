"""What binds the calls of one episode, and how their tokens are drawn."""

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, TypeAlias

from ....envs.agents.episode import ContextTooLong, EpisodeLimit
from ....envs.agents.messages import Picture
from ....schemas.agent import CallRequest
from ....schemas.config.job import JobConfig
from ....schemas.output_format import MAX_PENALTY, MAX_REPETITION
from ..engine.engine import Sampling
from ..episodes.agent_loop import EpisodeSampling

LimitHit: TypeAlias = Literal["", "turns", "length"]
"""The calls of an episode were used up, or its tokens or those of the model's context."""
_IMAGES_SHARE = 0.75
"""Of the message in which a group travels: the rest is for tokens and texts."""
_LEAST_REPETITION = 0.1
_NO_MORE = "end the program with what there is"


class CallLimits:
    """The limits of one episode, and which of them was met."""

    def __init__(self, config: JobConfig, message_bytes: int | None = None) -> None:
        """Take the limits of a job.

        An episode's images get their share of a message of `message_bytes`, in which its group
        travels; default: no bound.
        """
        self.hit: LimitHit = ""
        self._num_episodes = config.rollout.group_size + (config.algorithm.advantage == "remax")
        self._image_bytes = message_bytes and int(
            _IMAGES_SHARE * message_bytes / self._num_episodes
        )
        self._images: dict[str, int] = {}
        self._max_calls = config.agent.max_calls
        self._max_tokens = config.agent.max_tokens
        self._max_turn_tokens = config.rollout.max_turn_tokens
        self._max_context = config.rollout.max_tokens

    def check_context(self, num_prompt: int) -> None:
        """Raise ContextTooLong for a prompt that leaves no room for an answer."""
        if num_prompt >= self._max_context:
            self.hit = "length"
            raise ContextTooLong.of(num_prompt, self._max_context)

    def show(self, pictures: Iterable[Picture]) -> None:
        """Take notice of images that are shown; each counts once.

        Raises EpisodeLimit when those of the episode are too large together.
        """
        fresh = {one.digest: len(one.encoded) for one in pictures}
        shown = self._images | fresh
        total = sum(shown.values())
        if fresh and self._image_bytes is not None and total > self._image_bytes:
            self.hit = "length"
            raise EpisodeLimit(
                f"the episode's images have {total:,} bytes together, and may have "
                f"{self._image_bytes:,}: the {self._num_episodes} episodes of a task travel in one "
                "message",
                hint="send fewer or smaller images, or set a smaller rollout.group_size",
            )
        self._images = shown

    def room(
        self, request: CallRequest, num_prompt: int, num_calls: int, num_generated: int
    ) -> int:
        """Return how many tokens each choice of a request may have.

        `num_calls` were answered or are being answered, with `num_generated` tokens. Raises
        EpisodeLimit when the calls or the tokens are used up.
        """
        if num_calls + request.num_choices > self._max_calls:
            self.hit = "turns"
            raise EpisodeLimit(
                f"the episode has had {num_calls} calls of the model, agent.max_calls is "
                f"{self._max_calls}",
                hint=_NO_MORE,
            )
        room = min(self._max_turn_tokens, self._max_context - num_prompt)
        room = min(room, request.max_tokens or room)
        if self._max_tokens is None:
            return room
        if num_generated >= self._max_tokens:
            self.hit = "length"
            raise EpisodeLimit(
                f"the model has generated {num_generated} tokens in the episode, agent.max_tokens "
                f"is {self._max_tokens}",
                hint=_NO_MORE,
            )
        return min(room, self._max_tokens - num_generated)


class CallDrawing:
    """How the answers of one episode are drawn."""

    def __init__(
        self,
        sampling: EpisodeSampling,
        stop_token_ids: tuple[int, ...],
        seed: int,
        *,
        obeys_program: bool,
    ) -> None:
        """Draw as the job says, or with `obeys_program` as the program asks."""
        self._sampling = sampling
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._obeys_program = obeys_program

    def sampling(self, request: CallRequest, room: int, prompt: bytes, number: int) -> Sampling:
        """Return how a sample is drawn: the same for the same prompt (its digest) and number."""
        drawing = _asked(request, self._sampling) if self._obeys_program else self._sampling
        told = blake2b(f"{self._seed} {number}".encode() + prompt, digest_size=7).digest()
        sampling = Sampling(
            max_new_tokens=room,
            temperature=drawing.temperature,
            top_p=drawing.top_p,
            top_k=drawing.top_k,
            stop_token_ids=self._stop_token_ids,
            seed=int.from_bytes(told, "little"),
        )
        if not self._obeys_program:
            return sampling
        return replace(
            sampling,
            presence_penalty=_penalty(request, "presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
            frequency_penalty=_penalty(
                request, "frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0
            ),
            repetition_penalty=_penalty(
                request, "repetition_penalty", _LEAST_REPETITION, MAX_REPETITION, 1.0
            ),
        )


def _penalty(request: CallRequest, name: str, least: float, most: float, default: float) -> float:
    """Return a penalty that a program asks for, within what can be sampled with."""
    said = request.sampled.get(name)
    return min(max(least, float(said)), most) if isinstance(said, int | float) else default


def _asked(request: CallRequest, drawing: EpisodeSampling) -> EpisodeSampling:
    """Return the sampling that a program asks for; what it does not say is the job's."""
    said = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if isinstance(value := request.sampled.get(name), int | float)
    }
    return replace(
        drawing,
        temperature=min(max(0.0, float(said.get("temperature", drawing.temperature))), 100.0),
        top_p=min(max(1e-6, float(said.get("top_p", drawing.top_p))), 1.0),
        top_k=max(0, int(said.get("top_k", drawing.top_k))),
    )
