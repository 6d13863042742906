"""The engine that runs a model in vLLM: continuous batching, paged attention, CUDA graphs.

Several engines may share one model in vLLM, each with its own adapter. docs/engines.md lists its
features beyond `engine.Engine`, and where it was run.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from ....broker.jetstream.objects import DigestMismatch
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import LoraConfig
from ....schemas.plan.model_refusals import refuse_in_vllm
from ....schemas.plan.model_shape import count_positions, refuse_long_sequences
from ....schemas.weights import Manifest, Round, TensorEntry
from ....schemas.wire.array import IntVector
from ....schemas.wire.errors import ConfigError, EngineError, ModelError
from ...addresses import own_address
from ...policy.lora import read_lora
from ...policy.model_folder import load_model_config, sees_images
from ...policy.vision import ImageReader, Images, digest_of, load_image_reader
from ...storage.adapters import base_of, is_adapter
from ...weights.broadcast import BroadcastReceiver
from ...weights.broadcast_group import FORM_S, ProcessGroupFailed, no_route
from ...weights.shared_memory import place_of
from ...weights.store import WeightStore
from ...weights.tensors import TensorBytes, TensorSource, WeightNames, entry_of
from ..engine import (
    EngineStats,
    Generation,
    ImageReads,
    KvOnSwap,
    OnToken,
    PromptScores,
    Sampling,
    again,
    check_prompt,
    check_queue,
    check_sampling,
    check_scored,
    left_grammar,
    no_adapter,
    no_weights,
    not_finite,
    require_reader,
)
from ..transformers.adapters import RowAdapters
from .model import VllmModel
from .request import ShownImages, show
from .weight_files import WeightFiles, hollow_model, reference_names

_LEAST_TEMPERATURE = 0.01
"""vLLM replaces lower temperatures by this value."""
T = TypeVar("T")


class VllmEngine:
    """One policy of a model in vLLM: its weights, or an adapter; see `engine.Engine`."""

    def __init__(
        self,
        model: VllmModel,
        adapter: str,
        config: JobConfig,
        reader: ImageReader | None = None,
        *,
        max_waiting: int = 4096,
        max_rank: int = 0,
    ) -> None:
        """`start_vllm` makes one; `adapter` names it, "" is the model itself.

        `max_rank` is the largest supported rank of an adapter.
        """
        self._model = model
        self._adapter = adapter
        self._reader = reader
        self._reads = ImageReads[Images]()
        self._path = config.model.path
        self._lora = config.lora
        self._records_experts = config.algorithm.router_replay
        self._trust_remote_code = config.model.trust_remote_code
        self._max_context = max_context_of(config)
        self._max_pending = max_waiting + model.max_requests
        self._pending: dict[str, str] = {}
        """The adapter of each request, by request id."""
        self._max_rank = max_rank
        self._layers: RowAdapters | None = None
        self._records: tuple[int, ...] = ()
        """Layers with experts, and experts per token in each, if they are recorded."""
        self._files = WeightFiles()
        self._names: WeightNames | None = None
        self._loading = asyncio.Lock()
        self._receiver: BroadcastReceiver | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._closed: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        model.add_owner()

    @property
    def version(self) -> int:
        """Policy version used for decoding now."""
        return self._model.versions[self._adapter]

    @property
    def failure(self) -> EngineError | None:
        """Why requests are no longer answered, or None."""
        return self._closed.result() if self._closed.done() else self._model.failure

    async def generate(
        self,
        prompt_ids: Sequence[int] | IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
        adapter: str = "",
    ) -> Generation:
        """Generate from a prompt; see `engine.AdapterEngine.generate`.

        The common prefix of a conversation's turns is found in the cache without its name.
        """
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        self._check(prompt, sampling, request_id)
        name = self._named(adapter)
        self._pending[request_id] = name
        try:
            shown = await self._show(prompt, images) if images else None
            # a continued request has another seed: vLLM cannot start within a random stream
            seed = None
            if sampling.seed is not None:
                seed = (sampling.seed + (sampling.num_drawn << 32)) % (1 << 63)
            result = await self._unless_ended(
                self._model.generate(
                    name, prompt, sampling, seed, request_id, on_token, shown, conversation
                )
            )
        finally:
            self._pending.pop(request_id, None)
        if sampling.is_constrained:
            result = await self._with_figures(result, sampling, f"{name}/{request_id}")
        if self._records and result.finish_reason != "cancelled":
            result = await self._with_experts(result, f"{name}/{request_id}", len(prompt))
        broken = ~np.isfinite(result.logprobs)
        if broken.any():
            await self._to_the_end(self._model.purge())
            raise not_finite(int(result.versions[broken][0]))
        return result

    async def _with_figures(self, result: Generation, sampling: Sampling, key: str) -> Generation:
        """Add the share that a grammar excluded; ConfigError if it could not be followed."""
        answers = self._model.ask_workers("take_figures", key, len(result.token_ids))
        masked, error = (await self._unless_ended(answers))[0]
        if error:
            raise left_grammar(error)
        if sampling.grammar is None:
            return result
        return replace(result, masked=np.frombuffer(masked, np.float32))

    async def _with_experts(self, result: Generation, key: str, num_prompt: int) -> Generation:
        """Add the experts of all tokens but the last, as computed last."""
        num = num_prompt + len(result.token_ids) - 1
        answers = self._model.ask_workers("take_experts", key, num)
        first: bytes = (await self._unless_ended(answers))[0]
        experts = np.frombuffer(first, np.uint8).reshape(-1, *self._records)
        if len(experts) != num:
            raise EngineError(
                f"vLLM told the experts of {len(experts)} of {num} tokens of request {key}",
                hint="it may work when asked again; else set algorithm.router_replay=false",
            )
        return replace(result, experts=experts)

    async def score(
        self,
        prompt_ids: Sequence[int] | IntVector,
        *,
        request_id: str,
        top_k: int = 0,
        adapter: str = "",
    ) -> PromptScores:
        """Score a prompt; see `engine.AdapterEngine.score`."""
        prompt = np.ascontiguousarray(prompt_ids, dtype=np.int32)
        self._check_alive()
        running = request_id in self._pending
        check_queue(request_id, len(self._pending), self._max_pending, running=running)
        vocab, most = self._model.vocab_size, self._max_context
        check_scored(prompt, top_k, max_context=most, vocab_size=vocab)
        if len(prompt) == most:  # vLLM draws a token after it
            raise ConfigError(
                f"vLLM scores prompts of less than its {most} tokens",
                hint="shorten the prompt, or raise generator.max_context",
            )
        name = self._named(adapter)
        self._pending[request_id] = name
        try:
            return await self._unless_ended(self._model.score(name, prompt, top_k, request_id))
        finally:
            self._pending.pop(request_id, None)

    async def add_adapter(self, name: str, folder: Path, version: int = 0) -> None:
        """Load the adapter of a folder for requests; see `engine.AdapterEngine.add_adapter`.

        Newer weights of a loaded adapter are swapped in between two steps.
        """
        self._check_alive()
        await asyncio.to_thread(self._check_adapter, folder)
        self._check_alive()
        if self._model.has_adapter(name):
            await self._to_the_end(self._model.load_adapter(name, version, str(folder), "keep"))
        else:
            await self._to_the_end(self._model.add_adapter(name, version, str(folder)))

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter; see `engine.AdapterEngine.drop_adapter`."""
        self._model.drop_adapter(name)

    def _named(self, adapter: str) -> str:
        if adapter and not self._model.has_adapter(adapter):
            raise no_adapter(adapter)
        return adapter or self._adapter

    def _check_adapter(self, folder: Path) -> None:
        """Raise ModelError for an adapter that would crash vLLM."""
        config, tensors = read_lora(folder)
        for setting in ("rank_pattern", "alpha_pattern"):
            if value := getattr(config, setting):
                raise ModelError(
                    f"the adapter in {folder} has {setting}={value}, and vLLM multiplies all "
                    "layers of a folder by the same",
                    hint="set generator.engine=transformers, or serve it by itself",
                )
        if self._layers is None:
            trusted = self._trust_remote_code
            self._layers = RowAdapters(hollow_model(self._path, trust_remote_code=trusted))
        pairs = self._layers.prepare(tensors, config)
        rank = max((len(pair.a) for pair in pairs.values()), default=0)
        if rank > self._max_rank:
            raise ModelError(
                f"the adapter has rank {rank}, there is room for {self._max_rank}",
                hint="raise tinker.max_rank",
            )

    async def _show(self, prompt: IntVector, images: Sequence[bytes]) -> ShownImages:
        """Read images; concurrent requests for the same images share one read."""
        reader = require_reader(self._reader)
        read = await self._reads.share(digest_of(images), partial(reader.read, images))
        return show(read, reader.places(prompt, read), images)

    async def load_weights(
        self, version: int, tensors: Mapping[str, TensorSource], kv: KvOnSwap = "keep"
    ) -> None:
        """Swap weights between two steps; see `engine.Engine.load_weights`."""
        async with self._loading:
            self._check_alive()
            once = await asyncio.to_thread(self._checked, tensors)
            if self._adapter:
                await self._load_adapter(version, once, kv)
                return
            update = await asyncio.to_thread(self._update, version, once)
            self._check_alive()
            await self._to_the_end(self._model.load_file(version, update, kv))
            self._files.keep_only(None)

    def takes_from_learner(self, manifest: Manifest) -> bool:
        """Return whether vLLM's workers receive a version directly from the learner."""
        return manifest.transport == "nccl" and manifest.kind == "full" and not self._adapter

    async def receive_weights(
        self, manifest: Manifest, store: WeightStore, kv: KvOnSwap = "keep"
    ) -> None:
        """Receive a version from the learner's memory in vLLM's workers, without a file.

        No token is generated from its first byte until it is complete. Raises NotFoundError,
        DeadlineError, BrokerError as `WeightStore.fetch` does.
        """
        async with self._loading:
            self._check_alive()
            await asyncio.to_thread(self._check_manifest, manifest)
            receiver = await self._receiver_of(store)

            async def receive(stand_still: Callable[[], Awaitable[None]]) -> None:
                await store.receive(manifest, partial(receiver.receive, ready=stand_still))

            await self._to_the_end(self._model.receive(manifest.version, receive, kv))

    async def sleep(self, *, keep_weights: bool = True) -> None:
        """Free the memory of all engines of this model; see `engine.Engine.sleep`."""
        self._check_alive()
        await self._to_the_end(self._model.sleep(keep_weights=keep_weights))

    @property
    def has_weights(self) -> bool:
        """Whether it has weights to wake with; see `engine.Engine.has_weights`."""
        return self._model.has_weights

    async def wake(self) -> None:
        """Allocate the memory again and continue; see `engine.Engine.wake`."""
        self._check_alive()
        if not self.has_weights:
            raise no_weights()
        await self._to_the_end(self._model.wake())

    def cancel(self, request_id: str) -> None:
        """End a request; its `generate` returns the tokens so far, with `cancelled`."""
        if request_id in self._pending:
            self._model.cancel(self._pending[request_id], request_id)

    def release(self, conversation: str) -> None:
        """Forget a conversation; vLLM evicts the least recently used blocks itself."""
        if self._model.turns is not None:
            self._model.turns.forget(conversation)

    def stats(self) -> EngineStats:
        """Return the engine's statistics; those of the model cover all its engines."""
        model = self._model
        return model.meter.stats(
            version=self.version,
            running=model.inside,
            waiting=model.waiting,
            cached_prefixes=0,
            cache_bytes=model.cache_bytes,
        )

    async def close(self) -> None:
        """End the engine, and vLLM with the last one; running requests fail."""
        if not self._closed.done():
            self._closed.set_result(EngineError("the engine was closed", hint="start it again"))
            await self._model.close()
            self._files.close()

    # New weights ------------------------------------------------------------------------------

    async def begin(self, version: int) -> None:
        """Set the version of the first weights: an adapter's folder, or an empty adapter."""
        if self._records_experts:
            self._records = tuple((await self._model.ask_workers("record_experts"))[0])
        if not self._adapter:
            await self._model.name_version("", version)
            return
        names = await asyncio.to_thread(self._reference)
        if is_adapter(self._path):
            _, tensors = await asyncio.to_thread(read_lora, self._path)
            if self._lora.is_uniform:
                await self._model.load_adapter(self._adapter, version, self._path, "keep")
            else:
                await self.load_weights(version, tensors)
            return
        zeros: dict[str, TensorSource] = {
            of_one[0]: torch.zeros(tensor.shape)
            for of_one, tensor in zip(names.names, names.tensors, strict=True)
        }
        await self.load_weights(version, zeros)

    def _reference(self) -> WeightNames:
        if self._names is None:
            self._names = reference_names(
                self._path, self._lora, trust_remote_code=self._trust_remote_code
            )
        return self._names

    async def _receiver_of(self, store: WeightStore) -> BroadcastReceiver:
        if self._receiver is None or self._receiver.scope != store.scope:
            workers = _Workers(self._model, await self._model.ask_workers("gpu"))
            self._receiver = BroadcastReceiver(store.broker, store.scope, member=workers)
        return self._receiver

    def _check_manifest(self, manifest: Manifest) -> None:
        names = self._reference()
        names.check({entry.name: entry.shape for entry in manifest.tensors})

    def _checked(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        return self._reference().checked(tensors)

    def _update(self, version: int, tensors: Mapping[str, TensorSource]) -> dict[str, Any]:
        """Return the `TakeVersion` of tensors: in their file, or in a new one."""
        mapped = _update_of_mapped(tensors)
        return mapped or update_of_file(*self._files.write_model(version, tensors))

    async def _load_adapter(
        self, version: int, tensors: Mapping[str, TensorSource], kv: KvOnSwap
    ) -> None:
        """Load an adapter in vLLM; its folder is kept, since vLLM may read it again."""
        write = partial(self._files.write_adapter, version, tensors, self._lora)
        folder = await asyncio.to_thread(write)
        self._check_alive()
        loading = self._model.load_adapter(self._adapter, version, str(folder), kv)
        await self._to_the_end(loading)
        self._files.keep_only(folder)

    # What is refused, and the end -------------------------------------------------------------

    def _check(self, prompt: IntVector, sampling: Sampling, request_id: str) -> None:
        self._check_alive()
        check_sampling(sampling)
        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise ConfigError(
                f"vLLM does not sample at temperature {sampling.temperature}",
                hint=f"set 0, or at least {_LEAST_TEMPERATURE}",
            )
        running = request_id in self._pending
        check_queue(request_id, len(self._pending), self._max_pending, running=running)
        check_prompt(
            prompt, sampling, max_context=self._max_context, vocab_size=self._model.vocab_size
        )

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise again(self.failure)

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that pauses vLLM and must resume it, even if the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await self._unless_ended(asyncio.shield(task))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # raised where it is awaited

    async def _unless_ended(self, work: Awaitable[T]) -> T:
        """Await something; EngineError if the engine, or all of vLLM, ends first."""
        task = asyncio.ensure_future(work)
        ends = (self._closed, self._model.broken)
        try:
            await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return await task
            raise again(next(end.result() for end in ends if end.done()))
        finally:
            task.cancel()


def max_context_of(config: JobConfig) -> int:
    """Return the engine's longest sequence in tokens."""
    return config.generator.max_context or config.rollout.max_tokens


def num_engines(config: JobConfig) -> int:
    """Return how many engines a generator starts on the same GPUs."""
    return (1 + len(config.policies)) * (2 if config.self_play.past_share > 0 else 1)


async def open_vllm(config: JobConfig, adapters: Sequence[LoraConfig] = ()) -> VllmModel:
    """Start vLLM with the model of a configuration, and room for adapters."""
    path = config.model.path
    trusted = config.model.trust_remote_code
    if is_adapter(path) and not adapters:
        raise ModelError(
            f"vLLM cannot add the adapter {path} to all weights of its model",
            hint="merge it first (`merge_and_unload`), or set generator.engine=transformers",
        )
    model_config = load_model_config(path, trust_remote_code=trusted)
    values = model_config.to_dict()
    refuse_in_vllm(path, values, adapts=True)
    refuse_long_sequences(path, max_context_of(config), count_positions(values))
    return await VllmModel.start(
        base_of(path) if is_adapter(path) else path,
        config.generator,
        max_context=max_context_of(config),
        trust_remote_code=trusted,
        ranks=[lora.max_rank for lora in adapters],
        sees=sees_images(model_config),
        tokenizer=config.model.tokenizer or "",
        num_engines=num_engines(config),
    )


async def start_vllm(
    config: JobConfig,
    version: int = 0,
    base: VllmModel | None = None,
    *,
    max_waiting: int = 4096,
) -> VllmEngine:
    """Start the engine of a configuration, in a new vLLM or a running one."""
    lora = config.lora
    model = base or await open_vllm(config, [lora] if lora.rank else [])
    adapter = model.new_adapter() if lora.rank else ""
    reader = await asyncio.to_thread(
        load_image_reader, config.model.path, trust_remote_code=config.model.trust_remote_code
    )
    engine = VllmEngine(
        model,
        adapter,
        config,
        reader,
        max_waiting=max_waiting,
        max_rank=config.tinker.max_rank if config.tinker.base else 0,
    )
    await engine.begin(version)
    return engine


# -- vLLM's worker processes as receivers of weights -----------------------------------------------


class _Workers:
    """vLLM's workers as members of a learner's group; see `weights.broadcast_group.Member`."""

    def __init__(self, model: VllmModel, gpus: list[str]) -> None:
        """`gpus` are the UUIDs of the workers' GPUs, empty for a worker on a CPU."""
        self.gpus = [gpu for gpu in gpus if gpu]
        self.device: Literal["cpu", "cuda"] = "cuda" if self.gpus else "cpu"
        self.num_ranks = len(gpus)
        self._model = model
        self._group = ""
        self._where: dict[str, Any] = {}

    @property
    def group(self) -> str:
        """Name of the workers' group; empty: none."""
        return self._group

    async def connect(self, address: str, port: int) -> None:
        """Connect each worker to the learner's TCPStore. Raises ProcessGroupFailed."""
        self._where = {"address": address, "port": port}
        await self._join(self._where)

    async def join(self, place: Round) -> None:
        """Form the group of a place in the workers. Raises ProcessGroupFailed."""
        if self._group == place.group:
            return
        self._group = ""
        joined = {
            "group": place.group,
            "rank": place.rank,
            "size": place.size,
            "route": place.device,
        }
        await self._join(self._where | joined)
        self._group = place.group

    async def receive(self, manifest: Manifest) -> None:
        """Receive a version into the workers' paused model.

        Raises ProcessGroupFailed, DigestMismatch.
        """
        kind, why = await self._model.take_weights(
            update_of(manifest.tensors, manifest.num_bytes, digest=manifest.digest)
        )
        if kind == "damaged":
            raise DigestMismatch(why)
        if kind != "done":
            raise ProcessGroupFailed(why)

    def leave(self) -> None:
        """Forget the group; the workers leave it when they form another."""
        self._group = ""

    async def _join(self, joined: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(FORM_S):
                kind, why = await self._model.join_learner(joined)
        except TimeoutError as error:
            address = own_address(joined["address"], joined["port"])
            raise no_route("vLLM's workers", address, f"nothing came in {FORM_S:g} s") from error
        if kind != "done":
            raise ProcessGroupFailed(why)


def update_of(
    entries: Iterable[TensorEntry], num_bytes: int, *, digest: str = "", path: str = ""
) -> dict[str, Any]:
    """Return the `TakeVersion` of a version, from the learner or from a file."""
    ordered = sorted(entries, key=lambda entry: entry.offset)
    return {
        "names": [entry.name for entry in ordered],
        "dtype_names": [entry.dtype for entry in ordered],
        "shapes": [entry.shape for entry in ordered],
        "offsets": [entry.offset for entry in ordered],
        "num_bytes": num_bytes,
        "digest": digest,
        "path": path,
    }


def update_of_file(path: Path, entries: Iterable[TensorEntry]) -> dict[str, Any]:
    """Return the `TakeVersion` of a version in a file."""
    return update_of(entries, path.stat().st_size, path=str(path))


def _update_of_mapped(tensors: Mapping[str, TensorSource]) -> dict[str, Any] | None:
    """Return the `TakeVersion` of tensors in one mapped file; None: they are not in one file."""
    entries: list[TensorEntry] = []
    paths: set[Path] = set()
    for name, source in tensors.items():
        if not isinstance(source, TensorBytes) or (place := place_of(source.data)) is None:
            return None
        path, offset = place
        entries.append(entry_of(name, source, offset))
        paths.add(path)
    return update_of_file(paths.pop(), entries) if len(paths) == 1 else None
