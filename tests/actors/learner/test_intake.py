"""The intake keeps what can be trained, and refuses everything else without harm."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.learner.intake import CheckedEntry, Intake, batch_digest
from tinkermq.actors.learner.staleness import form_batch
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.direct_get import StoredMessage
from tinkermq.broker.rollouts import RolloutLog, read_entry
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Blame
from tinkermq.schemas.wire.errors import StorageError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.groups import make_group, make_trajectory, random_group
from tests.support.waiting import PATIENCE_S

SCOPE = JobScope("local", "intake")


def _intake(
    broker: Any = None, scope: JobScope = SCOPE, ledger: Ledger | None = None, **options: Any
) -> Intake:
    settings: dict[str, Any] = {
        "vocab_size": 264,
        "max_tokens": 40,
        "group_size": 2,
        "greedy_baseline": False,
        **options,
    }
    intake = Intake(
        RolloutLog(broker, scope), ledger or Ledger(LearnerState(next_task=100)), **settings
    )
    intake.note_version(3)
    return intake


def _taken(group: Group | bytes, number: int = 0, **options: Any) -> CheckedEntry:
    """Give the intake one message, as the log's reader does."""
    payload = group if isinstance(group, bytes) else group.to_bytes()
    intake = _intake(**options)
    raw = read_entry(StoredMessage(SCOPE.rollout(number), 7, payload, {}))
    intake._enter(raw, intake._check(raw))
    return intake[7]


def _good(**fields: Any) -> Group:
    return make_group(
        [
            make_trajectory([1, 2], [([3, 4], [5]), ([6], [])], [0.5, 1.0], versions=[1, 2, 3]),
            make_trajectory([1, 2], [([3], [])], [0.0], versions=3),
        ],
        **fields,
    )


def test_a_good_group_can_be_trained() -> None:
    entry = _taken(_good())
    assert entry.candidate.unusable is None
    assert entry.candidate.rewards == (1.5, 0.0)
    assert entry.candidate.min_token_version == 1
    assert entry.group is not None
    assert entry.task == entry.group.task


def test_a_task_that_was_given_up_has_failed() -> None:
    blame = Blame(boundary="engine", code="oom", message="out of memory")
    given_up = _good().model_copy(update={"trajectories": [], "error": blame, "tokens_wasted": 9})
    entry = _taken(given_up)
    assert entry.candidate.unusable == "failed"
    assert entry.group is None
    assert entry.tokens_wasted == 9
    assert entry.task == given_up.task


def _mask(place: int, value: int) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        group.trajectories[0].mask[place] = value

    return change


def _set(name: str, place: int, value: float) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        getattr(group.trajectories[0], name)[place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_set("token_ids", 3, 264), id="token beyond the vocabulary"),
        pytest.param(_set("token_ids", 0, -1), id="negative token"),
        pytest.param(_mask(0, 1), id="the first token is generated"),
        pytest.param(_mask(2, 2), id="mask of 2"),
        pytest.param(_mask(5, 0), id="a turn ends on no generated token"),
        pytest.param(_set("logprobs", 2, np.nan), id="log-prob is not a number"),
        pytest.param(_set("logprobs", 2, -np.inf), id="log-prob of minus infinity"),
        pytest.param(_set("logprobs", 2, 0.5), id="positive log-prob"),
        pytest.param(_set("versions", 2, 4), id="version from the future"),
        pytest.param(_set("versions", 2, -1), id="no version"),
        pytest.param(_set("turn_ends", 0, 5), id="turns do not ascend"),
        pytest.param(_set("turn_ends", 1, 6), id="a turn ends after the last token"),
        pytest.param(_set("turn_ends", 0, -2), id="a turn ends before the first token"),
        pytest.param(_set("rewards", 0, np.nan), id="reward is not a number"),
        pytest.param(_set("rewards", 1, np.inf), id="infinite reward"),
    ],
)
def test_a_malformed_group_is_refused(change: Callable[[Group], None]) -> None:
    group = _good()
    change(group)
    entry = _taken(group)
    assert entry.candidate.unusable == "malformed"
    assert entry.group is None


def test_returns_that_overflow_are_refused() -> None:
    group = _good()
    group.trajectories[0].rewards[:] = 3e38
    with np.errstate(over="ignore"):
        assert _taken(group).candidate.unusable == "malformed"


def test_a_group_that_does_not_fit_the_job_is_refused() -> None:
    assert _taken(_good(), max_tokens=5).candidate.unusable == "malformed"
    assert _taken(_good(), group_size=3).candidate.unusable == "malformed"
    assert _taken(_good(), greedy_baseline=True).candidate.unusable == "malformed"
    greedy = [*_good().trajectories, make_trajectory([1], [([2], [])], [0.0], greedy=True)]
    assert _taken(make_group(greedy)).candidate.unusable == "malformed"
    assert _taken(make_group(greedy), greedy_baseline=True).candidate.unusable is None
    assert _taken(_good(), ledger=Ledger(LearnerState())).candidate.unusable == "malformed"
    ledger = Ledger(LearnerState())
    ledger.note_task(_good().task.model_copy(update={"index": 9}))
    other = _taken(_good(), ledger=ledger)
    assert other.candidate.unusable == "malformed"
    assert "the issued task is position 9" in other.refusal


def test_episodes_of_several_rows_are_refused_by_a_job_that_takes_a_row_for_an_episode() -> None:
    parts = [
        make_trajectory([1], [([2], [])], [1.0], episode=0),
        make_trajectory([1], [([3], [])], [0.0], episode=0),
        make_trajectory([1], [([3], [])], [0.0], episode=1),
    ]
    group = make_group(parts)
    assert _taken(group).candidate.rewards == (1.0, 0.0)
    entry = _taken(group, why_no_rows="algorithm.loss=gspo clips a sequence as a whole")
    assert entry.candidate.unusable == "malformed"
    assert entry.refusal == (
        "the group of task 0 has episodes of several rows: algorithm.loss=gspo clips a sequence as "
        "a whole"
    )
    alone = [one.model_copy(update={"episode": -1}) for one in parts[1:]]
    assert _taken(make_group(alone), why_no_rows="of a reason").candidate.unusable is None


def test_bytes_that_are_no_group_are_refused() -> None:
    for payload in (b"", b"\xc1", b"hello", b"\x81\xa1v\x63", _good().to_bytes()[:-3]):
        entry = _taken(payload)
        assert entry.candidate.unusable == "malformed"
        assert entry.number == 0
        assert entry.task is None
    assert _taken(_good(), number=5).candidate.unusable == "malformed"  # another task's group


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.data())
def test_what_is_not_refused_can_be_trained(seed: int, data: st.DataObject) -> None:
    group = random_group(np.random.default_rng(seed), size=2, turns=2, version=3)
    item = group.trajectories[data.draw(st.integers(0, 1))]
    name = data.draw(st.sampled_from(["token_ids", "mask", "versions", "turn_ends", "rewards"]))
    array = getattr(item, name)
    limits = np.iinfo(array.dtype) if array.dtype.kind in "iu" else np.finfo(array.dtype)
    extremes = st.sampled_from([0, 1, 2, 7, int(limits.max > 0), limits.max, limits.min])
    array[data.draw(st.integers(0, len(array) - 1))] = data.draw(extremes)
    with np.errstate(over="ignore"):
        entry = _taken(group)
        if entry.group is None:
            assert entry.candidate.unusable == "malformed"
            return
        batch = assemble([entry.group])
    assert batch.num_tokens == int((batch.turn_N >= 0).sum())
    assert batch.num_seqs == int(batch.seq_N.max()) + 1


async def test_malformed_entries_harm_nothing_in_a_live_log(
    broker: Broker, scope: JobScope
) -> None:
    log, intake = RolloutLog(broker, scope), _intake(broker, scope)
    future = _good(number=2)
    future.trajectories[0].versions[2] = 9
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(intake.read_log())
        assert await log.append(_good(number=0))
        assert await log.append_payload(1, b"nonsense")
        assert await log.append(future)
        assert await log.append(_good(number=3))
        async with asyncio.timeout(PATIENCE_S):
            while intake.last_seq < 4:
                intake.changed.clear()
                await intake.changed.wait()
        reading.cancel()
    assert [entry.number for entry in intake.take_arrived()] == [0, 1, 2, 3]
    decision = form_batch(
        intake.candidates(), version=3, batch_size=2, max_staleness=2, policy="drop"
    )
    assert decision.train == [1, 4]
    assert decision.dropped == [(2, "malformed"), (3, "malformed")]
    intake.forget([1, 2, 3])
    assert intake.first_undecided() == 4
    intake.forget([4])
    assert intake.first_undecided() == 5


def test_what_newer_weights_made_is_trained_while_recorded_steps_are_trained_again() -> None:
    intake = _intake()
    intake.note_version(1)  # the step that is trained again
    raw = read_entry(StoredMessage(SCOPE.rollout(0), 7, _good().to_bytes(), {}))
    intake._enter(raw, intake._check(raw))
    assert intake[7].candidate.unusable is None


async def _caught_up(intake: Intake) -> None:
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(intake.read_log())
        async with asyncio.timeout(PATIENCE_S):
            await intake.catch_up(2 * PATIENCE_S)
        reading.cancel()


@pytest.mark.parametrize("lost", [0, 1, 3], ids=["all there", "newest gone", "trimmed"])
async def test_a_log_in_which_all_is_decided_has_been_read(
    broker: Broker, scope: JobScope, lost: int
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(3):
        assert await log.append(_good(number=number))
    if lost == 1:
        await broker.api(f"STREAM.MSG.DELETE.{scope.stream_rollout}", {"seq": 3})
    elif lost == 3:
        await log.trim(4)
    behind = _intake(broker, scope, from_seq=4)
    await _caught_up(behind)
    assert behind.first_undecided() == 4
    if lost != 3:
        last = _intake(broker, scope, from_seq=3 - lost)
        await _caught_up(last)
        assert last.candidates()


async def test_what_was_decided_on_behind_an_undecided_entry_is_not_decided_on_again(
    broker: Broker, scope: JobScope
) -> None:
    log = RolloutLog(broker, scope)
    for number in range(5):
        assert await log.append(_good(number=number))
    intake = _intake(broker, scope)
    await _caught_up(intake)
    intake.forget([1, 3, 4])
    state = LearnerState()
    intake.write_to(state)
    assert (state.log_seq, state.decided_seqs) == (2, [(3, 5)])
    again = _intake(broker, scope, from_seq=state.log_seq, decided=state.decided_seqs)
    await _caught_up(again)
    assert [one.seq for one in again.candidates()] == [2, 5]
    again.forget([5])
    again.write_to(state)
    assert (state.log_seq, state.decided_seqs) == (2, [(3, 6)])


async def test_a_log_that_ends_before_the_checkpoint_is_named(
    broker: Broker, scope: JobScope
) -> None:
    assert await RolloutLog(broker, scope).append(_good())
    with pytest.raises(StorageError, match=f"knows entry 8: stream {scope.stream_rollout} was"):
        await _intake(broker, scope, from_seq=9).catch_up(PATIENCE_S)


def test_the_digest_tells_groups_and_their_order_apart() -> None:
    first, second = _taken(_good()), _taken(_good(number=1), number=1)
    assert batch_digest([first, second]) == batch_digest([first, second])
    assert batch_digest([first, second]) != batch_digest([second, first])
