"""What a learner's GPU holds: settings chosen at its start, and smaller passes after a failure.

How many tokens a pass has decides the last bits of a sum, so each step's number is part of its
batch record: a step trained again, or replayed, has the same passes. The number in force is in
checkpoints.

Ranks that share a model cannot repeat a step in place (`training/out_of_memory.py`). Their learner
writes down the smaller passes, ends, and is started again: the step is recorded, and not trained.
"""

import json
from pathlib import Path
from typing import NamedTuple

import structlog

from ...broker.disk import remedy
from ...schemas.config.job import JobConfig
from ...schemas.plan.cards import GpuCard
from ...schemas.plan.settings import choose_learner_settings, find_models
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import EngineError, OutOfMemoryError, StorageError, TinkermqError
from ..training.out_of_memory import smaller_pass
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
