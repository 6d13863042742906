"""How often something may happen: a burst, then a rate, for each key by itself."""

from tinkermq.broker.fair_queue import Rates


def test_a_burst_is_let_through_then_the_rate_and_what_was_left_out_is_told() -> None:
    rates = Rates(0.5, 2)
    assert [rates.take("ada", at) for at in (0.0, 0.1, 0.2, 0.3)] == [0, 0, None, None]
    assert [rates.take("ada", at) for at in (2.5, 2.6, 4.5)] == [2, None, 1]


def test_one_key_takes_nothing_from_another() -> None:
    rates = Rates(1, 1)
    assert rates.take("ada", 0.0) == 0
    assert rates.take("ada", 0.0) is None
    assert rates.take("bob", 0.0) == 0


def test_keys_that_are_made_up_do_not_fill_the_memory() -> None:
    rates = Rates(1, 1, max_keys=10)
    for number in range(1000):
        rates.take(str(number), 0.0)
        rates.take(str(number), 0.0)
    assert rates.num_keys <= 10
