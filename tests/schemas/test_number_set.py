"""A set of task numbers behaves as a set, and stays small."""

from hypothesis import given
from hypothesis import strategies as st
from tinkermq.schemas.number_set import NumberSet

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], sum(r))))


@given(st.lists(st.integers(0, 60)), ranges)
def test_it_holds_what_a_set_holds(numbers: list[int], whole: list[tuple[int, int]]) -> None:
    ours, plain = NumberSet(whole), {n for start, end in whole for n in range(start, end)}
    for number in numbers:
        ours.add(number)
        plain.add(number)
        assert number in ours
    assert list(ours) == sorted(plain)
    assert len(ours) == len(plain)
    assert [number in ours for number in range(80)] == [number in plain for number in range(80)]


@given(ranges, ranges)
def test_its_ranges_are_ascending_disjoint_and_make_the_same_set_again(
    whole: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    ours = NumberSet(whole)
    ours.update(NumberSet(more))
    flat = [edge for pair in ours.ranges() for edge in pair]
    assert flat == sorted(set(flat))
    assert list(NumberSet(ours.ranges())) == list(ours)


@given(ranges, st.integers(0, 80))
def test_it_counts_and_completes_below_a_limit(whole: list[tuple[int, int]], limit: int) -> None:
    ours = NumberSet(whole)
    assert ours.count_below(limit) == sum(number < limit for number in ours)
    assert list(ours.gaps(limit)) == [number for number in range(limit) if number not in ours]


def test_numbers_in_order_make_one_range() -> None:
    ours = NumberSet()
    for number in [0, 1, 3, 2, 4]:
        ours.add(number)
    assert ours.ranges() == [(0, 5)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 70))))
def test_it_counts_right_while_it_grows(steps: list[tuple[int, int]]) -> None:
    ours, plain = NumberSet(), set[int]()
    for number, limit in steps:
        ours.add(number)
        plain.add(number)
        assert ours.count_below(limit) == sum(one < limit for one in plain)
