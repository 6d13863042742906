"""What a learner's GPU holds: settings chosen at its start, smaller passes, turns with an engine.

How many tokens a pass has decides the last bits of a sum, so each step's number is part of its
batch record: a step trained again, or replayed, has the same passes. The number in force is in
checkpoints.

Ranks that share a model cannot repeat a step in place (`training/rank_batches.py`). Their learner
writes down the smaller passes, ends, and is started again: the step is recorded, and not trained.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog
import torch
from torch import nn

from ...schemas.config.job import JobConfig
from ...schemas.control import GpuTurn, GpuTurnRequest
from ...schemas.local.disk import remedy
from ...schemas.plan.cards import GpuCard
from ...schemas.plan.settings import (
    GpuUse,
    JobModels,
    choose_gpu_use,
    choose_learner_settings,
    counted_models,
    find_models,
    held_bytes,
)
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import EngineError, OutOfMemoryError, StorageError, TinkermqError
from ..policy.devices import own_card
from ..runtime import JobContext
from ..training.rank_batches import smaller_pass
from ..training.state import LearnerState

_FILE = "smaller_passes.json"
_log = structlog.get_logger()


def with_chosen_settings(
    config: JobConfig, card: GpuCard | None, *, shared: bool = False
) -> JobConfig:
    """Return a configuration whose `auto` keys of the learner are settled for a card.

    `shared`: an engine has the same card. Without a card, or for a model that is not known, it
    stays as it is: the defaults of a CPU.
    """
    learner = config.learner
    chosen = "auto" in learner.settings.values()
    models = find_models(config) if chosen and card is not None else None
    if card is None or models is None:
        return config
    settings = choose_learner_settings(config, models, card, shared=shared)
    _log.info("learner_settings_chosen", gpu=card.name, **settings._asdict())
    return config.model_copy(update={"learner": learner.model_copy(update=settings._asdict())})


class SmallerPasses(NamedTuple):
    """From which step on passes are smaller than recorded, and how small."""

    step: int
    microbatch_tokens: int


def read_smaller_passes(run_dir: Path) -> SmallerPasses | None:
    """Return what a learner that was out of memory wrote down; None if none was."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        return SmallerPasses(int(values["step"]), int(values["microbatch_tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PassTokens:
    """The tokens of a pass, step by step."""

    def __init__(
        self, config: JobConfig, run_dir: Path, state: LearnerState, *, auto: bool
    ) -> None:
        """Begin with those of the checkpoint's state where they are chosen (`auto`)."""
        self._configured = config.learner.pass_tokens
        self._smaller = read_smaller_passes(run_dir)
        self._state = state
        if not (auto and state.microbatch_tokens):
            state.microbatch_tokens = self._configured
        if self._smaller is not None and state.step + 1 >= self._smaller.step:
            self.note(min(state.microbatch_tokens, self._smaller.microbatch_tokens))

    @property
    def now(self) -> int:
        """Those of the next new step."""
        return self._state.microbatch_tokens

    def of(self, record: BatchRecord) -> int:
        """Return those of a recorded step."""
        tokens = record.microbatch_tokens or self._configured
        if self._smaller is not None and record.step >= self._smaller.step:
            tokens = min(tokens, self._smaller.microbatch_tokens)
        return tokens

    def note(self, tokens: int) -> None:
        """Go on with those of the step that was trained."""
        self._state.microbatch_tokens = tokens


def smaller_passes_after(
    config: JobConfig, run_dir: Path, error: OutOfMemoryError
) -> TinkermqError:
    """Write down smaller passes for ranks that were out of memory; return what to raise.

    That is an error after which the learner is started again, or the given one where the step did
    not fit in smaller passes either.
    """
    if not config.learner.sharded or not error.step:
        return error
    tried = read_smaller_passes(run_dir)
    smaller = smaller_pass(config, error.microbatch_tokens)
    if smaller is None or (tried is not None and tried.step == error.step):
        return error
    file = run_dir / _FILE
    try:
        file.write_text(json.dumps({"step": error.step, "microbatch_tokens": smaller}))
    except OSError as failure:
        return StorageError(f"{file} cannot be written: {failure}", hint=remedy(failure, file))
    _log.warning("step_out_of_memory", message=error.message, hint=error.hint)
    return EngineError(
        f"{error.message}: step {error.step} is tried again in micro-batches of {smaller} tokens",
        hint=error.hint,
    )


# -- a GPU that is shared with a generator ---------------------------------------------------------
# What each may hold, and whether they take turns at all, `schemas/plan` decides. Either both keep a
# share of the memory and compute at the same time, or the engine sleeps while the learner trains:
# then the learner asks for the GPU before a step, and gives it back after the new version is a
# snapshot. The generator tells in each request what it does, so that neither has to remember
# anything about the other: a learner or a generator that is started anew goes on from there.

_POLL_S = 2.0
_FREE_S = 900.0
"""How long a generator may take to free the GPU: its engine may just be starting."""
T = TypeVar("T")


def gpu_use_of(
    config: JobConfig, policies: Sequence[nn.Module], critics: Sequence[nn.Module] = ()
) -> GpuUse:
    """Return how the GPU of this process is shared; on a CPU the engine sleeps if it is told to.

    Raises ConfigError where learner and engine do not fit.
    """
    card = own_card()
    if card is None:
        return GpuUse(config.generator.memory_share, config.generator.sleep == "always")
    models = find_models(config) or models_of(config, policies, critics)
    settings = choose_learner_settings(config, models, card, shared=True)
    held = held_bytes(config, models, card, settings)
    return choose_gpu_use(config, held, card.memory_bytes)


def models_of(
    config: JobConfig, policies: Sequence[nn.Module], critics: Sequence[nn.Module]
) -> JobModels:
    """Count the weights of loaded models, whose shapes are not known."""
    return counted_models(
        config,
        weights=_num_weights(policies),
        trained=_num_weights(policies, trained=True),
        critics=_num_weights(critics),
    )


def _num_weights(models: Sequence[nn.Module], *, trained: bool = False) -> int:
    found = (p for model in models for p in model.parameters())
    return sum(p.numel() for p in found if p.requires_grad or not trained)


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

    async def published(self, version: int) -> None:
        """Tell that a version is there, with which the learner begins or goes on."""
        await self._advance(asleep=False, version=version)

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
            await self.published(self._context.step or 0)

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
