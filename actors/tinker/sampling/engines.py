"""The engine of a sampler: one base model with a bounded number of adapters, shared by users.

A request for another adapter replaces the one that was idle for longest, or waits while requests
run with all of them. An adapter whose samples move on takes newer weights in its place, while they
run. The engine's slots are given to users by tokens and weights.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from ....broker.client.connection import Broker
from ....broker.client.rpc import call
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import LoraConfig
from ....schemas.plan.model_shape import count_positions
from ....schemas.tinker.names import CheckpointName
from ....schemas.tinker.sampling import (
    FetchSnapshot,
    FindSnapshot,
    FoundSnapshot,
    SamplerName,
    SnapshotPart,
)
from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import ModelError, TinkermqError
from ....schemas.wire.message import Message
from ....schemas.wire.subjects import JobScope
from ...engine.engine import AdapterEngine, Generation, OnToken, PromptScores, Sampling
from ...policy.model_folder import load_model_config, load_tokenizer
from ...rollout.players import load_base, settled_for_gpu, start_engine
from ...storage.tinker_checkpoints import CheckpointFolders
from ..fair_share import FairShare

M = TypeVar("M", bound=Message)

# -- finding and fetching adapters -----------------------------------------------------------------

_TIMEOUT_S = 20.0
_PREFIX = "tinkermq-lora-"
_TRAINER = "the trainer of this sampler"


@dataclass(frozen=True)
class Snapshot:
    """One adapter, as it was saved."""

    name: str
    """The engine's name of it; those that move on keep theirs."""
    version: int
    """The operation that saved it."""
    user: str
    """Who samples with it."""
    source: SamplerName
    path: str
    """The checkpoint."""
    folder: Path | None = None
    """Where its files lie; None: elsewhere."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Names and bytes of the files that are elsewhere."""


class Snapshots:
    """Finds adapters for users, and has their files where an engine can read them."""

    def __init__(self, broker: Broker, scope: JobScope, folder: Path) -> None:
        """`folder` is the trainer's, if this machine has it."""
        self._broker = broker
        self._scope = scope
        self._folders = CheckpointFolders(folder)
        self._is_here: bool | None = None
        self._fetched: Path | None = None

    @property
    def is_here(self) -> bool:
        """Whether the trainer's disk is known to be this machine's."""
        return bool(self._is_here)

    async def find(self, user: str, source: SamplerName) -> Snapshot:
        """Return what a user's samples are drawn with now.

        Raises NotFoundError, also for what belongs to others; NobodyAnswersError while the trainer
        of the first one is not there.
        """
        if self._is_here is None:
            reply = await self._ask("find", FindSnapshot(), FoundSnapshot)
            self._is_here = bool(reply.mark) and reply.mark == self._folders.mark
        name = source.checkpoint
        if self._is_here:
            return await asyncio.to_thread(self._found, user, source, name)
        request = FindSnapshot(user=user, path=str(name), moves=source.moves)
        reply = await self._ask("find", request, FoundSnapshot)
        engine_name = _engine_name(reply.owner, source, reply.path, reply.seq)
        return Snapshot(engine_name, reply.seq, user, source, reply.path, None, reply.files)

    async def fetch(self, snapshot: Snapshot) -> Path:
        """Return the folder with an adapter's files; raises NotFoundError, ModelError."""
        if snapshot.folder is not None:
            return snapshot.folder
        if self._fetched is None:
            self._fetched = await asyncio.to_thread(_own_folder)
        folder = self._place(snapshot)
        await asyncio.to_thread(folder.mkdir, exist_ok=True)
        for file, size in snapshot.files.items():
            await self._fetch_file(snapshot, file, size, folder / file)
        return folder

    def free(self, snapshot: Snapshot) -> None:
        """Remove what was fetched of an adapter."""
        if snapshot.folder is None and self._fetched is not None:
            shutil.rmtree(self._place(snapshot), ignore_errors=True)

    def close(self) -> None:
        """Remove all that was fetched."""
        if self._fetched is not None:
            shutil.rmtree(self._fetched, ignore_errors=True)

    def _found(self, user: str, source: SamplerName, name: CheckpointName) -> Snapshot:
        stored = self._folders.find_snapshot(user, name, moves=source.moves)
        engine_name = _engine_name(stored.user, source, str(stored.name), stored.seq)
        return Snapshot(
            engine_name, stored.seq, user, source, str(stored.name), folder=stored.folder
        )

    def _place(self, snapshot: Snapshot) -> Path:
        assert self._fetched is not None
        return self._fetched / f"{snapshot.name}@{snapshot.version}".replace("/", "_")

    async def _fetch_file(self, snapshot: Snapshot, file: str, size: int, target: Path) -> None:
        parts: list[bytes] = []
        offset = 0
        while offset < size:
            request = FetchSnapshot(
                user=snapshot.user,
                path=snapshot.path,
                seq=snapshot.version,
                file=file,
                offset=offset,
            )
            part = await self._ask("fetch", request, SnapshotPart)
            if not part.data:
                raise ModelError(f"{file} of {snapshot.path} is cut off", hint="sample again")
            parts.append(part.data)
            offset += len(part.data)
        await asyncio.to_thread(target.write_bytes, b"".join(parts))

    async def _ask(self, verb: str, request: Message, reply: type[M]) -> M:
        return await call(
            self._broker,
            self._scope.snapshot(verb),
            request,
            reply,
            timeout_s=_TIMEOUT_S,
            waiting_for=_TRAINER,
            idempotent=True,
        )


def _own_folder() -> Path:
    """Return a folder of this process, and remove those of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if not Path("/proc", pid).is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))


def _engine_name(owner: str, source: SamplerName, path: str, seq: int) -> str:
    if source.moves:
        return f"{owner}/{source.checkpoint.model}/inflight"
    return f"{owner}/{path.removeprefix('tinker://')}/{seq}"


@dataclass
class _Place:
    """An adapter in the engine, or on its way there."""

    snapshot: Snapshot
    ready: "asyncio.Task[None]"
    users: int = 0
    used: float = field(default_factory=time.monotonic)

    @property
    def has_failed(self) -> bool:
        done = self.ready.done()
        return done and (self.ready.cancelled() or self.ready.exception() is not None)


class SampledAdapters:
    """The adapters in an engine."""

    def __init__(
        self,
        engine: AdapterEngine,
        most: int,
        fetch: Callable[[Snapshot], Awaitable[Path]],
        free: Callable[[Snapshot], None],
    ) -> None:
        """Hold at most so many beside the base model of `engine`.

        `fetch` gives the folder of one, which is there until it is given to `free`.
        """
        self._engine = engine
        self._most = most
        self._fetch = fetch
        self._free = free
        self._places: dict[str, _Place] = {}
        self._changed = asyncio.Condition()

    @property
    def num_held(self) -> int:
        """Adapters in the engine."""
        return len(self._places)

    def moving(self) -> list[Snapshot]:
        """Return those that samples are drawn with now and that may move on."""
        return [
            place.snapshot
            for place in self._places.values()
            if place.users and place.snapshot.source.moves
        ]

    @contextlib.asynccontextmanager
    async def using(self, snapshot: Snapshot | None) -> AsyncIterator[str]:
        """Give the engine's name of an adapter while the block runs; None and "": the base.

        Raises ModelError for what is no adapter, or one that does not fit the base.
        """
        if snapshot is None:
            yield ""
            return
        place = await self._take(snapshot)
        try:
            await asyncio.shield(place.ready)
            yield snapshot.name
        finally:
            await self._leave(place)

    async def _take(self, snapshot: Snapshot) -> _Place:
        name = snapshot.name
        async with self._changed:
            while (place := self._places.get(name)) is None and not self._has_room():
                await self._changed.wait()
            if place is None:
                place = _Place(snapshot, asyncio.create_task(self._load(snapshot), name=name))
                self._places[name] = place
            elif snapshot.version > place.snapshot.version:
                moved = self._move(place.ready, place.snapshot, snapshot)
                place.snapshot, place.ready = snapshot, asyncio.create_task(moved, name=name)
            place.users += 1
            return place

    async def _load(self, snapshot: Snapshot) -> None:
        folder = await self._fetch(snapshot)
        await self._engine.add_adapter(snapshot.name, folder, snapshot.version)

    async def _move(self, before: "asyncio.Task[None]", old: Snapshot, new: Snapshot) -> None:
        """Let requests that have the old weights, and later ones, have the new ones."""
        await asyncio.wait({before})
        await self._load(new)
        self._free(old)

    def _has_room(self) -> bool:
        """Whether there is a place, maybe that of an adapter that is idle."""
        if len(self._places) < self._most:
            return True
        idle = [place for place in self._places.values() if not place.users]
        if not idle:
            return False
        self._drop(min(idle, key=lambda place: place.used))
        return True

    def _drop(self, place: _Place) -> None:
        del self._places[place.snapshot.name]
        place.ready.cancel()  # no longer awaited
        self._engine.drop_adapter(place.snapshot.name)
        self._free(place.snapshot)

    async def _leave(self, place: _Place) -> None:
        place.users -= 1
        place.used = time.monotonic()
        if place.has_failed and self._places.get(place.snapshot.name) is place:
            self._drop(place)  # the next one tries again
        async with self._changed:
            self._changed.notify_all()


# -- starting the engine ---------------------------------------------------------------------------

_NO_CONTEXT = 4096


@dataclass(frozen=True)
class SampledBase:
    """A base model in an engine, and what is to be known of it."""

    engine: AdapterEngine
    tokenizer: PreTrainedTokenizerBase
    vocab: int
    max_context: int
    num_requests: int
    """That compute at a time."""


async def open_engine(config: JobConfig) -> SampledBase:
    """Load the base model into the engine that is configured; raises ModelError, ConfigError."""
    model = config.model
    about = await asyncio.to_thread(_about, config)
    longest = count_positions(about.to_dict()) or _NO_CONTEXT
    context = min(config.generator.max_context or longest, longest)
    settled = config.generator.model_copy(update={"max_context": context})
    config = config.model_copy(update={"generator": settled})
    config = await asyncio.to_thread(settled_for_gpu, config, serves=True)
    base = None
    if settled.engine == "vllm":  # it makes room for adapters when it starts
        room = LoraConfig(rank=config.tinker.max_rank)
        base = await load_base(config, [room] * config.tinker.sampled_at_once)
    engine = cast("AdapterEngine", await start_engine(config, base=base))
    tokenizer = await asyncio.to_thread(
        load_tokenizer, model.tokenizer or model.path, trust_remote_code=model.trust_remote_code
    )
    at_once = config.generator.num_requests
    return SampledBase(engine, tokenizer, int(about.vocab_size), context, at_once)


def _about(config: JobConfig) -> Any:
    """Return the configuration of the model's text part."""
    read = load_model_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    return cast(Any, read).get_text_config()


# -- slots -----------------------------------------------------------------------------------------

QUANTUM = 2048
"""Tokens of one user's turn."""


@dataclass
class _WaitingRequest:
    """Somebody who waits for a place."""

    place: "asyncio.Future[None]"
    tokens: int


@dataclass
class Place:
    """A place in the engine."""

    tokens: int
    """What it is charged with: at first all that may be computed, at last what was."""


class FairSlots:
    """Places in an engine: one user's hundreds of requests hold up another's only for one place."""

    def __init__(self, most: int, quantum: int = QUANTUM) -> None:
        """Let `most` be inside at a time."""
        self.turns = FairShare(quantum)
        """The users' turns."""
        self._free = most
        self._waiting: dict[str, deque[_WaitingRequest]] = {}

    @asynccontextmanager
    async def place(self, user: str, tokens: int) -> AsyncIterator[Place]:
        """Hold a place in which at most so many tokens are computed for a user."""
        place = Place(tokens)
        await self._enter(user, tokens)
        try:
            yield place
        finally:
            self.turns.charge(user, place.tokens - tokens)
            self._leave()

    async def _enter(self, user: str, tokens: int) -> None:
        waiting = _WaitingRequest(asyncio.get_running_loop().create_future(), tokens)
        self._waiting.setdefault(user, deque()).append(waiting)
        self._let_in()
        try:
            await waiting.place
        except asyncio.CancelledError:
            if not waiting.place.cancelled():  # it was let in at that very moment
                self.turns.charge(user, -tokens)
                self._leave()
            raise

    def _leave(self) -> None:
        self._free += 1
        self._let_in()

    def _let_in(self) -> None:
        while self._free:
            user = self.turns.choose(self._users_waiting())
            if user is None:
                return
            waiting = self._waiting[user].popleft()
            self.turns.charge(user, waiting.tokens)
            self._free -= 1
            waiting.place.set_result(None)

    def _users_waiting(self) -> list[str]:
        """Return who waits, once those are gone who no longer do."""
        for user, queue in list(self._waiting.items()):
            while queue and queue[0].place.done():
                queue.popleft()
            if not queue:
                del self._waiting[user]
        return list(self._waiting)


# -- the engine as users share it: slots, and tokens counted ---------------------------------------


class MeteredEngine:
    """An engine whose places users get by turns, by tokens and weights."""

    def __init__(self, engine: AdapterEngine, max_requests: int) -> None:
        """Let `max_requests` compute at a time."""
        self._engine = engine
        self._places = FairSlots(max_requests)
        self.weights = self._places.turns.weights
        """Of users, in relation to each other."""
        self.tokens: dict[str, int] = {}
        """Computed for each user, prompts included."""

    def count(self, user: str, tokens: int) -> None:
        """Count tokens that were computed for a user."""
        self.tokens[user] = self.tokens.get(user, 0) + tokens

    def cancel(self, request_id: str) -> None:
        """End a request: it has what was drawn so far."""
        self._engine.cancel(request_id)

    async def generate(
        self,
        user: str,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        adapter: str,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate for a user as `AdapterEngine.generate` does, and count what was drawn.

        A task that is cancelled while it waits cancels the request, and what was drawn by then
        counts as well.
        """
        num_prompt = len(prompt_ids)
        async with self._places.place(user, num_prompt + sampling.max_new_tokens) as place:
            generating = asyncio.ensure_future(
                self._engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=request_id,
                    on_token=on_token,
                    images=images,
                    adapter=adapter,
                )
            )
            try:
                made = await asyncio.shield(generating)
            except asyncio.CancelledError:
                self._engine.cancel(request_id)
                with contextlib.suppress(TinkermqError):  # within a step it has what there is
                    self.count(user, len((await generating).token_ids))
                raise
            place.tokens = num_prompt + len(made.token_ids)
            self.count(user, len(made.token_ids))
        return made

    async def score(
        self, user: str, prompt_ids: IntVector, *, request_id: str, top_k: int, adapter: str
    ) -> PromptScores:
        """Score a prompt for a user as `AdapterEngine.score` does; counts nothing."""
        async with self._places.place(user, len(prompt_ids)):
            return await self._engine.score(
                prompt_ids, request_id=request_id, top_k=top_k, adapter=adapter
            )


class EngineOfUser:
    """What one request of a user is answered with: an adapter in the engine."""

    def __init__(self, engine: MeteredEngine, user: str, adapter: str) -> None:
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
        """Generate; the same prompt is counted once, however many answers it has."""
        made = self._engine.generate(
            self._user,
            prompt_ids,
            sampling,
            request_id=self._name(request_id),
            adapter=self._adapter,
            on_token=on_token,
            images=images,
        )
        if id(prompt_ids) not in self._prompts:
            self._prompts.add(id(prompt_ids))
            self._engine.count(self._user, len(prompt_ids))
        return await made

    async def score(
        self, prompt_ids: Sequence[int] | IntVector, *, request_id: str, top_k: int = 0
    ) -> PromptScores:
        """Score a prompt, whose tokens are counted."""
        scores = await self._engine.score(
            self._user,
            np.asarray(prompt_ids, np.int32),
            request_id=self._name(request_id),
            top_k=top_k,
            adapter=self._adapter,
        )
        if id(prompt_ids) not in self._prompts:
            self._prompts.add(id(prompt_ids))
            self._engine.count(self._user, len(prompt_ids))
        return scores

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._engine.cancel(self._name(request_id))

    def _name(self, request_id: str) -> str:
        """Return how a request is called in the engine: its user has chosen its name."""
        return f"{self._user}/{request_id}"
