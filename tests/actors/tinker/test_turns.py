"""Whose operation is done next, and what a user may have waiting."""

import pytest
from tinkermq.actors.tinker import models
from tinkermq.actors.tinker.models import Models
from tinkermq.schemas.tinker.names import ModelName
from tinkermq.schemas.tinker.operation import MAX_BODY_BYTES, ModelOperation
from tinkermq.schemas.wire.errors import BusyError, QuotaError, StateError


def operation(session: str, seq: int, body: bytes = b"") -> ModelOperation:
    kind = "create_model" if seq == 0 else "optim_step"
    return ModelOperation(kind=kind, model=f"{session}:train:0", seq=seq, body=body)


def done(every: Models, cost: float = 1.0) -> tuple[str, int] | None:
    """Do what is next; return whose it was, and its number."""
    chosen = every.choose()
    if chosen is None:
        return None
    every.applied(*chosen, cost)
    return chosen[0].user, chosen[1].seq


def test_operations_wait_for_those_before_them_in_whichever_order_they_come() -> None:
    every = Models()
    for seq in (0, 3, 2):
        every.enqueue("ada", operation("a", seq))
    assert done(every) == ("ada", 0)
    model = every.find("ada", ModelName("a", 0))
    assert model is not None
    assert model.has_gap
    assert done(every) is None
    every.enqueue("ada", operation("a", 1))
    assert [done(every) for _ in range(4)] == [("ada", 1), ("ada", 2), ("ada", 3), None]


def test_what_comes_again_changes_nothing() -> None:
    every = Models()
    every.enqueue("ada", operation("a", 0))
    assert done(every) == ("ada", 0)
    every.enqueue("ada", operation("a", 0))
    every.enqueue("ada", operation("a", 1, b"first"))
    model = every.enqueue("ada", operation("a", 1, b"second"))
    assert model.waiting[1].body == b"first"
    assert done(every) == ("ada", 1)
    assert done(every) is None


def test_a_light_user_waits_for_one_operation_of_a_heavy_one() -> None:
    every = Models()
    for seq in range(40):
        every.enqueue("heavy", operation("h", seq))
    for _ in range(20):
        done(every)
    for seq in range(3):
        every.enqueue("light", operation("l", seq))
    order = [done(every) for _ in range(6)]
    assert order.count(("light", 0)) == order.count(("light", 2)) == 1


def test_who_was_away_has_no_claim_to_the_time_that_was_not_used() -> None:
    every = Models()
    for seq in range(40):
        every.enqueue("first", operation("f", seq))
    for _ in range(20):
        done(every)
    for seq in range(20):
        every.enqueue("second", operation("s", seq))
    users = [one[0] for _ in range(20) if (one := done(every))]
    assert 9 <= users.count("first") <= 11


def test_a_user_has_bounds_that_cost_nobody_else() -> None:
    every = Models()
    big = b"x" * MAX_BODY_BYTES
    for seq in range(models.MAX_WAITING_BYTES // MAX_BODY_BYTES):
        every.check_room("ada", operation("a", seq, big))
        every.enqueue("ada", operation("a", seq, big))
    with pytest.raises(BusyError, match="wait for user 'ada'"):
        every.check_room("ada", operation("a", 99, big))
    every.check_room("bob", operation("b", 0, big))
    done(every)
    every.check_room("ada", operation("a", 99, big))


def test_numbers_far_ahead_and_models_without_end_are_refused() -> None:
    every = Models()
    with pytest.raises(StateError, match="too far ahead: number 0 is next"):
        every.check_room("ada", operation("a", models.MAX_AHEAD))
    for number in range(models.MAX_MODELS):
        every.enqueue("ada", operation(f"a{number}", 0))
    with pytest.raises(QuotaError, match="has 256 models"):
        every.check_room("ada", operation("more", 0))
