"""What the broker still holds of a run whose store was set back.

nats-server may confirm a message before its disk has it. After a loss of power, from a restored
copy, or with a damaged block, the rollout log and the batch log end before what a checkpoint or a
running learner knows. A learner then starts from the newest checkpoint that both logs hold, trains
the recorded steps after it whose groups are there, and goes on with new groups. Entries of the log
and steps that are gone count as never made, and their tasks are issued again.
"""

from collections.abc import Sequence
from pathlib import Path

from ...broker.rollouts import BatchLog, RolloutLog
from ...schemas.task import BatchRecord
from ...schemas.wire.errors import StorageError
from ..training.state import LearnerState
from .intake import stream_recreated


async def held_records(batches: BatchLog, log: RolloutLog, step: int) -> list[BatchRecord]:
    """Return the records from `step` on, up to the newest whose groups the rollout log holds.

    If it holds those of no such step, earlier records are returned, too. Raises StorageError if it
    holds those of no step at all: it was deleted and made again.
    """
    records = await batches.read_since(step)
    held = await _held_of(records, log)
    if not held and step:  # the store was set back to before it
        records = await batches.read_since(0)
        held = await _held_of(records, log)
    if records and not held:
        known = max(records[-1].seqs)
        raise stream_recreated("rollout log", await log.last_seq(), known, log.stream)
    return held


async def _held_of(records: Sequence[BatchRecord], log: RolloutLog) -> list[BatchRecord]:
    held = list(records)
    while held and not await log.holds_batch(held[-1]):
        held.pop()
    return held


async def records_behind(batches: BatchLog, log: RolloutLog, step: int) -> list[BatchRecord]:
    """Return the records of the steps after `step` that can be trained again, in order.

    Raises StorageError as `held_records`.
    """
    lost, behind = await log.lost_seqs(), list[BatchRecord]()
    for record in await held_records(batches, log, step):
        if record.step <= step:
            continue
        if lost.intersection(record.seqs):
            break
        behind.append(record)
    return behind


async def why_not_held(
    folder: Path, state: LearnerState, records: Sequence[BatchRecord], log: RolloutLog
) -> StorageError | None:
    """Return the error of a checkpoint that is newer than the logs; None if they hold it.

    `records` are those that the rollout log holds.
    """
    if state.batch_seq and not any(record.step == state.step for record in records):
        last = records[-1].step if records else 0
        problem = f"the last step that the broker holds is {last}"
    elif not await log.holds(*state.newest_decided):
        problem = f"the broker no longer holds entry {state.newest_decided[0]} of the rollout log"
    else:
        return None
    return StorageError(
        f"checkpoint {folder} is newer than the broker's store, which was set back: {problem}",
        hint="the steps after the checkpoint that is used are trained anew",
    )
