"""Running episodes: their tokens, and their record in the log for the task's next holder.

A segment is appended while the next tokens are generated, one at a time per episode. The end of a
turn is stored before the game gets the turn. So a generator that continues the episode sends the
same action to the game, and a host that has already played it repeats its answer. A fenced-off
holder never plays another action.

To continue an episode, a generator first finds its game. If the environment host still holds it,
the last turn is sent to the host again, which repeats its answer or plays the turn. If the host is
gone or has freed the episode, any host resets the game with the same seed and plays the recorded
turns. If the game answers them as before, nothing is lost; otherwise the episode starts again.
"""

import asyncio
import time
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
from .template_facts import first_prompt

# -- the tokens of one episode, turn by turn -------------------------------------------------------


@dataclass
class Transcript:
    """The progress of an episode; `begin` adds its prompt.

    The four lists have one entry per token of the conversation, without the turn that is being
    generated: if its tokens are reported one by one, they are in `open` until it ends.
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
    """Experts of all tokens but the last, one part per turn, if the engine records them."""
    turn_ends: list[int] = field(default_factory=list[int])
    turn_times: list[float] = field(default_factory=list[float])
    """When each turn ended; 0: another generator recorded it."""
    rewards: list[float] = field(default_factory=list[float])
    observations: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    """Messages between two turns, for each turn that the game has answered."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    first_token: float = 0.0
    """Time of the first generated token; 0: unknown."""
    generate_s: float = 0.0
    environment_s: float = 0.0

    def begin(
        self, prompt: Sequence[int], messages: list[dict[str, Any]], data_source: str
    ) -> None:
        """Add the first prompt."""
        self.num_prompt = len(prompt)
        self.messages = list(messages)
        self.images = images_of(messages)
        self.data_source = data_source
        self._add_given(prompt)

    def continue_from(self, recorded: "Transcript") -> None:
        """Continue from the transcript of another generator."""
        for part in fields(self):
            setattr(self, part.name, getattr(recorded, part.name))

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the open turn."""
        return len(self.token_ids) + len(self.open)

    @property
    def num_response(self) -> int:
        """Number of tokens after the prompt, without the open turn."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_generated(self) -> int:
        """Number of tokens that the policy generated so far."""
        return sum(self.mask) + len(self.open)

    @property
    def awaits_answer(self) -> bool:
        """Whether the last turn has ended and has no answer from the game."""
        return len(self.turn_ends) > len(self.rewards)

    @property
    def last_text(self) -> str:
        """The text of the last turn."""
        return self.messages[-1]["content"]

    def end_turn(self, begun: Sequence[Drawn], rest: Generation) -> None:
        """End a turn: `begun` was generated before, `rest` now."""
        self.open = []
        num = len(begun) + len(rest.token_ids)
        self.token_ids += [*(token.token_id for token in begun), *rest.token_ids.tolist()]
        self.mask += [1] * num
        self.logprobs += [*(token.logprob for token in begun), *rest.logprobs.tolist()]
        self.versions += [*(token.version for token in begun), *rest.versions.tolist()]
        self.turn_ends.append(len(self.token_ids) - 1)
        self.turn_times.append(time.time())
        if rest.experts is not None:
            self._add_experts(rest.experts)

    def note_text(self, text: str) -> None:
        """Add the text of the turn that has just ended."""
        self.messages.append({"role": "assistant", "content": text})

    def turn(self, turn: int) -> tuple[list[int], list[int]]:
        """Return the tokens before a turn that has ended, and those of the turn."""
        end = first = self.turn_ends[turn]
        while self.mask[first - 1]:
            first -= 1
        return self.token_ids[:first], self.token_ids[first : end + 1]

    def add_reply(self, reply: StepResult) -> None:
        """Add the reward and info of the game's answer to the last turn."""
        self.rewards.append(reply.reward)
        self.info = reply.info

    def add_observation(self, ids: Sequence[int], messages: list[dict[str, Any]]) -> None:
        """Append the game's messages before the next turn."""
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
        """Return the record of the ended episode.

        A turn that does not end with a stop token was cut by its limit.
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
            turn_times=self.turn_times,
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
        """Add the experts of the tokens without recorded ones.

        A token keeps the experts of its first computation, in which its successor was drawn.
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


# -- the interface of recorders, and recorders that store nothing ----------------------------------


@dataclass(frozen=True)
class GameAt:
    """The game of an episode, and its host."""

    started: Started
    """Its first prompt, and the host that holds it now."""
    episode: str
    """Its id at that host."""

    @property
    def host(self) -> str:
        """The environment host."""
        return self.started.host


class EpisodeRecorder:
    """Follows one episode as it grows."""

    follows_tokens = False
    """Whether `note_token` is called for each token."""
    stream_every = 1
    """Maximum number of tokens that are collected before `note_token` is called for each."""
    num_continued = 0
    """Number of earlier generated tokens that were kept instead of generated again."""

    async def rejoin(
        self, chat: ChatTokenizer, episode: str, start: Start, transcript: Transcript
    ) -> GameAt | None:
        """Find the game that another generator began; None: it must be started.

        The recorded progress is added to `transcript`. A replayed game gets the id `episode`.
        """
        del chat, episode, start, transcript

    async def begin(self, transcript: Transcript, game: GameAt) -> None:
        """Record that the episode is played, from its beginning or continued."""

    def keeps(self, game: GameAt) -> bool:
        """Return whether a game stays at its host until the recorder or a lease frees it."""
        del game
        return False

    def seed(self, turn: int) -> int | None:
        """Return the sampling seed of a turn; None: any."""
        del turn

    def note_token(self, transcript: Transcript) -> bool:
        """Record a token of the open turn; return False if the episode was taken over."""
        del transcript
        return True

    async def end_turn(self, transcript: Transcript) -> None:
        """Record the end of a turn, before the game gets it."""

    async def settle(self) -> None:
        """Wait for the running write; raises its error."""

    def stop(self) -> None:
        """Stop recording: this try of the episode is over."""


class TaskRecorder:
    """Follows the episodes of one lease of a task."""

    async def open(self, number: int) -> EpisodeRecorder:
        """Return the recorder of an episode of the task."""
        del number
        return EpisodeRecorder()

    async def end(self) -> None:
        """Record that the task's group is in the log."""


# -- episodes that another generator began ---------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """An episode as its last holder recorded it."""

    episode: str
    """Its id at the environment host."""
    host: str
    seed: int
    transcript: Transcript
    """Without first messages, images and data source, which the game's host has."""

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "Recorded | None":
        """Join segments; None if nothing was generated."""
        if not any(segment.mask.any() for segment in segments):
            return None
        made = Transcript()
        for segment in segments:
            made.token_ids += segment.token_ids.tolist()
            made.mask += segment.mask.tolist()
            made.logprobs += segment.logprobs.tolist()
            made.versions += segment.versions.tolist()
            made.turn_ends += segment.turn_ends
            made.turn_times += [0.0] * len(segment.turn_ends)
            made.rewards += segment.rewards
            made.observations += segment.messages_by_turn()
        made.num_prompt = made.mask.index(1)
        if not made.awaits_answer:
            _reopen(made)
        last = segments[-1]
        return cls(last.episode, last.host, last.seed, made)


def _reopen(made: Transcript) -> None:
    """Move the tokens after the last prompt or observation to the open turn."""
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
    """Find the game of a recorded episode, or replay it as `episode`.

    Raises HostGone if neither is possible, GameError if the game failed.
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
        except BaseException:
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
    """Play the recorded turns, or the last one, and compare the game's answers with the record."""
    made = recorded.transcript
    prompt = first_prompt(chat, started.messages, started.tools).tolist()
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
        f"and the replayed game gave {how}",
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
    """Records one episode in segments."""

    follows_tokens = True

    def __init__(
        self, task: "TaskSegments", name: str, writer: SegmentWriter, recorded: Recorded | None
    ) -> None:
        """`name` determines the episode's random draws, at any generator."""
        self._task = task
        self.stream_every = max(1, min(_MOST_LATE, task.every // 4))
        self._name, self._num_begun = name, 0
        self._writer = writer
        self._recorded = recorded
        self._rejoined: Recorded | None = None
        self._seed = 0
        """Sampling seed of the first turn; later turns count up from it."""
        self._episode, self._host = "", ""
        self._stored = self._turns = self._answers = 0
        self._appending: asyncio.Task[None] | None = None
        self._has_room = True

    async def rejoin(
        self, chat: ChatTokenizer, episode: str, start: Start, transcript: Transcript
    ) -> GameAt | None:
        """Find the recorded game, or replay it; only the first call does.

        Raises HostGone if neither is possible, GameError if the game failed.
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
        """Continue the recorded episode, or begin a new one, which voids earlier segments."""
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

    def keeps(self, game: GameAt) -> bool:
        """Return whether the game has a stored turn, from which another generator may continue."""
        return self._stored > 0 and (game.host, game.episode) == (self._host, self._episode)

    def seed(self, turn: int) -> int | None:
        """Return the sampling seed of a turn, with which each holder draws the same tokens."""
        return self._seed + turn if self._task.seeded else None

    def note_token(self, transcript: Transcript) -> bool:
        """Start storing a segment if one is due; return False if the episode was taken over."""
        appending = self._appending
        if appending is None or (appending.done() and appending.exception() is None):
            if self._has_room and transcript.num_tokens - self._stored >= self._task.every:
                self._appending = asyncio.create_task(self._append(transcript), name="segment")
            return True
        return not appending.done()

    async def end_turn(self, transcript: Transcript) -> None:
        """Store the rest of the turn; raises Fenced if the episode was taken over."""
        await self.settle()
        if len(transcript.turn_ends) > self._turns:
            await self._append(transcript)

    def stop(self) -> None:
        """Stop, and cancel a running append."""
        appending, self._appending = self._appending, None
        if appending is not None and not appending.cancel() and not appending.cancelled():
            appending.exception()  # retrieved, since the task is not awaited

    async def settle(self) -> None:
        """Wait for a running append; raises its error."""
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

        def column(values: Sequence[Any], name: str, dtype: Any) -> Any:
            return np.array([*values[at:], *(getattr(drawn, name) for drawn in rest)], dtype)

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
    """Records the episodes of one lease of a task."""

    broker: Broker
    scope: JobScope
    environments: Environments
    task: Task
    delivery: int
    """Number of deliveries of the task, including this one."""
    writer: str
    """Unique id of the lease."""
    every: int
    """Tokens per segment."""
    seeded: bool = True
    """Whether the engine can continue a seeded answer in its middle. vLLM cannot, and needs an
    additional kernel for each seeded request and token."""
    hosts: dict[str, str] = field(default_factory=dict[str, str])
    """The environment host of each episode, until the task's end."""

    async def open(self, number: int) -> EpisodeSegments:
        """Take over an episode of the task; raises Fenced if another generator has."""
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
        """Delete the segments and free the episodes, once the task's group is in the log."""
        for episode, host in self.hosts.items():
            self.environments.close(host, episode)
        task = self.task.task
        try:
            await purge_segments(self.broker, self.scope, task)
        except errors.DeadlineError as error:  # they are bounded, and unused from now on
            _log.warning("segments_left", task=task, reason=error.message)
