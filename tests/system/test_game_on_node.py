"""A game is tried on a node, as a job would play it there, before a job is submitted."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients.command import Outcome, tinkermq
from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check(stack: Stack, folder: Path, *words: str) -> Outcome:
    """Check a game from `folder`, where nothing of this checkout can be imported."""
    line = ("env", "check", *words, "--on-node", "--nats-url", stack.server.url)
    return await asyncio.to_thread(tinkermq, *line, cwd=folder)


def job(folder: Path, **env: Any) -> str:
    """Write the configuration of a job whose model is not there; return the file's name."""
    (folder / "job.yaml").write_text(yaml.safe_dump(small_job(Path("/no/model"), env=env)))
    return "job.yaml"


async def test_what_is_importable_there_alone_is_played_there(stack: Stack, tmp_path: Path) -> None:
    game = "tests.support.games:SlowBandit"
    here = await asyncio.to_thread(tinkermq, "env", "check", game, cwd=tmp_path)
    assert here.code == 1
    file = job(tmp_path, game=game, kwargs={"delay_s": 0.001}, num_val=0)
    for words in ((game, "delay_s=0.001"), (file,)):
        told = await check(stack, tmp_path, *words, "--json")
        assert told.code == 0, told.out + told.err
        answer = json.loads(told.out)
        assert answer["node"] == "node"
        names = [one["name"] for one in answer["checks"]]
        assert "a seed reproduces an episode" in names
        assert "gold answers score full marks" in names


async def test_a_game_that_takes_longer_than_a_request_may_is_asked_for_again(
    stack: Stack, tmp_path: Path
) -> None:
    game = ("tests.support.games:SlowBandit", "delay_s=0.15")
    told = await check(stack, tmp_path, *game)
    assert told.code == 0, told.out + told.err
    assert "played by node node" in told.err
    assert "gold answers score full marks" in told.out


async def test_what_is_wrong_with_a_game_is_told_as_if_it_were_played_here(
    stack: Stack, tmp_path: Path
) -> None:
    told = await check(stack, tmp_path, "tests.support.games:RaisesInStep")
    assert told.code == 1
    assert "no rule for" in told.out


async def test_a_game_that_ends_its_process_costs_the_node_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    told = await check(stack, tmp_path, "tests.support.games:EndsItsProcess")
    assert told.code == 2
    assert "the process that played it ended: exit code 0" in told.err
    assert "so long" in told.err
    assert (await check(stack, tmp_path, "guess")).code == 0


async def test_what_no_node_has_or_would_play_is_said(stack: Stack, tmp_path: Path) -> None:
    rows = job(tmp_path, game="addition", train_data=["/no/rows.jsonl"], num_val=0)
    lacks_rows = await check(stack, tmp_path, rows)
    assert lacks_rows.code == 2
    assert "node node: there is no file /no/rows.jsonl" in lacks_rows.err
    lacks_game = await check(stack, tmp_path, "none.such:Game")
    assert "node node: there is no module 'none'" in lacks_game.err
    hosted = await check(stack, tmp_path, job(tmp_path, game="guess", hosts=0))
    assert "env.hosts=0 leaves it to clients" in hosted.err
    with_model = await check(stack, tmp_path, "guess", "--model", "/no/model")
    assert "--on-node plays without a model" in with_model.err
