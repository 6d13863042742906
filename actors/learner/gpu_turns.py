"""A learner and a generator on one GPU: what each may hold, and whose turn it is.

Either both keep a share of the memory and compute at the same time, or the engine sleeps while the
learner trains: then the learner asks for the GPU before a step, and gives it back after the new
version is a snapshot. The generator tells in each request what it does, so that neither has to
remember anything about the other: a learner or a generator that is started anew goes on from there.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import Dtype, resolve_dtype
from ...schemas.control import GpuTurn, GpuTurnRequest
from ...schemas.plan.cards import GpuCard
from ...schemas.plan.memory import stored_bytes
from ...schemas.plan.plan import (
    choose_engine_settings,
    choose_learner_settings,
    estimate_memory,
    find_models,
)
from ...schemas.wire.errors import ConfigError, EngineError
from ..policy.devices import own_card
from ..runtime import JobContext

_POLL_S = 2.0
_FREE_S = 900.0
"""How long a generator may take to free the GPU: its engine may just be starting."""
_CONTEXT_SHARE = 0.06
"""Of a GPU's memory, for the CUDA contexts, libraries and graphs of two processes."""
_ACTIVATION_SHARE = 0.25
"""Of a GPU's memory, for activations and logits of a model whose shape is not known."""
_LEAST_CACHE_SHARE = 0.1
"""Of a GPU's memory, for keys and values."""
_MOST_SHARE = 0.9
"""Of a GPU's memory, for the engine, however little the learner holds."""
_GIB = 1 << 30
T = TypeVar("T")


@dataclass(frozen=True)
class GpuUse:
    """How learner and engine share a GPU."""

    memory_share: float | None
    """Of the GPU's memory, for the engine; None: there is no GPU."""
    sleeps: bool
    """Whether the engine frees it while the learner trains."""


@dataclass(frozen=True)
class HeldBytes:
    """What learner and engine of a job hold on a GPU."""

    stored: int
    """What the learner holds from step to step: weights and optimiser."""
    step: int
    """What it holds in a step: activations and logits, too."""
    engine: int
    """What the engine holds but its cache."""


def choose_gpu_use(config: JobConfig, held: HeldBytes, card_bytes: int) -> GpuUse:
    """Decide how learner and engine share a GPU of `card_bytes`.

    They overlap where the engine fits, with a tenth of the memory for its cache, beside what the
    learner holds in a step; else the engine sleeps while the learner trains, and takes what the
    learner does not hold from step to step. Raises ConfigError where not even that fits.
    """
    generator = config.generator
    usable = card_bytes * (1 - _CONTEXT_SHARE)
    left, beside = usable - held.stored, usable - held.step
    needed = held.engine + _LEAST_CACHE_SHARE * card_bytes
    sleeps = beside < needed if generator.sleep == "auto" else generator.sleep == "always"
    room = left if sleeps else beside
    if generator.memory_share is not None:
        return GpuUse(generator.memory_share, sleeps)
    if room < needed:
        raise ConfigError(
            f"learner and generator do not fit on one GPU of {card_bytes / _GIB:.0f} GiB: the "
            f"learner holds {held.stored / _GIB:.1f} from step to step and {held.step / _GIB:.1f} "
            f"in a step, the engine {held.engine / _GIB:.1f} without a cache",
            hint="train an adapter (lora.rank), keep the optimiser in the machine's memory "
            "(learner.cpu_offload=true), take a smaller model, or two GPUs",
        )
    share = min(room / card_bytes, _MOST_SHARE)
    return GpuUse(math.floor(100 * share) / 100, sleeps)


def held_bytes(
    config: JobConfig, card: GpuCard, policies: Sequence[nn.Module], critics: Sequence[nn.Module]
) -> HeldBytes:
    """Estimate what learner and engine hold on a card.

    Of models whose shape is not known, parameters are counted: 18 bytes for each that is trained.
    """
    models = find_models(config)
    if models is None:
        return _count_bytes(config, card, policies, critics)
    learner = choose_learner_settings(config, models, card)
    engine = choose_engine_settings(config, models, card)
    of_learner, of_engine = estimate_memory(config, models, card, learner, engine)
    *without_cache, _ = of_engine.terms
    return HeldBytes(
        stored_bytes(of_learner.terms),
        of_learner.num_bytes,
        sum(term.num_bytes for term in without_cache),
    )


def _count_bytes(
    config: JobConfig, card: GpuCard, policies: Sequence[nn.Module], critics: Sequence[nn.Module]
) -> HeldBytes:
    total = _num_parameters(policies)
    trained = _num_parameters(policies, trained=True) + _num_parameters(critics, trained=True)
    still = total + _num_parameters(critics) - trained
    if config.algorithm.kl_coef > 0 and not config.lora.rank:
        still += total  # the reference
    frozen = still * _width(config.learner.dtype)
    states = 0 if config.learner.cpu_offload else 18 * trained
    in_engine = 1 if config.generator.quantization else _width(config.generator.dtype)
    stored = frozen + states
    return HeldBytes(
        stored, stored + round(_ACTIVATION_SHARE * card.memory_bytes), in_engine * total
    )


def _num_parameters(models: Sequence[nn.Module], *, trained: bool = False) -> int:
    found = (p for model in models for p in model.parameters())
    return sum(p.numel() for p in found if p.requires_grad or not trained)


def _width(dtype: Dtype) -> int:
    return 4 if resolve_dtype(dtype, on_gpu=True) == "float32" else 2


def gpu_use_of(
    config: JobConfig, policies: Sequence[nn.Module], critics: Sequence[nn.Module] = ()
) -> GpuUse:
    """Return how the GPU of this process is shared; on a CPU the engine sleeps if it is told to."""
    card = own_card()
    if card is None:
        return GpuUse(config.generator.memory_share, config.generator.sleep == "always")
    return choose_gpu_use(config, held_bytes(config, card, policies, critics), card.memory_bytes)


class GpuTurns:
    """The learner's side: it has the GPU while it trains."""

    def __init__(self, context: JobContext, use: GpuUse | None) -> None:
        """Share a GPU as `use` says; None: the learner has one of its own."""
        self._context = context
        self._use = use
        self._turn = GpuTurn(number=0, asleep=False, version=-1)
        if use is not None:
            shares = {"memory_share": use.memory_share, "sleeps": use.sleeps}
            self._turn = self._turn.model_copy(update=shares)
        self._changed = asyncio.Condition()
        self._free_at = -1
        """Number of the turn in which the generator has told that it sleeps."""

    async def serve(self) -> None:
        """Answer the generator; to be called once the models are loaded."""
        if self._use is not None:
            subject = self._context.scope.gpu_turn(self._context.name)
            await self._context.service.endpoint("turn", subject, GpuTurnRequest, self._answer)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Have the GPU alone meanwhile, if the engine has to free it.

        Raises EngineError for a generator that does not free it.
        """
        if self._use is None or not self._use.sleeps:
            yield
            return
        await self._take()
        try:
            yield
        finally:
            await self._advance(asleep=False, version=self._context.step or 0)

    def freeing(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return what does some work, and then gives memory back that torch keeps for later.

        The engine takes its own back when the new version is published.
        """

        def run() -> T:
            try:
                return work()
            finally:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

        return run if self._use is not None and self._use.sleeps else work

    async def _take(self) -> None:
        await self._advance(asleep=True, version=self._turn.version)
        number = self._turn.number
        try:
            with self._context.waiting("the generator to free the GPU"):
                async with self._changed, asyncio.timeout(_FREE_S):
                    await self._changed.wait_for(lambda: self._free_at == number)
        except TimeoutError:
            raise EngineError(
                f"the generator has not freed the GPU within {_FREE_S:.0f} s",
                hint="see its log (`tinkermq logs RUN --actor generator-0`)",
            ) from None

    async def _advance(self, *, asleep: bool, version: int) -> None:
        changes = {"number": self._turn.number + 1, "asleep": asleep, "version": version}
        async with self._changed:
            self._turn = self._turn.model_copy(update=changes)
            self._changed.notify_all()

    async def _answer(self, request: GpuTurnRequest) -> GpuTurn:
        """Take notice of what the generator does; answer once there is something new."""
        async with self._changed:
            if request.asleep and request.seen == self._turn.number:
                self._free_at = request.seen
                self._changed.notify_all()
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait_for(lambda: self._turn.number != request.seen)
            except TimeoutError:
                pass  # the answer tells that nothing has changed
            return self._turn
