"""What the sum is to be; pytest runs it."""

from adding import add


def test_numbers_are_added() -> None:
    assert add(2, 5) == 7


def test_nothing_adds_nothing() -> None:
    assert add(7, 0) == 7
