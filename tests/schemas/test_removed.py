"""Configurations of earlier versions: removed keys are refused, renamed ones are read."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from tinkermq.clients.opentinker import translate
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import load_config, parse_config, write_yaml
from tinkermq.schemas.config.sections import RENAMED, RenamedKeyWarning
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.codec import pack
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


LEAST_TREE = {"model": {"path": "m"}, "env": {"game": "bandit"}}
OLD_TREE = {
    **LEAST_TREE,
    "learner": {"row_tokens": 5000, "batch_epochs": 2},
    "weights": {"whole_every": 4, "stock_digest": False},
    "limits": {"max_losses": 1},
}


BOTH = r"limits\.max_losses is the former name of limits\.max_node_failures, and both are set"


def _assert_current(config: JobConfig) -> None:
    assert (config.learner.max_row_tokens, config.learner.ppo_epochs) == (5000, 2)
    assert (config.weights.full_snapshot_every, config.weights.sha256) == (4, False)
    assert config.limits.max_node_failures == 1


def test_a_file_with_former_names_is_read_with_one_warning(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(write_yaml(OLD_TREE))
    with pytest.warns(RenamedKeyWarning) as caught:
        config = load_config(file)
    _assert_current(config)
    assert len(caught) == 1
    for old, new in RENAMED.items():
        assert f"{old} is now {new}" in str(caught[0].message)


def test_an_override_by_a_former_name_is_over_the_file_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(
        write_yaml(
            {"model": {"path": "m"}, "env": {"game": "b"}, "limits": {"max_node_failures": 9}}
        )
    )
    with pytest.warns(RenamedKeyWarning, match="max_losses is now"):
        config = load_config(file, ["limits.max_losses=1"])
    assert config.limits.max_node_failures == 1


def test_a_client_renames_former_names_with_one_warning() -> None:
    dotted = {"learner.row_tokens": 5000, **{k: v for k, v in OLD_TREE.items() if k != "learner"}}
    for given in (OLD_TREE, {**dotted, "learner.batch_epochs": 2}):
        with pytest.warns(RenamedKeyWarning) as caught:
            tree = translate(given)
        assert len(caught) == 1
        _assert_current(parse_config(tree))


def test_a_key_under_both_names_is_refused() -> None:
    tree = {**OLD_TREE, "limits": {"max_losses": 1, "max_node_failures": 2}}
    with pytest.raises(ConfigError, match=BOTH):
        parse_config(tree)
    with pytest.raises(ValidationError, match=BOTH):
        JobConfig.model_validate(tree)


def test_a_stored_run_with_former_names_is_read_without_a_warning() -> None:
    # the suite turns warnings into errors
    _assert_current(parse_config(OLD_TREE))
    stored = pack(
        {
            "v": 1,
            "job": "j1",
            "name": "old",
            "user": "u",
            "state": "COMPLETED",
            "created": 0.0,
            "config": OLD_TREE,
        }
    )
    record = JobRecord.from_bytes(stored)
    assert record.config["limits"] == {"max_node_failures": 1}
    _assert_current(parse_config(record.config))
