"""The engine for transformers models: its part on the event loop.

Torch never runs on the event loop. Requests made within one turn of the loop reach the engine's
thread together, so a group's shared prompt is computed once; results return in one call per decode
step.
"""

import asyncio
import itertools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from ....schemas.config.sections import LoraConfig
from ....schemas.local.process import finish
from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import EngineError, TinkermqError
from ...policy.adapted_layers import LowRank
from ...policy.lora import check_base, policy_tensors, read_lora
from ...policy.vision import SeenImages, digest_of
from ...weights.tensors import TensorSource
from .. import engine
from .adapters import DoubleBuffer, EngineAdapter
from .decoder import SlotDecoder, load_decoder
from .kv_cache import PREFIX_CACHE_BYTES
from .rows import RowRequest
from .worker import EngineWorker, Outcome, ScoreRequest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CLOSE_DEADLINE_S = 30.0
R = TypeVar("R", engine.Generation, engine.PromptScores)


class TransformersEngine:
    """Continuous batching over a transformers model; see `engine.Engine` for its contract."""

    def __init__(
        self,
        decoder: SlotDecoder,
        *,
        version: int = 0,
        max_waiting: int = 4096,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        """Start the engine's thread; `start` loads the model as well.

        `max_waiting` bounds the running and waiting requests, `prefix_cache_bytes` the caches of
        conversations between two turns. Call it on the event loop that will use the engine.
        """
        self._loop = asyncio.get_running_loop()
        self._decoder = decoder
        self._max_pending = max_waiting + decoder.cache.max_slots
        self._pending: dict[str, asyncio.Future[Any]] = {}
        """Results of requests: Generation or PromptScores."""
        self._adapters: dict[str, EngineAdapter] = {}
        self._listeners: dict[str, engine.OnToken] = {}
        self._swaps: set[asyncio.Future[None]] = set()
        self._commands: list[Callable[[], None]] = []
        self._ended: EngineError | None = None
        self._seeds = itertools.count(secrets.randbits(63))
        self._loading = asyncio.Lock()
        self._reads = engine.ImageReads[SeenImages]()
        self._weights = DoubleBuffer(policy_tensors(decoder.model))
        self._worker = EngineWorker(
            decoder,
            self._weights,
            version,
            partial(self._post, self._deliver),
            partial(self._post, self._fail_all),
            prefix_cache_bytes // decoder.cache.shape.token_bytes,
        )
        self._thread = threading.Thread(target=self._worker.run, name="engine", daemon=True)
        self._thread.start()

    @classmethod
    async def start(
        cls,
        path: str,
        *,
        max_slots: int,
        max_context: int,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        lora: LoraConfig | None = None,
        base: PreTrainedModel | None = None,
        version: int = 0,
        max_waiting: int = 4096,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        record_experts: bool = False,
    ) -> "TransformersEngine":
        """Load the model in `path` and start; raises ModelError for one that cannot run here.

        With a rank in `lora` the model has an adapter, and `load_weights` changes only that. With
        `base` the model shares the other weights with one in memory. `record_experts` records the
        experts of each token of a mixture.
        """
        decoder = await asyncio.to_thread(
            load_decoder,
            path,
            dtype=_DTYPES[dtype],
            device=device,
            max_slots=max_slots,
            max_tokens=max_context,
            trust_remote_code=trust_remote_code,
            lora=lora,
            base=base,
        )
        if record_experts:
            decoder.record_experts()
        return cls(
            decoder, version=version, max_waiting=max_waiting, prefix_cache_bytes=prefix_cache_bytes
        )

    @property
    def version(self) -> int:
        """Current policy version."""
        return self._worker.version

    @property
    def failure(self) -> EngineError | None:
        """Why the engine ended, or None."""
        return self._ended

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: engine.Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: engine.OnToken | None = None,
        images: Sequence[bytes] = (),
        adapter: str = "",
    ) -> engine.Generation:
        """Generate from a prompt; see `engine.AdapterEngine.generate`."""
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        self._check(prompt, sampling, request_id)
        seen = await self._read_images(prompt, images) if images else None
        if seen is not None:  # other requests may have arrived meanwhile
            self._check(prompt, sampling, request_id)
        seed = next(self._seeds) if sampling.seed is None else sampling.seed
        request = RowRequest(
            request_id,
            prompt,
            sampling,
            seed % (1 << 64),
            conversation,
            on_token is not None,
            seen,
            self._adapter(adapter),
        )
        future: asyncio.Future[engine.Generation] = self._loop.create_future()
        if on_token is not None:
            self._listeners[request_id] = on_token
        return await self._submit(request_id, future, partial(self._worker.submit, request))

    async def score(
        self,
        prompt_ids: Sequence[int] | IntVector,
        *,
        request_id: str,
        top_k: int = 0,
        adapter: str = "",
    ) -> engine.PromptScores:
        """Score a prompt; see `engine.Engine.score`."""
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        self._check_alive()
        running = request_id in self._pending
        engine.check_queue(request_id, len(self._pending), self._max_pending, running=running)
        vocab = self._decoder.vocab_size
        engine.check_scored(
            prompt, top_k, max_context=self._decoder.cache.max_tokens, vocab_size=vocab
        )
        request = ScoreRequest(request_id, prompt, top_k, self._adapter(adapter))
        future: asyncio.Future[engine.PromptScores] = self._loop.create_future()
        return await self._submit(request_id, future, partial(self._worker.score, request))

    async def _submit(
        self, request_id: str, future: "asyncio.Future[R]", command: Callable[[], None]
    ) -> R:
        """Submit a request and return its result."""
        self._pending[request_id] = future
        self._command(command)
        try:
            return await future
        finally:
            self._listeners.pop(request_id, None)
            if self._pending.pop(request_id, None) is not None:  # the caller was cancelled
                self._command(partial(self._worker.cancel, request_id))

    # Adapters ---------------------------------------------------------------------------------

    async def add_adapter(self, name: str, folder: Path, version: int = 0) -> None:
        """Load an adapter for requests; see `engine.AdapterEngine.add_adapter`."""
        self._check_alive()
        by_layer = await asyncio.to_thread(self._read, folder)
        self._check_alive()
        adapter = self._adapters.get(name) or EngineAdapter(name, version, {})
        swapped: asyncio.Future[None] = self._loop.create_future()
        self._swaps.add(swapped)
        done = partial(self._post, self._swapped, swapped)
        self._command(partial(self._worker.adapt, adapter, version, by_layer, done))
        await asyncio.shield(swapped)
        self._adapters[name] = adapter

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter; see `engine.AdapterEngine.drop_adapter`."""
        if (adapter := self._adapters.pop(name, None)) is not None:
            self._command(partial(self._worker.forget, adapter))

    def _read(self, folder: Path) -> dict[str, LowRank]:
        config, tensors = read_lora(folder)
        check_base(self._decoder.model, folder)
        return self._decoder.adapters.prepare(tensors, config)

    def _adapter(self, name: str) -> EngineAdapter | None:
        if name and name not in self._adapters:
            raise engine.no_adapter(name)
        return self._adapters[name] if name else None

    async def _read_images(self, prompt: IntVector, images: Sequence[bytes]) -> SeenImages:
        """Read images; concurrent requests for the same ones share the work."""
        reader = engine.require_reader(self._decoder.reader)
        remembered = reader.remembered(prompt, images)
        if remembered is not None:
            return remembered
        look = partial(reader.read_images, self._decoder.model, prompt, images)
        return await self._reads.share((digest_of(images), prompt.tobytes()), look)

    async def load_weights(
        self, version: int, tensors: Mapping[str, TensorSource], kv: engine.KvOnSwap = "keep"
    ) -> None:
        """Swap weights between two decode steps; see `engine.Engine.load_weights`."""
        async with self._loading:
            self._check_alive()
            fresh = await finish(asyncio.to_thread(self._weights.prepare, tensors))
            self._check_alive()
            swapped: asyncio.Future[None] = self._loop.create_future()
            self._swaps.add(swapped)
            done = partial(self._post, self._swapped, swapped)
            self._command(partial(self._worker.swap, version, fresh, kv, done))
            # Also if it is cancelled: the prepared set must not be refilled before.
            await finish(swapped)

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the memory of weights and cache; see `engine.Engine.sleep`."""
        await self._in_worker(partial(self._worker.sleep, keep_weights))

    @property
    def has_weights(self) -> bool:
        """Whether it has weights to wake with; see `engine.Engine.has_weights`."""
        return self._worker.has_weights

    async def wake(self) -> None:
        """Allocate the memory again and continue; see `engine.Engine.wake`."""
        if not self.has_weights:
            raise engine.no_weights()
        await self._in_worker(self._worker.wake)

    async def _in_worker(self, command: Callable[[Callable[[], None]], None]) -> None:
        """Run a command in the engine's thread, and wait for it."""
        async with self._loading:
            self._check_alive()
            done: asyncio.Future[None] = self._loop.create_future()
            self._swaps.add(done)
            self._command(partial(command, partial(self._post, self._swapped, done)))
            await asyncio.shield(done)

    def cancel(self, request_id: str) -> None:
        """End a request; its `generate` returns the tokens so far, with `cancelled`."""
        self._command(partial(self._worker.cancel, request_id))

    def release(self, conversation: str) -> None:
        """Drop the cache of a conversation."""
        self._command(partial(self._worker.release, conversation))

    def stats(self) -> engine.EngineStats:
        """Return the engine's counters."""
        return self._worker.stats()

    async def close(self) -> None:
        """End the thread; requests that still run fail with EngineError."""
        self._command(self._worker.close)
        await asyncio.to_thread(self._thread.join, _CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            raise EngineError(
                f"the engine's thread did not end within {_CLOSE_DEADLINE_S:.0f} s",
                hint="the process ends without it",
            )
        self._fail_all(EngineError("the engine was closed", hint="start it again"))

    # Between the event loop and the thread ----------------------------------------------------

    def _command(self, command: Callable[[], None]) -> None:
        """Submit a command with the others of this turn of the event loop, in order."""
        if not self._commands:
            self._loop.call_soon(self._hand_over)
        self._commands.append(command)

    def _hand_over(self) -> None:
        commands, self._commands = self._commands, []
        self._worker.do(partial(_run_all, commands))

    def _post(self, function: Callable[..., None], *args: object) -> None:
        """Run a function on the event loop; the engine's thread calls this."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # nobody waits on a closed loop
            self._worker.close()

    def _deliver(self, outcomes: list[Outcome]) -> None:
        for request_id, outcome in outcomes:
            if isinstance(outcome, engine.Drawn):
                if request_id in self._pending and request_id in self._listeners:
                    self._listeners[request_id](outcome)
                continue
            future = self._pending.pop(request_id, None)
            if future is None or future.done():
                continue
            if isinstance(outcome, TinkermqError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _swapped(self, future: asyncio.Future[None]) -> None:
        self._swaps.discard(future)
        if not future.done():
            future.set_result(None)

    def _fail_all(self, error: EngineError) -> None:
        """Fail all waiting and later requests."""
        if self._ended is None:
            self._ended = error
        futures = [*self._pending.values(), *self._swaps]
        self._pending.clear()
        self._swaps.clear()
        for future in futures:
            if not future.done():
                future.set_exception(engine.again(self._ended))

    # Checks before a request is submitted -----------------------------------------------------

    def _check(self, prompt: IntVector, sampling: engine.Sampling, request_id: str) -> None:
        self._check_alive()
        engine.check_sampling(sampling)
        running = request_id in self._pending
        engine.check_queue(request_id, len(self._pending), self._max_pending, running=running)
        engine.check_prompt(
            prompt,
            sampling,
            max_context=self._decoder.cache.max_tokens,
            vocab_size=self._decoder.vocab_size,
        )

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise engine.again(self._ended)


def _run_all(commands: Sequence[Callable[[], None]]) -> None:
    for command in commands:
        command()
