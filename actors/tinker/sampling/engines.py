"""The engine of a sampler: one base model with a bounded number of adapters, shared by users.

A request for another adapter replaces the one that was idle for longest, or waits while all of them
are in use. An in-flight adapter is replaced by newer weights while its samples run. Users share the
engine's slots by tokens and weights.
"""

import asyncio
import contextlib
import shutil
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import LoraConfig
from ....schemas.local.folder import process_folder
from ....schemas.plan.model_shape import count_positions
from ....schemas.tinker.checkpoints import ExportedFile, FetchFile, FilePart
from ....schemas.tinker.names import CheckpointName
from ....schemas.tinker.sampling import FindSnapshot, FoundSnapshot, SamplerName
from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import ModelError, NotFoundError, TinkermqError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import DEFAULT_USER, JobScope
from ...engine.engine import AdapterEngine, Generation, OnToken, PromptScores, Sampling
from ...policy.chat import ChatTokenizer, open_chat
from ...policy.model_folder import load_model_config
from ...rollout.players import load_base, settled_for_gpu, start_engine
from ...storage.tinker_checkpoints import CheckpointFolders
from ..fair_share import FairShare

M = TypeVar("M", bound=Message)

HELD_PER_FREE = 7
"""Places that a user may hold for each place that stays free: one user alone holds seven eighths,
two hold seven fifteenths each, and another one waits for nobody's row to end."""


def _may_hold_more(user: str, num_held: int, num_free: int) -> bool:
    """Return whether a user may take one of the free places of rows, or of adapters.

    In a pool without users nobody else comes, and all places are used.
    """
    return not num_held or user == DEFAULT_USER or num_held < HELD_PER_FREE * (num_free - 1)


# -- finding and fetching adapters -----------------------------------------------------------------

_TIMEOUT_S = 20.0
_TRAINER = "the trainer of this sampler"


@dataclass(frozen=True)
class Snapshot:
    """One adapter, as it was saved."""

    name: str
    """Its name in the engine; in-flight adapters keep it."""
    version: int
    """The operation that saved it."""
    user: str
    """The user who samples with it."""
    source: SamplerName
    path: str
    """Path of the checkpoint."""
    folder: Path | None = None
    """Folder of its files; None: they are on the trainer's machine."""


class Snapshots:
    """Finds users' adapters, and fetches their files from another machine if need be."""

    def __init__(self, broker: Broker, scope: JobScope, folder: Path) -> None:
        """`folder` is the trainer's, if it is on this machine."""
        self._broker = broker
        self._scope = scope
        self._folders = CheckpointFolders(folder)
        self._is_here: bool | None = None
        self._fetched: Path | None = None

    @property
    def is_here(self) -> bool:
        """Whether the trainer's folder is known to be on this machine."""
        return bool(self._is_here)

    async def find(self, user: str, source: SamplerName) -> Snapshot:
        """Return the adapter that a user's samples use now.

        Raises NotFoundError, also for another user's adapter; NobodyAnswersError while the trainer
        is away, if it must be asked.
        """
        if self._is_here is None:
            reply = await self._request("find", FindSnapshot(), FoundSnapshot)
            self._is_here = bool(reply.mark) and reply.mark == self._folders.mark
        name = source.checkpoint
        if self._is_here:
            return await asyncio.to_thread(self._find_here, user, source, name)
        request = FindSnapshot(user=user, path=str(name), moves=source.moves)
        reply = await self._request("find", request, FoundSnapshot)
        engine_name = _engine_name(reply.owner, source, reply.path, reply.seq)
        return Snapshot(engine_name, reply.seq, user, source, reply.path)

    async def fetch(self, snapshot: Snapshot) -> Path:
        """Return the folder with an adapter's files; raises NotFoundError, ModelError."""
        if snapshot.folder is not None:
            return snapshot.folder
        if self._fetched is None:
            self._fetched = await asyncio.to_thread(process_folder, "lora")
        folder = self._place(snapshot)
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        request = FindSnapshot(user=snapshot.user, path=snapshot.path)
        reply = await self._request("find", request, FoundSnapshot)
        if reply.export is None or reply.seq != snapshot.version:
            raise NotFoundError(f"{snapshot.path} was saved anew", hint="sample again")
        for file in reply.export.files:
            await self._fetch_file(reply.export.ticket, file, folder / file.name)
        return folder

    def free(self, snapshot: Snapshot) -> None:
        """Remove the fetched files of an adapter."""
        if snapshot.folder is None and self._fetched is not None:
            shutil.rmtree(self._place(snapshot), ignore_errors=True)

    def close(self) -> None:
        """Remove all fetched files."""
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)

    def _find_here(self, user: str, source: SamplerName, name: CheckpointName) -> Snapshot:
        stored = self._folders.find_snapshot(user, name, moves=source.moves)
        engine_name = _engine_name(stored.user, source, str(stored.name), stored.seq)
        return Snapshot(
            engine_name, stored.seq, user, source, str(stored.name), folder=stored.folder
        )

    def _place(self, snapshot: Snapshot) -> Path:
        assert self._fetched is not None
        return self._fetched / f"{snapshot.name}@{snapshot.version}".replace("/", "_")

    async def _fetch_file(self, ticket: str, file: ExportedFile, target: Path) -> None:
        parts: list[bytes] = []
        offset = 0
        while offset < file.size_bytes:
            request = FetchFile(ticket=ticket, file=file.name, offset=offset)
            part = await self._request("fetch", request, FilePart)
            if not part.data:
                raise ModelError(f"{file.name} of a checkpoint is incomplete", hint="sample again")
            parts.append(part.data)
            offset += len(part.data)
        await asyncio.to_thread(target.write_bytes, b"".join(parts))

    async def _request(self, verb: str, request: Message, reply: type[M]) -> M:
        return await call(
            self._broker,
            self._scope.snapshot(verb),
            request,
            reply,
            timeout_s=_TIMEOUT_S,
            waiting_for=_TRAINER,
            idempotent=True,
        )


def _engine_name(owner: str, source: SamplerName, path: str, seq: int) -> str:
    if source.moves:
        return f"{owner}/{source.checkpoint.model}/inflight"
    return f"{owner}/{path.removeprefix('tinker://')}/{seq}"


@dataclass
class _Loaded:
    """An adapter that is or will be in the engine."""

    snapshot: Snapshot
    ready: "asyncio.Task[None]"
    rows: Counter[str] = field(default_factory=Counter[str])
    """Running rows by user."""
    used: float = field(default_factory=time.monotonic)
    opened: float = field(default_factory=time.monotonic)
    closes_for: str | None = None
    """A user for whose waiting rows it leaves: until they begin, no more rows begin with it."""

    @property
    def has_failed(self) -> bool:
        done = self.ready.done()
        return done and (self.ready.cancelled() or self.ready.exception() is not None)


class _WaitingRow(NamedTuple):
    """A row whose adapter is not in the engine, or is about to leave it."""

    user: str
    snapshot: Snapshot
    adapter: "asyncio.Future[_Loaded]"


class SampledAdapters:
    """The adapters in an engine, by turns: no user's rows keep another's adapter out.

    Only running rows hold an adapter. While a user waits for a place, no more rows begin with one
    adapter of the user who uses most, so that its place becomes free within one row.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        max_adapters: int,
        fetch: Callable[[Snapshot], Awaitable[Path]],
        free: Callable[[Snapshot], None],
    ) -> None:
        """Hold at most `max_adapters` beside the base model of `engine`.

        `fetch` returns an adapter's folder, which exists until the adapter is passed to `free`.
        """
        self._engine = engine
        self._max_adapters = max_adapters
        self._fetch = fetch
        self._free = free
        self._loaded: dict[str, _Loaded] = {}
        self._waiting: list[_WaitingRow] = []
        """In the order of their requests."""

    @property
    def num_held(self) -> int:
        """Adapters in the engine."""
        return len(self._loaded)

    def in_flight(self) -> list[Snapshot]:
        """Return the in-flight adapters in use."""
        return [
            loaded.snapshot
            for loaded in self._loaded.values()
            if loaded.rows and loaded.snapshot.source.moves
        ]

    @contextlib.asynccontextmanager
    async def using(self, snapshot: Snapshot | None) -> AsyncIterator[str]:
        """Hold an adapter in the engine for one row, and yield its name there.

        None, "": the base model. Raises ModelError for an adapter that cannot be read or does not
        fit the base.
        """
        if snapshot is None:
            yield ""
            return
        loaded = await self._acquire(snapshot)
        try:
            await asyncio.shield(loaded.ready)
            yield snapshot.name
        finally:
            self._release(loaded, snapshot.user)

    async def update(self, newest: Snapshot) -> None:
        """Replace the weights of an in-flight adapter, if it is in use; raises as `using`."""
        loaded = self._loaded.get(newest.name)
        if loaded is not None and loaded.rows:
            self._update(loaded, newest)
            await asyncio.shield(loaded.ready)

    async def _acquire(self, snapshot: Snapshot) -> _Loaded:
        future: asyncio.Future[_Loaded] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingRow(snapshot.user, snapshot, future))
        self._begin_rows()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._begin_rows()
            else:  # it got its adapter at that moment
                self._release(future.result(), snapshot.user)
            raise

    def _begin_rows(self) -> None:
        """Give rows their adapters in turn, and have adapters leave for the users who wait on."""
        self._waiting = [row for row in self._waiting if not row.adapter.done()]  # cancelled
        while (row := self._next_row()) is not None:
            self._waiting.remove(row)
            row.adapter.set_result(self._entered(row.user, row.snapshot))
        for user in {row.user for row in self._waiting}:
            self._close_one_for(user)

    def _next_row(self) -> _WaitingRow | None:
        """Return the next row that may begin: with an adapter that is there, or in a free place.

        Free places go to the user who has the fewest, then in the order of requests.
        """
        absent: list[_WaitingRow] = []
        for row in self._waiting:
            loaded = self._loaded.get(row.snapshot.name)
            if loaded is None:
                absent.append(row)
            elif not self._is_closing(loaded):
                return row
        num = self._num_used()
        for row in sorted(absent, key=lambda row: num[row.user]):
            if self._may_use_more(row.user, num) and self._has_room():
                return row
        return None

    def _entered(self, user: str, snapshot: Snapshot) -> _Loaded:
        name = snapshot.name
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = _Loaded(snapshot, asyncio.create_task(self._load(snapshot), name=name))
            self._loaded[name] = loaded
        loaded.rows[user] += 1
        self._update(loaded, snapshot)
        return loaded

    def _update(self, loaded: _Loaded, newest: Snapshot) -> None:
        if newest.version > loaded.snapshot.version:
            replacing = self._replace(loaded.ready, loaded.snapshot, newest)
            task = asyncio.create_task(replacing, name=newest.name)
            loaded.snapshot, loaded.ready = newest, task

    def _num_used(self) -> Counter[str]:
        """Return the number of adapters in use by user."""
        return Counter(user for loaded in self._loaded.values() for user in loaded.rows)

    def _may_use_more(self, user: str, num: Counter[str]) -> bool:
        in_use = sum(bool(loaded.rows) for loaded in self._loaded.values())
        return _may_hold_more(user, num[user], self._max_adapters - in_use)

    def _close_one_for(self, user: str) -> None:
        """Let an adapter in use become idle for a user who waits: of the user who uses most.

        One who may not use more gives up one of the own.
        """
        if any(loaded.closes_for == user for loaded in self._loaded.values()):
            return
        num = self._num_used()
        most = max(num.values(), default=0) if self._may_use_more(user, num) else num[user]
        losers = {other for other in num if num[other] == most}
        if user in losers:
            losers = {user}
        busy = (loaded for loaded in self._loaded.values() if not self._is_closing(loaded))
        busy = (loaded for loaded in busy if not losers.isdisjoint(loaded.rows))
        if (oldest := min(busy, key=lambda loaded: loaded.opened, default=None)) is not None:
            oldest.closes_for = user

    def _is_closing(self, loaded: _Loaded) -> bool:
        return any(row.user == loaded.closes_for for row in self._waiting)

    async def _load(self, snapshot: Snapshot) -> None:
        folder = await self._fetch(snapshot)
        await self._engine.add_adapter(snapshot.name, folder, snapshot.version)

    async def _replace(self, before: "asyncio.Task[None]", old: Snapshot, new: Snapshot) -> None:
        """Replace an adapter's weights, also for running requests."""
        await asyncio.wait({before})
        await self._load(new)
        self._free(old)

    def _has_room(self) -> bool:
        """Whether there is a place; an idle adapter is dropped for it."""
        if len(self._loaded) < self._max_adapters:
            return True
        idle = [loaded for loaded in self._loaded.values() if not loaded.rows]
        if not idle:
            return False
        self._drop(min(idle, key=lambda loaded: loaded.used))
        return True

    def _drop(self, loaded: _Loaded) -> None:
        del self._loaded[loaded.snapshot.name]
        loaded.ready.cancel()  # no longer awaited
        self._engine.drop_adapter(loaded.snapshot.name)
        self._free(loaded.snapshot)

    def _release(self, loaded: _Loaded, user: str) -> None:
        loaded.rows[user] -= 1
        loaded.rows += Counter()  # without users who have none
        loaded.used = time.monotonic()
        is_over = loaded.has_failed or (not loaded.rows and self._is_closing(loaded))
        if is_over and self._loaded.get(loaded.snapshot.name) is loaded:
            self._drop(loaded)  # the next row loads it again
        self._begin_rows()


# -- starting the engine ---------------------------------------------------------------------------

_NO_CONTEXT = 4096


@dataclass(frozen=True)
class SampledBase:
    """A base model in an engine."""

    engine: AdapterEngine
    chat: ChatTokenizer
    vocab: int
    max_context: int
    num_requests: int
    """Requests that it computes at a time."""


async def open_engine(config: JobConfig) -> SampledBase:
    """Load the base model into the configured engine; raises ModelError, ConfigError."""
    model = config.model
    load = partial(load_model_config, model.path, trust_remote_code=model.trust_remote_code)
    text_config = cast(Any, await asyncio.to_thread(load)).get_text_config()
    longest = count_positions(text_config.to_dict()) or _NO_CONTEXT
    context = min(config.generator.max_context or longest, longest)
    settled = config.generator.model_copy(update={"max_context": context})
    config = config.model_copy(update={"generator": settled})
    config = await asyncio.to_thread(settled_for_gpu, config, serves=True)
    base = None
    if settled.engine == "vllm":  # it allocates room for adapters at its start
        room = LoraConfig(rank=config.tinker.max_rank)
        base = await load_base(config, [room] * config.tinker.sampled_at_once)
    engine = cast("AdapterEngine", await start_engine(config, base=base))
    chat = await asyncio.to_thread(open_chat, model, must_chat=False)
    at_once = config.generator.num_requests
    return SampledBase(engine, chat, int(text_config.vocab_size), context, at_once)


# -- slots -----------------------------------------------------------------------------------------

QUANTUM = 2048
"""Tokens of one user's turn."""


@dataclass
class _WaitingRequest:
    """A request that waits for a place."""

    place: "asyncio.Future[None]"
    tokens: int


@dataclass
class Place:
    """A place in the engine."""

    tokens: int
    """Charged tokens: the most that may be computed, replaced by the computed ones at the end."""


class FairSlots:
    """Places in an engine, by turns: no user waits for all requests of another.

    Users leave some places free, for those who come later.
    """

    def __init__(self, num_places: int, quantum: int = QUANTUM) -> None:
        """Offer `num_places`."""
        self.turns = FairShare(quantum)
        """The users' turns."""
        self._free: int = num_places
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[_WaitingRequest]] = {}

    @asynccontextmanager
    async def place(self, user: str, tokens: int) -> AsyncIterator[Place]:
        """Hold a place to compute at most `tokens` for a user."""
        place = Place(tokens)
        await self._enter(user, tokens)
        try:
            yield place
        finally:
            self.turns.charge(user, place.tokens - tokens)
            self._leave(user)

    async def _enter(self, user: str, tokens: int) -> None:
        waiting = _WaitingRequest(asyncio.get_running_loop().create_future(), tokens)
        self._waiting.setdefault(user, deque()).append(waiting)
        self._assign_places()
        try:
            await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled():  # it got its place at that moment
                self.turns.charge(user, -tokens)
                self._leave(user)
            raise

    def _leave(self, user: str) -> None:
        self._free += 1
        self._held[user] -= 1
        if not self._held[user]:
            del self._held[user]
        self._assign_places()

    def _assign_places(self) -> None:
        while self._free:
            waits = self._users_waiting()
            user = self.turns.choose(
                [user for user in waits if _may_hold_more(user, self._held[user], self._free)]
            )
            if user is None:
                return
            waiting = self._waiting[user].popleft()
            self.turns.charge(user, waiting.tokens)
            self._free -= 1
            self._held[user] += 1
            waiting.place.set_result(None)

    def _users_waiting(self) -> list[str]:
        """Return the users who wait, without cancelled requests."""
        for user, queue in list(self._waiting.items()):
            while queue and queue[0].place.done():
                queue.popleft()
            if not queue:
                del self._waiting[user]
        return list(self._waiting)


# -- the engine, shared by users -------------------------------------------------------------------


class MeteredEngine:
    """An engine with places by turns, which counts each user's tokens."""

    def __init__(self, engine: AdapterEngine, adapters: SampledAdapters, max_requests: int) -> None:
        """Compute `max_requests` at a time, with any of the adapters."""
        self._engine = engine
        self._adapters = adapters
        self._places = FairSlots(max_requests)
        self.weights = self._places.turns.weights
        """Weights of users, relative to each other."""
        self.tokens: dict[str, int] = {}
        """Computed tokens by user, prompts included."""

    def count(self, user: str, tokens: int) -> None:
        """Count computed tokens of a user."""
        self.tokens[user] = self.tokens.get(user, 0) + tokens

    def cancel(self, request_id: str) -> None:
        """End a request; its result has the tokens drawn so far."""
        self._engine.cancel(request_id)

    async def generate(
        self,
        user: str,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        adapter: Snapshot | None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate for a user as `AdapterEngine.generate` does, and count the drawn tokens.

        Cancelling the task cancels the request; tokens drawn until then are counted.
        """
        num_prompt = len(prompt_ids)
        async with (
            self._places.place(user, num_prompt + sampling.max_new_tokens) as place,
            self._adapters.using(adapter) as name,
        ):
            generating = asyncio.ensure_future(
                self._engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=request_id,
                    on_token=on_token,
                    images=images,
                    adapter=name,
                )
            )
            try:
                made = await asyncio.shield(generating)
            except asyncio.CancelledError:
                self._engine.cancel(request_id)
                with contextlib.suppress(TinkermqError):  # it returns within a step
                    self.count(user, len((await generating).token_ids))
                raise
            place.tokens = num_prompt + len(made.token_ids)
            self.count(user, len(made.token_ids))
        return made

    async def score(
        self,
        user: str,
        prompt_ids: IntVector,
        *,
        request_id: str,
        top_k: int,
        adapter: Snapshot | None,
    ) -> PromptScores:
        """Score a prompt for a user as `AdapterEngine.score` does, without counting tokens."""
        async with (
            self._places.place(user, len(prompt_ids)),
            self._adapters.using(adapter) as name,
        ):
            return await self._engine.score(
                prompt_ids, request_id=request_id, top_k=top_k, adapter=name
            )


class EngineOfUser:
    """An engine and adapter for one request of a user."""

    def __init__(self, engine: MeteredEngine, user: str, adapter: Snapshot | None) -> None:
        self._engine = engine
        self._user = user
        self._adapter = adapter
        self._prompts = set[int]()

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate; a prompt is counted once, however many answers it has."""
        made = self._engine.generate(
            self._user,
            prompt_ids,
            sampling,
            request_id=self._name(request_id),
            adapter=self._adapter,
            on_token=on_token,
            images=images,
        )
        self._count_prompt(prompt_ids)
        return await made

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Score a prompt, and count its tokens."""
        scores = await self._engine.score(
            self._user,
            np.asarray(prompt_ids, np.int32),
            request_id=self._name(request_id),
            top_k=top_k,
            adapter=self._adapter,
        )
        self._count_prompt(prompt_ids)
        return scores

    def _count_prompt(self, prompt_ids: Sequence[int] | IntVector) -> None:
        if id(prompt_ids) not in self._prompts:
            self._prompts.add(id(prompt_ids))
            self._engine.count(self._user, len(prompt_ids))

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._engine.cancel(self._name(request_id))

    def _name(self, request_id: str) -> str:
        """Return a request's name in the engine: two users may choose the same id."""
        return f"{self._user}/{request_id}"
