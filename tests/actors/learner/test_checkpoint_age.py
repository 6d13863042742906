"""When a checkpoint is due because the last is old, told by hand-written times."""

from tinkermq.actors.learner.saving import CheckpointAge
from tinkermq.schemas.config.job import TrainingConfig


def test_a_checkpoint_is_due_once_the_last_is_so_old() -> None:
    age = CheckpointAge(900.0, now=100.0)
    assert not age.is_over(999.0)
    assert age.is_over(1000.0)
    age.saved(1000.0, 1010.0)
    assert not age.is_over(1909.0)
    assert age.is_over(1910.0)


def test_at_most_a_tenth_of_the_time_goes_into_writing() -> None:
    age = CheckpointAge(900.0, now=0.0)
    age.saved(900.0, 1200.0)
    assert not age.is_over(4199.0)
    assert age.is_over(4200.0)


def test_no_minutes_mean_never() -> None:
    assert not CheckpointAge(0.0, now=0.0).is_over(1e9)


def test_recovery_is_bounded_without_a_word_of_the_user() -> None:
    assert TrainingConfig().save_freq == 0
    assert 0 < TrainingConfig().save_minutes <= 30
