"""What the tests of calls ask, and what writes their calls down."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkermq.actors.engine.engine import Engine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout.agent_loop import EpisodeSampling
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_log import CallLog, TaskCalls
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.agent import CallPart, CallRequest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.generation import Decoding
from tinkermq.schemas.model_apis.canonical import ModelMessage
from tinkermq.schemas.profile import TimeUse
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.engine.conftest import EngineKind

MAX_TURN = 12


@dataclass
class Asking:
    """What one test asks, and what answers it."""

    engine: Engine
    chat: ChatTokenizer
    folder: Path
    engine_kind: EngineKind
    parts: list[CallPart] = field(default_factory=list)

    def calls(
        self,
        log: CallLog | None = None,
        *,
        max_turn: int = MAX_TURN,
        message_bytes: int | None = None,
        episode: str = "e",
        **agent: Any,
    ) -> CallAnswers:
        """Return what answers the calls of an episode; `episode` names it in the engine."""
        config = JobConfig.model_validate(
            {
                "model": {"path": str(self.folder)},
                "env": {"hosts": 0},
                "agent": {"client": True, **agent},
                "rollout": {
                    "group_size": 1,
                    "max_prompt_tokens": 60,
                    "max_turn_tokens": max_turn,
                    "max_response_tokens": 100,
                },
            }
        )
        if log is None:
            log = CallLog("an episode")
            log.begin_try()
        sampling = EpisodeSampling(1.0)
        time_use = TimeUse("generate", "environment", rest="other")
        return CallAnswers(
            episode,
            self.engine,
            self.chat,
            config,
            sampling,
            log,
            time_use,
            message_bytes=message_bytes,
        )

    async def tell(self, part: CallPart) -> None:
        """Keep what is told."""
        self.parts.append(part)


def request(*texts: str, **fields: Any) -> CallRequest:
    """Return a request whose messages take turns, a user's first."""
    messages = [
        ModelMessage(role="assistant" if place % 2 else "user", content=(text,))
        for place, text in enumerate(texts)
    ]
    decoding = {name: fields.pop(name) for name in Decoding.model_fields if name in fields}
    return CallRequest(
        **{"request": "r", "messages": messages, "decoding": Decoding(**decoding), **fields}
    )


async def hang_up(calls: CallAnswers, asked: CallRequest) -> None:
    """Ask, and be gone as soon as anything is told."""

    async def tell(part: CallPart) -> None:
        del part
        asking.cancel()

    asking = asyncio.create_task(calls.answer(asked, tell))
    await asyncio.wait([asking])
    assert asking.cancelled()


def text_of(part: CallPart, choice: int = 0) -> str:
    """Return what a last part says."""
    return next(delta.text for delta in part.deltas if delta.choice == choice)


def held(broker: Broker, scope: JobScope, delivery: int, task: int = 3) -> TaskCalls:
    """Return what writes a delivery of a task of one episode down."""
    of = Task(task=task, seed=5, group_size=1)
    return TaskCalls(broker, scope, None, of, delivery, f"holder-{delivery}")  # type: ignore[arg-type]


async def opened(holder: TaskCalls) -> CallLog:
    """Return the log of the task's episode."""
    log = await holder.open(0)
    log.begin_try()
    return log
