"""What an agent job implies, and what it cannot have."""

from typing import Any

import pytest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import load_config
from tinkermq.schemas.config.rules import why_no_rows
from tinkermq.schemas.wire.errors import ConfigError

LEAST = ["model.path=m", "env.game=agent", "agent.command=[run.sh]"]


def test_what_runs_programs_cannot_be_an_sft_job() -> None:
    with pytest.raises(ConfigError, match="runs no programs"):
        load_config(None, [*LEAST, "sft.data=[chats.jsonl]"])


def test_an_episode_of_several_rows_can_be_trained_by_what_an_agent_job_may_have() -> None:
    assert why_no_rows(load_config(None, LEAST)) is None
    assert why_no_rows(load_config(None, [*LEAST, "algorithm.advantage=gae"])) is None
    assert why_no_rows(load_config(None, ["model.path=m", "env.game=bandit"])) is None


def test_a_games_job_is_told_why_it_cannot_train_such_episodes() -> None:
    config = load_config(None, ["model.path=m", "env.game=bandit", "algorithm.advantage=gae"])
    assert (why_no_rows(config) or "").startswith(
        "algorithm.advantage=gae follows rewards from turn to"
    )


def test_a_generator_begins_no_more_episodes_of_programs_than_have_a_place() -> None:
    def at_once(agent: dict[str, Any], **sections: Any) -> int:
        tree = {"model": {"path": "m"}, "agent": {"per_host": 6, **agent}, **sections}
        return JobConfig.model_validate(tree).episodes_at_once

    command = {"command": ["run.sh"]}
    assert at_once({"client": True}) == 6
    assert at_once(command, env={"hosts": 4}) == 24
    assert at_once(command, env={"hosts": 4}, generator={"count": 3}) == 8
    assert at_once(command, env={"hosts": 4}, generator={"max_episodes": 10}) == 10


@pytest.mark.parametrize("train", ["mian", "/open", "not not /a/", "/(/", "title", "//"])
def test_what_is_trained_is_a_word_or_a_pattern(train: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.train"):
        load_config(None, [*LEAST, f"agent.train={train}"])
    assert load_config(None, LEAST).agent.train == "all"
    for known in ("all", "main", "alive", "/a|b/", "not /Write a title/"):
        assert load_config(None, [*LEAST, f"agent.train={known}"]).agent.train == known
