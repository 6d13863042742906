"""Models whose files are replaced after they were checked: libraries read what was opened."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.policy.model_folder import (
    check_model_is_here,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
)
from tinkermq.actors.storage.access import refuse_files_of_others
from tinkermq.actors.storage.adapters import base_of, is_adapter
from tinkermq.actors.storage.files import check_digests, write_digests
from tinkermq.actors.storage.held_models import MayRead, held_models
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import LoraSpec
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.models import make_tiny_model
from tests.support.owners import record_of_ada


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "mine")


@pytest.fixture
def hers(tmp_path: Path, mine: Path) -> Path:
    """The checkpoint of another user, whose weights differ."""
    folder = tmp_path / "runs/ben/r/step_1"
    shutil.copytree(mine, folder)
    model = load_causal_lm(str(folder), dtype=torch.float32)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def may_read(tmp_path: Path) -> Iterator[MayRead]:
    root = tmp_path / "runs"
    record = record_of_ada(root)
    allowed = refuse_files_of_others(record)
    assert allowed is not None
    yield allowed
    held_models.close()


def weights(path: str | Path) -> torch.Tensor:
    return next(iter(load_causal_lm(str(path), dtype=torch.float32).parameters())).detach()


def replace(file: Path, target: Path) -> None:
    """Put a link in a file's or folder's place."""
    file.rename(file.with_name(f"{file.name}-before"))
    file.symlink_to(target)


def test_libraries_read_the_files_that_were_there_when_a_model_was_opened(
    mine: Path, hers: Path, may_read: MayRead
) -> None:
    write_digests(mine)
    before = weights(mine)
    shown = held_models.hold(str(mine), may_read)
    assert held_models.hold(f"{mine.parent}/./mine", may_read) == shown
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        replace(mine / name, hers / name)
    replace(mine, hers)
    check_digests(Path(shown))
    check_model_is_here(shown)
    assert torch.equal(weights(shown), before)
    assert not torch.equal(weights(mine), before)
    assert load_tokenizer(shown).vocab_size
    model = load_causal_lm(shown, dtype=torch.float32)
    assert [model.name_or_path, load_model_config(shown).name_or_path] == [str(mine)] * 2
    held_models.close()
    assert not Path(shown).exists()


@pytest.mark.parametrize("at", ["model.safetensors", "config.json", "inner", "."])
def test_a_file_that_becomes_a_link_while_a_model_is_opened_is_not_followed(
    mine: Path, hers: Path, may_read: MayRead, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    for folder in (mine, hers):
        (folder / "inner").mkdir()
        (folder / "inner" / "notes").write_text("x")
    look, changed = os.path.realpath, mine / at

    def replaced(path: str | Path, **options: Any) -> str:
        real = look(path, **options)
        if str(path) == str(changed) and not changed.is_symlink():
            replace(changed, hers / at)
        return real

    monkeypatch.setattr(os.path, "realpath", replaced)
    with pytest.raises(ConfigError, match=r"has become a link|in a run folder of another user"):
        held_models.hold(str(mine), may_read)
    assert changed.is_symlink()


@pytest.mark.parametrize("at", ["model.safetensors", "inner", "."])
def test_a_link_to_the_model_of_another_user_is_refused_by_the_path_of_what_was_opened(
    mine: Path, hers: Path, may_read: MayRead, at: str
) -> None:
    (mine / "inner").mkdir()
    (hers / "inner").mkdir()
    replace(mine / at, hers / at)
    with pytest.raises(ConfigError, match=r"ben/r/step_1.*is in a run folder of another user"):
        held_models.hold(str(mine), may_read)


def test_the_base_of_an_adapter_is_held_as_well(
    mine: Path, hers: Path, may_read: MayRead, tmp_path: Path
) -> None:
    trainer = AdapterTrainer.open(str(mine))
    trainer.create("0", LoraSpec(rank=2))
    adapter = tmp_path / "adapter"
    trainer.save("0", adapter, with_optimizer=False)
    before = weights(mine)
    shown = held_models.hold(str(adapter), may_read)
    replace(mine, hers)
    assert is_adapter(shown)
    assert torch.equal(weights(base_of(shown)), before)
    again = AdapterTrainer.open(base_of(shown))
    again.create("0", LoraSpec(rank=2))
    again.save("0", tmp_path / "again", with_optimizer=False)
    held_models.close()
    assert base_of(tmp_path / "again") == str(mine), "not where this process read it"


def test_names_of_the_hub_stay_and_odd_entries_of_a_folder_are_left_out(
    mine: Path, may_read: MayRead
) -> None:
    assert held_models.hold("org/model", may_read) == "org/model"
    before = {path.name for path in mine.iterdir()}
    for name in ("a", "b", "c", "d"):
        (mine / name).symlink_to(mine)
    os.mkfifo(mine / "pipe")
    (mine / "nowhere").symlink_to(mine / "gone")
    shown = held_models.hold(str(mine), may_read)
    assert {path.name for path in Path(shown).iterdir()} == before
    assert torch.equal(weights(shown), weights(mine))


def test_a_folder_of_more_files_than_a_model_has_is_refused(mine: Path, may_read: MayRead) -> None:
    (mine / "many").mkdir()
    for number in range(10_001):
        (mine / "many" / str(number)).symlink_to("gone")
    with pytest.raises(ConfigError, match="holds more than 10,000 files"):
        held_models.hold(str(mine), may_read)
