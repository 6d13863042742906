"""Whole episodes, played with the generator's own agent loop: token ids in and out."""

import asyncio
import time
from collections import OrderedDict

from ...envs.host_client import Environments, Start
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import RolloutConfig
from ...schemas.infer import PlayPart, PlayRequest
from ...schemas.wire.errors import BusyError, ConfigError, DeadlineError
from ..engine.engine import Engine
from ..policy.chat import ChatTokenizer
from ..rollout.agent_loop import (
    AgentLoop,
    EpisodeFailed,
    EpisodePlan,
    EpisodeSampling,
    until_played,
)
from ..runtime import JobContext

_SESSIONS = 64
_LIMITS = ("max_turns", "max_prompt_tokens", "max_turn_tokens", "max_response_tokens")


class EpisodePlayer:
    """Plays the episodes that callers of one server ask for."""

    def __init__(
        self, context: JobContext, config: JobConfig, engine: Engine, chat: ChatTokenizer
    ) -> None:
        self._context = context
        self._config = config
        self._engine = engine
        self._chat = chat
        self._environments: OrderedDict[str, Environments] = OrderedDict()
        self._num_open = 0
        self._proven = config.rollout.max_turns > 1

    async def play(self, request: PlayRequest) -> PlayPart:
        """Play one episode, trying again what failed; the last part holds it, or the blame."""
        limit = self._config.generator.max_episodes
        if self._num_open >= limit:
            raise BusyError(
                f"this server plays {self._num_open} episodes, its limit",
                hint="ask again later; generator.max_episodes raises the limit",
            )
        self._num_open += 1
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._play(request)
        except TimeoutError:
            raise DeadlineError(
                f"the episode was not over after {request.deadline_s:g} s",
                hint="see whether its environment host answers, or allow more time",
            ) from None
        finally:
            self._num_open -= 1

    async def _play(self, request: PlayRequest) -> PlayPart:
        rollout = self._rollout(request)
        sampling = EpisodeSampling(request.temperature, request.top_p, request.top_k)
        loop = AgentLoop(self._engine, self._chat, self._hosts(request.session), rollout, sampling)
        start = Start(request.split, request.sample, request.seed, request.kwargs)
        greedy = request.temperature == 0
        plan = EpisodePlan(request.request, start, greedy=greedy, time=time.time())
        try:
            trajectory = await until_played(loop.run, plan, rollout.max_tries, loop.check_engine)
        except EpisodeFailed as failure:
            return PlayPart(blame=failure.blame)
        return PlayPart(trajectory=trajectory)

    def _rollout(self, request: PlayRequest) -> RolloutConfig:
        """Return the job's limits with those of the request laid over."""
        given = {name: getattr(request, name) for name in _LIMITS}
        rollout = self._config.rollout.model_copy(
            update={name: value for name, value in given.items() if value is not None}
        )
        longest = self._config.generator.max_context or self._config.rollout.max_tokens
        if rollout.max_tokens > longest:
            raise ConfigError(
                f"an episode may have {rollout.max_tokens} tokens, the context of this server "
                f"holds {longest}",
                hint="lower max_tokens, or serve with a larger max_model_len",
            )
        if rollout.max_turns > 1 and not self._proven:
            self._chat.check_template(multi_turn=True)
            self._proven = True
        return rollout

    def _hosts(self, session: str) -> Environments:
        """Return the environment hosts of a caller's session, or those of the job itself."""
        env = self._config.env
        if not session and not env.game:
            raise ConfigError(
                "this job serves a model without a game of its own",
                hint="bring one: run_inference(…, game_class=…), or `tinkermq infer --game`",
            )
        known = self._environments.get(session)
        if known is None:
            scope = self._context.scope
            if session:
                scope, env = scope.of_session(session), env.model_copy(update={"hosts": 1})
            known = Environments(self._context.broker, scope, env, self._context.missing)
            self._environments[session] = known
            if len(self._environments) > _SESSIONS:
                self._environments.popitem(last=False)
        return known
