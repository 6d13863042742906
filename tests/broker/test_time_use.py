"""An actor's time is divided without gaps: the seconds by kind add up to the wall time."""

from tinkermq.broker.metering import TimeUse


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_of_several_things_at_once_the_first_named_counts() -> None:
    clock = Clock()
    use = TimeUse("generate", "environment", rest="tasks", clock=clock)
    clock.now += 1
    with use.doing("environment"):
        clock.now += 2
        with use.doing("generate"), use.doing("environment"):
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert use.take() == {"generate": 4, "environment": 10, "tasks": 17}
    clock.now += 32
    assert use.take() == {"tasks": 32}
    assert use.totals() == {"generate": 4, "environment": 10, "tasks": 49}


def test_no_more_seconds_get_another_name_than_there_are() -> None:
    clock = Clock()
    use = TimeUse("swap", "generate", rest="tasks", clock=clock)
    with use.doing("generate"):
        clock.now += 3
        use.reassign("generate", "swap", 1)
        assert use.take() == {"swap": 1, "generate": 2}
        clock.now += 1
        use.reassign("generate", "swap", 5)
        assert use.take() == {"swap": 1}
