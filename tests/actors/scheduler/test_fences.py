"""What a job of a pool with users may not name, also by way of a folder that it names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.scheduler.submission.access import refuse_runs_of_others
from tinkermq.actors.storage.access import refuse_links_to_others
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.owners import record_of_ada


def test_an_adapter_may_not_stand_on_the_model_of_another_user(tmp_path: Path) -> None:
    hers = tmp_path / "ben" / "r"
    (hers / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(hers / "x")
    mine, between = tmp_path / "mine", tmp_path / "between"
    config = parse_config({"model": {"path": str(mine)}, "env": {"game": "bandit"}})

    def stand(adapter: Path, base: Path) -> None:
        adapter.mkdir(exist_ok=True)
        settings = {"base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))

    judged = {"algorithm": {"advantage": "gae"}, "critic": {"path": str(mine)}}
    critic = parse_config({"model": {"path": "m"}, "env": {"game": "bandit"}, **judged})
    stand(mine, tmp_path / "base")
    refuse_runs_of_others(config, [(str(hers), "ben")])
    stand(mine, between)
    for base in (hers / "x", tmp_path / "link", hers.parent / "other"):
        stand(between, base)
        with pytest.raises(ConfigError, match=r"the base of the adapter in model\.path=.*another"):
            refuse_runs_of_others(config, [(str(hers), "ben")])
        with pytest.raises(ConfigError, match=r"the base of the adapter in critic\.path=.*another"):
            refuse_runs_of_others(critic, [(str(hers), "ben")])


def a_model(folder: Path) -> Path:
    """Make what looks like a model's folder, with weights of its own."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


def to_the_file(mine: Path, hers: Path) -> None:
    (mine / "model.safetensors").symlink_to(hers / "model.safetensors")


def to_the_folder(mine: Path, hers: Path) -> None:
    (mine / "tokenizer").symlink_to(hers)


def over_another_link(mine: Path, hers: Path) -> None:
    (mine.parent / "between").symlink_to(hers)
    (mine / "model.safetensors").symlink_to(mine.parent / "between" / "model.safetensors")


def by_another_name(mine: Path, hers: Path) -> None:
    (mine / "model.safetensors").hardlink_to(hers / "model.safetensors")


def by_an_index(mine: Path, hers: Path) -> None:
    told = {"weight_map": {"w": "../runs/ben/r/model.safetensors"}}
    (mine / "model.safetensors.index.json").write_text(json.dumps(told))


def by_a_tokenizer(mine: Path, hers: Path) -> None:
    told = {"tokenizer_file": str(hers / "config.json")}
    (mine / "tokenizer_config.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "lead",
    [to_the_file, to_the_folder, over_another_link, by_another_name, by_an_index, by_a_tokenizer],
)
@pytest.mark.parametrize("key", ["model.path", "model.tokenizer", "policies.black"])
def test_nothing_in_a_model_folder_leads_to_the_run_of_another_user(
    tmp_path: Path, lead: Callable[[Path, Path], None], key: str
) -> None:
    hers = a_model(tmp_path / "runs" / "ben" / "r")
    mine = a_model(tmp_path / "mine")
    tree: dict[str, Any] = {"model": {"path": "m"}, "env": {"game": "tictactoe"}}
    section, _, name = key.partition(".")
    tree[section] = {**tree.get(section, {}), name: str(mine)}
    config = parse_config(tree)
    own = mine / "model.safetensors"
    own.rename(mine / "own.safetensors")
    own.symlink_to("own.safetensors")
    refuse_runs_of_others(config, [(str(hers), "ben")])
    own.unlink()
    lead(mine, hers)
    with pytest.raises(ConfigError, match=r"is in a run folder of another user") as refused:
        refuse_runs_of_others(config, [(str(hers), "ben")])
    assert key in refused.value.message


@pytest.mark.parametrize("at", ["model", "fork", "checkpoints"])
def test_a_link_that_came_after_the_submission_is_found_right_before_the_files_are_read(
    tmp_path: Path, at: str
) -> None:
    root = tmp_path / "runs"
    hers = a_model(root / "ben" / "r")
    mine = a_model(root / "ada" / "old" / "checkpoints" / "step_1")
    fork, checkpoint = a_model(root / "ada/r/fork"), a_model(root / "ada/r/checkpoints/step_000001")
    config = parse_config({"model": {"path": str(mine)}, "env": {"game": "bandit"}})
    record = record_of_ada(root, fork_dir=str(fork))
    (mine / "own").symlink_to(fork)
    refuse_links_to_others(record, config)
    changed = {"model": mine, "fork": fork, "checkpoints": checkpoint}[at]
    (changed / "model.safetensors").unlink()
    to_the_file(changed, hers)
    with pytest.raises(ConfigError, match=r"leads to .*ben/r/model.safetensors, which is in a run"):
        refuse_links_to_others(record, config)


def test_a_run_with_the_name_of_another_user_is_not_that_users(tmp_path: Path) -> None:
    """Nor a folder in it: a user may choose the name of someone's run, or `checkpoints`."""
    root = tmp_path / "runs"
    mine = a_model(root / "ada" / "old" / "model")
    config = parse_config({"model": {"path": str(mine)}, "env": {"game": "bandit"}})
    for theirs in ("ben/ada", "ben/r/ada", "ben/r/checkpoints/ada"):
        hers = a_model(root / theirs)
        (mine / "model.safetensors").unlink()
        to_the_file(mine, hers)
        with pytest.raises(ConfigError, match=r"is in a run folder of another user"):
            refuse_links_to_others(record_of_ada(root), config)
    own = a_model(root / "team" / "ada" / "r")
    (mine / "model.safetensors").unlink()
    to_the_file(mine, own)
    refuse_links_to_others(record_of_ada(root, own_folders=[str(root / "team" / "ada")]), config)


def test_a_run_folder_that_became_a_link_out_of_the_roots_is_not_written_to(tmp_path: Path) -> None:
    root, outside = tmp_path / "runs", tmp_path / "outside"
    outside.mkdir()
    (root / "ada").mkdir(parents=True)
    (root / "ada" / "r").symlink_to(outside)
    config = parse_config({"model": {"path": "m"}, "env": {"game": "bandit"}})
    with pytest.raises(ConfigError, match=r"run_dir=.* is outside of the folders where runs"):
        refuse_links_to_others(record_of_ada(root), config)
