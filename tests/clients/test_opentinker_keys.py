"""Configurations written for OpenTinker mean the same here, or say why not."""

import re
import warnings
from typing import Any

import pytest
from tinkermq.clients.opentinker import TABLE, NeedlessWarning, translate
from tinkermq.schemas.config.load_config import all_keys, parse_config
from tinkermq.schemas.wire.codec import merged
from tinkermq.schemas.wire.errors import ConfigError

MATH = {
    "tokenizer_path": "Qwen/Qwen2.5-1.5B",
    "adv_estimator": "grpo",
    "rollout_n": 8,
    "batch_size": 64,
    "val_batch_size": 100,
    "num_steps": 1000,
    "save_freq": 100,
    "test_freq": 50,
    "max_prompt_tokens": 1024,
    "max_new_tokens": 8192,
    "temperature": 1.0,
    "multi_turn": {"max_user_turns": 0, "max_assistant_turns": 3, "max_tokens_per_turn": 1024},
    "lora": {"lora_rank": 0, "lora_alpha": 16},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.002, "kl_loss_type": "low_var_kl"},
    "data_path": "train.parquet",
    "experiment_name": "Qwen2.5-3B try",
}


def test_a_whole_opentinker_configuration_becomes_a_valid_job() -> None:
    config = parse_config(merged(translate(MATH), {"env": {"game": "math"}}))
    assert config.model.path == "Qwen/Qwen2.5-1.5B"
    assert config.algorithm.advantage == "grpo"
    assert config.rollout.group_size == 8
    assert (config.training.batch_size, config.training.num_steps) == (64, 1000)
    assert (config.training.save_freq, config.training.test_freq) == (100, 50)
    assert config.env.num_val == 100
    assert config.rollout.max_response_tokens == 8192
    assert config.rollout.max_turn_tokens == 1024
    assert config.rollout.max_turns == 3
    assert config.learner.max_row_tokens == 1024 + 8192
    assert (config.algorithm.kl_coef, config.algorithm.kl_in) == (0.002, "loss")
    assert config.name == "qwen2-5-3b-try"


@pytest.mark.parametrize("key", sorted(key for key in TABLE if TABLE[key].target))
def test_every_translation_ends_in_a_key_that_exists(key: str) -> None:
    assert TABLE[key].target in all_keys()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("grpo_per_step", "grpo_per_step"),
        ("reinforce_plus_plus", "reinforce_pp"),
        ("reinforce_plus_plus_baseline", "reinforce_pp_baseline"),
        ("rloo", "rloo"),
        ("remax", "remax"),
        ("opo", "opo"),
    ],
)
def test_estimators_keep_their_meaning(theirs: str, ours: str) -> None:
    assert translate({"adv_estimator": theirs})["algorithm"]["advantage"] == ours


def test_our_own_keys_pass_through_nested_or_dotted() -> None:
    ours = {"learner": {"lr": 1e-4}, "env": {"game": "addition", "kwargs": {"digits": 2}}}
    assert translate(ours) == ours
    assert translate({"learner.lr": 1e-4}) == {"learner": {"lr": 1e-4}}


def test_without_a_limit_per_turn_a_turn_may_use_the_whole_budget() -> None:
    assert translate({"max_new_tokens": 256})["rollout"]["max_turn_tokens"] == 256


@pytest.mark.parametrize("key", sorted(key for key in TABLE if TABLE[key].refusal))
def test_a_key_without_effect_names_what_to_use(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} has no effect here") as caught:
        translate({key: "x"})
    assert caught.value.hint == TABLE[key].refusal


@pytest.mark.parametrize("key", sorted(key for key in TABLE if TABLE[key].needless))
def test_a_key_that_changes_nothing_is_left_out_with_a_warning(key: str) -> None:
    with pytest.warns(NeedlessWarning, match=f"{re.escape(key)}: "):
        assert translate({key: "x"}) == {}


def test_all_keys_that_change_nothing_are_told_in_one_warning() -> None:
    theirs = {
        "scheduler_url": "http://0.0.0.0:8780",
        "algorithm": "agent_loop",
        "interaction": {"name": "gomoku", "config": {"env_endpoint": "http://0.0.0.0:8088"}},
        "scheduler_api_key": None,
    }
    with pytest.warns(NeedlessWarning) as caught:
        assert translate(theirs) == {}
    assert len(caught) == 1
    for key in ("scheduler_url", "algorithm", "interaction.config.env_endpoint"):
        assert key in str(caught[0].message)


def test_all_keys_that_cannot_be_used_are_told_at_once() -> None:
    theirs = {"rolout_n": 4, "tensor_parallel_size": 2, "num_gpus": 1, "batch_size": 8}
    with pytest.raises(ConfigError, match="3 configuration keys cannot be used") as caught:
        translate(theirs)
    for told in ("did you mean rollout_n?", "generator.tensor_parallel", "num_gpus=1"):
        assert told in caught.value.message


def test_the_steps_of_an_interaction_bound_the_turns_as_they_did() -> None:
    turns = {"max_user_turns": 8, "max_assistant_turns": 9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeedlessWarning)
        tree = translate({"interaction": {"config": {"max_steps": 5}}, "multi_turn": turns})
    assert tree == {"rollout": {"max_turns": 5}}


def test_observations_in_a_frame_of_words_are_refused() -> None:
    assert translate({"interaction": {"config": {"observation_template": "{observation}"}}}) == {}
    with pytest.raises(ConfigError, match="observation_template='State: "):
        translate({"interaction": {"config": {"observation_template": "State: {observation}"}}})


def test_lora_keys_make_an_adapter() -> None:
    lora = {"lora_rank": 64, "lora_alpha": 32, "target_modules": "all-linear", "lr": 3e-5}
    config = parse_config(merged(translate({**MATH, "lora": lora}), {"env": {"game": "math"}}))
    assert (config.lora.rank, config.lora.alpha, config.lora.targets) == (64, 32, "all-linear")
    assert config.learner.lr == 3e-5


@pytest.mark.parametrize("value", [0, 1, -3, "two", True, 2.5])
def test_fewer_gpus_than_a_learner_and_a_generator_hold_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="learner and generator hold one slot each"):
        translate({"num_gpus": value})


def test_a_job_holds_as_many_slots_as_it_was_given_gpus() -> None:
    config = parse_config(merged(translate({**MATH, "num_gpus": 4}), {"env": {"game": "math"}}))
    held = config.learner.slots + config.generator.count * config.generator_slots
    assert held == 4


def test_an_unknown_key_names_the_closest_of_both_kinds() -> None:
    with pytest.raises(ConfigError, match="unknown") as caught:
        translate({"rolout_n": 8})
    assert caught.value.hint == "did you mean rollout_n?"


def test_two_keys_for_the_same_thing_must_agree() -> None:
    with pytest.raises(ConfigError, match=r"both set training\.batch_size"):
        translate({"training": {"batch_size": 8}, "batch_size": 16})


@pytest.mark.parametrize(
    ("keys", "algorithm"),
    [
        ({"adv_estimator": "gae"}, {"advantage": "gae"}),
        (
            {"multi_turn": {"per_turn_training": True}},
            {"sample": "turn", "turn_reward": "reward"},
        ),
        (
            {"multi_turn": {"per_turn_training": True, "per_turn_reward_gamma": 0.0}},
            {"sample": "turn", "turn_reward": "reward"},
        ),
        (
            {"multi_turn": {"per_turn_training": True, "per_turn_reward_gamma": 0.9}},
            {"sample": "turn", "turn_reward": "return", "gamma": 0.9},
        ),
        (
            {"adv_estimator": "grpo_per_step", "multi_turn": {"per_turn_reward_gamma": 0.9}},
            {"advantage": "grpo_per_step", "gamma": 0.9},
        ),
    ],
)
def test_ppo_and_turns_as_samples_are_asked_for_by_their_old_names(
    keys: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    assert translate(keys) == {"algorithm": algorithm}
