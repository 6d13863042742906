"""The numbers of a step, computed by hand."""

import math

import numpy as np
import pytest
from tinkermq.actors.learner.group_metrics import group_numbers, prompt_and_others
from tinkermq.actors.training.state import Waste
from tinkermq.schemas.task import Blame

from tests.support.groups import make_group, make_trajectory


def _groups():
    first = make_group(
        [
            make_trajectory(
                [1, 2, 3],
                [([4, 5], [6, 7]), ([8], [])],
                [0.5, 2.0],
                versions=[4, 4, 6],
                finish="turns",
                finish_reasons=["length", "stop"],
                generate_s=3.0,
                info={"score": 1, "won": True, "note": "text"},
            ),
            make_trajectory(
                [1, 2, 3], [([9], [])], [1.0], versions=7, environment_s=1.0, num_tries=3
            ),
        ]
    )
    second = make_group(
        [
            make_trajectory([1], [([2, 3, 4, 5], [])], [0.0], versions=1, finish="length"),
            make_trajectory([1], [([6], [])], [0.0], versions=7, info={"score": 4.0}),
        ]
    )
    return [first, second]


def test_a_step_is_described_under_the_names_that_users_know() -> None:
    numbers = group_numbers(_groups(), version=7, max_response_tokens=5, success_reward=1.5)
    wanted = {
        "training_step_reward": (2.5 + 1.0 + 0.0 + 0.0) / 4,
        "critic/score/mean": 0.875,
        "critic/score/max": 2.5,
        "critic/score/min": 0.0,
        "response_length/mean": (5 + 1 + 4 + 1) / 4,
        "response_length/max": 5.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 0.25,
        "prompt_length/mean": 2.0,
        "num_turns/mean": 1.25,
        "num_turns/max": 2.0,
        "rollout/generated_tokens": 9.0,
        "rollout/episodes": 4.0,
        "rollout/equal_reward_share": 0.5,
        "rollout/tries_mean": 1.5,
        "rollout/continued_tokens": 0.0,
        "timing_s/generate_mean": 0.75,
        "timing_s/environment_mean": 0.25,
        "staleness/lag_mean": (3 + 3 + 1 + 0 + 6 * 4 + 0) / 9,
        "staleness/lag_max": 6.0,
        "staleness/group_lag_max": 6.0,
        "staleness/lag_share/0": 2 / 9,
        "staleness/lag_share/1": 1 / 9,
        "staleness/lag_share/2": 0.0,
        "staleness/lag_share/3-4": 2 / 9,
        "staleness/lag_share/5+": 4 / 9,
        "rollout/finish_done": 0.5,
        "rollout/finish_turns": 0.25,
        "rollout/finish_length": 0.25,
        "rollout/cut_turn_share": 0.5,
        "game/score": 2.5,
        "game/won": 1.0,
        "game/success_rate": 0.25,
    }
    assert {key: numbers[key] for key in wanted} == pytest.approx(wanted)
    assert "game/note" not in numbers
    assert all(type(value) is float and math.isfinite(value) for value in numbers.values())


def test_the_lengths_of_kept_and_cut_episodes_are_compared() -> None:
    first, second = _groups()  # 3, 1, 4 and 1 tokens
    cut = first.model_copy(update={"tokens_cut": [7, 5], "tokens_continued": 2})
    groups = [cut, second.model_copy(update={"tokens_cut": [9, 6]})]
    numbers = group_numbers(groups, version=7, max_response_tokens=5, success_reward=1.5)
    assert numbers["rollout/continued_tokens"] == 2.0
    told = {key: value for key, value in numbers.items() if "/oversample/" in key}
    assert told == {
        "rollout/oversample/kept_length": 2.25,
        "rollout/oversample/cut_length": 6.75,
        "rollout/oversample/estimated_length": 9.0,
        "rollout/oversample/cut_token_share": 0.75,
    }
    waste = Waste()
    waste.add(cut, trained=True)  # 4 tokens, and 12 that were cut
    assert waste.numbers()["rollout/wasted_share"] == 0.75


def test_waste_is_what_was_generated_and_not_trained() -> None:
    waste = Waste()
    assert waste.numbers() == {}
    groups = _groups()
    waste.add(groups[0], trained=True)  # 4 tokens in 2 episodes
    waste.add(groups[1].model_copy(update={"tokens_wasted": 3}), trained=False)  # 5 + 3 in 2
    numbers = waste.numbers()
    assert numbers["rollout/wasted_share"] == pytest.approx(8 / 12)
    assert numbers["rollout/trained_over_generated_length"] == pytest.approx((4 / 2) / (9 / 4))


def test_a_task_that_was_given_up_wastes_what_its_tries_generated() -> None:
    waste = Waste()
    blame = Blame(boundary="environment", code="hung", message="it hung")
    failed = make_group([make_trajectory([1], [([2], [])], [0.0])]).model_copy(
        update={"trajectories": [], "error": blame, "tokens_wasted": 6}
    )
    waste.add(failed, trained=False)
    waste.add(_groups()[0], trained=True)
    assert waste.numbers()["rollout/wasted_share"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("mask", "expected"), [([0, 0, 1, 0, 1], (2, 3)), ([1], (0, 1)), ([0, 0], (2, 0)), ([], (0, 0))]
)
def test_a_prompt_ends_at_the_first_generated_token(
    mask: list[int], expected: tuple[int, int]
) -> None:
    assert prompt_and_others(np.array(mask, np.uint8)) == expected
