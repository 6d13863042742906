"""The curriculum: what it prefers, that it is a function of the log, and that it survives."""

from collections import Counter

import numpy as np
import pytest
from tinkermq.actors.learner.curriculum import Curriculum, CurriculumConfig
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.training.state import LearnerState
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Task

from tests.support.groups import make_trajectory

NUM_ITEMS = 5
SETTINGS = CurriculumConfig(NUM_ITEMS, uniform=0.1, success_reward=0.5)


def _curriculum(state: LearnerState | None = None, num_rows: int | None = NUM_ITEMS) -> Curriculum:
    return Curriculum(DataOrder(7, num_rows), SETTINGS, state or LearnerState())


def _group(item: int | None, *rewards: float, index: int = 0) -> Group:
    episodes = [make_trajectory([1], [([2], [])], [reward]) for reward in rewards]
    task = Task(
        task=0, seed=0, group_size=len(rewards), sample=item, item=item, index=index, chosen_at=3
    )
    return Group(task=task, trajectories=episodes, source="test")


def _shares(curriculum: Curriculum, num: int = 4000) -> list[float]:
    counts = Counter(curriculum.choose(index, 0).item for index in range(num))
    return [counts[item] / num for item in range(NUM_ITEMS)]


def test_what_is_solved_half_of_the_time_comes_most_often() -> None:
    curriculum = _curriculum()
    assert _shares(curriculum) == pytest.approx([0.2] * NUM_ITEMS, abs=0.03)
    curriculum.learn(
        [
            _group(0, 1, 1, 1, 1),  # always solved
            _group(1, 0, 0, 0, 0),  # never
            _group(2, 1, 0, 0, 1),  # half
            _group(3, 1, 0, 0, 0),  # a quarter
        ]
    )
    # weights 0, 0, 1/4, 3/16 and, of the unseen one, 1/4; a tenth of all choices is uniform
    expected = [0.02 + 0.9 * weight / 11 for weight in (0, 0, 4, 3, 4)]
    assert _shares(curriculum) == pytest.approx(expected, abs=0.03)


def test_newer_episodes_count_more() -> None:
    curriculum, state = _curriculum(), LearnerState()
    for rewards in ((0, 0), (1, 1), (1, 1)):
        curriculum.learn([_group(4, *rewards)])
    curriculum.write_to(state)
    assert state.success == [(4, 3.5, 3.0)]
    assert curriculum.numbers()["curriculum/seen_share"] == 1 / NUM_ITEMS


def test_what_was_passed_over_counts_with_the_next_step_and_failed_tasks_do_not() -> None:
    curriculum = _curriculum()
    before = [curriculum.choose(index, 0) for index in range(50)]
    curriculum.pass_over(_group(0, 1, 1), "equal_rewards")
    curriculum.pass_over(_group(0, 1, 1), "duplicate")
    assert [curriculum.choose(index, 0) for index in range(50)] == before
    curriculum.learn([_group(None, 1, 1), _group(NUM_ITEMS, 1, 1)])  # of a client, of no row
    state = LearnerState()
    curriculum.write_to(state)
    assert state.success == [(0, 2.0, 2.0)]


def test_it_goes_on_from_a_checkpoint_with_the_same_choices() -> None:
    rng, curriculum = np.random.default_rng(0), _curriculum()
    stale = _group(3, 0, 0, index=99)
    curriculum.pass_over(stale, "stale")
    curriculum.keep(stale.task)
    for step in range(40):
        rewards = rng.integers(0, 2, 4).tolist()
        curriculum.learn([_group(int(rng.integers(NUM_ITEMS)), *rewards, index=step)])
    state = LearnerState()
    curriculum.write_to(state)
    restored = _curriculum(LearnerState.model_validate_json(state.model_dump_json()))
    chosen = [curriculum.choose(index, 40) for index in range(100)]
    assert [restored.choose(index, 40) for index in range(100)] == chosen
    assert (chosen[99].item, chosen[99].chosen_at) == (3, 3)  # the one kept for its second try
    assert len({(one.sample, one.seed) for one in chosen}) == 100


def test_a_game_that_makes_its_states_comes_back_to_the_same_seeds() -> None:
    chosen = [_curriculum(num_rows=None).choose(index, 0) for index in range(50)]
    assert {one.sample for one in chosen} == {None}
    assert len({one.seed for one in chosen}) == NUM_ITEMS == len({one.item for one in chosen})
