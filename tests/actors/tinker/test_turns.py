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


def done(every: Models, cost: float = 1000.0) -> tuple[str, int] | None:
    """Do what is next; return whose it was, and its number."""
    chosen = every.choose()
    if chosen is None:
        return None
    every.charge(chosen[0], cost)
    every.applied(*chosen)
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


def filled(**users: int) -> Models:
    """Return models of users who have so many operations waiting."""
    every = Models(quantum=2000)
    for user, count in users.items():
        for seq in range(count):
            every.enqueue(user, operation(user[0], seq))
    return every


def test_a_light_user_waits_for_one_piece_of_heavy_ones() -> None:
    every = filled(heavy=40, large=40)
    for _ in range(21):
        done(every)
    for seq in range(2):
        every.enqueue("tiny", operation("t", seq))
    assert [done(every) for _ in range(2)] == [("tiny", 0), ("tiny", 1)]


def test_one_who_comes_again_and_again_does_not_keep_others_from_their_turns() -> None:
    every = filled(heavy=40)
    users: list[str] = []
    for seq in range(20):
        every.enqueue("often", operation("o", seq))
        users += [one[0] for _ in range(2) if (one := done(every))]
    assert 18 <= users.count("heavy") <= 22


def test_users_have_turns_by_their_weights() -> None:
    every = filled(half=60, one=60, two=60)
    every.turns.weights |= {"half": 0.5, "two": 2.0}
    users = [one[0] for _ in range(70) if (one := done(every))]
    assert [users.count(name) for name in ("half", "one", "two")] == [10, 20, 40]


def test_pieces_of_different_sizes_come_to_the_same_shares() -> None:
    every = filled(small=400, large=400)
    had: dict[str, float] = {"small": 0.0, "large": 0.0}
    for _ in range(200):
        chosen = every.choose()
        assert chosen is not None
        cost = 300.0 if chosen[0].user == "small" else 1900.0
        every.charge(chosen[0], cost)
        every.applied(*chosen)
        had[chosen[0].user] += cost
    assert abs(had["small"] - had["large"]) < 0.05 * had["large"]


def test_who_was_away_has_no_claim_to_the_time_that_was_not_used() -> None:
    every = filled(first=40)
    for _ in range(20):
        done(every)
    for seq in range(20):
        every.enqueue("second", operation("s", seq))
    users = [one[0] for _ in range(20) if (one := done(every))]
    assert 7 <= users.count("first") <= 13


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
