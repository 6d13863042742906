"""The inference server of a job: loads the job's models and answers requests.

It serves the configured model, a run's checkpoint (the job's own copy), or the newest version of a
live run, whose weights it loads like a generator. Each further LoRA checkpoint has an engine with
its own adapter; all of them share one base. Several servers of a job share its requests.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachetools import FIFOCache

from ...broker.client.connection import Msg
from ...broker.client.parts import PartsHandler, PartsService, Tell
from ...envs.host_client import Environments, Start
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import RolloutConfig
from ...schemas.infer import (
    CancelInference,
    ChatRequest,
    CompletionRequest,
    InferPart,
    PlayPart,
    PlayRequest,
)
from ...schemas.job import JobRecord
from ...schemas.wire import errors
from ..engine.engine import ROOM, Engine, bytes_of_engines, report_engine
from ..policy.chat import ChatTokenizer, make_chat
from ..policy.grammar import OutputGrammars
from ..policy.lora import config_of
from ..policy.policies import MAIN, check_weights, config_of_checkpoint, config_of_folder
from ..rollout.agent_loop import (
    AgentLoop,
    EpisodeFailed,
    EpisodePlan,
    EpisodeSampling,
    until_played,
)
from ..rollout.completions import Answers
from ..rollout.players import load_base, settled_for_gpu, start_engine
from ..runtime import JobContext, settle_memory
from ..storage.adapters import base_of, is_adapter
from ..weights.follower import WeightFollower
from ..weights.job_weights import follow_weights

# -- whole episodes, played by the generator's agent loop ------------------------------------------

_SESSIONS = 64
_LIMITS = ("max_turns", "max_prompt_tokens", "max_turn_tokens", "max_response_tokens")


class EpisodePlayer:
    """Plays the episodes that a server's callers request."""

    def __init__(
        self, context: JobContext, config: JobConfig, engine: Engine, chat: ChatTokenizer
    ) -> None:
        self._context = context
        self._config = config
        self._engine = engine
        self._chat = chat
        self._environments: FIFOCache[str, Environments] = FIFOCache(_SESSIONS)
        self._num_open = 0
        self._proven = config.rollout.max_turns > 1

    async def play(self, request: PlayRequest) -> PlayPart:
        """Play one episode with retries; the part has the episode, or its failure."""
        limit = self._config.generator.max_episodes
        if self._num_open >= limit:
            raise errors.BusyError(
                f"this server plays {self._num_open} episodes, which is its limit",
                hint="retry later, or raise generator.max_episodes",
            )
        self._num_open += 1
        try:
            async with asyncio.timeout(request.deadline_s):
                return await self._play(request)
        except TimeoutError:
            raise errors.DeadlineError(
                f"the episode was not over after {request.deadline_s:g} s",
                hint="check that its environment host answers, or allow more time",
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
        """Return the job's limits, overridden by those of the request."""
        limits = {name: getattr(request, name) for name in _LIMITS}
        rollout = self._config.rollout.model_copy(
            update={name: value for name, value in limits.items() if value is not None}
        )
        longest = self._config.generator.max_context or self._config.rollout.max_tokens
        if rollout.max_tokens > longest:
            raise errors.ConfigError(
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
            raise errors.ConfigError(
                "this run serves a model without a game of its own",
                hint="pass one: run_inference(…, game_class=…), or `tinkermq infer --game`",
            )
        known = self._environments.get(session)
        if known is None:
            scope = self._context.scope
            if session:
                scope, env = scope.of_session(session), env.model_copy(update={"hosts": 1})
            known = Environments(self._context.broker, scope, env, self._context.missing)
            self._environments[session] = known
        return known


P = TypeVar("P")
Q = TypeVar("Q", ChatRequest, CompletionRequest)
_STATS_S = 1.0
_DRAIN_S = 20.0
_QUEUED_PER_ROW = 4
"""Maximum number of queued answers for each concurrent one."""


async def run_server(context: JobContext) -> None:
    """Serve until stopped."""
    await context.serve_control()
    await asyncio.to_thread(check_weights, context.record, context.config)
    config = config_of_checkpoint(context.record, context.config)
    config = await asyncio.to_thread(settled_for_gpu, config, serves=True)
    chat = await asyncio.to_thread(make_chat, config)
    engines = await start_engines(context.record, config)
    engine = engines[""]
    context.own_bytes = partial(bytes_of_engines, engines.values())
    grammars = OutputGrammars(chat)
    answers = {
        adapter: Answers(
            its_engine,
            chat,
            partial(_name, context.record, adapter, its_engine),
            max_context=config.generator.max_context or config.rollout.max_tokens,
            max_open=_QUEUED_PER_ROW * config.generator.num_requests,
            grammars=grammars,
        )
        for adapter, its_engine in engines.items()
    }
    player, rows = EpisodePlayer(context, config, engine, chat), config.generator.num_requests
    server = Server(context, engine, answers, player, rows)
    try:
        await server.run()
    finally:
        for running in engines.values():
            await running.close()


def _name(record: JobRecord, adapter: str, engine: Engine) -> str:
    return adapter or served_name(record, engine.version)


async def start_engines(record: JobRecord, config: JobConfig) -> dict[str, Engine]:
    """Start an engine for the served model, named "", and one for each further adapter.

    They share the weights of one base. Raises ModelError for an adapter of another base.
    """
    if not record.adapters:
        return {"": await start_engine(config, served_step(record))}
    _check_base(record, config)
    if is_adapter(config.model.path):
        config = config.model_copy(update={"lora": config_of(config.model.path)})
    adapters = [config_of(folder) for folder in record.adapters.values()]
    base = await load_base(config, [*([config.lora] if config.lora.rank else []), *adapters])
    configs = {"": (config, served_step(record))}
    for name, folder in record.adapters.items():
        configs[name] = config_of_folder(config, folder), int(name.rpartition("@")[2])
    engines: dict[str, Engine] = {}
    async with contextlib.AsyncExitStack() as undone:
        for name, (own, version) in configs.items():
            engines[name] = await start_engine(own, version, base)
            undone.push_async_callback(engines[name].close)
        undone.pop_all()
    return engines


def _check_base(record: JobRecord, config: JobConfig) -> None:
    """Raise ModelError if the engines cannot share one base."""
    path = config.model.path
    path = base_of(path) if is_adapter(path) else path
    if record.follow is not None and not config.lora.rank:
        raise errors.ModelError(
            f"{record.serves} trains all weights, so they do not stay the base of other adapters",
            hint=f"serve one of its checkpoints: {record.serves}@STEP",
        )
    for name, folder in record.adapters.items():
        if Path(base_of(folder)).resolve() != Path(path).resolve():
            raise errors.ModelError(
                f"adapter {name} belongs to {base_of(folder)}, the served model to {path}",
                hint=f"serve it separately: `tinkermq serve {name}`",
            )


def served_step(record: JobRecord) -> int:
    """Return the version of the served checkpoint's weights."""
    step = record.serves.rpartition("@")[2]
    return int(step) if record.fork_of and step.isdigit() else 0


def served_name(record: JobRecord, version: int) -> str:
    """Return the model's name in answers: `run@step`, or the job's name for a plain model."""
    if record.follow is not None:
        return f"{record.serves}@{version}"
    return record.serves or record.name


class Server:
    """One server of an inference job."""

    def __init__(
        self,
        context: JobContext,
        engine: Engine,
        answers: Mapping[str, Answers],
        player: EpisodePlayer,
        rows: int,
    ) -> None:
        """Serve with `engine` and `player`; `answers` are by adapter, "" for the main model.

        The engine decodes `rows` requests at once.
        """
        self._rows = rows
        self._context = context
        self._engine = engine
        self._answers = answers
        self._player = player
        self._parts = PartsService(context.broker, context.service)

    async def run(self) -> None:
        """Follow the served run, if there is one, and answer until `stopping` is set."""
        context = self._context
        async with asyncio.TaskGroup() as background:
            helpers = [background.create_task(self._report_engine(), name="statistics")]
            if context.record.follow is not None:
                follower = self._follower(context.record.follow)
                helpers.append(
                    background.create_task(follower.follow_versions(), name="weight follower")
                )
                with context.waiting(f"the first weights of run {context.record.serves}"):
                    await context.unless_stopping(follower.wait_for(0), None)
            if not context.stopping.is_set():
                await self._serve()
                await context.stopping.wait()
            await context.service.stop(_DRAIN_S)
            for helper in helpers:
                helper.cancel()

    async def _serve(self) -> None:
        context = self._context
        scope = context.scope
        add = self._parts.endpoint
        await add("chat", scope.infer("chat"), ChatRequest, InferPart, self._chat)
        await add("complete", scope.infer("complete"), CompletionRequest, InferPart, self._complete)
        here, own = "chat-here", scope.infer_at(context.name, "chat")
        await add(here, own, ChatRequest, InferPart, self._unless_waiting(self._chat))
        here, own = "complete-here", scope.infer_at(context.name, "complete")
        await add(here, own, CompletionRequest, InferPart, self._unless_waiting(self._complete))
        await add("play", scope.infer("play"), PlayRequest, PlayPart, self._play)
        await context.broker.listen(scope.infer("cancel"), self._cancel)
        settle_memory()
        name = served_name(context.record, self._engine.version)
        context.set_state("working", version=self._engine.version)
        await context.event("server_ready", f"{context.name} serves {name}", model=name)

    def _follower(self, job: str) -> WeightFollower:
        context = self._context
        store = follow_weights(context, job)
        return WeightFollower(store, {MAIN: self._engine}, context.config.generator.kv_on_swap)

    async def _chat(self, request: ChatRequest, tell: Tell[InferPart]) -> InferPart:
        return self._finished(await self._of(request.adapter).chat(request, tell))

    async def _complete(self, request: CompletionRequest, tell: Tell[InferPart]) -> InferPart:
        return self._finished(await self._of(request.adapter).complete(request, tell))

    def _unless_waiting(self, handler: PartsHandler[Q, InferPart]) -> PartsHandler[Q, InferPart]:
        """Return a handler that refuses a request with BusyError if it would wait here."""

        async def answer(request: Q, tell: Tell[InferPart]) -> InferPart:
            stats = self._engine.stats()
            num_open = sum(answers.num_open for answers in self._answers.values())
            if num_open >= self._rows or (stats.waiting and stats.cache_share >= ROOM):
                raise errors.BusyError(
                    f"{self._context.name} answers {num_open} requests, and another would wait",
                    hint="ask another server",
                )
            return await handler(request, tell)

        return answer

    def _finished(self, part: P) -> P:
        self._context.progressed()
        return part

    def _of(self, adapter: str) -> Answers:
        if adapter not in self._answers:
            raise errors.NotFoundError(
                f"job {self._context.record.name} does not serve adapter {adapter!r}",
                hint=f"it serves {', '.join(name for name in self._answers if name) or 'none'}",
            )
        return self._answers[adapter]

    async def _play(self, request: PlayRequest, tell: object) -> PlayPart:
        del tell  # an episode is sent as one part
        part = self._finished(await self._player.play(request))
        name = served_name(self._context.record, self._engine.version)
        return part.model_copy(update={"model": name})

    def _cancel(self, message: Msg) -> None:
        try:
            self._parts.cancel(CancelInference.from_bytes(message.data).request)
        except errors.MessageError as error:
            self._context.log.warning("cancel_ignored", error=error.message)

    async def _report_engine(self) -> None:
        """Add the engine's figures to the heartbeat."""
        context = self._context
        while True:
            report_engine(context, self._engine.stats(), requests=self._parts.num_running)
            await asyncio.sleep(_STATS_S)
