"""One episode: the policy and the game take turns.

The state machine is PENDING (reset) → GENERATING ⇄ INTERACTING → TERMINATED. Token ids go in and
come out of the engine; what was generated is never re-tokenised. Every generated turn reaches the
game, and limits bind at generation: no token is generated that is cut off afterwards.

With a recorder the episode is written down as it goes, and one that another generator has begun is
gone on with: it enters the machine where it was left.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Literal, NoReturn

from ....broker.observe.time_use import TimeUse
from ....broker.segments import Fenced
from ....envs.game import StepResult
from ....envs.serving.remote import Environments, Start, Started
from ....schemas.config.job import RolloutConfig
from ....schemas.rollout import Trajectory
from ....schemas.task import Blame
from ....schemas.wire.errors import (
    Boundary,
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    SandboxError,
    TinkermqError,
)
from ..engine.engine import Drawn, Engine, Generation, OnToken, Sampling, nothing
from .chat import ChatTokenizer
from .continuing import GameAt, find_game, retell
from .recording import EpisodeRecorder, Recorded
from .transcript import Transcript


class EpisodeFailed(TinkermqError):
    """An episode that ended without a trajectory; says whom to blame and what it cost."""

    def __init__(self, cause: TinkermqError, boundary: Boundary, tokens_wasted: int) -> None:
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


class NoTurn(TinkermqError):
    """The game ended before this role's first turn: there is no conversation to record."""


@dataclass(frozen=True)
class EpisodePlan:
    """What one episode starts from."""

    episode: str
    """Id, unique in the job."""
    start: Start
    greedy: bool = False


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
    ) -> None:
        """`time_use` is told when episodes wait for the engine and for their games."""
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
        record: EpisodeRecorder | None = None,
    ) -> Trajectory:
        """Run one episode to its end.

        With a fresh `transcript` the caller can see token by token how far it is; with `record` it
        is written down, and what that has found is gone on with. Who gives a recorder closes the
        episode at its host.

        Raises EpisodeFailed, naming the boundary to blame, when there is no trajectory; NoTurn for
        a role whose turn never came; Fenced when somebody else has taken the episode over.
        """
        told = transcript is not None or record is not None
        transcript = Transcript() if transcript is None else transcript
        open_at: GameAt | None = None
        boundary: Boundary = "environment"
        try:
            found = None if record is None else record.take_found()
            game = open_at = await self._start(plan, transcript, found)
            boundary = "task"
            self._open(plan, game.started, transcript, found)
            if record is not None:
                boundary = "broker"
                await record.begin(transcript, game.host, game.episode, found)
            while True:
                if not transcript.awaits_answer:
                    boundary = "engine"
                    await self._generate(plan, transcript, record, told=told)
                if record is not None:
                    boundary = "broker"
                    await record.turn_ended(transcript)
                boundary = "environment"
                reply = await self._interact(plan, game, transcript)
                finish = self._finish(transcript, reply)
                if finish is None and not self._observe(transcript, reply):
                    finish = "length"
                if finish is not None:
                    if finish != "done" and self._environments.rewards_ends:
                        await self._reward_end(game, transcript)
                    trajectory = self._trajectory(plan, transcript, finish, game.host)
                    if finish == "done":
                        open_at = None  # the game has ended: its host frees it by itself
                    return trajectory
        except (Fenced, NoTurn):
            raise
        except TinkermqError as error:
            raise failure_of(boundary, error, transcript.num_generated) from error
        finally:
            self._engine.release(plan.episode)
            if record is not None:
                record.stop()
            elif open_at is not None:
                self._environments.close(open_at.host, open_at.episode)

    async def _start(
        self, plan: EpisodePlan, transcript: Transcript, found: Recorded | None
    ) -> GameAt:
        """PENDING: start the game, or find the one that another generator has begun."""
        begun = time.perf_counter()
        with self._time_use.doing("environment"):
            if found is None:
                started = await self._environments.reset(plan.episode, plan.start)
                game = GameAt(started, plan.episode)
            else:
                transcript.continue_from(found.transcript)
                game = await find_game(
                    self._environments, self._chat, found, plan.episode, plan.start
                )
        transcript.environment_s += time.perf_counter() - begun
        return game

    def _open(
        self, plan: EpisodePlan, started: Started, transcript: Transcript, found: Recorded | None
    ) -> None:
        """Give the transcript its first prompt, or its messages where it has its tokens already."""
        if not started.messages:
            _refuse_table(plan)
        if found is not None:
            retell(transcript, self._chat, started)
            return
        prompt = self._chat.first_prompt(started.messages, started.tools).tolist()
        self._check_prompt(prompt)
        transcript.begin(prompt, started.messages, started.data_source)

    async def _generate(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        record: EpisodeRecorder | None,
        *,
        told: bool,
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
            sampling = Sampling(
                max_new_tokens=room - len(begun),
                temperature=0.0 if plan.greedy else self._sampling.temperature,
                top_p=1.0 if plan.greedy else self._sampling.top_p,
                top_k=0 if plan.greedy else self._sampling.top_k,
                stop_token_ids=self._chat.stop_token_ids,
                seed=None if record is None else record.seed + turn,
                num_drawn=len(begun),
            )
            request = f"{plan.episode}.{turn}"
            on_token = partial(self._take, request, transcript, record) if told else None
            rest = await self._ask_engine(plan, transcript, sampling, request, on_token)
            if rest.finish_reason == "cancelled" or not len(rest.token_ids):
                if record is not None:
                    await record.settle()  # tells why, if somebody has taken the episode over
                raise EngineError(f"the engine ended request {request} without a turn")
        transcript.end_turn(begun, rest)
        transcript.say(self._chat.decode(transcript.turn_ids(turn)))

    async def _ask_engine(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        sampling: Sampling,
        request: str,
        on_token: OnToken | None,
    ) -> Generation:
        started = time.perf_counter()
        with self._time_use.doing("generate"):
            generation = await self._engine.generate(
                [*transcript.token_ids, *(one.token_id for one in transcript.open)],
                sampling,
                request_id=request,
                conversation=plan.episode if self._config.max_turns > 1 else None,
                on_token=on_token,
                images=transcript.images,
            )
        transcript.generate_s += time.perf_counter() - started
        return generation

    def _take(
        self, request: str, transcript: Transcript, record: EpisodeRecorder | None, drawn: Drawn
    ) -> None:
        """Take notice of one token of the turn that is being generated."""
        transcript.open.append(drawn)
        if record is not None and not record.take(transcript):
            self._engine.cancel(request)

    async def _interact(
        self, plan: EpisodePlan, game: GameAt, transcript: Transcript
    ) -> StepResult:
        """INTERACTING: the game's answer to the last turn."""
        started = time.perf_counter()
        turn, text = len(transcript.rewards), transcript.last_text
        seated = plan.start.seat is not None
        with self._time_use.doing("environment"):
            reply = await self._environments.step(
                game.host, game.episode, turn, text, seated=seated
            )
        transcript.environment_s += time.perf_counter() - started
        transcript.add_reply(reply)
        return reply

    async def _reward_end(self, game: GameAt, transcript: Transcript) -> None:
        """Add what an episode earns at its end though its game has not ended."""
        started = time.perf_counter()
        turn = len(transcript.rewards)
        with self._time_use.doing("environment"):
            reply = await self._environments.finish(game.host, game.episode, turn)
        transcript.environment_s += time.perf_counter() - started
        transcript.rewards[-1] += reply.reward
        transcript.info = reply.info

    def _finish(
        self, transcript: Transcript, reply: StepResult
    ) -> Literal["done", "turns", "length"] | None:
        """Say why the episode is over, or None."""
        if reply.done:
            return "done"
        if len(transcript.turn_ends) >= self._config.max_turns:
            return "turns"
        return None

    def _observe(self, transcript: Transcript, reply: StepResult) -> bool:
        """Append the observation; False when it leaves no room for another turn."""
        last_turn = transcript.token_ids[-1:]
        message = {"role": reply.role, "content": reply.observation}
        ids = self._chat.next_turn(last_turn, [message]).tolist()
        if transcript.num_response + len(ids) >= self._config.max_response_tokens:
            return False
        transcript.add_observation(ids, message)
        return True

    def _trajectory(
        self,
        plan: EpisodePlan,
        transcript: Transcript,
        finish: Literal["done", "turns", "length"],
        host: str,
    ) -> Trajectory:
        return transcript.trajectory(
            finish,
            host,
            stop_token_ids=self._chat.stop_token_ids,
            seed=plan.start.seed,
            role=plan.start.seat.role if plan.start.seat else "",
            greedy=plan.greedy,
        )

    def _check_prompt(self, prompt: list[int]) -> None:
        limit = self._config.max_prompt_tokens
        if len(prompt) > limit:
            raise PromptTooLong(
                f"the first prompt has {len(prompt)} tokens, rollout.max_prompt_tokens is {limit}",
                hint=f"raise rollout.max_prompt_tokens to {len(prompt)}, or shorten the data",
            )


class PromptTooLong(TinkermqError, ValueError):
    """A first prompt over the limit: a mistake in the task, so it is not tried again."""

    code = "prompt_too_long"
    status = 400
    is_mistake = True


def failure_of(boundary: Boundary, error: TinkermqError, num_generated: int = 0) -> EpisodeFailed:
    """Blame a boundary, or the one that the error names, for what cost `num_generated` tokens."""
    is_image = boundary == "engine" and isinstance(error, DataError)  # one that cannot be read
    if is_image or isinstance(error, SandboxError | RewardError):
        boundary = error.boundary or boundary
    return EpisodeFailed(error, boundary, num_generated)


def _refuse_table(plan: EpisodePlan) -> NoReturn:
    """There is no first prompt: the role's turn never came, or the episode is no seat at all."""
    if plan.start.seat is not None:
        raise NoTurn(f"the game ended before {plan.start.seat.role!r} had a turn")
    raise ConfigError(
        "the game has several roles, and this command plays games for one",
        hint="train it, or evaluate it with `tinkermq eval`",
    )
