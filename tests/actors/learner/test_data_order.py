"""The data order is a function of seed and position."""

from typing import Any

import pytest
from tinkermq.actors.learner.data_order import DataOrder, total_steps
from tinkermq.schemas.config.job import TrainingConfig
from tinkermq.schemas.wire.errors import ConfigError, DataError


def test_every_epoch_visits_each_row_once_in_an_order_of_its_own() -> None:
    order = DataOrder(seed=3, num_rows=50)
    first = [order.sample(index) for index in range(50)]
    second = [order.sample(index) for index in range(50, 100)]
    assert None not in first
    assert set(first) == set(second) == set(range(50))
    assert first != second
    assert first != list(range(50))


def test_a_restart_goes_on_where_it_was() -> None:
    order = DataOrder(seed=3, num_rows=7)
    whole = [(order.sample(index), order.task_seed(index)) for index in range(30)]
    again = DataOrder(seed=3, num_rows=7)
    assert [(again.sample(i), again.task_seed(i)) for i in range(29, 9, -1)] == whole[29:9:-1]


def test_seeds_differ_by_position_and_by_job() -> None:
    seeds = [DataOrder(seed, None).task_seed(index) for seed in (0, 1) for index in range(500)]
    assert len(set(seeds)) == 1000
    assert max(seeds) < 2**62


def test_a_game_that_generates_its_states_has_no_rows() -> None:
    assert DataOrder(0, None).sample(5) is None


@pytest.mark.parametrize(
    ("training", "rows", "steps"),
    [
        ({"num_steps": 7, "num_epochs": 3}, 100, 7),
        ({"num_steps": 7}, None, 7),
        ({"num_epochs": 3, "batch_size": 16}, 100, 18),
        ({"batch_size": 16}, 100, 6),
    ],
)
def test_steps_come_from_num_steps_or_else_from_epochs(
    training: dict[str, Any], rows: int | None, steps: int
) -> None:
    assert total_steps(TrainingConfig(**training), rows) == steps


def test_a_generated_game_needs_num_steps() -> None:
    with pytest.raises(ConfigError, match=r"training.num_steps is not set") as raised:
        total_steps(TrainingConfig(), None)
    assert raised.value.hint == "set training.num_steps"


def test_too_little_data_for_one_batch_is_an_error() -> None:
    with pytest.raises(DataError, match="5 rows do not fill one batch of 16 tasks"):
        total_steps(TrainingConfig(), 5)
