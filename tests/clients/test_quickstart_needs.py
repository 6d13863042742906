"""What the quickstart needs before it trains, and the configuration that it leaves."""

import sys
from pathlib import Path

import pytest
from tinkermq.clients.cli.quickstart import SUMS, write_config
from tinkermq.schemas.config.load_config import load_config

from tests.clients.conftest import Cli
from tests.support.configs import REPOSITORY


def test_without_torch_the_quickstart_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    told = cli("quickstart", "--output-dir", str(tmp_path / "outputs"))
    assert told.code == 2
    assert "torch is not installed here" in told.err
    assert "pip install 'tinkermq[worker]'" in told.err
    assert not (tmp_path / "outputs").exists()


def test_the_example_is_the_configuration_that_the_quickstart_ships() -> None:
    example = load_config(REPOSITORY / "examples" / "calculator.yaml")
    assert example.model.path == "outputs/models/calculator"


def test_in_another_folder_all_paths_of_the_configuration_are_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "it's, [odd]: #1 日本"
    folder.mkdir()
    config = load_config(write_config(folder))
    assert config.model.path == str(folder / "models" / "calculator")
    assert config.env.train_data == [str(folder / "data" / "calculator" / "train.parquet")]
    assert config.env.val_data == [str(folder / "data" / "calculator" / "val.parquet")]
    assert config.output_dir == str(folder)


def test_the_model_of_the_real_example_stays_a_name_and_its_data_lie_below_the_folder(
    tmp_path: Path,
) -> None:
    config = load_config(write_config(tmp_path, SUMS))
    assert config.model.path == SUMS.catalogue_model == "smollm2"
    assert config.env.val_data == [str(tmp_path / "data" / "sums" / "val.parquet")]
