"""Configurations of earlier versions: what was removed is refused with what to use instead."""

import pytest
from pydantic import ValidationError
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import load_config, parse_config
from tinkermq.schemas.wire.errors import ConfigError

LEAST = ["model.path=m", "env.game=bandit"]
SFT = [*LEAST, "sft.data=[chats.jsonl]"]


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ([*SFT, "sft.objective=dpo"], "train with TRL"),
        ([*SFT, "sft.objective=reward"], "train with TRL"),
        ([*SFT, "sft.beta=0.2"], "the DPO recipe of tinker-cookbook"),
        ([*SFT, "sft.val_data=[pairs.jsonl]"], "train with TRL"),
        ([*LEAST, "algorithm.loss=dpo"], "train with TRL"),
        ([*LEAST, "learner.optimizer=adamw_8bit"], "use muon"),
        ([*LEAST, "learner.dtype=float16"], "use bfloat16"),
    ],
)
def test_what_was_removed_is_refused_with_what_to_use_instead(
    given: list[str], instead: str
) -> None:
    with pytest.raises(ConfigError, match="was removed") as raised:
        load_config(None, given)
    assert raised.value.message.startswith(f"{given[-1].partition('=')[0]}=")
    assert instead in raised.value.message


def test_a_configuration_that_reaches_the_model_directly_is_refused_alike() -> None:
    tree = {"model": {"path": "m"}, "env": {"game": "b"}, "learner": {"dtype": "float16"}}
    with pytest.raises(ValidationError, match=r"learner\.dtype=float16: .* use bfloat16"):
        JobConfig.model_validate(tree)


def test_a_stored_sft_job_that_named_the_only_objective_left_is_read() -> None:
    tree = {"model": {"path": "m"}, "sft": {"data": ["c.jsonl"], "objective": "sft"}}
    config = parse_config(tree)
    assert config == JobConfig.model_validate(tree)
    assert config.sft.model_dump() == {"data": ["c.jsonl"]}
