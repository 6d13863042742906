"""What the configuration of an SFT job implies, and what it refuses."""

import pytest
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError

Job = dict[str, dict[str, object]]
SFT: Job = {"model": {"path": "m"}, "sft": {"data": ["chats.jsonl"]}}
DPO: Job = {"model": {"path": "m"}, "sft": {"data": ["pairs.jsonl"], "objective": "dpo"}}
REWARD: Job = {"model": {"path": "m"}, "sft": {"data": ["pairs.jsonl"], "objective": "reward"}}


def test_conversations_are_all_that_an_sft_job_must_name() -> None:
    config = parse_config(SFT)
    assert (config.algorithm.loss, config.algorithm.correction) == ("sft", "none")
    assert (config.env.game, config.env.hosts, config.env.num_val) == ("", 0, 0)
    assert (config.rollout.group_size, config.training.staleness_policy) == (1, "train")
    assert parse_config(config.model_dump(exclude_unset=True)) == config
    with_game = parse_config({**SFT, "env": {"game": "bandit", "num_val": 8}})
    assert with_game.env.num_val == 8


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"advantage": "rloo"}}, r"algorithm\.advantage has no effect in an SFT job"),
        ({"algorithm": {"loss": "ppo"}}, r"algorithm\.loss=ppo has no effect in an SFT job"),
        ({"rollout": {"group_size": 8}}, r"rollout\.group_size=8 has no effect in an SFT job"),
        ({"algorithm": {"sample": "turn"}}, r"algorithm\.sample has no effect in an SFT job"),
        ({"training": {"curriculum": "success_rate"}}, "curriculum=success_rate has no effect"),
        ({"critic": {"lr": 1e-4}}, "critic has no effect"),
        ({"sft": {}}, "env is missing"),
    ],
)
def test_a_key_without_effect_is_refused(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**SFT, **sections})


def test_pairs_are_groups_of_two_and_need_no_coefficient_of_a_kl() -> None:
    config = parse_config(DPO)
    assert (config.algorithm.loss, config.algorithm.correction) == ("dpo", "none")
    assert (config.rollout.group_size, config.sft.has_pairs) == (2, True)
    assert not config.has_evaluator
    assert parse_config(config.model_dump(exclude_unset=True)) == config
    own = parse_config({**DPO, "algorithm": {"reference": {"path": "r", "reset_every": 64}}})
    assert own.algorithm.reference.path == "r"
    held_out = parse_config({**DPO, "sft": {**DPO["sft"], "val_data": ["val.jsonl"]}})
    assert held_out.has_evaluator
    reward = parse_config(REWARD)
    assert (reward.sft.trains_rewards, reward.rollout.group_size) == (True, 2)


@pytest.mark.parametrize(
    ("job", "sections", "message"),
    [
        (DPO, {"algorithm": {"kl_coef": 0.1}}, r"algorithm\.kl_coef has no effect in a DPO job"),
        (DPO, {"algorithm": {"loss_agg": "token-mean"}}, r"loss_agg=token-mean has no effect in a"),
        (DPO, {"rollout": {"group_size": 8}}, r"rollout\.group_size=8 has no effect in a DPO job"),
        (REWARD, {"algorithm": {"reference": {}}}, "reference has no effect in a job that trains"),
        (SFT, {"sft": {"data": ["c"], "beta": 1}}, "beta has no effect while objective is 'sft'"),
        (
            SFT,
            {"sft": {"data": ["c"], "val_data": ["v"]}},
            "val_data has no effect while objective",
        ),
        (DPO, {"sft": {**DPO["sft"], "center_coef": 1}}, "center_coef has no effect while"),
        (
            DPO,
            {"sft": {**DPO["sft"], "dpo_loss": "ipo", "label_smoothing": 0.1}},
            "label_smoothing has no effect while dpo_loss is 'ipo'",
        ),
        (DPO, {"sft": {**DPO["sft"], "label_smoothing": 0.5}}, "label_smoothing.* less than 0.5"),
        (DPO, {"sft": {**DPO["sft"], "objective": "orpo"}}, "Input should be 'sft', 'dpo' or"),
        (DPO, {"policies": {"low": "m"}}, "policies of an SFT job are not built"),
    ],
)
def test_a_key_that_pairs_do_not_read_is_refused(
    job: Job, sections: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**job, **sections})
