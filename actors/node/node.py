"""The node: runs the actors that the scheduler last asked for, and nothing else.

A sync names every actor that the node shall run. Missing ones are started, extra ones stopped, and
running ones left alone, so the scheduler may die, come back and ask again at any time. Actors are
children that die with the node; a restarted node begins with none and gets them by the next sync.
"""

import asyncio
import contextlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import structlog
from pydantic import ValidationError

from ...broker.client.connection import Broker
from ...broker.client.login import KEY_VARIABLE, without_secrets
from ...broker.client.rpc import Service, call
from ...broker.feed import publish_log
from ...broker.jetstream.kv import Bucket
from ...broker.jetstream.streams import stream_info
from ...broker.weights.shared_memory import sweep
from ...envs.dataset import is_dataset_name
from ...envs.registry import find_game
from ...envs.task_folders import holds_tasks
from ...schemas.config.agent import TaskSource
from ...schemas.job import OpenedSecrets, OpenRequest
from ...schemas.local.disk import DiskThreads
from ...schemas.local.process import die_with
from ...schemas.metric import LogLines, Presence
from ...schemas.node import (
    ActorStatus,
    GameCheck,
    InspectQuestion,
    LookAnswer,
    LookQuestion,
    ModelAnswer,
    ModelQuestion,
    NodeStatus,
    NodeSync,
    PlayAnswer,
    PlayQuestion,
    RemoveRun,
    WantedActor,
)
from ...schemas.user import JobKeyRequest, NewKey
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import (
    AuthError,
    DeadlineError,
    FencedError,
    NotFoundError,
    StateError,
    TinkermqError,
)
from ...schemas.wire.message import Empty, Message
from ...schemas.wire.subjects import BUCKET_ACTORS, BUCKET_NODES, JobScope, rpc
from ...schemas.wire.subjects import node as node_subject
from ..check_game import END, PREFIX, VARIABLE, cut
from ..gpus import Gpus
from ..policy.model_folder import check_model_alike, check_model_is_here
from ..storage.access import without_tilde
from ..storage.run_folders import remove_run_folder
from .children import ActorStarter, Child, StartChild, StartFailed
from .process import (
    PIPE_DEADLINE_S,
    STOP_DEADLINE_S,
    ActorProcess,
    ErrorMemory,
    kill_group,
    read_lines,
    silence_bound,
)
from .sandbox import ENVIRONMENT, StartRefused

# -- checks before a job is submitted: its files, its game and its model ---------------------------
# Checking files runs no code of the game. A game is played by a process like an environment host's,
# in the same sandbox; a model is inspected by a process like a generator's, with the code of the
# run.

ANSWER_S = 10.0
"""A file system or hub that takes longer is left for the job to find out."""
_PLAY_S = 60.0
"""A game that takes longer for its few episodes is ended."""
_INSPECT_S = 120.0
"""A model that takes longer to be looked into is left for the job to find out."""
_MAX_CHECKS = 32
_AT_ONCE = 8
"""Files, or models, that are looked at; those on disks that hang are among them."""
MAX_CONFIG_BYTES = 96 * 1024
"""Of what a process is given by its environment, which the kernel bounds."""


class FileChecks:
    """Answers questions after files, some at a time."""

    def __init__(self) -> None:
        """Have been asked nothing."""
        self._threads = DiskThreads(_AT_ONCE, ANSWER_S)

    async def answer(self, question: LookQuestion) -> LookAnswer:
        """Say what is there, as far as that is known in time."""
        try:
            return await self._threads.look("", check_files_now, question)
        except TimeoutError:
            return LookAnswer(known=False)


def check_files_now(question: LookQuestion) -> LookAnswer:
    """Look at the files, and for the game's package."""
    missing = [file for file in question.files if not _is_there(file)]
    if not question.game:
        return LookAnswer(missing=missing)
    try:
        return LookAnswer(missing=missing, game=find_game(question.game))
    except TinkermqError as error:
        return LookAnswer(missing=missing, lacks_game=error.message, hint=error.hint)


def _is_there(name: str) -> bool:
    """Whether a dataset exists; of other files and folders this is not revealed."""
    source = TaskSource.parse(name)
    if source is not None:
        return holds_tasks(source)
    path = without_tilde(name)
    return is_dataset_name(path) and path.is_file()


class EnvCheckRunner:
    """Plays games that jobs may be submitted with, one at a time."""

    def __init__(self, starter: ActorStarter, play_s: float = _PLAY_S) -> None:
        """Play nothing yet; `starter` starts the processes, in the sandbox that hosts have."""
        self._starter = starter
        self._play_s = play_s
        self._is_busy = False

    async def play(self, question: PlayQuestion) -> PlayAnswer:
        """Play a game; a node that plays one already says so at once."""
        if question.wanted.role != "environment":
            return PlayAnswer(trouble="environment hosts play games", hint="ask for one of them")
        if self._is_busy:
            return PlayAnswer(known=False)
        given = json.dumps({"env": question.env, "seed": question.seed})
        if len(given) > MAX_CONFIG_BYTES:
            return PlayAnswer(
                trouble=f"its configuration has {len(given):,} bytes, and nodes try games of "
                f"{MAX_CONFIG_BYTES:,} at most",
                hint="let env.kwargs name a file in place of what it holds",
            )
        self._is_busy = True
        try:
            return await self._played(question, {VARIABLE: given, **ENVIRONMENT})
        finally:
            self._is_busy = False

    async def _played(self, question: PlayQuestion, environment: dict[str, str]) -> PlayAnswer:
        reading, writing = os.pipe()
        try:
            command = [sys.executable, "-P", "-m", "tinkermq.actors.check_game"]
            child = await self._starter.start(question.wanted, environment, writing, command)
        except (OSError, ValueError) as error:  # no name of a folder can have a null byte
            os.close(reading)
            return PlayAnswer(trouble=str(error), hint="see the node's log")
        finally:
            os.close(writing)
        output = _CheckOutput()
        reader = asyncio.create_task(read_lines(reading, output.add_lines))
        exit_code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._play_s):
                    exit_code = await child.wait()
        finally:
            kill_group(child.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PIPE_DEADLINE_S):
                    await reader
        if exit_code is None:
            await child.wait()
            return output.cut_off(self._play_s)
        return output.answer(exit_code)


class _CheckOutput:
    """What the process that plays a game says; of what the game prints a little is kept."""

    def __init__(self) -> None:
        self._memory = ErrorMemory()
        self._checks: list[GameCheck] = []
        self._has_ended = False

    async def add_lines(self, lines: list[str]) -> None:
        """Read checks and errors from lines of output."""
        for line in lines:
            if line == END:
                self._has_ended = True
            elif line.startswith(PREFIX):
                with contextlib.suppress(ValidationError):  # the game has printed this
                    self._checks.append(GameCheck.model_validate_json(line.removeprefix(PREFIX)))
            else:
                self._memory.note(line)
        del self._checks[_MAX_CHECKS:]

    def answer(self, exit_code: int) -> PlayAnswer:
        """Say what was found by a process that ended so."""
        if self._has_ended:
            return PlayAnswer(checks=self._checks)
        return PlayAnswer(
            checks=self._checks,
            trouble=f"the process that played it ended: {self._memory.reason(exit_code)}",
            hint="a game must not end its process",
        )

    def cut_off(self, play_s: float) -> PlayAnswer:
        """Say what was found by a process that took too long, and was ended."""
        return PlayAnswer(
            checks=self._checks,
            trouble=f"it was not played within {play_s:.0f} s",
            hint="`tinkermq env check` without --on-node has no time limit and shows the time used",
        )


class _ModelInspection:
    """Looks into models of jobs that may be submitted, one at a time."""

    def __init__(self) -> None:
        """Look into nothing yet."""
        self._is_busy = False

    async def answer(self, question: InspectQuestion) -> PlayAnswer:
        """Look into a job's model; a node that looks into another already says so at once."""
        if self._is_busy:
            return PlayAnswer(known=False)
        self._is_busy = True
        try:
            return await self._inspected(question)
        finally:
            self._is_busy = False

    async def _inspected(self, question: InspectQuestion) -> PlayAnswer:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tinkermq.actors.check_chat"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**without_secrets(os.environ), **ENVIRONMENT},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        parameters: dict[str, Any] = {"config": question.config, "conversations": [], "gold": False}
        parameters["job"] = True
        try:
            async with asyncio.timeout(_INSPECT_S):
                said, errors = await process.communicate(pack(parameters))
        except TimeoutError:
            return PlayAnswer(
                trouble=f"its model was not looked into within {_INSPECT_S:.0f} s",
                hint="see whether its folder lies on a disk that answers",
            )
        finally:
            kill_group(process.pid)
            await process.wait()
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            return PlayAnswer(trouble=f"its model cannot be looked into: {' '.join(last)}"[:1000])
        fields: dict[str, Any] = json.loads(said.splitlines()[-1])
        if "error" in fields:
            return PlayAnswer(trouble=fields["error"]["message"], hint=fields["error"]["hint"])
        result = fields["checks"][:_MAX_CHECKS]
        texts = (
            {**item, "detail": cut(item["detail"]), "hint": cut(item["hint"])} for item in result
        )
        return PlayAnswer(checks=[GameCheck.model_validate(text) for text in texts])


# -- models ----------------------------------------------------------------------------------------


class ModelChecks:
    """Answers questions after models, some at a time."""

    def __init__(self) -> None:
        """Have been asked nothing."""
        self._threads = DiskThreads(_AT_ONCE, ANSWER_S)
        self._num_running = 0

    async def answer(self, question: ModelQuestion) -> ModelAnswer:
        """Say whether a model can be had, as far as that is known in time."""
        if self._num_running >= _AT_ONCE:
            return ModelAnswer(known=False)
        check = check_model_alike if question.alike else check_model_is_here
        self._num_running += 1
        try:
            await self._threads.look("", check, question.model)
        except TinkermqError as error:
            return ModelAnswer(known=True, missing=error.message, hint=error.hint)
        except Exception:  # noqa: BLE001  of whatever library: the job finds out
            return ModelAnswer(known=False)
        finally:
            self._num_running -= 1
        return ModelAnswer(known=True)


# -- keys and secrets for one process --------------------------------------------------------------
# They are requested at each start, stored nowhere on the node, and passed in the environment, from
# which the process removes them.

R = TypeVar("R", bound=Message)

_TIMEOUT_S = 5.0
_KEY_PATIENCE_S = 15.0
_PAUSE_S = 0.5


def with_job_keys(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with a key that the auth service has signed."""

    async def fetch(wanted: WantedActor) -> Mapping[str, str]:
        request = JobKeyRequest(
            user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
        )
        subject, patience_s = rpc("node", "keys", "job"), _KEY_PATIENCE_S
        reply = await _ask(broker, subject, request, NewKey, "the auth service", patience_s)
        return {KEY_VARIABLE: reply.secret}

    return _starting_with(fetch, start)


def with_secrets(broker: Broker, start: StartChild) -> StartChild:
    """Return what starts an actor as `start` does, with the secrets that are for it."""

    async def fetch(wanted: WantedActor) -> Mapping[str, str]:
        if not wanted.secrets:
            return {}
        request = OpenRequest(
            user=wanted.user, job=wanted.job, actor=wanted.name, attempt=wanted.attempt
        )
        subject = rpc("node", "secrets", "open")
        reply = await _ask(broker, subject, request, OpenedSecrets, "the scheduler")
        return {str(name): value for name, value in reply.values.items()}

    return _starting_with(fetch, start)


def _starting_with(
    fetch: Callable[[WantedActor], Awaitable[Mapping[str, str]]], start: StartChild
) -> StartChild:
    async def start_with(wanted: WantedActor, environment: Mapping[str, str], output: int) -> Child:
        return await start(wanted, {**environment, **await fetch(wanted)}, output)

    return start_with


async def _ask(
    broker: Broker,
    subject: str,
    request: Message,
    reply: type[R],
    service: str,
    patience_s: float = 0.0,
) -> R:
    """Ask until `service` answers.

    Raises StartFailed while it does not, which is no failure of the actor, and OSError when it
    refuses.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            return await call(
                broker,
                subject,
                request,
                reply,
                timeout_s=_TIMEOUT_S,
                waiting_for=service,
                idempotent=True,
            )
        except TinkermqError as error:
            if isinstance(error, AuthError):
                raise OSError(f"{service} gave nothing: {error.message}") from error
            if loop.time() >= deadline:
                raise StartFailed(f"{service} gave nothing: {error.message}") from error
        await asyncio.sleep(_PAUSE_S)


# -- the node --------------------------------------------------------------------------------------

RECORD_S = 2.0
_STORES_S = 10.0
_RECORD_PAUSE_S = 0.05
_BEAT_DEADLINE_S = 2.0
_DRAIN_S = STOP_DEADLINE_S + 5.0
_log: structlog.stdlib.BoundLogger = structlog.get_logger()

ActorKey = tuple[str, str, str]


class Node:
    """The actors of one machine."""

    def __init__(
        self,
        broker: Broker,
        name: str,
        slots: int,
        *,
        gpus: Gpus | None = None,
        link: str = "",
        packages: Mapping[str, str] | None = None,
        start: StartChild | None = None,
        stop_deadline_s: float = STOP_DEADLINE_S,
    ) -> None:
        """Run nothing yet; with `gpus` each of them is a slot, else there are `slots` CPU shares.

        `packages` are the versions that its actors compute with; `start` starts an actor in another
        way than the usual one.
        """
        self.name = name
        self._broker = broker
        self._gpus = gpus
        self._gpu_use = gpus.read() if gpus else []
        self._slots = len(gpus) if gpus else slots
        self._link = link
        self._packages = dict(packages or {})
        has_users = broker.user == "node"  # as a service of a pool with authentication
        self._starter = ActorStarter(sandbox_games=has_users)
        self._start_child = with_secrets(broker, start or self._starter.start)
        if has_users:
            self._start_child = with_job_keys(broker, self._start_child)
        self._stop_deadline_s = stop_deadline_s
        self._actors: dict[ActorKey, ActorProcess] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._epoch = 0
        self._draining = False
        self._records = Bucket(broker, BUCKET_NODES, NodeStatus)
        self._changed = asyncio.Event()
        self._recorded = float("-inf")
        self._silence_s = silence_bound()
        self._store_made = ""
        self._store_lost: float | None = None
        self.store_seen = False
        """Whether it has looked at the broker's store since it is connected."""
        self._beats = Bucket(broker, BUCKET_ACTORS, Presence, deadline_s=_BEAT_DEADLINE_S)

    def status(self) -> NodeStatus:
        """What the node is and runs."""
        gpus = self._gpu_use
        return NodeStatus(
            node=self.name,
            host=socket.gethostname(),
            slots=self._slots,
            slot_kind="gpu" if gpus else "cpu",
            slot_model=gpus[0].model if gpus else platform.processor() or platform.machine(),
            groups=self._gpus.groups if self._gpus else [],
            groups_by=self._gpus.groups_by if self._gpus else "",
            link=self._link,
            gpus=gpus,
            actors=[_reported(actor) for actor in self._actors.values()],
            draining=self._draining,
            packages=self._packages,
            time=time.time(),
            epoch=self._epoch,
            store_lost=self._store_lost,
        )

    async def sync(self, request: NodeSync) -> NodeStatus:
        """Start and stop actors until exactly the wanted ones run; answers at once.

        Raises FencedError for a scheduler that another has replaced.
        """
        if request.epoch < self._epoch:
            raise FencedError(
                f"scheduler {request.scheduler} has been replaced by another",
                hint="let it wait for its lease",
            )
        self._epoch = request.epoch
        wanted = {(actor.user, actor.job, actor.name): actor for actor in request.actors}
        for key in set(self._actors) - set(wanted):
            self._remove(key, kill=f"{key[0]}.{key[1]}" in request.kill)
        if not self._draining:
            for key, actor in wanted.items():
                self._ensure(key, actor)
        return self.status()

    def _remove(self, key: ActorKey, *, kill: bool) -> None:
        actor = self._actors[key]
        if actor.ended:
            del self._actors[key]
        else:
            actor.stop(kill=kill)

    def _ensure(self, key: ActorKey, wanted: WantedActor) -> None:
        """Run the wanted actor; one of an older attempt, or one being stopped, ends first."""
        present = self._actors.get(key)
        if present is not None:
            is_current = present.wanted.attempt == wanted.attempt and not present.stopping
            if is_current or not present.ended:
                if not is_current:
                    present.stop()
                return
        self._start(key, wanted)

    def _start(self, key: ActorKey, wanted: WantedActor) -> None:
        assert self._tasks is not None
        scope = JobScope(wanted.user, wanted.job)

        async def send(lines: LogLines) -> None:
            await publish_log(self._broker, scope, lines)

        async def last_beat() -> Presence | None:
            if time.monotonic() - self._recorded > _STORES_S:
                raise DeadlineError("the broker stores nothing: no heartbeat can be there")
            entry = await self._beats.get(f"{scope.key}.{wanted.name}")
            return None if entry is None else entry.value

        start, gpus = self._start_child, None
        if self._gpus and max(wanted.devices, default=0) < len(self._gpus):
            gpus = self._gpus.uuids(wanted.devices)
        elif self._gpus:  # the node was started again with fewer
            start = _refuse_to_start(
                f"slot {max(wanted.devices)} of node {self.name} was given to it, and the node has "
                f"{len(self._gpus)} GPUs by now; resume the job: it is placed anew"
            )
        actor = ActorProcess(
            wanted,
            start=start,
            nats_url=self._broker.url,
            send=send,
            gpus=gpus,
            stop_deadline_s=self._stop_deadline_s,
            changed=self._changed.set,
            last_beat=last_beat,
            silence_s=self._silence_s,
        )
        self._actors[key] = actor
        self._tasks.create_task(actor.run(), name=f"actor {'.'.join(key)}")

    async def run(self, service: Service, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set, then drain.

        Raises StateError if a node of this name answers already.
        """
        await self._refuse_second()
        self._broker.on_reconnect(self._see_store_again)
        async with asyncio.TaskGroup() as self._tasks:
            record = self._tasks.create_task(self._keep_record(), name="node record")
            await service.endpoint("sync", node_subject(self.name, "sync"), NodeSync, self.sync)
            await service.endpoint(
                "status", node_subject(self.name, "status"), Empty, self._answer_status
            )
            await service.endpoint(
                "remove", node_subject(self.name, "remove"), RemoveRun, self._remove_run
            )
            await service.endpoint(
                "model", node_subject(self.name, "model"), ModelQuestion, ModelChecks().answer
            )
            await service.endpoint(
                "look", node_subject(self.name, "look"), LookQuestion, FileChecks().answer
            )
            await service.endpoint(
                "inspect",
                node_subject(self.name, "inspect"),
                InspectQuestion,
                _ModelInspection().answer,
            )
            await service.endpoint(
                "play",
                node_subject(self.name, "play"),
                PlayQuestion,
                EnvCheckRunner(self._starter).play,
            )
            await stopping.wait()
            await self._drain()
            await self._starter.close()
            record.cancel()
            await asyncio.to_thread(sweep, 0.0)
        await self._leave()

    async def _remove_run(self, request: RemoveRun) -> Empty:
        """Remove the folder of a job that was deleted; raises StateError while it runs here."""
        if any(key[:2] == (request.user, request.job) for key in self._actors):
            raise StateError(f"job {request.job} still has actors on node {self.name}")
        await asyncio.to_thread(remove_run_folder, request.run_dir, request.job)
        return Empty()

    async def _answer_status(self, _: Empty) -> NodeStatus:
        return self.status()

    async def _refuse_second(self) -> None:
        try:
            other = await call(
                self._broker,
                node_subject(self.name, "status"),
                Empty(),
                NodeStatus,
                timeout_s=2.0,
                waiting_for=f"a second node {self.name!r}",
                idempotent=True,
            )
        except (NotFoundError, DeadlineError):
            return
        raise StateError(
            f"a node named {self.name!r} runs already on host {other.host}",
            hint="give this one another name with --name",
        )

    async def _keep_record(self) -> None:
        """Write the node's record when it changes and every two seconds.

        By its record schedulers find the node, and learn at once what became of an actor.
        """
        while True:
            self._changed.clear()
            if self._gpus:
                self._gpu_use = await asyncio.to_thread(self._gpus.read)  # the driver may be slow
            try:
                await self._records.put(self.name, self.status())
                self._recorded = time.monotonic()
                await self._look_at_store()
            except TinkermqError as error:
                _log.warning("node_record_failed", error=str(error))
            await asyncio.to_thread(sweep)  # versions that killed actors have left in memory
            await asyncio.sleep(_RECORD_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_S):
                    await self._changed.wait()

    async def _look_at_store(self) -> None:
        """Notice, after the broker was away, that it holds no more what it had stored before."""
        if self.store_seen:
            return
        made = str((await stream_info(self._broker, f"KV_{BUCKET_NODES}"))["created"])
        if self._store_made not in ("", made):
            self._store_lost = time.time()
            _log.error("store_lost", made=made, before=self._store_made)
            self._changed.set()
        self._store_made, self.store_seen = made, True

    def _see_store_again(self) -> None:
        self.store_seen = False

    async def _drain(self) -> None:
        """Stop all actors; what does not end by its deadline is killed by `ActorProcess`."""
        self._draining = True
        self._changed.set()
        for actor in self._actors.values():
            actor.stop()
        async with asyncio.timeout(_DRAIN_S):
            while not all(actor.ended for actor in self._actors.values()):  # noqa: ASYNC110  each actor ends in a task of its own
                await asyncio.sleep(0.02)

    async def _leave(self) -> None:
        """Take the record away, so that schedulers need not wait for the silence."""
        try:
            await self._records.delete(self.name)
        except TinkermqError as error:
            _log.warning("node_record_failed", error=str(error))


def _refuse_to_start(why: str) -> StartChild:
    async def refuse(*_: object) -> Child:
        raise StartRefused(why)

    return refuse


def _reported(actor: ActorProcess) -> ActorStatus:
    """Return an actor's status; an end that the node brought about is not the actor's own."""
    status = actor.status
    if actor.stopping and status.state in {"running", "exited"}:
        return status.model_copy(update={"state": "restarting"})
    return status
