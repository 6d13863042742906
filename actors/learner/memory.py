"""Memory of a learner's GPU: settings chosen at the start, smaller passes, turns with an engine.

The number of tokens in a pass affects the last bits of a sum, so it is part of each batch record: a
repeated or replayed step has the same passes. The current number is in checkpoints.

Ranks that share a model cannot repeat a step in place (`training/rank_batches.py`). Their learner
stores the smaller number of tokens, ends, and is restarted: the step is recorded but not yet
trained.
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
from ..policy.model_folder import fetch_configs
from ..runtime import JobContext
from ..training.rank_batches import smaller_pass
from ..training.state import LearnerState

_FILE = "smaller_passes.json"
_log = structlog.get_logger()


def with_chosen_settings(
    config: JobConfig, card: GpuCard | None, *, shared: bool = False
) -> JobConfig:
    """Return a configuration with the learner's `auto` keys chosen for a card; blocks.

    `shared`: an engine uses the same card. Without a card the keys keep the defaults of a CPU.
    """
    learner = config.learner
    if card is None or "auto" not in learner.settings.values():
        return config
    fetch_configs(config)
    models = find_models(config)
    settings = choose_learner_settings(config, models, card, shared=shared)
    _log.info("learner_settings_chosen", gpu=card.name, **settings._asdict())
    return config.model_copy(update={"learner": learner.model_copy(update=settings._asdict())})


class SmallerPasses(NamedTuple):
    """The step from which passes are smaller than recorded, and their tokens."""

    step: int
    microbatch_tokens: int


def read_smaller_passes(run_dir: Path) -> SmallerPasses | None:
    """Return the smaller passes that a learner out of memory stored; None if there are none."""
    try:
        values = json.loads((run_dir / _FILE).read_text())
        return SmallerPasses(int(values["step"]), int(values["microbatch_tokens"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PassTokens:
    """The tokens of a pass in each step."""

    def __init__(
        self, config: JobConfig, run_dir: Path, state: LearnerState, *, auto: bool
    ) -> None:
        """Begin with the tokens of the checkpoint's state if they are chosen automatically."""
        self._configured = config.learner.pass_tokens
        self._smaller = read_smaller_passes(run_dir)
        self._state = state
        if not (auto and state.microbatch_tokens):
            state.microbatch_tokens = self._configured
        if self._smaller is not None and state.step + 1 >= self._smaller.step:
            self.note(min(state.microbatch_tokens, self._smaller.microbatch_tokens))

    @property
    def now(self) -> int:
        """Tokens of a pass in the next unrecorded step."""
        return self._state.microbatch_tokens

    def of(self, record: BatchRecord) -> int:
        """Return the tokens of a pass in a recorded step."""
        tokens = record.microbatch_tokens or self._configured
        if self._smaller is not None and record.step >= self._smaller.step:
            tokens = min(tokens, self._smaller.microbatch_tokens)
        return tokens

    def note(self, tokens: int) -> None:
        """Use the tokens of the trained step from now on."""
        self._state.microbatch_tokens = tokens


def smaller_passes_after(
    config: JobConfig, run_dir: Path, error: OutOfMemoryError
) -> TinkermqError:
    """Store smaller passes for ranks out of memory; return the error to raise.

    The learner is restarted after that error, unless it is `error` itself: then the step did not
    fit in smaller passes either.
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
# `schemas/plan` decides how much memory each gets, and whether they take turns. Either both keep a
# share of the memory and compute at the same time, or the engine sleeps while the learner trains:
# then the learner requests the GPU before a step, and returns it after the snapshot of the new
# version. Each request of the generator has its state, so that neither stores the other's state:
# a restarted learner or generator continues from there.

_POLL_S = 2.0
_FREE_S = 900.0
"""Time for a generator to free the GPU, as its engine may be starting."""
T = TypeVar("T")


def gpu_use_of(
    config: JobConfig, policies: Sequence[nn.Module], critics: Sequence[nn.Module] = ()
) -> GpuUse:
    """Return how the GPU of this process is shared; on a CPU the engine sleeps if configured.

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
    """Count the weights of loaded models with unknown shapes."""
    return counted_models(
        config,
        weights=_num_weights(policies),
        trained=_num_weights(policies, trained=True),
        critics=_num_weights(critics),
    )


def _num_weights(models: Sequence[nn.Module], *, trained: bool = False) -> int:
    weights = (weight for model in models for weight in model.parameters())
    return sum(weight.numel() for weight in weights if weight.requires_grad or not trained)


class GpuTurns:
    """The learner's side of the turns: the learner uses the GPU while it trains."""

    def __init__(self, context: JobContext, use: GpuUse | None) -> None:
        """Share a GPU according to `use`; None: the learner has its own GPU."""
        self._context = context
        self._use = use
        self._turn = GpuTurn(number=0, asleep=False, version=-1)
        if use is not None:
            shares = {"memory_share": use.memory_share, "sleeps": use.sleeps}
            self._turn = self._turn.model_copy(update=shares)
        self._changed = asyncio.Condition()
        self._free_at = -1
        """Number of the turn in which the generator last slept."""

    async def serve(self) -> None:
        """Answer the generator; call it once the models are loaded."""
        if self._use is not None:
            subject = self._context.scope.gpu_turn(self._context.name)
            await self._context.service.endpoint("turn", subject, GpuTurnRequest, self._answer)

    async def published(self, version: int) -> None:
        """Return the GPU to the engine, with the learner's published version."""
        await self._advance(asleep=False, version=version)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Hold the GPU exclusively within the block, if the engine has to free it.

        Raises EngineError for a generator that does not free it.
        """
        if self._use is None or not self._use.sleeps:
            yield
            return
        await self._acquire()
        try:
            yield
        finally:
            await self.published(self._context.step or 0)

    def freeing(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return a function that runs the work and then frees torch's cached memory.

        The engine allocates its memory again when the new version is published.
        """

        def run() -> T:
            try:
                return work()
            finally:
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()

        return run if self._use is not None and self._use.sleeps else work

    async def _acquire(self) -> None:
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
        """Record the generator's state; answer once there is another turn."""
        async with self._changed:
            if request.asleep and request.seen == self._turn.number:
                self._free_at = request.seen
                self._changed.notify_all()
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait_for(lambda: self._turn.number != request.seen)
            except TimeoutError:
                pass  # the answer repeats the turn
            return self._turn
