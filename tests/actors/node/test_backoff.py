"""When a crashed actor is started again."""

from tinkermq.actors.node.process import Backoff


def test_each_failure_doubles_the_delay_up_to_ten_seconds() -> None:
    backoff = Backoff(max_restarts=8)
    delays = [backoff.after_failure(float(second)) for second in range(8)]
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_one_failure_over_the_limit_is_final() -> None:
    backoff = Backoff(max_restarts=1)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(599.0) is None


def test_failures_of_more_than_ten_minutes_ago_are_forgiven() -> None:
    backoff = Backoff(max_restarts=1)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(600.0, progress=True) == 0.2
    assert backoff.num_failures == 2


def test_failures_without_any_work_in_between_are_final_however_much_time_they_take() -> None:
    backoff = Backoff(max_restarts=2)
    assert backoff.after_failure(0.0) == 0.2
    assert backoff.after_failure(3600.0) == 0.2
    assert backoff.after_failure(7200.0) is None


def test_work_in_between_is_what_counts_and_the_unknown_does_not() -> None:
    backoff = Backoff(max_restarts=1)
    for hour, progress in enumerate([False, None, True, False, None, None, True]):
        assert backoff.after_failure(3600.0 * hour, progress=progress) == 0.2
    assert backoff.num_fruitless == 0
