"""Dropped groups are told as events that cannot flood the job's stream, with examples."""

from typing import Any, cast

from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.learner.intake import REPORT_EVERY_S, Drops, Intake
from tinkermq.actors.learner.tasks import Ledger
from tinkermq.actors.training.state import LearnerState
from tinkermq.broker.jetstream.direct_get import StoredMessage
from tinkermq.broker.rollouts import RolloutLog, read_entry
from tinkermq.schemas.task import Dropped, DropReason
from tinkermq.schemas.wire.subjects import JobScope

SCOPE = JobScope("local", "drops")


class World:
    """A learner's bookkeeping about groups that cannot be read, and the events it tells."""

    def __init__(self, state: LearnerState | None = None, *, external: bool = False) -> None:
        self.now = 0.0
        self.told: list[tuple[str, str, dict[str, Any]]] = []
        self.ledger = Ledger(LearnerState())
        self.intake = Intake(
            RolloutLog(cast(Any, None), SCOPE),
            self.ledger,
            vocab_size=10,
            max_tokens=10,
            group_size=1,
            greedy_baseline=False,
        )
        self.drops = Drops(
            self.intake,
            self.ledger,
            DataOrder(0, None),
            state or LearnerState(),
            self.tell,
            lambda: self.now,
            external=external,
        )

    async def tell(self, kind: str, message: str, **data: Any) -> None:
        self.told.append((kind, message, data))

    def drop(self, number: int, reason: DropReason = "malformed", *, told: bool = False) -> None:
        seq = number + 1
        raw = read_entry(StoredMessage(SCOPE.rollout(number), seq, b"nonsense", {}))
        self.intake._enter(raw, self.intake._check(raw))
        self.drops.drop([Dropped(seq=seq, task=number, reason=reason)], reported=told)


async def test_the_first_is_told_at_once_and_many_in_one_event() -> None:
    world = World()
    world.drop(0)
    await world.drops.report_drops()
    [(kind, message, data)] = world.told
    assert kind == "groups_dropped"
    assert message.startswith("1 group was dropped (1 malformed); the tasks of 0 are issued again")
    assert "task 0: " in message
    assert data == {"dropped": {"malformed": 1}, "issued_again": 0}
    for number in range(1, 1000):
        world.drop(number)
        await world.drops.report_drops()
    assert len(world.told) == 1
    world.now = REPORT_EVERY_S
    await world.drops.report_drops()
    assert world.told[1][2]["dropped"] == {"malformed": 999}
    assert len(world.told[1][1].splitlines()) == 4  # with three examples
    world.now = 10 * REPORT_EVERY_S
    await world.drops.report_drops(now=True)
    assert len(world.told) == 2
    assert world.drops.num_by_reason == {"malformed": 1000}


async def test_the_same_reason_is_told_ever_more_rarely_and_a_new_one_at_once() -> None:
    world = World()
    steps = [(0, "stale", 1), (1, "stale", 2), (2, "stale", 2), (3, "stale", 3), (3, "failed", 4)]
    for number, (pauses, reason, told) in enumerate(steps):
        world.now = pauses * REPORT_EVERY_S
        world.drop(number, cast("DropReason", reason))
        await world.drops.report_drops()
        assert len(world.told) == told


async def test_what_is_asked_for_or_was_told_before_is_not_told() -> None:
    world = World(external=True)
    world.drop(0, "equal_rewards")
    world.drop(1, "duplicate")
    world.drop(2, told=True)
    await world.drops.report_drops(now=True)
    assert world.told == []
    world.drop(3)
    await world.drops.report_drops()
    assert world.told[0][1].endswith("must publish 1 more; the run waits for them")


def test_what_no_batch_record_names_yet_outlives_a_crash() -> None:
    world, state = World(), LearnerState()
    world.drop(4)
    world.drops.write_to(state)
    again = World(LearnerState.model_validate_json(state.model_dump_json()))
    assert [item.seq for item in again.drops.unrecorded] == [5]
    assert again.drops.take_unrecorded() == [Dropped(seq=5, task=4, reason="malformed")]
    assert again.drops.take_unrecorded() == []
