"""The inference server of a job: loads what the job serves, and answers until told to stop.

It serves the model of the configuration, a run's checkpoint (the copy that the job keeps), or the
newest version of a live run, which it follows as a generator does. Several servers of one job
share its requests.
"""

import asyncio

from nats.aio.msg import Msg

from ...broker.parts import PartsService
from ...broker.weights import WeightStore
from ...schemas.errors import MessageError
from ...schemas.infer import (
    CancelInference,
    ChatRequest,
    CompletionRequest,
    InferPart,
    PlayPart,
    PlayRequest,
)
from ...schemas.job import JobRecord
from ...schemas.subjects import JobScope
from ..generator.engine import Engine
from ..generator.following import WeightFollower
from ..generator.generator import config_of_checkpoint, make_chat, tell_engine
from ..generator.players import start_engine
from ..policies import MAIN
from ..runtime import JobContext, settle_memory
from .answers import Answers
from .play import Player

_STATS_S = 1.0
_DRAIN_S = 20.0
_QUEUED_PER_ROW = 4
"""Answers that may wait for each that is generated."""


async def run_server(context: JobContext) -> None:
    """Serve until told to stop."""
    await context.serve_control()
    config = config_of_checkpoint(context.record, context.config)
    chat = await asyncio.to_thread(make_chat, config)
    engine = await start_engine(config, served_step(context.record))
    answers = Answers(
        engine,
        chat,
        lambda: served_name(context.record, engine.version),
        max_context=config.generator.max_context or config.rollout.max_tokens,
        max_open=_QUEUED_PER_ROW * config.generator.max_requests,
    )
    server = Server(context, engine, answers, Player(context, config, engine, chat))
    try:
        await server.run()
    finally:
        await engine.close()


def served_step(record: JobRecord) -> int:
    """Return the version that the weights of the served checkpoint had."""
    step = record.serves.rpartition("@")[2]
    return int(step) if record.fork_of and step.isdigit() else 0


def served_name(record: JobRecord, version: int) -> str:
    """Return how answers name the model: `run@step`, or the job's name for a plain model."""
    if record.follow is not None:
        return f"{record.serves}@{version}"
    return record.serves or record.name


class Server:
    """One server of an inference job."""

    def __init__(
        self, context: JobContext, engine: Engine, answers: Answers, player: Player
    ) -> None:
        self._context = context
        self._engine = engine
        self._answers = answers
        self._player = player
        self._parts = PartsService(context.broker, context.service)

    async def run(self) -> None:
        """Follow the run that is served, if any, and answer until `stopping` is set."""
        context = self._context
        async with asyncio.TaskGroup() as background:
            helpers = [background.create_task(self._tell(), name="statistics")]
            if context.record.follow is not None:
                follower = self._follower(context.record.follow)
                helpers.append(background.create_task(follower.run(), name="weight follower"))
                with context.waiting(f"the first weights of run {context.record.serves}"):
                    await context.unless_stopping(follower.wait_for(0))
            if not context.stopping.is_set():
                await self._serve()
                await context.stopping.wait()
            await context.service.stop(_DRAIN_S)
            for helper in helpers:
                helper.cancel()

    async def _serve(self) -> None:
        context = self._context
        scope = context.scope
        answers, add = self._answers, self._parts.endpoint
        await add("chat", scope.infer("chat"), ChatRequest, InferPart, answers.chat)
        await add(
            "complete", scope.infer("complete"), CompletionRequest, InferPart, answers.complete
        )
        await add("play", scope.infer("play"), PlayRequest, PlayPart, self._play)
        await context.broker.listen(scope.infer("cancel"), self._cancel)
        settle_memory()
        name = served_name(context.record, self._engine.version)
        context.set_state("working", version=self._engine.version)
        await context.event("server_ready", f"{context.name} serves {name}", model=name)

    def _follower(self, job: str) -> WeightFollower:
        context = self._context
        store = WeightStore(context.broker, JobScope(context.scope.user, job))
        return WeightFollower(store, {MAIN: self._engine}, context.config.generator.kv_on_swap)

    async def _play(self, request: PlayRequest, tell: object) -> PlayPart:
        del tell  # an episode is told whole
        part = await self._player.play(request)
        name = served_name(self._context.record, self._engine.version)
        return part.model_copy(update={"model": name})

    def _cancel(self, message: Msg) -> None:
        try:
            self._parts.cancel(CancelInference.from_bytes(message.data).request)
        except MessageError as error:
            self._context.log.warning("cancel_ignored", error=error.message)

    async def _tell(self) -> None:
        """Put the engine's figures into the heartbeat."""
        context = self._context
        while True:
            tell_engine(context, self._engine.stats(), requests=self._parts.num_running)
            await asyncio.sleep(_STATS_S)
