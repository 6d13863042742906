"""When a crashed actor is started again."""

from tinkermq.actors.node.backoff import Backoff


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
    assert backoff.after_failure(600.0) == 0.2
    assert backoff.num_failures == 2
