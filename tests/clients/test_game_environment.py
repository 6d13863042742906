"""Games of the user's own are hosted in the user's process."""

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.clients import GameEnvironment, MathGameEnvironment, create_game_environment
from tinkermq.clients.address import JobAddress
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.games.addition import AdditionGame, make_data
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.env import DescribeReply, DescribeRequest
from tinkermq.schemas.wire.errors import ConfigError, DataError, GameError
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.waiting import PATIENCE_S


class EchoGame(AbstractGame):
    """Pays for repeating a word."""

    def __init__(self, word: str = "yes", listener: Any = None) -> None:
        self.word = word
        self.listener = listener

    def reset(self, **_: Any) -> str:
        return f"say {self.word}"

    def step(self, action: str) -> StepResult:
        if self.listener is not None:
            self.listener.append(action)
        return StepResult("", float(action == self.word), done=True)

    def get_system_prompt(self) -> str:
        return ""

    def get_initial_user_message(self) -> str:
        return ""


class BrokenGame(EchoGame):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")


@pytest.fixture
def url(broker: Broker, scope: JobScope) -> str:
    return JobAddress(broker.url, scope).server_url


async def play(broker: Broker, scope: JobScope, action: str, sample: int | None = None) -> float:
    """Reset and step once, as a generator does."""
    hosts = Environments(broker, scope, EnvConfig(game="echo"), lambda _: nullcontext())
    episode = f"e-{action}"
    started = await hosts.reset(episode, Start("train", sample, 1))
    stepped = await hosts.step(started.host, episode, 0, action)
    return stepped.reward


async def test_a_game_runs_in_a_thread_of_the_users_process_while_its_loop_goes_on(
    broker: Broker, scope: JobScope, url: str
) -> None:
    # The listener is shared by reference: nothing was pickled.
    heard: list[str] = []
    kwargs = {"word": "ja", "listener": heard}
    with GameEnvironment(EchoGame, game_kwargs=kwargs, job_id=scope.job) as env:
        env.setup(url)
        assert await play(broker, scope, "ja") == 1.0
        assert await play(broker, scope, "nein") == 0.0
    assert heard == ["ja", "nein"]


async def test_a_dataset_game_reads_its_files_in_the_users_process(
    broker: Broker, scope: JobScope, url: str, tmp_path: Path
) -> None:
    train, val = make_data(tmp_path, num_train=8, num_val=4)
    with MathGameEnvironment(AdditionGame, {"val_batch_size": 3}, train, [val]) as env:
        env.setup(url)
        described = await call(
            broker,
            scope.env_describe,
            DescribeRequest(),
            DescribeReply,
            timeout_s=PATIENCE_S,
            waiting_for="the game",
        )
        assert (described.num_train, described.num_val) == (8, 3)
        assert isinstance(await play(broker, scope, "0", sample=2), float)


async def test_cleanup_ends_the_host_and_its_thread(
    broker: Broker, scope: JobScope, url: str
) -> None:
    env = GameEnvironment(EchoGame)
    env.setup(url)
    env.setup(url)
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("tinkermq-games") == 1
    env.cleanup()
    env.cleanup()
    assert "tinkermq-games" not in [thread.name for thread in threading.enumerate()]


async def test_a_game_that_cannot_be_made_says_why_at_setup(url: str) -> None:
    with pytest.raises(GameError, match="no licence"):
        GameEnvironment(BrokenGame).setup(url)


async def test_missing_data_is_named_at_setup(url: str) -> None:
    with pytest.raises(DataError, match=r"none\.parquet"):
        MathGameEnvironment(AdditionGame, data_paths="/no/none.parquet").setup(url)


def test_a_dataset_environment_without_files_is_refused() -> None:
    with pytest.raises(ConfigError, match="data_paths is empty"):
        MathGameEnvironment(AdditionGame)


def test_an_environment_of_another_job_is_refused() -> None:
    env = GameEnvironment(EchoGame, job_id="another")
    with pytest.raises(ConfigError, match="made for job another"):
        env.setup("nats://127.0.0.1:4222/local/this")


def test_the_configuration_says_that_the_client_hosts() -> None:
    env = create_game_environment(EchoGame, {"env": {"workers": 2}}, word="ja", listener=print)
    config = env.get_config()["env"]
    assert config["hosts"] == 0
    assert config["workers"] == 2
    assert config["game"].endswith("test_game_environment:EchoGame")
    # What cannot travel is only shown: the object itself stays in this process.
    assert config["kwargs"] == {"word": "ja", "listener": repr(print)}
    assert env.game_kwargs["listener"] is print
