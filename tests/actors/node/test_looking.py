"""A node says whether files and a game are there, and runs nothing of the game."""

from pathlib import Path

import pytest
from tinkermq.actors.node.looking import look, look_now
from tinkermq.schemas.node import LookAnswer, LookQuestion


async def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    there, gone = tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"
    there.write_text("{}\n")
    question = LookQuestion(files=[str(there), str(gone), str(tmp_path)])
    assert await look(question) == LookAnswer(missing=[str(gone), str(tmp_path)])


def test_a_game_is_found_by_its_name_or_its_package() -> None:
    assert look_now(LookQuestion(game="bandit")).game == "tinkermq.envs.games.bandit:BanditGame"
    unknown = look_now(LookQuestion(game="bandti"))
    assert "did you mean bandit?" in unknown.hint
    missing = look_now(LookQuestion(game="no_such_package.games:Game"))
    assert missing.lacks_game.startswith("there is no module 'no_such_package'")


def test_no_code_of_a_game_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmful_game").mkdir()
    for name in ("__init__", "game"):
        (tmp_path / "harmful_game" / f"{name}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target = "harmful_game.game:Game"
    assert look_now(LookQuestion(game=target)).game == target
