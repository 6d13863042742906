"""One episode: the policy and the game take turns.

The states are PENDING (reset) → GENERATING ⇄ INTERACTING → TERMINATED. The engine reads and writes
token ids, so generated text is never tokenised again. Every generated turn reaches the game. Limits
apply during generation, so that no generated token is cut off afterwards.

A recorder stores the progress. If another generator began the episode, it continues from there.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NoReturn, TypeAlias, TypeVar

import structlog

from ...broker.partial_rollouts import Fenced
from ...envs.game import StepResult
from ...envs.host_client import Environments, Start
from ...envs.running.episodes import TimedOut
from ...schemas.config.sections import RolloutConfig
from ...schemas.profile import TimeUse
from ...schemas.rollout import Finish, Teaching, Trajectory
from ...schemas.task import Blame
from ...schemas.wire import errors
from ...schemas.wire.array import IntVector
from ...schemas.wire.trace import trace_of
from ..engine.engine import Drawn, Engine, Generation, OnToken, Sampling, nothing
from ..policy.chat import ChatMessage, ChatTokenizer
from ..runtime import Repeats
from .recording import EpisodeRecorder, GameAt, Transcript
from .template_facts import first_prompt, next_turn

PromptForTeacher: TypeAlias = Callable[
    [Sequence[ChatMessage], Sequence[Mapping[str, Any]], int, Mapping[str, Any], float | None],
    IntVector,
]
"""Returns a teacher's first prompt, which may contain more than the policy's, from messages, tools,
the prompt's length, the game's `info` and the episode's time (`EpisodePlan.time`)."""


class EpisodeFailed(errors.TinkermqError):
    """An episode failed; has the boundary to blame and the number of wasted tokens."""

    def __init__(
        self, cause: errors.TinkermqError, boundary: errors.Boundary, tokens_wasted: int
    ) -> None:
        super().__init__(cause.message, hint=cause.hint)
        self.cause = cause
        self.blame = Blame(
            boundary=boundary, code=cause.code, message=cause.message, hint=cause.hint
        )
        self.tokens_wasted = tokens_wasted

    @property
    def is_final(self) -> bool:
        """Whether another try would fail, too."""
        return self.cause.is_mistake


class NoTurn(errors.TinkermqError):
    """The game ended before this role's first turn, so there is no conversation to record."""


@dataclass(frozen=True)
class EpisodePlan:
    """The start of one episode."""

    episode: str
    """Id, unique in the job."""
    start: Start
    greedy: bool = False
    number: int = 0
    """Index in the group."""
    draws: str | None = None
    """Determines the random draws of sampling; the same in every run with the same seed. None:
    fresh ones."""
    time: float | None = None
    """Time for chat templates that use it, in seconds since the epoch, equal at all generators.
    None: the job's own time."""

    def seed(self, turn: int) -> int | None:
        """Return the sampling seed of a turn, below 2^63; None: a random one."""
        if self.draws is None:
            return None
        digest = blake2b(f"{self.draws} {turn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class EpisodeSampling:
    """Sampling parameters of the policy's tokens."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def of(cls, config: RolloutConfig) -> "EpisodeSampling":
        """Return the sampling of training episodes."""
        return cls(config.temperature, config.top_p, config.top_k)


class AgentLoop:
    """Runs episodes of one job with an engine and the job's environment hosts."""

    def __init__(
        self,
        engine: Engine,
        chat: ChatTokenizer,
        environments: Environments,
        config: RolloutConfig,
        sampling: EpisodeSampling,
        time_use: TimeUse | None = None,
        prompt_for_teacher: PromptForTeacher | None = None,
    ) -> None:
        """`time_use` records when episodes wait for the engine and for their games;
        `prompt_for_teacher` renders a teacher's first prompt, if it differs."""
        self._prompt_for_teacher = prompt_for_teacher
        self._engine = engine
        self._chat = chat
        self._environments = environments
        self._config = config
        self._sampling = sampling
        self._time_use = time_use or TimeUse("generate", "environment", rest="other")

    def check_engine(self) -> None:
        """Raise the engine's failure, if there is one, since then no episode can succeed."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def run(
        self,
        plan: EpisodePlan,
        transcript: Transcript | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> Trajectory:
        """Run one episode to its end.

        With a new `transcript` the caller can follow the episode token by token. `recorder` stores
        the episode, which continues from what is stored already.

        Raises EpisodeFailed with the boundary to blame if the episode fails, NoTurn for a role
        without a turn, and Fenced if another generator has taken the episode over.
        """
        recorder = recorder or EpisodeRecorder()
        by_token = transcript is not None or recorder.follows_tokens
        transcript = Transcript() if transcript is None else transcript
        game: GameAt | None = None
        finish: Finish | None = None
        has_failed = True
        try:
            with blaming("environment", transcript):
                game = await self._start(plan, transcript, recorder)
            with blaming("task", transcript):
                self._open(plan, game, transcript)
            with blaming("broker", transcript):
                await recorder.begin(transcript, game)
            while finish is None:
                if not transcript.awaits_answer:
                    with blaming("engine", transcript):
                        await self._generate(plan, transcript, recorder, by_token=by_token)
                with blaming("broker", transcript):
                    await recorder.end_turn(transcript)
                with blaming("environment", transcript):
                    finish = await self._interact(plan, game, transcript)
            with blaming("environment", transcript):
                teaching = self._teaching(plan, transcript, game)
            has_failed = False
            return self._trajectory(plan, transcript, finish, game.host, teaching)
        except (asyncio.CancelledError, Fenced):
            has_failed = False  # another generator may continue it
            raise
        finally:
            self._engine.release(plan.episode)
            recorder.stop()
            ends_itself = finish in ("done", "timeout")
            if game is not None and not ends_itself and (has_failed or not recorder.keeps(game)):
                self._environments.close(game.host, game.episode)

    async def _start(
        self, plan: EpisodePlan, transcript: Transcript, recorder: EpisodeRecorder
    ) -> GameAt:
        """PENDING: start the game, or rejoin the one that another generator began."""
        chat = self._chat_of(plan)
        with self._in_environment(transcript):
            game = await recorder.rejoin(chat, plan.episode, plan.start, transcript)
            if game is None:
                started = await self._environments.reset(plan.episode, plan.start)
                game = GameAt(started, plan.episode)
        return game

    def _chat_of(self, plan: EpisodePlan) -> ChatTokenizer:
        return self._chat if plan.time is None else self._chat.at(plan.time)

    def _open(self, plan: EpisodePlan, game: GameAt, transcript: Transcript) -> None:
        """Add the first prompt to the transcript, unless the episode continues."""
        started = game.started
        if not started.messages:
            _refuse_table(plan)
        if transcript.token_ids:
            return
        prompt = first_prompt(self._chat_of(plan), started.messages, started.tools).tolist()
        self._check_prompt(prompt)
        transcript.begin(prompt, started.messages, started.data_source)

    async def _generate(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        recorder: EpisodeRecorder,
        *,
        by_token: bool,
    ) -> None:
        """GENERATING: one turn of the policy, within the turn's and the episode's limits.

        A turn that another generator began is completed, if it is not complete already.
        """
        config, begun = self._config, list(transcript.open)
        turn = len(transcript.turn_ends)
        room = min(config.max_turn_tokens, config.max_response_tokens - transcript.num_response)
        has_end = bool(begun) and begun[-1].token_id in self._chat.stop_token_ids
        rest = nothing()
        if not has_end and len(begun) < room:
            recorded_seed = recorder.seed(turn)
            sampling = Sampling(
                max_new_tokens=room - len(begun),
                temperature=0.0 if plan.greedy else self._sampling.temperature,
                top_p=1.0 if plan.greedy else self._sampling.top_p,
                top_k=0 if plan.greedy else self._sampling.top_k,
                stop_token_ids=self._chat.stop_token_ids,
                seed=plan.seed(turn) if recorded_seed is None else recorded_seed,
                num_drawn=len(begun),
                stream_every=recorder.stream_every,
            )
            request = f"{plan.episode}.{turn}"
            on_token = partial(self._note_token, request, transcript, recorder)
            rest = await self._generate_rest(
                plan, transcript, sampling, request, on_token if by_token else None
            )
            if rest.finish_reason == "cancelled" or not len(rest.token_ids):
                await recorder.settle()  # raises Fenced if another generator has the episode
                raise errors.EngineError(f"the engine ended request {request} without a turn")
        transcript.end_turn(begun, rest)
        transcript.note_text(self._chat.answer(*transcript.turn(turn)))

    async def _generate_rest(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        sampling: Sampling,
        request: str,
        on_token: OnToken | None,
    ) -> Generation:
        started, is_first = time.perf_counter(), not (transcript.num_generated or transcript.open)
        with self._time_use.doing("generate"):
            generation = await self._engine.generate(
                [*transcript.token_ids, *(drawn.token_id for drawn in transcript.open)],
                sampling,
                request_id=request,
                conversation=plan.episode if self._config.max_turns > 1 else None,
                on_token=on_token,
                images=transcript.images,
            )
        transcript.generate_s += time.perf_counter() - started
        if is_first:
            transcript.first_token = generation.first_token
        return generation

    def _note_token(
        self, request: str, transcript: Transcript, recorder: EpisodeRecorder, drawn: Drawn
    ) -> None:
        """Record one token of the turn that is being generated."""
        transcript.open.append(drawn)
        if not recorder.note_token(transcript):
            self._engine.cancel(request)

    async def _interact(
        self, plan: EpisodePlan, game: GameAt, transcript: Transcript
    ) -> Finish | None:
        """INTERACTING: play the last turn; return why the episode is over, or None."""
        turn, text = len(transcript.rewards), transcript.last_text
        seated = plan.start.seat is not None
        with self._in_environment(transcript):
            reply = await self._environments.step(
                game.host, game.episode, turn, text, seated=seated
            )
        transcript.add_reply(reply)
        finish = self._finish(plan, transcript, reply, game.started.tools)
        rewards_ends = game.started.rewards_ends or self._environments.rewards_ends
        if finish in ("turns", "length") and rewards_ends:
            await self._reward_end(game, transcript)
        return finish

    async def _reward_end(self, game: GameAt, transcript: Transcript) -> None:
        """Add the final reward of an episode whose game has not ended."""
        turn = len(transcript.rewards)
        with self._in_environment(transcript):
            reply = await self._environments.finish(game.host, game.episode, turn)
        transcript.rewards[-1] += reply.reward
        transcript.info = reply.info

    @contextmanager
    def _in_environment(self, transcript: Transcript) -> Iterator[None]:
        """Measure how long the episode waits for its game."""
        started = time.perf_counter()
        with self._time_use.doing("environment"):
            yield
        transcript.environment_s += time.perf_counter() - started

    def _finish(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        reply: StepResult,
        tools: Sequence[Mapping[str, Any]],
    ) -> Finish | None:
        """Return why the episode is over; None: the observation was appended, a turn follows."""
        if isinstance(reply, TimedOut):
            return "timeout"
        if reply.done:
            return "done"
        if len(transcript.turn_ends) >= self._config.max_turns:
            return "turns"
        messages, last_turn = reply.messages(), transcript.token_ids[-1:]
        text = transcript.last_text
        ids = next_turn(self._chat_of(plan), text, last_turn, messages, tools).tolist()
        if transcript.num_response + len(ids) >= self._config.max_response_tokens:
            return "length"  # it leaves no room for another turn
        transcript.add_observation(ids, messages)
        return None

    def _trajectory(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        finish: Finish,
        host: str,
        teaching: Teaching | None,
    ) -> Trajectory:
        return transcript.trajectory(
            finish,
            host,
            stop_token_ids=self._chat.stop_token_ids,
            seed=plan.start.seed,
            role=plan.start.seat.role if plan.start.seat else "",
            greedy=plan.greedy,
            teaching=teaching,
        )

    def _teaching(self, plan: EpisodePlan, transcript: Transcript, game: GameAt) -> Teaching | None:
        """Return a teacher's first prompt, if it differs from the policy's."""
        if self._prompt_for_teacher is None or plan.start.split != "train" or plan.greedy:
            return None
        started, num = game.started, transcript.num_prompt
        prompt = self._prompt_for_teacher(
            started.messages, started.tools, num, transcript.info, plan.time
        )
        return Teaching(prompt=prompt)

    def _check_prompt(self, prompt: list[int]) -> None:
        limit = self._config.max_prompt_tokens
        if len(prompt) > limit:
            raise PromptTooLong(
                f"the first prompt has {len(prompt)} tokens, rollout.max_prompt_tokens is {limit}",
                hint=f"raise rollout.max_prompt_tokens to {len(prompt)}, or shorten the data",
            )


class PromptTooLong(errors.TinkermqError, ValueError):
    """A first prompt exceeds the limit. The task is at fault, so it is not tried again."""

    code = "prompt_too_long"
    status = 400
    is_mistake = True


@contextmanager
def blaming(boundary: errors.Boundary, transcript: Transcript | None = None) -> Iterator[None]:
    """Convert errors to EpisodeFailed, which blames a boundary, or the one that the error names.

    `transcript` has the number of wasted tokens.
    """
    try:
        yield
    except (Fenced, NoTurn):
        raise
    except errors.TinkermqError as error:
        # an image that cannot be read
        is_image = boundary == "engine" and isinstance(error, errors.DataError)
        if is_image or isinstance(error, errors.SandboxError | errors.RewardError):
            boundary = error.boundary or boundary
        wasted = 0 if transcript is None else transcript.num_generated
        raise EpisodeFailed(error, boundary, wasted) from error


def _refuse_table(plan: EpisodePlan) -> NoReturn:
    """Raise the error of an episode without a first prompt."""
    if plan.start.seat is not None:
        raise NoTurn(f"the game ended before {plan.start.seat.role!r} had a turn")
    raise errors.ConfigError(
        "the game has several roles, and this command plays games for one",
        hint="train it, or evaluate it with `tinkermq eval`",
    )


# -- episodes that failed --------------------------------------------------------------------------

T = TypeVar("T")
_log = structlog.get_logger()
_failed = Repeats()
"""Errors of this process's episodes; each failed task has its own in its dead letter."""


async def until_played(
    play: Callable[[EpisodePlan], Awaitable[T]],
    plan: EpisodePlan,
    max_tries: int,
    check_engines: Callable[[], None],
    failures: list[EpisodeFailed] | None = None,
) -> T:
    """Play an episode until it succeeds, each time under a new id; return its outcome.

    A host that vanished does not count as a try. Each failure is added to `failures`. Raises the
    last one when no try is left, and any error of `check_engines`: a failure of the engine is not
    the episode's fault.
    """
    failures = [] if failures is None else failures
    while True:
        attempt = len(failures) + 1
        draws = None if plan.draws is None else f"{plan.draws} {attempt}"
        tried = replace(plan, episode=f"{plan.episode}-{attempt}", draws=draws)
        try:
            return await play(tried)
        except EpisodeFailed as failure:
            check_engines()
            trace = trace_of(plan.start.traceparent)
            blame = failure.blame.model_dump()
            if count := _failed.due(failure.blame.message):
                blame |= {"episodes": count, "trace": trace}
                _log.warning("episode_failed", episode=tried.episode, **blame)
            failures.append(failure)
            counted = [earlier for earlier in failures if earlier.blame.code != "host_gone"]
            if failure.is_final or len(counted) >= max_tries:
                raise
