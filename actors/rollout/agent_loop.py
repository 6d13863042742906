"""One episode: the policy and the game take turns.

The state machine is PENDING (reset) → GENERATING ⇄ INTERACTING → TERMINATED. Token ids go in and
come out of the engine; what was generated is never re-tokenised. Every generated turn reaches the
game, and limits bind at generation: no token is generated that is cut off afterwards.

A recorder gets its progress; an episode that it has, because another generator began it, enters
the machine where it was left.
"""

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
from .recording import EpisodeRecorder, GameAt, Transcript

PromptForTeacher: TypeAlias = Callable[
    [Sequence[ChatMessage], Sequence[Mapping[str, Any]], int, Mapping[str, Any], float | None],
    IntVector,
]
"""Returns the first prompt with what only a teacher reads, of messages, tools, the prompt's length,
the game's `info`, and the episode's time (`EpisodePlan.time`)."""


class EpisodeFailed(errors.TinkermqError):
    """An episode that ended without a trajectory; says whom to blame and what it cost."""

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
        """Whether another try could not end otherwise."""
        return self.cause.is_mistake


class NoTurn(errors.TinkermqError):
    """The game ended before this role's first turn: there is no conversation to record."""


@dataclass(frozen=True)
class EpisodePlan:
    """What one episode starts from."""

    episode: str
    """Id, unique in the job."""
    start: Start
    greedy: bool = False
    number: int = 0
    """Its place in the group."""
    draws: str | None = None
    """Names the random numbers that the policy draws: the same in every run with the same seed.
    None: fresh ones."""
    time: float | None = None
    """The time for chat templates that ask for it, in seconds since the epoch: the same at any
    generator. None: the job's own time."""

    def seed(self, turn: int) -> int | None:
        """Return the seed of a turn's sampling, below 2^63; None: any."""
        if self.draws is None:
            return None
        digest = blake2b(f"{self.draws} {turn}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class EpisodeSampling:
    """How the policy's tokens are drawn."""

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
        `prompt_for_teacher` makes what a teacher reads in place of the first prompt."""
        self._prompt_for_teacher = prompt_for_teacher
        self._engine = engine
        self._chat = chat
        self._environments = environments
        self._config = config
        self._sampling = sampling
        self._time_use = time_use or TimeUse("generate", "environment", rest="other")

    def check_engine(self) -> None:
        """Raise what ended the engine, if it has ended: no episode can succeed any more."""
        if self._engine.failure is not None:
            raise self._engine.failure

    async def run(
        self,
        plan: EpisodePlan,
        transcript: Transcript | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> Trajectory:
        """Run one episode to its end.

        With a fresh `transcript` the caller can see token by token how far it is; `recorder` is
        told, and what it knows of the episode is gone on with.

        Raises EpisodeFailed, naming the boundary to blame, when there is no trajectory; NoTurn for
        a role whose turn never came; Fenced when another generator has taken the episode over.
        """
        recorder = recorder or EpisodeRecorder()
        by_token = transcript is not None or recorder.follows_tokens
        transcript = Transcript() if transcript is None else transcript
        game: GameAt | None = None
        finish: Finish | None = None
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
            return self._trajectory(plan, transcript, finish, game.host, teaching)
        finally:
            self._engine.release(plan.episode)
            recorder.stop()
            if game is not None and finish not in ("done", "timeout") and not recorder.keeps_game:
                self._environments.close(game.host, game.episode)  # one that is done frees itself

    async def _start(
        self, plan: EpisodePlan, transcript: Transcript, recorder: EpisodeRecorder
    ) -> GameAt:
        """PENDING: start the game, or find the one that another generator has begun."""
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
        """Give the transcript its first prompt, unless the episode is gone on with."""
        started = game.started
        if not started.messages:
            _refuse_table(plan)
        if transcript.token_ids:
            return
        prompt = self._chat_of(plan).first_prompt(started.messages, started.tools).tolist()
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

        A turn that another generator has begun is generated to its end; it may have one already.
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
            rest = await self._ask_engine(
                plan, transcript, sampling, request, on_token if by_token else None
            )
            if rest.finish_reason == "cancelled" or not len(rest.token_ids):
                await recorder.settle()  # raises the reason if another generator has the episode
                raise errors.EngineError(f"the engine ended request {request} without a turn")
        transcript.end_turn(begun, rest)
        transcript.note_text(self._chat.answer(*transcript.turn(turn)))

    async def _ask_engine(
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
        """Take notice of one token of the turn that is being generated."""
        transcript.open.append(drawn)
        if not recorder.note_token(transcript):
            self._engine.cancel(request)

    async def _interact(
        self, plan: EpisodePlan, game: GameAt, transcript: Transcript
    ) -> Finish | None:
        """INTERACTING: let the game answer the last turn; say why the episode is over, or None."""
        turn, text = len(transcript.rewards), transcript.last_text
        seated = plan.start.seat is not None
        with self._in_environment(transcript):
            reply = await self._environments.step(
                game.host, game.episode, turn, text, seated=seated
            )
        transcript.add_reply(reply)
        finish = self._finish(plan, transcript, reply)
        rewards_ends = game.started.rewards_ends or self._environments.rewards_ends
        if finish in ("turns", "length") and rewards_ends:
            await self._reward_end(game, transcript)
        return finish

    async def _reward_end(self, game: GameAt, transcript: Transcript) -> None:
        """Add what an episode earns at its end though its game has not ended."""
        turn = len(transcript.rewards)
        with self._in_environment(transcript):
            reply = await self._environments.finish(game.host, game.episode, turn)
        transcript.rewards[-1] += reply.reward
        transcript.info = reply.info

    @contextmanager
    def _in_environment(self, transcript: Transcript) -> Iterator[None]:
        """Count the time that an episode waits for its game."""
        started = time.perf_counter()
        with self._time_use.doing("environment"):
            yield
        transcript.environment_s += time.perf_counter() - started

    def _finish(
        self, plan: EpisodePlan, transcript: Transcript, reply: StepResult
    ) -> Finish | None:
        """Say why the episode is over; None: the observation is appended, and a turn follows."""
        if isinstance(reply, TimedOut):
            return "timeout"
        if reply.done:
            return "done"
        if len(transcript.turn_ends) >= self._config.max_turns:
            return "turns"
        return None if self._observe(plan, transcript, reply) else "length"

    def _observe(self, plan: EpisodePlan, transcript: Transcript, reply: StepResult) -> bool:
        """Append the observation; False when it leaves no room for another turn."""
        last_turn = transcript.token_ids[-1:]
        messages = reply.messages()
        ids = self._chat_of(plan).next_turn(last_turn, messages).tolist()
        if transcript.num_response + len(ids) >= self._config.max_response_tokens:
            return False
        transcript.add_observation(ids, messages)
        return True

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
        """Return what a teacher reads in place of the first prompt, where it reads more."""
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
    """A first prompt over the limit: a mistake in the task, so it is not tried again."""

    code = "prompt_too_long"
    status = 400
    is_mistake = True


@contextmanager
def blaming(boundary: errors.Boundary, transcript: Transcript | None = None) -> Iterator[None]:
    """Blame a boundary for the errors in here, or the one that an error names, by EpisodeFailed.

    `transcript` says what the failure has cost.
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
    """There is no first prompt: the role's turn never came, or the episode is no seat at all."""
    if plan.start.seat is not None:
        raise NoTurn(f"the game ended before {plan.start.seat.role!r} had a turn")
    raise errors.ConfigError(
        "the game has several roles, and this command plays games for one",
        hint="train it, or evaluate it with `tinkermq eval`",
    )


# -- episodes that failed --------------------------------------------------------------------------

T = TypeVar("T")
_log = structlog.get_logger()


async def until_played(
    play: Callable[[EpisodePlan], Awaitable[T]],
    plan: EpisodePlan,
    max_tries: int,
    check_engines: Callable[[], None],
    failures: list[EpisodeFailed] | None = None,
) -> T:
    """Play an episode until it succeeds, each time as an episode of its own; return its outcome.

    A host that vanished does not count as a try. `failures` gets what the tries ended with. Raises
    the last of them when there is no other try to be made, and what `check_engines` raises: an
    engine that has ended is no failure of the episode.
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
            _log.warning("episode_failed", episode=tried.episode, trace=trace, **blame)
            failures.append(failure)
            counted = [earlier for earlier in failures if earlier.blame.code != "host_gone"]
            if failure.is_final or len(counted) >= max_tries:
                raise
