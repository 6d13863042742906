"""One episode: the policy and the game take turns.

The state machine is PENDING (reset) → GENERATING ⇄ INTERACTING → TERMINATED. Token ids go in and
come out of the engine; what was generated is never re-tokenised. Every generated turn reaches the
game, and limits bind at generation: no token is generated that is cut off afterwards.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np

from ...broker.time_use import TimeUse
from ...envs.game import StepResult
from ...envs.remote import Environments, HostGone, Start
from ...schemas.config import RolloutConfig
from ...schemas.errors import (
    ConfigError,
    DataError,
    EngineError,
    RewardError,
    SandboxError,
    TinkermqError,
)
from ...schemas.images import images_of
from ...schemas.rollout import Trajectory
from ...schemas.task import Blame
from .chat import ChatTokenizer
from .engine import Engine, Generation, Sampling

Boundary = Literal["engine", "environment", "sandbox", "reward", "task", "broker"]


class EpisodeFailed(Exception):
    """An episode that ended without a trajectory; says whom to blame and what it cost."""

    def __init__(self, blame: Blame, tokens_wasted: int, *, host_gone: bool = False) -> None:
        super().__init__(blame.message)
        self.blame = blame
        self.tokens_wasted = tokens_wasted
        self.host_gone = host_gone


class NoTurn(Exception):
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


@dataclass
class _Transcript:
    """The token-level record as it grows."""

    token_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    versions: list[int]
    messages: list[dict[str, Any]]
    num_prompt: int
    data_source: str = ""
    images: tuple[bytes, ...] = ()
    turn_ends: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    generate_s: float = 0.0
    environment_s: float = 0.0

    @classmethod
    def start(cls, prompt: Sequence[int], messages: list[dict[str, Any]]) -> "_Transcript":
        length = len(prompt)
        return cls(list(prompt), [0] * length, [0.0] * length, [-1] * length, messages, length)

    @property
    def num_response(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_generated(self) -> int:
        return sum(self.mask)

    def add_generated(self, generation: Generation, text: str) -> None:
        self.token_ids += generation.token_ids.tolist()
        self.mask += [1] * len(generation.token_ids)
        self.logprobs += generation.logprobs.tolist()
        self.versions += generation.versions.tolist()
        self.turn_ends.append(len(self.token_ids) - 1)
        self.messages.append({"role": "assistant", "content": text})

    def add_observation(self, ids: Sequence[int], message: dict[str, Any]) -> None:
        self.token_ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.messages.append(message)

    def add_reply(self, reply: StepResult) -> None:
        self.rewards.append(reply.reward)
        self.info = reply.info

    def trajectory(
        self, plan: EpisodePlan, finish: Literal["done", "turns", "length"], host: str
    ) -> Trajectory:
        return Trajectory(
            token_ids=np.array(self.token_ids, np.int32),
            mask=np.array(self.mask, np.uint8),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            turn_ends=np.array(self.turn_ends, np.int32),
            rewards=np.array(self.rewards, np.float32),
            finish=finish,
            greedy=plan.greedy,
            role=plan.start.seat.role if plan.start.seat else "",
            seed=plan.start.seed,
            messages=self.messages,
            info=self.info,
            host=host,
            data_source=self.data_source,
            generate_s=self.generate_s,
            environment_s=self.environment_s,
        )


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

    async def run(self, plan: EpisodePlan) -> Trajectory:
        """Run one episode to its end.

        Raises EpisodeFailed, naming the boundary to blame, when there is no trajectory; NoTurn for
        a role whose turn never came.
        """
        transcript = _Transcript.start([], [])
        host: str | None = None
        boundary: Boundary = "environment"
        try:
            started = time.perf_counter()
            with self._time_use.doing("environment"):
                reset = await self._environments.reset(plan.episode, plan.start)
            host = reset.host
            if not reset.messages:
                _refuse_table(plan)
            boundary = "task"
            prompt = self._chat.first_prompt(reset.messages, reset.tools).tolist()
            self._check_prompt(prompt)
            transcript = _Transcript.start(prompt, list(reset.messages))
            transcript.images = images_of(reset.messages)
            transcript.data_source = reset.data_source
            transcript.environment_s = time.perf_counter() - started
            while True:
                boundary = "engine"
                text = await self._generate(plan, transcript)
                boundary = "environment"
                reply = await self._interact(plan, host, transcript, text)
                finish = self._finish(transcript, reply)
                if finish is None and not self._observe(transcript, reply):
                    finish = "length"
                if finish is not None:
                    if finish != "done" and self._environments.rewards_ends:
                        await self._reward_end(plan, host, transcript)
                    trajectory = transcript.trajectory(plan, finish, host)
                    if finish == "done":
                        host = None  # the game has ended: its host frees it by itself
                    return trajectory
        except TinkermqError as error:
            raise failure_of(boundary, error, transcript.num_generated) from error
        finally:
            self._engine.release(plan.episode)
            if host is not None:
                self._environments.close(host, plan.episode)

    async def _generate(self, plan: EpisodePlan, transcript: _Transcript) -> str:
        """GENERATING: one turn of the policy, within the turn's and the episode's limits."""
        config = self._config
        room = config.max_response_tokens - transcript.num_response
        turn = len(transcript.turn_ends)
        sampling = Sampling(
            max_new_tokens=min(config.max_turn_tokens, room),
            temperature=0.0 if plan.greedy else self._sampling.temperature,
            top_p=1.0 if plan.greedy else self._sampling.top_p,
            top_k=0 if plan.greedy else self._sampling.top_k,
            stop_token_ids=self._chat.stop_token_ids,
        )
        started = time.perf_counter()
        with self._time_use.doing("generate"):
            generation = await self._engine.generate(
                transcript.token_ids,
                sampling,
                request_id=f"{plan.episode}.{turn}",
                conversation=plan.episode if config.max_turns > 1 else None,
                images=transcript.images,
            )
        transcript.generate_s += time.perf_counter() - started
        if generation.finish_reason == "cancelled" or not len(generation.token_ids):
            raise EngineError(f"the engine ended request {plan.episode}.{turn} without a turn")
        text = self._chat.decode(generation.token_ids)
        transcript.add_generated(generation, text)
        return text

    async def _interact(
        self, plan: EpisodePlan, host: str, transcript: _Transcript, text: str
    ) -> StepResult:
        """INTERACTING: the game's answer to the turn."""
        started = time.perf_counter()
        turn = len(transcript.rewards)
        seated = plan.start.seat is not None
        with self._time_use.doing("environment"):
            reply = await self._environments.step(host, plan.episode, turn, text, seated=seated)
        transcript.environment_s += time.perf_counter() - started
        transcript.add_reply(reply)
        return reply

    async def _reward_end(self, plan: EpisodePlan, host: str, transcript: _Transcript) -> None:
        """Add what an episode earns at its end though its game has not ended."""
        started = time.perf_counter()
        turn = len(transcript.rewards)
        with self._time_use.doing("environment"):
            reply = await self._environments.finish(host, plan.episode, turn)
        transcript.environment_s += time.perf_counter() - started
        transcript.rewards[-1] += reply.reward
        transcript.info = reply.info

    def _finish(
        self, transcript: _Transcript, reply: StepResult
    ) -> Literal["done", "turns", "length"] | None:
        """Say why the episode is over, or None."""
        if reply.done:
            return "done"
        if len(transcript.turn_ends) >= self._config.max_turns:
            return "turns"
        return None

    def _observe(self, transcript: _Transcript, reply: StepResult) -> bool:
        """Append the observation; False when it leaves no room for another turn."""
        last_turn = transcript.token_ids[-1:]
        message = {"role": reply.role, "content": reply.observation}
        ids = self._chat.next_turn(last_turn, [message]).tolist()
        if transcript.num_response + len(ids) >= self._config.max_response_tokens:
            return False
        transcript.add_observation(ids, message)
        return True

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


def failure_of(boundary: Boundary, error: TinkermqError, num_generated: int = 0) -> EpisodeFailed:
    """Blame a boundary, or the one that the error names, for what cost `num_generated` tokens."""
    if isinstance(error, SandboxError):
        boundary = "sandbox"
    elif isinstance(error, RewardError):
        boundary = "reward"
    elif boundary == "engine" and isinstance(error, DataError):
        boundary = "task"  # an image that cannot be read
    blame = Blame(boundary=boundary, code=error.code, message=error.message, hint=error.hint)
    return EpisodeFailed(blame, num_generated, host_gone=isinstance(error, HostGone))


def _refuse_table(plan: EpisodePlan) -> NoReturn:
    """There is no first prompt: the role's turn never came, or the episode is no seat at all."""
    if plan.start.seat is not None:
        raise NoTurn(plan.start.seat.role)
    raise ConfigError(
        "the game has several roles, and this command plays games for one",
        hint="train it, or evaluate it with `tinkermq eval`",
    )
