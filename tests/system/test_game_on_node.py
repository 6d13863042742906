"""A game is tried on a node, as a job would play it there, before a job is submitted."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.clients.pool import Pool
from tinkermq.schemas.node import GameCheckReply
from tinkermq.schemas.wire.errors import ConfigError, DataError, GameError

from tests.clients.command import tinkermq
from tests.support.configs import small_job
from tests.support.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


def job(**env: Any) -> dict[str, Any]:
    """Return the configuration of a job whose model is not there."""
    return small_job(Path("/no/model"), env=env)


async def checked(stack: Stack, game: str, **env: Any) -> GameCheckReply:
    """Have the stack's node play a game of the tests."""
    return await Pool(stack.broker).check_game(job(game=f"tests.support.games:{game}", **env))


async def test_what_is_importable_there_alone_is_played_there(stack: Stack, tmp_path: Path) -> None:
    env = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.04}, "num_val": 0}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(**env)))
    words = ("env", "check", "job.yaml", "--json")
    here = await asyncio.to_thread(tinkermq, *words, cwd=tmp_path)
    assert here.code == 1
    there = ("--on-node", "--nats-url", stack.server.url)  # longer than one request may take
    told = await asyncio.to_thread(tinkermq, *words, *there, cwd=tmp_path)
    assert told.code == 0, told.out + told.err
    answer = json.loads(told.out)
    assert (answer["ok"], answer["node"]) == (True, "node")
    names = {one["name"] for one in answer["checks"]}
    assert {"a seed reproduces an episode", "gold answers score full marks"} <= names


async def test_what_is_wrong_with_a_game_is_told_as_if_it_were_played_here(stack: Stack) -> None:
    failed = [one for one in (await checked(stack, "RaisesInStep")).checks if not one.ok]
    assert "no rule for" in failed[0].detail


async def test_a_game_that_ends_its_process_costs_the_node_nothing(stack: Stack) -> None:
    with pytest.raises(GameError, match=r"process that played it ended: exit code 0(?s:.*)so long"):
        await checked(stack, "EndsItsProcess")
    assert (await checked(stack, "WithTool")).done


async def test_what_no_node_has_or_would_play_is_said(stack: Stack) -> None:
    pool = Pool(stack.broker)
    with pytest.raises(DataError, match=r"node node: there is no file /no/rows.jsonl"):
        await pool.check_game(job(game="addition", train_data=["/no/rows.jsonl"]))
    with pytest.raises(GameError, match=r"node node: there is no module 'none'"):
        await pool.check_game(job(game="none.such:Game"))
    with pytest.raises(ConfigError, match=r"env.hosts=0 leaves it to clients"):
        await pool.check_game(job(game="guess", hosts=0))


@pytest.mark.long
async def test_a_node_looks_into_a_model_with_the_code_of_the_run(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    pool, env = Pool(stack.broker), {"game": "addition", "hosts": 1}
    told = await pool.check_game(small_job(model, env=env), look="model")
    assert (told.node, [one.detail for one in told.checks if not one.ok]) == ("node", [])
    names = {one.name for one in told.checks}
    assert {"the weights are those of the configuration", "a checkpoint can be written"} <= names

    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    told = await pool.check_game(small_job(broken, env=env), look="model")
    wrong = [one.name for one in told.checks if not one.ok]
    assert "the weights are those of the configuration" in wrong
    nowhere = await pool.check_game(small_job(tmp_path / "none", env=env), look="model")
    assert (nowhere.done, nowhere.node, nowhere.checks) == (True, "", [])
