"""What the configuration of an SFT job implies, and what it refuses."""

import pytest
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError

Job = dict[str, dict[str, object]]
SFT: Job = {"model": {"path": "m"}, "sft": {"data": ["chats.jsonl"]}}


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
        ({"policies": {"low": "m"}}, "policies of an SFT job are not built"),
        ({"sft": {}}, "env is missing"),
    ],
)
def test_a_key_without_effect_is_refused(sections: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**SFT, **sections})
