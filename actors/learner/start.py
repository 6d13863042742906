"""Builds a learner: model, data order, state, checkpoints, trackers."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...broker.rollouts import BatchLog, RolloutLog
from ...envs.data import ChatData
from ...envs.host_client import Environments
from ...schemas.config.job import JobConfig
from ...schemas.config.sections import given_section
from ...schemas.local.disk import with_room
from ...schemas.metric import LOST_STEPS
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import OutOfMemoryError, StorageError, TinkermqError, root_cause
from ..policy.devices import let_segments_grow, own_card, own_device
from ..policy.lora import refuse_other_kind
from ..policy.model_folder import load_generation_config, load_tokenizer
from ..runtime import EXIT_DONE, EXIT_DRAINED, JobContext
from ..storage.checkpoints import CheckpointMirror, own_folder
from ..training.checkpoint import CheckpointStore, load_state, try_saving
from ..training.functions.calls import OwnFunctions
from ..training.numerics import settle_numerics
from ..training.parallel import once_in_torch
from ..training.policies import Policies, load_models
from ..training.ranks import Ranks
from ..training.state import LearnerState
from .compute import Compute
from .curriculum import Curriculum, CurriculumConfig
from .data_order import DataOrder, TaskOrder, total_steps
from .failures import deserted
from .intake import stream_recreated
from .learner import Learner
from .memory import PassTokens, smaller_passes_after, with_chosen_settings
from .ranks.processes import PlacedRanks
from .reporter import (
    forget_reported,
    last_reported_step,
    open_reporter,
    restore_reported,
    store_reported,
)
from .rewind import held_records, records_behind, why_not_held
from .saving import open_mirror


async def run_learner(context: JobContext) -> int:
    """Run the learner of a job to its end; return the exit code."""
    await context.serve_control()
    shared = context.record.is_colocated
    settle = partial(with_chosen_settings, context.config, own_card(), shared=shared)
    context.config = await asyncio.to_thread(settle)
    if not shared:
        let_segments_grow()
    alone = context.config.learner.ranks == 1
    ranks = Ranks(context.config) if alone else PlacedRanks(context)
    try:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(ranks.watch(), name="ranks")
            code = await _run(context, ranks)
            watching.cancel()
        return code
    except BaseExceptionGroup as errors:
        cause = root_cause(errors)
        if isinstance(cause, OutOfMemoryError):
            lower = partial(smaller_passes_after, context.config, context.run_dir, cause)
            cause = await asyncio.to_thread(lower)
        raise cause from errors
    finally:
        await asyncio.to_thread(ranks.close)


async def _run(context: JobContext, ranks: Ranks) -> int:
    learner = await context.unless_stopping(make_learner(context, ranks), stopped=None)
    if learner is None:
        return EXIT_DONE if context.stop_asked else EXIT_DRAINED
    return await learner.run()


async def make_learner(context: JobContext, ranks: Ranks) -> Learner:
    """Load the job's models and state, from its newest checkpoint if it has one."""
    config = context.config
    functions = await asyncio.to_thread(OwnFunctions.of, config, context.hidden)
    settle_numerics(config.learner, on_gpu=own_device().type == "cuda")
    torch.set_num_threads(config.learner.threads)
    checkpoints = CheckpointStore(
        context.run_dir,
        keep_last=config.training.keep_last,
        keep_every=config.training.keep_every,
    )
    wrong = await asyncio.to_thread(_fetch_newest, context, open_mirror(context), checkpoints)
    start = await _start_of_records(context, checkpoints)
    start.damaged.extend(wrong)
    folder, state = start.folder, start.state
    await _report_damaged(context, start)
    if folder is not None:
        refuse_other_kind(folder, config.lora)
    in_torch = partial(once_in_torch, config.learner.threads)
    loading = in_torch(partial(load_models, config, folder))
    num_rows, models = await asyncio.gather(_num_rows(context), loading)
    steps = total_steps(config.training, num_rows)
    policies = await in_torch(
        partial(
            Policies.open,
            config,
            models,
            ranks,
            total_steps=steps,
            functions=functions,
            folder=folder,
        )
    )
    tokenizer = load_tokenizer(
        str(folder or config.model.tokenizer or config.model.path),
        trust_remote_code=config.model.trust_remote_code,
    )
    if folder is None or str(folder) == context.record.fork_dir:
        await _try_saving(context, policies, tokenizer)
    state.total_steps = steps
    state.note_numerics(policies.numerics)
    configured = given_section(context.record.config, "learner").get("microbatch_tokens", "auto")
    passes = PassTokens(config, context.run_dir, state, auto=configured == "auto")
    return Learner(
        context,
        Compute(context, policies, tokenizer, passes),
        state,
        await asyncio.to_thread(task_order, config, num_rows, state, functions),
        checkpoints,
        await open_reporter(context, state),
        functions,
    )


async def _try_saving(context: JobContext, policies: Policies, tokenizer: Any) -> None:
    """Save a trial checkpoint before anything is trained; raises ModelError.

    For large models it has no weights, which would take minutes to write.
    """
    is_small = policies.num_bytes <= _TRIED_WHOLE_BYTES
    save = policies.save if is_small else policies.save_form
    model = context.config.model
    settings = await asyncio.to_thread(load_generation_config, model.path)
    trial = partial(
        try_saving,
        context.run_dir,
        partial(save, tokenizer=tokenizer),
        tokenizer,
        settings,
        trust_remote_code=model.trust_remote_code,
    )
    threads = context.config.learner.threads
    write = partial(once_in_torch, threads, trial)
    await with_room(write, "a checkpoint to try saving by", context.missing)


def _fetch_newest(
    context: JobContext, mirror: CheckpointMirror | None, checkpoints: CheckpointStore
) -> list[TinkermqError]:
    """Fetch the newest checkpoint of the job's store; return damaged ones, local and stored.

    Raises StorageError for a store that cannot be written.
    """
    if mirror is None:
        return []
    mirror.check()
    own_folder(context.run_dir, context.scope.job)
    _, damaged = checkpoints.latest_whole()
    return [*damaged, *mirror.fetch_newest(checkpoints.folder)]


def task_order(
    config: JobConfig, num_rows: int | None, state: LearnerState, functions: OwnFunctions
) -> TaskOrder:
    """Return the configured order of tasks, with its state; blocks."""
    training, order = config.training, DataOrder(config.seed, num_rows)
    num_items = num_rows or training.curriculum_tasks
    if training.curriculum == "none" or num_items is None:
        return order
    settings = CurriculumConfig(
        num_items, training.curriculum_uniform, config.evaluation.success_reward
    )
    if (own := functions.get("curriculum", training.own_curriculum)) is not None:
        settings = replace(settings, weigh=own.weights)
    return Curriculum(order, settings, state)


_TRIED_WHOLE_BYTES = 1 << 30
"""Below this size, a trial checkpoint includes the weights, which takes seconds."""
_FRESH_LOG: dict[str, Any] = {
    "numerics": [],
    "batch_seq": 0,
    "log_seq": 1,
    "decided_seqs": [],
    "unrecorded": [],
    "judged_seq": 0,
    "newest_decided": (0, ""),
}
"""Fields about the log and steps that are new in a fork's state."""


class StartingPoint(NamedTuple):
    """Where a learner starts."""

    folder: Path | None
    """The checkpoint; None for the initial model."""
    state: LearnerState
    damaged: list[TinkermqError]
    """The errors of newer, damaged checkpoints."""
    newer: list[TinkermqError]
    """The errors of checkpoints that are newer than what the broker holds."""


def starting_point(checkpoints: CheckpointStore, fork_dir: str) -> StartingPoint:
    """Return the newest undamaged checkpoint, or the run's origin.

    A fork starts from another run's checkpoint, with a new log and a new frontier. Raises
    StorageError if that checkpoint is damaged.
    """
    latest, damaged = checkpoints.latest_whole()
    if latest is not None:
        return StartingPoint(latest, load_state(latest), damaged, [])
    if not fork_dir:
        return StartingPoint(None, LearnerState(), damaged, [])
    folder = Path(fork_dir)
    state = load_state(folder).model_copy(update=_FRESH_LOG)
    return StartingPoint(folder, state, damaged, [])


async def _start_of_records(context: JobContext, checkpoints: CheckpointStore) -> StartingPoint:
    """Return the newest undamaged checkpoint that agrees with the broker's logs.

    A fenced-off learner may have written one that disagrees. One that is newer than the logs is
    set aside, too, unless the logs no longer hold what comes after an earlier one. Empty logs that
    are as old as the run are from before its first step: it begins again. Raises StorageError for a
    log that was deleted and made again.
    """
    started = context.record.started or time.time()
    log = RolloutLog(context.broker, context.scope)
    batches = BatchLog(context.broker, context.scope)
    damaged, newer = list[TinkermqError](), list[TinkermqError]()
    newest: int | None = None
    while True:
        start = await asyncio.to_thread(starting_point, checkpoints, context.record.fork_dir)
        damaged.extend(start.damaged)
        start = start._replace(damaged=damaged, newer=newer)
        folder, state = start.folder, start.state
        if folder is None or folder.parent != checkpoints.folder:
            if newest is None or await log.first_seq() <= state.log_seq:
                return start
            folder = await asyncio.to_thread(checkpoints.put_back, newest)
            return start._replace(folder=folder, state=await _with_new_log(folder, log))
        records = await held_records(batches, log, state.step)
        if state.batch_seq and not records and await batches.made() > started:
            raise stream_recreated("log of batches", 0, state.batch_seq, batches.stream)
        if (error := unlike_records(folder, state, records)) is not None:
            damaged.append(error)
        elif (error := await why_not_held(folder, state, records, log)) is not None:
            newer.append(error)
            newest = newest or state.step
        else:
            return start
        await asyncio.to_thread(checkpoints.put_aside, folder, state.step)


async def _with_new_log(folder: Path, log: RolloutLog) -> LearnerState:
    """Return the state of a checkpoint that the logs do not hold, to go on with what they hold.

    The numbers of trained tasks keep entries of the log from being trained twice.
    """
    state = await asyncio.to_thread(load_state, folder)
    fresh = {**_FRESH_LOG, "numerics": state.numerics, "log_seq": await log.first_seq()}
    return state.model_copy(update=fresh)


def unlike_records(
    folder: Path, state: LearnerState, records: Sequence[BatchRecord]
) -> StorageError | None:
    """Return the error of a checkpoint that contradicts the records; None if it agrees.

    The record after a checkpoint lists all entries dropped before it but not yet recorded.
    """
    following = next((record for record in records if record.step == state.step + 1), None)
    if following is None:
        return None
    named = {item.seq for item in following.dropped}
    if not (other := [item.seq for item in state.unrecorded if item.seq not in named]):
        return None
    return StorageError(
        f"checkpoint {folder} was written by a fenced-off learner: it had dropped entries "
        f"{other[:5]} of the rollout log, which the record of step {following.step} does not name",
        hint="the checkpoint before it is used; no recorded step is lost",
    )


async def _report_damaged(context: JobContext, start: StartingPoint) -> None:
    """Report damaged checkpoints; raise StorageError if the log after the good one was trimmed.

    A node that sees other files under the run's folder finds no checkpoint at all.
    """
    used = start.folder or "the model that the run began with"
    for error in start.damaged:
        await context.event("checkpoint_damaged", f"{error.message}; used instead: {used}")
    await _report_rewound(context, start, str(used))
    there = await RolloutLog(context.broker, context.scope).first_seq()
    if there <= start.state.log_seq:
        return
    if start.damaged:
        raise StorageError(
            f"{start.damaged[0].message}; the checkpoint before is of step "
            f"{start.state.step}, and the rollout log was trimmed behind it",
            hint="restore the file, or fork the run from a whole checkpoint; how far a run can go "
            "back depends on training.keep_last and limits.rollout_bytes",
        )
    raise StorageError(
        f"the newest checkpoint that this node sees below {context.run_dir} is of step "
        f"{start.state.step}, and the rollout log was trimmed behind a later one",
        hint="the nodes of a run must see the same files under output_dir; or set storage.url "
        "(`broker:` needs nothing else)",
    )


async def _report_rewound(context: JobContext, start: StartingPoint, used: str) -> None:
    """Report a broker's store that was set back; its numbers and the run folder's agree again."""
    batches = BatchLog(context.broker, context.scope)
    log = RolloutLog(context.broker, context.scope)
    records = await records_behind(batches, log, start.state.step)
    last = records[-1].step if records else start.state.step
    await restore_reported(context)
    reported = await asyncio.to_thread(last_reported_step, context.run_dir)
    if not start.newer and reported <= last:
        return
    why = f"; {start.newer[0].message}" if start.newer else ""
    await context.event(
        "store_rewound",
        f"the broker's store was set back: the run was at step {max(reported, last)}, its logs "
        f"hold step {last}; it goes on from {used}{why}",
        step=last,
        lost_steps=max(reported - last, 0),
    )
    context.numbers[LOST_STEPS] = float(max(reported - last, 0))
    await asyncio.to_thread(forget_reported, context.run_dir, last)
    await store_reported(context)


async def _num_rows(context: JobContext) -> int | None:
    """Count the rows of the data: here for an SFT job, else at the environment hosts.

    Raises GameError if no host starts.
    """
    config = context.config
    if config.sft.data:
        return await asyncio.to_thread(_num_sft_rows, config.sft.data)
    if config.training.tasks == "external" and config.training.num_steps is not None:
        return None
    environments = Environments(context.broker, context.scope, config.env, context.missing)
    try:
        async with asyncio.timeout(config.limits.idle_s):
            return (await environments.describe()).num_train
    except TimeoutError:
        raise deserted(config.limits.idle_s) from None


def _num_sft_rows(files: list[str]) -> int:
    with contextlib.closing(ChatData(files)) as data:
        return len(data)
