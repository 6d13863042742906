"""How many requests an engine with a paged cache works on at once."""

import asyncio

import pytest
from tinkermq.actors.engine.engine import Concurrency, RequestLimit


def test_the_bound_rises_while_requests_wait_and_the_cache_has_room() -> None:
    bound = Concurrency(fits=8, most=64)
    assert bound.limit == 8
    for _ in range(100):
        bound.step(bound.limit, wanted=True, cache_share=0.3, preempted=0)
    assert bound.limit == 64


@pytest.mark.parametrize(
    ("running", "wanted", "cache_share"), [(8, False, 0.3), (8, True, 0.85), (7, True, 0.3)]
)
def test_the_bound_stays_without_need_or_room_or_use(
    running: int, wanted: bool, cache_share: float
) -> None:
    bound = Concurrency(fits=8, most=64)
    bound.step(running, wanted=wanted, cache_share=cache_share, preempted=0)
    assert bound.limit == 8


def test_a_preemption_cuts_the_bound_but_never_below_what_fits_in_any_case() -> None:
    bound = Concurrency(fits=8, most=64)
    for _ in range(100):
        bound.step(bound.limit, wanted=True, cache_share=0.5, preempted=0)
    bound.step(60, wanted=True, cache_share=0.99, preempted=4)
    assert bound.limit == 42
    for _ in range(20):
        bound.step(bound.limit, wanted=True, cache_share=0.99, preempted=1)
    assert bound.limit == 8


def test_requests_that_new_weights_threw_out_of_an_empty_cache_cut_nothing() -> None:
    bound = Concurrency(fits=8, most=64)
    bound.step(8, wanted=True, cache_share=0.1, preempted=8)
    assert bound.limit == 8


def test_what_fits_is_bounded_by_what_is_allowed() -> None:
    assert Concurrency(fits=1000, most=64).limit == 64
    assert Concurrency(fits=0, most=64).limit == 1


async def test_the_gate_lets_in_as_many_as_the_bound_in_their_order() -> None:
    bound = Concurrency(fits=2, most=8)
    gate = RequestLimit(bound)
    places = [gate.request_place() for _ in range(5)]
    assert [place.done() for place in places] == [True, True, False, False, False]
    assert (gate.inside, gate.waiting) == (2, 3)
    gate.leave(places[3])  # whoever gives up waiting frees no place
    gate.leave(places[0])
    assert [place.done() for place in places[2:]] == [True, True, False]
    assert places[3].cancelled()
    assert (gate.inside, gate.waiting) == (2, 1)
    bound.limit = 3
    gate.admit()
    await asyncio.wait_for(places[4], 1)
    assert (gate.inside, gate.waiting) == (3, 0)
