"""Rollouts in a run's folder: what the log no longer has, bounded in bytes, for people to read."""

from pathlib import Path

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import delete_job_streams
from tinkermq.broker.kept_rollouts import (
    RolloutKeeper,
    RunRollouts,
    keep_rollout,
    kept_rollouts,
    spread,
    thin_out,
)
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.schemas.task import BatchRecord
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.strategies import make_group

PLENTY = 1 << 20
STEPS = 40


async def trained(broker: Broker, scope: JobScope) -> tuple[RolloutLog, int]:
    """Fill a log: step N trains the entries 2N - 1 and 2N; return it and the last batch record."""
    log, batches, last = RolloutLog(broker, scope), BatchLog(broker, scope), 0
    for step in range(1, STEPS + 1):
        seqs = [2 * step - 1, 2 * step]
        for seq in seqs:
            assert await log.append(make_group(seq))
        record = BatchRecord(
            step=step, tasks=seqs, seqs=seqs, seed=0, digest="", learner="learner-0", time=0.0
        )
        last = await batches.append(record, last)
    return log, last


async def test_what_is_trimmed_archived_or_lost_is_still_read(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    log, last = await trained(broker, scope)
    keeper = RolloutKeeper(broker, scope, tmp_path, PLENTY)
    await keeper.sample(last // 2)
    await log.trim(STEPS)
    await keeper.sample(last)
    await log.trim(2 * STEPS - 3)
    await keeper.keep_newest()

    there = await RunRollouts.open(broker, scope, str(tmp_path))
    in_log = list(range(2 * STEPS, 2 * STEPS - 4, -1))
    assert there.before(None, 4) == in_log
    older = there.before(in_log[-1], 100)
    assert 8 <= len(older) <= 16
    assert min(older) < 10
    assert older == sorted(older, reverse=True)
    assert all(there.steps[seq] == (seq + 1) // 2 for seq in older)
    entry = await there.get(older[-1])
    assert entry is not None
    assert entry.group is not None
    assert entry.group.task.task == older[-1] == entry.number
    assert there.after(older[0]) == in_log[-1]
    assert there.after(2 * STEPS) is None

    await delete_job_streams(broker, scope)
    lost = await RunRollouts.open(broker, scope, str(tmp_path))
    assert lost.before(None, 100) == [*in_log, *older]
    assert RunRollouts.of_folder(tmp_path).before(None, 100) == [*in_log, *older]
    newest = await lost.get(2 * STEPS)
    assert newest is not None
    assert newest.payload == make_group(2 * STEPS).to_bytes()


async def test_a_folder_is_bounded_and_0_bytes_keep_nothing(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    _, last = await trained(broker, scope)
    nothing = RolloutKeeper(broker, scope, tmp_path / "nothing", 0)
    await nothing.sample(last)
    await nothing.keep_newest()
    assert not (tmp_path / "nothing").exists()

    size = len(make_group(1).to_bytes())
    keeper = RolloutKeeper(broker, scope, tmp_path, 12 * size)
    for seq in range(4, last + 1, 4):
        await keeper.sample(seq)
    await keeper.keep_newest()
    kept = kept_rollouts(tmp_path)
    assert sum(one.num_bytes for one in kept) <= 12 * size
    assert len(kept) >= 6
    assert [one.seq for one in kept][-3:] == [2 * STEPS - 2, 2 * STEPS - 1, 2 * STEPS]


async def test_a_folder_without_room_ends_no_run(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    _, last = await trained(broker, scope)
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    keeper = RolloutKeeper(broker, scope, tmp_path, PLENTY)
    await keeper.sample(last)
    await keeper.keep_newest()
    assert kept_rollouts(tmp_path) == []


def test_files_that_are_none_of_ours_are_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    keep_rollout(tmp_path, 7, b"not a group", 3, None)
    (folder / "2-1-1.group").symlink_to("/etc/passwd")
    (folder / "notes.txt").write_text("mine")
    (folder / "3-1-1.group").mkdir()
    (found,) = kept_rollouts(tmp_path)
    assert (found.seq, found.step, found.task) == (7, None, 3)
    thin_out(tmp_path, 1)
    assert kept_rollouts(tmp_path) == []
    assert (folder / "notes.txt").read_text() == "mine"
    assert kept_rollouts(tmp_path / "nowhere") == kept_rollouts("") == []


async def test_a_file_that_is_no_group_is_told_as_such(tmp_path: Path) -> None:
    keep_rollout(tmp_path, 7, b"not a group", 3, 1)
    entry = await RunRollouts.of_folder(tmp_path).get(7)
    assert entry is not None
    assert entry.group is None
    assert entry.error is not None


@pytest.mark.parametrize(
    ("behind", "last", "expected"),
    [(0, 3, [1, 2, 3]), (0, 8, [2, 4, 6, 8]), (5, 6, [6]), (10, 19, [13, 16, 19]), (4, 4, [])],
)
def test_records_are_picked_evenly(behind: int, last: int, expected: list[int]) -> None:
    assert spread(behind, last, 4) == expected
