"""Running episodes: their tokens, and their record in the log for the task's next holder.

A segment is appended while the next tokens are generated, one at a time per episode. The end of a
turn is different: it is stored before the game sees the turn. So a generator that continues the
episode gives the game that very action, which a host that has played it already only answers again,
and a holder that was overtaken never plays another.

To go on with an episode, its game comes first. Where the environment host still holds the episode,
its last turn is given to it once more, which repeats its answer or, if it had not come to that,
plays it. A host that is gone, or has freed the episode, is replaced by a reset with the same seed
on any host and the recorded turns: with a game that answers them as it did before nothing is lost.
With another one the episode starts again.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

import numpy as np
import structlog

from ...broker.client.connection import Broker
from ...broker.partial_rollouts import SegmentWriter, purge_segments
from ...envs.game import StepResult
from ...envs.host import HostGone
from ...envs.host_client import Environments, Start, Started
from ...schemas.rollout import Finish, Segment, Teaching, Trajectory
from ...schemas.task import Task
from ...schemas.wire import errors
from ...schemas.wire.images import images_of
from ...schemas.wire.subjects import JobScope
from ..engine.engine import Drawn, ExpertRecord, Generation
from ..policy.chat import ChatTokenizer

# -- the tokens of one episode, turn by turn -------------------------------------------------------


@dataclass
class Transcript:
    """What an episode has so far; `begin` gives it its prompt.

    The four lists hold one entry per token of the conversation, but for those of the turn that is
    being generated: if its tokens are reported one by one, they are in `open` until it ends.
    """

    token_ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    num_prompt: int = 0
    open: list[Drawn] = field(default_factory=list[Drawn])
    data_source: str = ""
    images: tuple[bytes, ...] = ()
    experts: list[ExpertRecord] = field(default_factory=list[ExpertRecord])
    """Of an engine that records them, one part for each turn: all tokens but the last."""
    turn_ends: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    observations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    """By turn that the game has answered, the messages before the next one."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    first_token: float = 0.0
    """When its first token was generated; 0: not known."""
    generate_s: float = 0.0
    environment_s: float = 0.0

    def begin(
        self, prompt: Sequence[int], messages: list[dict[str, Any]], data_source: str
    ) -> None:
        """Take the first prompt."""
        self.num_prompt = len(prompt)
        self.messages = list(messages)
        self.images = images_of(messages)
        self.data_source = data_source
        self._add_given(prompt)

    def continue_from(self, made: "Transcript") -> None:
        """Become what another generator has made."""
        for part in fields(self):
            setattr(self, part.name, getattr(made, part.name))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those of the open turn included."""
        return len(self.token_ids) + len(self.open)

    @property
    def num_response(self) -> int:
        """Number of tokens behind the prompt, without the open turn."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy generated so far."""
        return sum(self.mask) + len(self.open)

    @property
    def awaits_answer(self) -> bool:
        """Whether the last turn has ended and the game has not answered it."""
        return len(self.turn_ends) > len(self.rewards)

    @property
    def last_text(self) -> str:
        """The text of the last turn."""
        return self.messages[-1]["content"]

    def end_turn(self, begun: Sequence[Drawn], rest: Generation) -> None:
        """Close a turn of which `begun` was there before and `rest` was generated now."""
        self.open = []
        num = len(begun) + len(rest.token_ids)
        self.token_ids += [*(token.token_id for token in begun), *rest.token_ids.tolist()]
        self.mask += [1] * num
        self.logprobs += [*(token.logprob for token in begun), *rest.logprobs.tolist()]
        self.versions += [*(token.version for token in begun), *rest.versions.tolist()]
        self.turn_ends.append(len(self.token_ids) - 1)
        if rest.experts is not None:
            self._add_experts(rest.experts)

    def note_text(self, text: str) -> None:
        """Note the text of the turn that has just ended."""
        self.messages.append({"role": "assistant", "content": text})

    def turn(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the tokens before a turn that has ended, and its own."""
        end = first = self.turn_ends[turn]
        while self.mask[first - 1]:
            first -= 1
        return self.token_ids[:first], self.token_ids[first : end + 1]

    def add_reply(self, reply: StepResult) -> None:
        """Note the game's answer to the last turn."""
        self.rewards.append(reply.reward)
        self.info = reply.info

    def add_observation(self, ids: Sequence[int], messages: list[dict[str, Any]]) -> None:
        """Append what the game says before the next turn."""
        self._add_given(ids)
        self.observations.append(messages)
        self.messages += messages

    def trajectory(
        self,
        finish: Finish,
        host: str,
        *,
        stop_token_ids: Collection[int],
        seed: int,
        role: str = "",
        greedy: bool = False,
        teaching: Teaching | None = None,
    ) -> Trajectory:
        """Return the record of the episode, which has ended.

        A turn that does not end with one of the stop tokens was cut by its limit.
        """
        return Trajectory(
            token_ids=np.array(self.token_ids, np.int32),
            mask=np.array(self.mask, np.uint8),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            experts=np.concatenate(self.experts) if self.experts else None,
            turn_ends=np.array(self.turn_ends, np.int32),
            rewards=np.array(self.rewards, np.float32),
            finish=finish,
            finish_reasons=[
                "stop" if self.token_ids[end] in stop_token_ids else "length"
                for end in self.turn_ends
            ],
            greedy=greedy,
            teaching=teaching,
            role=role,
            seed=seed,
            messages=self.messages,
            info=self.info,
            host=host,
            data_source=self.data_source,
            first_token=self.first_token,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
        )

    def _add_experts(self, experts: ExpertRecord) -> None:
        """Take the experts of the tokens that none are known of yet.

        A token keeps those with which it was computed first, as its successor was drawn.
        """
        known = sum(map(len, self.experts))
        computed_from = len(self.token_ids) - 1 - len(experts)
        if computed_from > known:
            raise errors.EngineError(
                f"the engine recorded no experts for the tokens {known} to {computed_from - 1}",
                hint="set algorithm.router_replay=false, and report this",
            )
        self.experts.append(experts[known - computed_from :])

    def _add_given(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)


# -- the interface of recorders, and those that write nothing down ---------------------------------


@dataclass(frozen=True)
class GameAt:
    """The game of an episode, and where it is played."""

    started: Started
    """Its first prompt, and the host that holds it now."""
    episode: str
    """Its id there."""

    @property
    def host(self) -> str:
        """The environment host."""
        return self.started.host


class EpisodeRecorder:
    """Told of one episode as it grows."""

    follows_tokens = False
    """Whether `note_token` is called for each token."""
    stream_every = 1
    """How many tokens may be collected before `note_token` is called for each of them."""
    keeps_game = False
    """Whether the episode stays at its host when it is over: the recorder sees to its end."""
    num_continued = 0
    """Generated tokens that were not generated again."""

    async def rejoin(
        self, chat: ChatTokenizer, episode: str, start: Start, transcript: Transcript
    ) -> GameAt | None:
        """Find the game that another generator has begun; None: it is to be started.

        `transcript` gets what there is. A game that is played again is so as `episode`.
        """
        del chat, episode, start, transcript

    async def begin(self, transcript: Transcript, game: GameAt) -> None:
        """Take notice that the episode is being played, from its beginning or gone on with."""

    def seed(self, turn: int) -> int | None:
        """Return the seed of a turn's sampling; None: any."""
        del turn

    def note_token(self, transcript: Transcript) -> bool:
        """Take notice of a token of the open turn; False when the episode was taken over."""
        del transcript
        return True

    async def end_turn(self, transcript: Transcript) -> None:
        """Take notice of the end of a turn, before the game is given it."""

    async def settle(self) -> None:
        """Wait for what is being stored; raises what that raises."""

    def stop(self) -> None:
        """Leave off: this try of the episode is over."""


class TaskRecorder:
    """Told of the episodes of one lease of a task."""

    async def open(self, number: int) -> EpisodeRecorder:
        """Return the record of an episode of the task."""
        del number
        return EpisodeRecorder()

    async def end(self) -> None:
        """Take notice that the task's group is in the log."""


# -- episodes that another generator began ---------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """An episode as its last holder wrote it down."""

    episode: str
    """Its id at the environment host."""
    host: str
    seed: int
    transcript: Transcript
    """Without messages but the observations, images and data source: the game's host has them."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Recorded | None":
        """Put segments together; None when nothing was generated."""
        if not any(segment.mask.any() for segment in segments):
            return None
        made = Transcript()
        for segment in segments:
            made.token_ids += segment.token_ids.tolist()
            made.mask += segment.mask.tolist()
            made.logprobs += segment.logprobs.tolist()
            made.versions += segment.versions.tolist()
            made.turn_ends += segment.turn_ends
            made.rewards += segment.rewards
            made.observations += segment.messages_by_turn()
        made.num_prompt = made.mask.index(1)
        if not made.awaits_answer:
            _reopen(made)
        last = segments[-1]
        return cls(last.episode, last.host, last.seed, made)


def _reopen(made: Transcript) -> None:
    """Take the tokens behind the last prompt or observation as those of the open turn."""
    closed = len(made.mask)
    while made.mask[closed - 1]:
        closed -= 1
    columns = (made.token_ids, made.logprobs, made.versions)
    tokens = zip(*(column[closed:] for column in columns), strict=True)
    made.open = [Drawn(*token) for token in tokens]
    for column in (*columns, made.mask):
        del column[closed:]


async def find_game(
    environments: Environments, chat: ChatTokenizer, recorded: Recorded, episode: str, start: Start
) -> GameAt:
    """Find the game of a recorded episode, or play it again as `episode`.

    Raises HostGone when neither is possible, GameError when the game failed.
    """
    try:
        started = await environments.rejoin(recorded.host, recorded.episode, start)
        await _check(environments, chat, recorded, started, recorded.episode, last_only=True)
        return GameAt(started, recorded.episode)
    except (HostGone, errors.NotFoundError, errors.StateError):
        environments.close(recorded.host, recorded.episode)
        started = await environments.reset(episode, start)
        try:
            await _check(environments, chat, recorded, started, episode, last_only=False)
        except errors.TinkermqError:
            environments.close(started.host, episode)
            raise
        return GameAt(started, episode)


async def _check(
    environments: Environments,
    chat: ChatTokenizer,
    recorded: Recorded,
    started: Started,
    episode: str,
    *,
    last_only: bool,
) -> None:
    """Give the game its turns, or the last one, and compare what it says with the record."""
    made = recorded.transcript
    prompt = chat.first_prompt(started.messages, started.tools).tolist()
    if prompt != made.token_ids[: made.num_prompt]:
        raise _diverged(recorded, "another first prompt")
    num_turns = len(made.turn_ends)
    for turn in range(max(0, num_turns - 1) if last_only else 0, num_turns):
        text = chat.answer(*made.turn(turn))
        reply = await environments.step(started.host, episode, turn, text)
        if turn < len(made.rewards) and not _same(reply, made, turn):
            raise _diverged(recorded, f"another answer to turn {turn}")


def _same(reply: StepResult, made: Transcript, turn: int) -> bool:
    same = reply.messages() == made.observations[turn] and reply.reward == made.rewards[turn]
    return same and not reply.done


def _diverged(recorded: Recorded, how: str) -> HostGone:
    return HostGone(
        f"episode {recorded.episode} cannot be continued: host {recorded.host} no longer holds it, "
        f"and the game, played again, gave {how}",
        hint="the episode starts again",
    )


def restart_messages(made: Transcript, chat: ChatTokenizer, started: Started) -> None:
    """Complete a recorded transcript with the messages of its first prompt and of its turns."""
    observations = list(made.observations)
    prompt = made.token_ids[: made.num_prompt]
    restarted = Transcript()
    restarted.begin(prompt, started.messages, started.data_source)
    made.messages, made.images = restarted.messages, restarted.images
    made.data_source = restarted.data_source
    for turn in range(len(made.turn_ends)):
        made.note_text(chat.answer(*made.turn(turn)))
        made.messages += observations[turn] if turn < len(observations) else []


_log = structlog.get_logger()


_MOST_LATE = 32


class EpisodeSegments(EpisodeRecorder):
    """Writes one episode down."""

    follows_tokens = True
    keeps_game = True

    def __init__(
        self, task: "TaskSegments", name: str, writer: SegmentWriter, recorded: Recorded | None
    ) -> None:
        """`name` decides the episode's random draws, at any generator."""
        self._task = task
        self.stream_every = max(1, min(_MOST_LATE, task.every // 4))
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
        restart_messages(transcript, chat, game.started)
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

    def seed(self, turn: int) -> int | None:
        """Return the seed of a turn's sampling, by which whoever goes on draws the same tokens."""
        return self._seed + turn if self._task.seeded else None

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
            observations=[
                messages[0] if len(messages) == 1 else messages
                for messages in transcript.observations[self._answers :]
            ],
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
    seeded: bool = True
    """Whether the engine can go on with a seed in the middle of an answer; vLLM cannot, and a seed
    costs it a kernel for each request and token."""
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """Which environment host holds each episode, until the task's end."""

    async def open(self, number: int) -> EpisodeSegments:
        """Take over an episode of the task; raises Fenced when another generator has."""
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
        except errors.DeadlineError as error:  # they are bounded, and void
            _log.warning("segments_left", task=task, reason=error.message)
