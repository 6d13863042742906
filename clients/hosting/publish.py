"""The publish API: an external agent adds finished trajectories, or tasks, to a job.

Trajectories that were made elsewhere (by another agent framework, against the job's model) enter
the same log as those of the generators: numbers are reserved from the learner, which keeps the
staleness bound, and the group is appended once. Everything is checked here before it is sent; the
learner checks it again.
"""

import asyncio
import reprlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...broker.client.rpc import call
from ...broker.jobs import JobStore
from ...broker.rollouts import RolloutLog
from ...schemas import control
from ...schemas.job import FINAL_STATES
from ...schemas.rollout import Group, Trajectory, check_group, episodes_of
from ...schemas.task import Task
from ...schemas.wire import errors
from ...schemas.wire.codec import most_bytes
from ...schemas.wire.message import Message, summarize
from ..base import PoolClient, SyncTwin, make_future, make_sync, parse_server_url

R = TypeVar("R", bound=Message)

CALL_TIMEOUT_S = 10.0
RESERVATION_S = 60.0
_RETRY_S = 0.5
_TASKS_AT_ONCE = 1_000
_UNKNOWN = 2**31 - 1
_ROOM_BYTES = 1 << 14
"""Bytes of a message that are reserved for the fields that the learner adds to a task."""


class AsyncTrajectoryPublisher(PoolClient):
    """Publishes into one job, for async code; see `TrajectoryPublisher`."""

    def __init__(
        self, server_url: str, *, source: str = "external", api_key: str | None = None
    ) -> None:
        """Name the job by its `server_url`, and the agent by `source`."""
        self._address = parse_server_url(server_url)
        super().__init__(self._address.broker_url, api_key, self._address.scope.user)
        self._source = source
        self._limits: control.ReserveReply | None = None

    async def publish_group(
        self,
        trajectories: Sequence[Trajectory],
        *,
        sample: int | None = None,
        timeout_s: float = 60,
    ) -> int:
        """Append the trajectories of one prompt to the job's rollout log; return its task number.

        Their number must be the job's `rollout.group_size`; make them with `make_trajectory`. Waits
        up to `timeout_s` for a starting learner and while the staleness bound is reached.

        Raises MessageError with the violated rule, DeadlineError.
        """
        # All possible checks come before a number is reserved: an unused one blocks the job until
        # its reservation expires.
        unnumbered = self._group(trajectories, _UNKNOWN, sample, self._limits)
        broker = (await self._connected()).broker
        log = RolloutLog(broker, self._address.scope)
        log.check_fits(unnumbered, unnumbered.to_bytes())
        self._limits = await self._reserve(time.monotonic() + timeout_s)
        number = self._limits.tasks[0]
        group = self._group(trajectories, number, sample, self._limits)
        if not await log.append(group):
            raise errors.StateError(
                f"the reservation of task {number} ran out before the group was appended",
                hint="publish the group again",
            )
        return number

    async def publish_tasks(
        self, tasks: Sequence[control.TaskSpec | Mapping[str, Any]], *, timeout_s: float = 60
    ) -> int:
        """Have the job's generators roll out given tasks; return the number of issued tasks.

        A task is a `TaskSpec`, or a map with `sample`, `seed` and `reset_kwargs`. Tasks are issued
        as the staleness bound allows; waits up to `timeout_s` for the last.

        Raises MessageError for a malformed task, DeadlineError.
        """
        specs = [_spec(task) for task in tasks]
        most = most_bytes((await self._connected()).broker.max_payload_bytes)
        ends = _batches([len(spec.to_bytes()) for spec in specs], most - _ROOM_BYTES)
        deadline = time.monotonic() + timeout_s
        num_issued = 0
        while num_issued < len(specs):
            num_issued += await self._issue(specs[num_issued : ends[num_issued]], deadline)
            if num_issued < len(specs):
                await self._pause(deadline, f"{len(specs) - num_issued} of {len(specs)} tasks wait")
        return num_issued

    async def _issue(self, specs: list[control.TaskSpec], deadline: float) -> int:
        """Issue as many tasks as the learner accepts now; wait for a starting learner."""
        while True:
            try:
                request = control.PublishTasksRequest(tasks=specs)
                return (
                    await self._request_learner("tasks", request, control.PublishTasksReply)
                ).queued
            except errors.StateError as error:
                await self._pause(deadline, error.message)

    async def _reserve(self, deadline: float) -> control.ReserveReply:
        """Reserve one task number, waiting for the learner and while its bound is reached."""
        request = control.ReserveRequest(count=1, source=self._source, deadline_s=RESERVATION_S)
        while True:
            try:
                return await self._request_learner("reserve", request, control.ReserveReply)
            except errors.StateError as error:
                await self._pause(deadline, error.message)

    def _group(
        self,
        trajectories: Sequence[Trajectory],
        number: int,
        sample: int | None,
        limits: control.ReserveReply | None,
    ) -> Group:
        """Make and check a group; unknown limits are not checked."""
        sampled = [trajectory for trajectory in trajectories if not trajectory.greedy]
        episodes = len(episodes_of(sampled))
        size = limits.group_size if limits is not None else max(1, episodes)
        if episodes != size:
            raise errors.MessageError(
                f"a group of this run has {size} trajectories, this has {episodes}",
                hint="give one per episode (rollout.group_size)",
            )
        now = time.time()
        task = Task(
            task=number,
            sample=sample,
            seed=0,
            group_size=size,
            greedy_baseline=len(sampled) < len(trajectories),
        )
        group = Group(
            task=task,
            trajectories=list(trajectories),
            source=self._source,
            started=now,
            finished=now,
        )
        reserved = limits is not None and number in limits.tasks
        try:
            check_group(
                group,
                vocab_size=limits.vocab_size if limits is not None else _UNKNOWN,
                max_tokens=limits.max_tokens if limits is not None else _UNKNOWN,
                version=limits.version if limits is not None and reserved else _UNKNOWN,
            )
        except errors.MessageError as error:
            text = error.message.replace(f"task {number}", "this prompt")
            raise errors.MessageError(
                text, hint="nothing was appended; correct it and publish"
            ) from error
        return group

    async def _request_learner(self, verb: str, request: Message, reply: type[R]) -> R:
        scope = self._address.scope
        broker = (await self._connected()).broker
        try:
            return await call(
                broker,
                f"{scope.control('learner')}.{verb}",
                request,
                reply,
                timeout_s=CALL_TIMEOUT_S,
                waiting_for=f"the learner of job {scope.job}",
            )
        except errors.NotFoundError as error:
            job = await JobStore(broker).find(scope.user, scope.job)
            if job is not None and job.state not in FINAL_STATES:
                raise errors.StateError(
                    f"the learner of job {scope.job} is not there yet"
                ) from error
            raise errors.BrokerError(
                f"the learner of job {scope.job} is not there",
                hint="it may not have started, or the run has ended: `tinkermq ps --all`",
            ) from error

    async def _pause(self, deadline: float, why: str) -> None:
        if time.monotonic() + _RETRY_S > deadline:
            raise errors.DeadlineError(
                f"the learner took no more in time: {why}",
                hint="it takes more after its next training step; raise timeout_s",
            )
        await asyncio.sleep(_RETRY_S)


class TrajectoryPublisher(SyncTwin[AsyncTrajectoryPublisher]):
    """Publishes finished trajectories, or tasks, of an external agent into one job.

    It works inside a running event loop, too; use `AsyncTrajectoryPublisher` in async code.
    """

    def __init__(
        self, server_url: str, *, source: str = "external", api_key: str | None = None
    ) -> None:
        """Name the job by its `server_url`, and the agent by `source`."""
        super().__init__(AsyncTrajectoryPublisher(server_url, source=source, api_key=api_key))

    publish_group = make_sync(AsyncTrajectoryPublisher.publish_group)
    publish_group_future = make_future(AsyncTrajectoryPublisher.publish_group)
    publish_tasks = make_sync(AsyncTrajectoryPublisher.publish_tasks)


def _batches(sizes: Sequence[int], most: int) -> list[int]:
    """Return, for each task, the end of the message that begins with it.

    Raises MessageError for a task too large for a message.
    """
    for place, size in enumerate(sizes):
        if size > most:
            raise errors.MessageError(
                f"task {place} of {len(sizes)} has {size:,} bytes in reset_kwargs, a message "
                f"takes at most {most:,}",
                hint="nothing was issued; name a file or a row in place of what it holds",
            )
    ends: list[int] = []
    end, held = 0, 0
    for start, size in enumerate(sizes):
        while end < len(sizes) and end - start < _TASKS_AT_ONCE and held + sizes[end] <= most:
            held += sizes[end]
            end += 1
        ends.append(end)
        held -= size
    return ends


def _spec(task: control.TaskSpec | Mapping[str, Any]) -> control.TaskSpec:
    if isinstance(task, control.TaskSpec):
        return task
    unknown = set(task) - set(control.TaskSpec.model_fields)
    if unknown:
        raise errors.MessageError(
            f"a task has no {sorted(unknown)[0]!r}",
            hint=f"its keys are {', '.join(control.TaskSpec.model_fields)}",
        )
    try:
        return control.TaskSpec(**dict(task))
    except ValidationError as error:
        raise errors.MessageError(f"a task is malformed: {summarize(error)}") from error


# Trajectories from plain lists, for external agents.


def make_trajectory(
    token_ids: Sequence[int] | NDArray[Any],
    mask: Sequence[int] | NDArray[Any],
    logprobs: Sequence[float] | NDArray[Any],
    rewards: float | Sequence[float] | NDArray[Any],
    version: int | Sequence[int] | NDArray[Any],
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    finish_reasons: Sequence[Literal["stop", "length"]] = (),
    role: str = "",
    episode: int = -1,
    greedy: bool = False,
    seed: int = 0,
    info: Mapping[str, Any] | None = None,
    data_source: str = "",
    generate_s: float = 0.0,
    environment_s: float = 0.0,
) -> Trajectory:
    """Return a trajectory from plain lists; one entry per token of the whole conversation.

    `mask` is 1 where the policy generated the token. `logprobs` are the behaviour log-probs, and
    `version` the policy version, of the generated tokens (a single number, or one per token);
    both are ignored elsewhere. A turn is a run of generated tokens; `rewards` has one number per
    turn, or is a single one for the end of the episode. `finish_reasons` has one per turn: `length`
    for a turn cut by its token limit, else `stop`; empty: unknown.

    `messages` are the conversation as text. `role` is the played role in a multi-agent game. Rows
    with the same `episode` belong to one episode of their group. `greedy` marks the baseline of
    remax, which is not trained. `info` is the game's final info, such as `success`; `data_source`
    groups scores; `seed` is that of the episode.
    `generate_s` and `environment_s` are the seconds spent waiting for the model and for the
    environment.

    Raises MessageError that names what is wrong.
    """
    masks = _vector("mask", mask, np.uint8)
    generated = masks == 1
    turn_ends = np.flatnonzero(generated & ~np.append(generated[1:], False)).astype(np.int32)
    if not len(turn_ends):
        raise errors.MessageError(
            "a trajectory has no generated token: mask is 0 everywhere",
            hint="set mask to 1 where the policy generated the token",
        )
    returns, versions = _numbers("rewards", rewards), _numbers("version", version)
    if returns.ndim == 0:
        returns = np.append(np.zeros(len(turn_ends) - 1), returns)
    if versions.ndim == 0:
        versions = np.full(len(masks), versions)
    logps = _vector("logprobs", logprobs, np.float32)
    if len(versions) != len(masks) or len(logps) != len(masks):
        raise errors.MessageError(
            f"mask has {len(masks)} entries, logprobs {len(logps)}, version {len(versions)}",
            hint="give one entry per token of the whole conversation, prompt included",
        )
    fields: dict[str, Any] = {
        "token_ids": _vector("token_ids", token_ids, np.int32),
        "mask": masks,
        "logprobs": np.where(generated, logps, 0).astype(np.float32),
        "versions": _vector("version", np.where(generated, versions, -1), np.int32),
        "turn_ends": turn_ends,
        "rewards": _vector("rewards", returns, np.float32),
        "messages": [_map("a message", message) for message in _list("messages", messages)],
        "finish_reasons": _list("finish_reasons", finish_reasons),
        "role": role,
        "episode": episode,
        "greedy": greedy,
        "seed": seed,
        "info": {} if info is None else _map("info", info),
        "data_source": data_source,
        "generate_s": generate_s,
        "environment_s": environment_s,
    }
    try:
        return Trajectory(**fields)
    except ValidationError as error:
        raise errors.MessageError(f"a trajectory is invalid: {summarize(error)}") from error


def _numbers(name: str, values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor of torch: `detach` it first
        raise errors.MessageError(
            f"{name} cannot be an array of numbers: {error}", hint=f"it is {_shown(values)}"
        ) from error
    if array.dtype.kind not in "biuf":
        raise errors.MessageError(
            f"{name} cannot be an array of numbers: it is {_shown(values)}",
            hint="give plain numbers that 64 bits hold, or an array of them",
        )
    return array


def _vector(name: str, values: Any, dtype: Any) -> NDArray[Any]:
    array = _numbers(name, values)
    with np.errstate(invalid="ignore", over="ignore"):  # wrong lengths are found below
        exact = array.astype(dtype)
    if exact.ndim != 1:
        raise errors.MessageError(f"{name} must have 1 dimension, has {exact.ndim}")
    if np.dtype(dtype).kind in "iu" and not np.array_equal(exact, array):
        raise errors.MessageError(f"{name} holds values that are not {np.dtype(dtype)}")
    return exact


def _list(name: str, values: Any) -> list[Any]:
    try:
        if not isinstance(values, str | bytes | Mapping):
            return list(values)
    except TypeError:
        pass
    raise errors.MessageError(f"{name} must be a list, is {_shown(values)}")


def _map(name: str, value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise errors.MessageError(f"{name} must be a map, is {_shown(value)}")
    return dict(cast("Mapping[Any, Any]", value))


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"
