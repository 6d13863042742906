"""A node says whether files and a game are there, which runs nothing of the game, and plays it."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from tinkermq.actors.node.children import ActorStarter
from tinkermq.actors.node.preflight import (
    MAX_CONFIG_BYTES,
    EnvCheckRunner,
    check_files,
    check_files_now,
)
from tinkermq.schemas.node import LookAnswer, LookQuestion, PlayQuestion, WantedActor

from tests.support.waiting import until


async def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    there, gone = tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"
    there.write_text("{}\n")
    question = LookQuestion(files=[str(there), str(gone), str(tmp_path)])
    assert await check_files(question) == LookAnswer(missing=[str(gone), str(tmp_path)])


def test_a_game_is_found_by_its_name_or_its_package() -> None:
    assert (
        check_files_now(LookQuestion(game="bandit")).game == "tinkermq.envs.games.bandit:BanditGame"
    )
    unknown = check_files_now(LookQuestion(game="bandti"))
    assert "did you mean bandit?" in unknown.hint
    missing = check_files_now(LookQuestion(game="no_such_package.games:Game"))
    assert missing.lacks_game.startswith("there is no module 'no_such_package'")


def test_no_code_of_a_game_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmful_game").mkdir()
    for name in ("__init__", "game"):
        (tmp_path / "harmful_game" / f"{name}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target = "harmful_game.game:Game"
    assert check_files_now(LookQuestion(game=target)).game == target


def question(game: str, folder: Path, **kwargs: object) -> PlayQuestion:
    """Return a question for a game of a job that would have its run below `folder`."""
    wanted = {"user": "ada", "job": "tried", "name": "environment-0", "role": "environment"}
    return PlayQuestion(
        wanted=WantedActor.model_validate({**wanted, "run_dir": str(folder / "run")}),
        env={"game": f"tests.support.games:{game}", "kwargs": kwargs},
    )


def told_of(folder: Path) -> list[Path]:
    """Return the processes that were given a question with this folder."""
    found: list[Path] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if str(folder).encode() in (process / "environ").read_bytes():
                found.append(process)
    return found


@pytest.fixture
def games() -> EnvCheckRunner:
    return EnvCheckRunner(ActorStarter())


async def test_a_game_that_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    games = EnvCheckRunner(ActorStarter(), play_s=3.0)
    playing = asyncio.create_task(
        games.play(question("SlowBandit", tmp_path, delay_s=60, until=str(tmp_path / "never")))
    )
    await until(lambda: bool(told_of(tmp_path)), "the game to be played")
    answer = await playing
    assert "was not played within 3 s" in answer.trouble
    assert not told_of(tmp_path)


async def test_a_node_plays_one_game_at_a_time(games: EnvCheckRunner, tmp_path: Path) -> None:
    one = question("SlowBandit", tmp_path, delay_s=0.001)
    first, second = await asyncio.gather(games.play(one), games.play(one))
    assert first.checks
    assert all(check.ok for check in first.checks)
    assert not second.known
    assert (await games.play(one)).known


async def test_a_configuration_that_no_process_can_be_given_is_refused(
    games: EnvCheckRunner, tmp_path: Path
) -> None:
    answer = await games.play(question("SlowBandit", tmp_path, text="x" * MAX_CONFIG_BYTES))
    assert "nodes try games of 98,304 at most" in answer.trouble


async def test_environment_hosts_alone_play(games: EnvCheckRunner, tmp_path: Path) -> None:
    asked = question("SlowBandit", tmp_path)
    as_learner = asked.wanted.model_copy(update={"role": "learner"})
    answer = await games.play(asked.model_copy(update={"wanted": as_learner}))
    assert answer.trouble == "environment hosts play games"
