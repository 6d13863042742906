"""Writing running episodes down, so that the task's next holder goes on with them.

A segment is appended while the next tokens are generated, one at a time per episode. The end of a
turn is different: it is stored before the game sees the turn. So whoever goes on with the episode
gives the game that very action, which a host that has played it already only answers again, and a
holder that was overtaken never plays another.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import structlog

from ....broker.client.connection import Broker
from ....broker.segments import SegmentWriter, purge_segments
from ....envs.serving.remote import Environments, Start
from ....schemas.segment import Segment
from ....schemas.task import Task
from ....schemas.wire.errors import DeadlineError
from ....schemas.wire.subjects import JobScope
from .chat import ChatTokenizer
from .continuing import Recorded, find_game, retell
from .recorder import EpisodeRecorder, GameAt, TaskRecorder
from .transcript import Transcript

_log = structlog.get_logger()


class EpisodeSegments(EpisodeRecorder):
    """Writes one episode down."""

    follows_tokens = True
    keeps_game = True

    def __init__(
        self, task: "TaskSegments", name: str, writer: SegmentWriter, recorded: Recorded | None
    ) -> None:
        """`name` decides what the episode draws, whoever plays it."""
        self._task = task
        self._name, self._num_begun = name, 0
        self._writer = writer
        self._recorded = recorded
        self._rejoined: Recorded | None = None
        self._seed = 0
        """Of the first turn's sampling; the turns count up from it."""
        self._episode, self._host = "", ""
        self._stored = self._turns = self._answers = 0
        self._appending: asyncio.Task[None] | None = None
        self._has_room = True

    async def rejoin(
        self, chat: ChatTokenizer, episode: str, start: Start, transcript: Transcript
    ) -> GameAt | None:
        """Find the recorded game, or play it again; it is tried once.

        Raises HostGone when neither is possible, GameError when the game failed.
        """
        recorded, self._recorded = self._recorded, None
        self._rejoined = recorded
        if recorded is None:
            return None
        transcript.continue_from(recorded.transcript)
        game = await find_game(self._task.environments, chat, recorded, episode, start)
        retell(transcript, chat, game.started)
        return game

    async def begin(self, transcript: Transcript, game: GameAt) -> None:
        """Go on with what was recorded, or begin anew: then what was written before is void."""
        await self.settle()
        rejoined = self._rejoined
        self._num_begun += rejoined is None
        self._seed = self._fresh_seed() if rejoined is None else rejoined.seed
        self.num_continued = 0 if rejoined is None else transcript.num_generated
        self._stored = 0 if rejoined is None else transcript.num_tokens
        self._turns, self._answers = len(transcript.turn_ends), len(transcript.rewards)
        self._host, self._episode = game.host, game.episode
        self._task.hosts[game.episode] = game.host
        if rejoined is not None and (game.host, game.episode) != (rejoined.host, rejoined.episode):
            await self._append(transcript)

    def seed(self, turn: int) -> int:
        """Return the seed of a turn's sampling."""
        return self._seed + turn

    def note_token(self, transcript: Transcript) -> bool:
        """Begin to store a segment once it is due; False when the episode was taken over."""
        appending = self._appending
        if appending is None or (appending.done() and appending.exception() is None):
            if self._has_room and transcript.num_tokens - self._stored >= self._task.every:
                self._appending = asyncio.create_task(self._append(transcript), name="segment")
            return True
        return not appending.done()

    async def end_turn(self, transcript: Transcript) -> None:
        """Store all that is not yet; raises Fenced when the episode was taken over."""
        await self.settle()
        if len(transcript.turn_ends) > self._turns:
            await self._append(transcript)

    def stop(self) -> None:
        """Leave off, whatever is being appended."""
        appending, self._appending = self._appending, None
        if appending is not None and not appending.cancel() and not appending.cancelled():
            appending.exception()  # the episode has ended otherwise

    async def settle(self) -> None:
        """Wait for what is being appended; raises what it raises."""
        appending, self._appending = self._appending, None
        if appending is not None:
            await appending

    async def _append(self, transcript: Transcript) -> None:
        if not self._has_room:
            return
        segment = self._segment(transcript)
        turns, answers = len(transcript.turn_ends), len(transcript.observations)
        self._has_room = await self._writer.append(segment)
        self._stored, self._turns, self._answers = segment.end, turns, answers

    def _fresh_seed(self) -> int:
        digest = blake2b(f"{self._name} {self._num_begun}".encode(), digest_size=7).digest()
        return int.from_bytes(digest, "little")

    def _segment(self, transcript: Transcript) -> Segment:
        at, closed = self._stored, len(transcript.token_ids)
        rest = transcript.open[max(0, at - closed) :]

        def column(given: Sequence[Any], name: str, dtype: Any) -> Any:
            return np.array([*given[at:], *(getattr(drawn, name) for drawn in rest)], dtype)

        mask = np.array([*transcript.mask[at:], *(1 for _ in rest)], np.uint8)
        return Segment(
            delivery=self._writer.delivery,
            writer=self._writer.writer,
            episode=self._episode,
            host=self._host,
            seed=self._seed,
            start=at,
            token_ids=column(transcript.token_ids, "token_id", np.int32),
            mask=mask,
            logprobs=column(transcript.logprobs, "logprob", np.float32),
            versions=column(transcript.versions, "version", np.int32),
            turn_ends=transcript.turn_ends[self._turns :],
            rewards=transcript.rewards[self._answers : len(transcript.observations)],
            observations=transcript.observations[self._answers :],
        )


@dataclass
class TaskSegments(TaskRecorder):
    """Writes the episodes of one lease of a task down."""

    broker: Broker
    scope: JobScope
    environments: Environments
    task: Task
    delivery: int
    """How often the task was handed out, this time included."""
    writer: str
    """Names the lease, uniquely."""
    every: int
    """Tokens of a segment."""
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """Which environment host holds each episode, until the task's end."""

    async def open(self, number: int) -> EpisodeSegments:
        """Take over an episode of the task; raises Fenced when somebody else has."""
        writer = SegmentWriter(
            self.broker,
            self.scope,
            self.task.task,
            number,
            delivery=self.delivery,
            writer=self.writer,
        )
        recorded = Recorded.of(await writer.take_over())
        name = f"{self.task.seed} {self.task.task} {number}"
        return EpisodeSegments(self, name, writer, recorded)

    async def end(self) -> None:
        """Forget the episodes and free them at their hosts: the task's group is in the log."""
        for episode, host in self.hosts.items():
            self.environments.close(host, episode)
        task = self.task.task
        try:
            await purge_segments(self.broker, self.scope, task)
        except DeadlineError as error:  # they are bounded, and void
            _log.warning("segments_left", task=task, reason=error.message)
