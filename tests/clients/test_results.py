"""Files of results: one line each, gone on with where they ended, never mixed."""

import json
from pathlib import Path

import numpy as np
import pytest
from tinkermq.clients.inference.play import EpisodeResult, ResultFile
from tinkermq.schemas.wire.errors import ConfigError, StorageError

SETTINGS = {"model": "my-run@4", "temperature": 1.0}


def result(task: int, **fields: object) -> EpisodeResult:
    return EpisodeResult(task, 0, 1.0, True, **fields)  # pyright: ignore[reportArgumentType]


def test_a_line_is_on_disk_as_soon_as_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(3, info={"board": np.zeros(2)}))
        line = json.loads(path.read_text())
    assert (line["task"], line["reward"], line["info"]) == (3, 1.0, {"board": [0.0, 0.0]})


def test_a_file_goes_on_without_its_half_written_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(1))
        file.add(result(2))
    path.write_bytes(path.read_bytes() + b'{"task": 3, "sam')
    with ResultFile(path, SETTINGS) as file:
        assert set(file.done) == {(1, 0), (2, 0)}
        file.add(result(3))
    assert [json.loads(line)["task"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_failed_episodes_are_kept_on_file_and_played_again(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(EpisodeResult(1, 0, 0.0, False, error="the game raised"))
    assert "the game raised" in path.read_text()
    assert "reward" not in json.loads(path.read_text())
    assert not ResultFile(path, SETTINGS).done


def test_results_of_other_settings_are_never_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultFile(path, SETTINGS) as file:
        file.add(result(1))
    with pytest.raises(ConfigError, match=r"line 1 of .* was made with other settings"):
        ResultFile(path, {**SETTINGS, "temperature": 0.5})


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(ConfigError, match="is no result of an inference"):
        ResultFile(path, SETTINGS)
    assert path.read_text() == '{"hello": 1}\n'


def test_a_path_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(StorageError, match="cannot be written"),
        ResultFile(tmp_path / "file" / "results.jsonl", SETTINGS),
    ):
        pass


def test_without_a_path_results_stay_in_memory() -> None:
    with ResultFile(None, SETTINGS) as file:
        file.add(result(1))
    assert set(file.done) == {(1, 0)}
