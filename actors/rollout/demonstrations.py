"""The generator of an SFT job, which appends the conversations of the data as episodes.

A task names a row. Its group is one trajectory, whose generated tokens are those of the assistant,
with log-prob 0 and the version that the task requires. Everything after the log works as in other
jobs: batches, checkpoints, resuming, replay, viewing rollouts. A row takes a fraction of a
millisecond. A model is loaded only if the generators validate.
"""

import asyncio
import time
from functools import lru_cache

import numpy as np
import structlog

from ...broker.rollouts import RolloutLog
from ...broker.tasks import Lease, TaskQueue
from ...envs.data import ChatData, ChatRow
from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.plan.model_shape import find_max_positions
from ...schemas.rollout import Group, Trajectory
from ...schemas.task import Blame, Task
from ...schemas.wire.errors import DataError, ModelError, TinkermqError
from ...schemas.wire.foreign import words_of
from ..policy.chat import ChatTokenizer, make_chat, open_chat
from ..policy.histories import Conversation
from ..policy.policies import check_weights
from ..runtime import JobContext, settle_memory
from ..weights.follower import WeightFollower
from ..weights.job_weights import open_weights
from .groups import GroupFailed, append_given_up, append_group
from .players import start_engines
from .validation import TaskEpisodes, Validator

_PULL_TIMEOUT_S = 2.0
_AT_ONCE = 64
_log = structlog.get_logger()


async def run_demonstrations(context: JobContext) -> None:
    """Append the rows that the learner requests, until stopped."""
    config = context.config
    chat = (await asyncio.to_thread(open_chat, config.model)).at(context.record.created)
    data = await asyncio.to_thread(ChatData, config.sft.data)
    await context.serve_control()
    demonstrations = Demonstrations(context, data, chat)
    try:
        if config.validates and not config.has_evaluator:
            await _append_and_validate(context, demonstrations)
        else:
            await demonstrations.append_until_stopped()
    finally:
        data.close()


async def _append_and_validate(context: JobContext, demonstrations: "Demonstrations") -> None:
    """Append rows, and validate versions with an engine of its own."""
    config = context.config
    await asyncio.to_thread(check_weights, context.record, config)
    chat = make_chat(config).at(context.record.created)
    environments = Environments(context.broker, context.scope, config.env, context.missing)
    engines = await start_engines(config)
    episodes = await TaskEpisodes.start(context, engines, chat, environments)
    weights = WeightFollower(open_weights(context), engines, "recompute")
    try:
        async with asyncio.TaskGroup() as group:
            validator = Validator(context, episodes, weights)
            validating = group.create_task(validator.play_tasks(), name="validation")
            await demonstrations.append_until_stopped()
            validating.cancel()
    finally:
        await episodes.close()
        for engine in engines.values():
            await engine.close()


class Demonstrations:
    """Turns tasks into groups of the rollout log."""

    def __init__(self, context: JobContext, data: ChatData, chat: ChatTokenizer) -> None:
        self._context = context
        self._data = data
        self._chat = chat
        self._queue = TaskQueue(
            context.broker, context.scope, ack_wait_s=context.config.generator.ack_wait_s
        )
        self._log = RolloutLog(context.broker, context.scope)
        self._reported = set[str]()
        """Unknown keys of messages that an event has named."""

    async def append_until_stopped(self) -> None:
        """Pull and append until `stopping` is set."""
        context = self._context
        settle_memory()
        context.set_state("working")
        await context.event("generator_ready")
        while not context.stopping.is_set():
            pulling = self._queue.pull(_AT_ONCE, _PULL_TIMEOUT_S)
            leases = await context.unless_stopping(pulling, stopped=list[Lease]())
            async with asyncio.TaskGroup() as appending:
                for lease in leases:
                    appending.create_task(self._append(lease), name=f"task {lease.task.task}")
        await self._queue.close()

    async def _append(self, lease: Lease) -> None:
        context, task = self._context, lease.task
        try:
            group = demonstrate(task, self._data, self._chat, context.config, context.name)
            await append_group(self._log, group, context.name)
        except GroupFailed as failure:
            await append_given_up(context, self._log, failure)
        await self._report_unknown_keys()
        context.progressed()
        await lease.done()

    async def _report_unknown_keys(self) -> None:
        """Send an event when rows have more keys that may have no effect."""
        unknown = self._data.unknown_keys.keys()
        if unknown > self._reported:
            self._reported |= unknown
            await self._context.event("unknown_message_keys", self._data.note)


def demonstrate(
    task: Task, data: ChatData, chat: ChatTokenizer, config: JobConfig, source: str
) -> Group:
    """Return the group of a task: its row as one trajectory.

    Raises GroupFailed for a row that cannot be trained on.
    """
    now = time.time()
    try:
        trajectory = _trajectory(task, data, chat, config)
        group = Group(task=task, trajectories=[trajectory], source=source, started=now)
        return group.with_shared_images().model_copy(update={"finished": time.time()})
    except DataError as error:
        raise _failed(task, error, source, now) from error
    except ModelError as error:
        failure = ModelError(f"row {task.sample} of sft.data: {error.message}", hint=error.hint)
        raise _failed(task, failure, source, now) from error
    except Exception as error:  # only this row is not trained
        _log.exception("row_failed", sample=task.sample)
        failure = DataError(
            f"row {task.sample} of sft.data cannot be trained on: {words_of(error)}",
            hint="remove the row; the generator's log has the traceback",
        )
        raise _failed(task, failure, source, now) from error


def _failed(task: Task, error: TinkermqError, source: str, started: float) -> GroupFailed:
    blame = Blame(boundary="task", code=error.code, message=error.message, hint=error.hint)
    group = Group(task=task, error=blame, source=source, started=started, finished=time.time())
    return GroupFailed(group, blame, 1)


def _trajectory(task: Task, data: ChatData, chat: ChatTokenizer, config: JobConfig) -> Trajectory:
    if task.sample is None:
        raise DataError(f"task {task.task} names no row")
    row = data.row(task.sample)
    conversation = tokenise_row(row, chat, config)
    is_assistant = conversation.mask == 1
    return Trajectory(
        token_ids=conversation.token_ids,
        mask=conversation.mask.astype(np.uint8),
        logprobs=np.zeros(len(is_assistant), np.float32),
        versions=np.where(is_assistant, task.min_version, -1).astype(np.int32),
        turn_ends=conversation.turn_ends,
        rewards=np.zeros(len(conversation.turn_ends), np.float32),
        messages=row.messages[: max(row.trained) + 1],
        seed=task.seed,
    )


_max_positions = lru_cache(find_max_positions)
"""Cached, since each row reads it and a model's configuration does not change."""


def tokenise_row(row: ChatRow, chat: ChatTokenizer, config: JobConfig) -> Conversation:
    """Tokenise the conversation of a row.

    Raises DataError if it is longer than the job's limit, ModelError if it is longer than the model
    has positions for, or if the template does not accept it; all errors name the row.
    """
    try:
        conversation = chat.conversation(row.messages, row.tools, row.trained)
    except ModelError as error:
        raise ModelError(f"{row.where}: {error.message}", hint=error.hint) from error
    length, max_tokens = len(conversation.token_ids), config.rollout.max_tokens
    if length > max_tokens:
        raise DataError(
            f"{row.where} has {length} tokens, rollout.max_prompt_tokens + "
            f"rollout.max_response_tokens is {max_tokens}",
            hint=f"raise them to {length} together, or shorten the data",
        )
    max_positions = _max_positions(config.model.path)
    if 0 < max_positions < length:
        raise ModelError(
            f"{row.where} has {length} tokens, model {config.model.path} has positions for "
            f"{max_positions}",
            hint="shorten the data, or take a model with more positions",
        )
    return conversation
