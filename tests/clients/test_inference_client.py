"""Which model and which job a caller means, and games that the client hosts."""

import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import call
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import (
    AsyncInferenceSchedulerClient,
    GameEnvironment,
    MathGameEnvironment,
    create_game_environment,
    run_inference,
)
from tinkermq.clients.base import JobAddress, parse_broker_url, parse_server_url
from tinkermq.clients.cli.evaluation import Progress, find_served, print_report
from tinkermq.clients.cli.serving import _print_served
from tinkermq.clients.home import Home, StackState, find_openai
from tinkermq.clients.inference.inference_client import (
    ModelSource,
    find_source,
    with_options,
)
from tinkermq.clients.inference.play import (
    EpisodeResult,
    InferenceReport,
    chosen_tasks,
    hosted_env,
)
from tinkermq.clients.inference.run_inference import open_served
from tinkermq.clients.pool import Pool
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.games.addition import AdditionGame, make_data
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.env import DescribeReply, DescribeRequest
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.codec import merged
from tinkermq.schemas.wire.errors import ConfigError, DataError, GameError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record
from tests.support.waiting import PATIENCE_S


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def test_a_folder_is_served_with_the_context_that_its_model_has(
    broker: Broker, tmp_path: Path
) -> None:
    for positions, context in ((512, 512), (131072, 4096)):
        folder = model_folder(tmp_path / str(positions), max_position_embeddings=positions)
        source = await find_source(Pool(broker), str(folder))
        assert (source.fork_of, source.follow) == (None, None)
        config = parse_config(with_options(source, broker_url=broker.url))
        assert config.model.path == str(folder)
        assert config.generator.max_context == context
        assert config.rollout.max_tokens <= context


async def test_a_length_of_ones_own_fits_prompt_and_response_into_it(broker: Broker) -> None:
    source = await find_source(Pool(broker), "owner/name")
    for length in (2, 64, 100_000):
        tree = with_options(source, max_model_len=length, broker_url=broker.url)
        config = parse_config(tree)
        assert config.generator.max_context == length
        assert config.rollout.max_tokens <= length


async def test_a_live_run_is_followed_and_a_step_of_it_is_its_checkpoint(
    broker: Broker, record: JobRecord
) -> None:
    pool = Pool(broker)
    followed = await find_source(pool, record.name)
    assert (followed.follow, followed.fork_of) == (record.job, None)
    step = await find_source(pool, f"{record.name}@40")
    assert (step.follow, step.fork_of) == (None, f"{record.job}@40")
    assert step.config["env"] == record.config["env"]
    with pytest.raises(ConfigError, match="names no step"):
        await find_source(pool, f"{record.name}@newest")


async def test_of_a_run_that_has_ended_the_last_checkpoint_is_served(
    broker: Broker, scope: JobScope
) -> None:
    ended = new_record(scope, state="COMPLETED")
    await JobStore(broker).create(ended, "test")
    for name in (ended.name, f"{ended.name}@last"):
        assert (await find_source(Pool(broker), name)).fork_of == f"{ended.job}@last"


async def test_a_run_comes_before_a_folder_of_its_name_unless_that_is_named_as_one(
    broker: Broker, scope: JobScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = new_record(scope, state="COMPLETED")
    await JobStore(broker).create(ended, "test")
    model_folder(tmp_path / ended.name, max_position_embeddings=512)
    monkeypatch.chdir(tmp_path)
    pool = Pool(broker)
    assert (await find_source(pool, ended.name)).fork_of == f"{ended.job}@last"
    assert (await find_source(pool, f"./{ended.name}")).fork_of is None
    _, env = await find_served(pool, ended.name)
    assert env == ended.config["env"]
    model_folder(tmp_path / "no-run", max_position_embeddings=512)
    assert (await find_source(pool, "no-run")).fork_of is None


async def test_a_run_of_external_agents_is_served_by_a_server_of_its_own(
    broker: Broker, scope: JobScope
) -> None:
    external = new_record(scope, state="COMPLETED")
    config = merged(external.config, {"generator": {"count": 0}})
    await JobStore(broker).create(external.model_copy(update={"config": config}), "test")
    source = await find_source(Pool(broker), external.name)
    config = with_options(source, broker_url=broker.url)
    assert parse_config(config).generator.count == 1


async def test_a_misspelt_run_is_answered_with_the_closest(
    broker: Broker, record: JobRecord
) -> None:
    with pytest.raises(NotFoundError) as caught:
        await find_source(Pool(broker), record.name + "x")
    assert record.name in caught.value.hint


async def test_an_inference_job_trains_nothing_that_could_be_served(
    broker: Broker, scope: JobScope
) -> None:
    serving = await JobStore(broker).create(new_record(scope, kind="infer"), "test")
    with pytest.raises(ConfigError, match="of kind infer, which trains no model"):
        await find_source(Pool(broker), serving.name)


async def test_a_run_that_waits_for_its_configuration_has_no_model_yet(
    broker: Broker, scope: JobScope
) -> None:
    waiting = await JobStore(broker).create(new_record(scope, configured=False), "test")
    with pytest.raises(ConfigError, match="waits for its configuration"):
        await find_source(Pool(broker), waiting.name)


def test_options_are_laid_over_the_runs_configuration() -> None:
    source = ModelSource({"model": {"path": "m"}, "env": {"game": "bandit"}})
    config = with_options(source, tokenizer_path="m", num_servers=3, trust_remote_code=True)
    assert config["model"] == {"path": "m", "trust_remote_code": True}
    assert config["generator"] == {"count": 3}


def test_the_url_is_the_gateways_where_one_is_known(
    scope: JobScope, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TINKERMQ_HOME", str(tmp_path))
    monkeypatch.delenv("TINKERMQ_GATEWAY_URL", raising=False)
    record = new_record(scope, kind="infer", serves="my-run@4")
    url = "nats://127.0.0.1:4222"
    plain = AsyncInferenceSchedulerClient(url).describe_job(record)
    assert plain["vllm_server_url"] == f"{url}/{scope.user}/{scope.job}"
    assert plain["model"] == "my-run@4"
    monkeypatch.setenv("TINKERMQ_GATEWAY_URL", "http://pool:8080/")
    assert (
        AsyncInferenceSchedulerClient(url).describe_job(record)["vllm_server_url"]
        == "http://pool:8080/v1"
    )
    given = AsyncInferenceSchedulerClient(url, gateway_url="http://other").describe_job(record)
    assert given["vllm_server_url"] == "http://other/v1"


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("temprature", "did you mean temperature"),
        ("num_gpus", "it has"),
    ],
)
def test_an_option_that_run_inference_does_not_have_is_refused_with_the_closest(
    option: str, told: str
) -> None:
    unknown: dict[str, Any] = {option: 1}
    with pytest.raises(ConfigError, match=f"run_inference has no option {option}") as refused:
        run_inference("nats://127.0.0.1:1/local/j", **unknown)
    assert told in refused.value.hint


@pytest.mark.parametrize(
    ("server", "job", "model", "said"),
    [
        (None, None, None, "must be given by exactly one"),
        ("job", None, "model", "must be given by exactly one"),
        ("http://pool:8080/v1", None, None, "does not name a job"),
        ("nats://pool:4222/local/a", "b", None, "names job a, job_id is 'b'"),
    ],
)
async def test_an_unclear_job_is_refused(
    server: str | None, job: str | None, model: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with open_served(server, job, model_path=model):
            pass


@pytest.mark.parametrize(
    ("env", "played"),
    [
        ({"game": "bandit"}, "tinkermq infer chat --max-samples 64 "),
        ({"game": "bandit", "hosts": 0}, "tinkermq infer chat --game GAME --max-samples 64 "),
        ({}, "tinkermq infer chat --game GAME --max-samples 64 "),
    ],
)
def test_a_served_model_is_shown_with_commands_that_work(
    env: dict[str, Any], played: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record = new_record(JobScope("u", "j"), name="chat", kind="infer", config={"env": env})
    _print_served(record, {"model": "m", "url": "http://h/v1", "server_url": "nats://h/u/j"})
    shown = capsys.readouterr().out
    assert f"  {played}" in shown
    asked = '{"model": "m", "messages": [{"role": "user", "content": "Hello"}]}'
    assert f"  curl http://h/v1/chat/completions -d '{asked}' " in shown


def test_episodes_that_all_failed_have_no_scores(capsys: pytest.CaptureFixture[str]) -> None:
    failed = EpisodeResult(0, 0, 0.0, False, error="no rule\nFile game.py")
    progress = Progress(as_json=False)
    progress.start(2, 0)
    progress.add(failed)
    progress.add(EpisodeResult(1, 0, 0.5, False))
    assert print_report(InferenceReport(failed=[failed]), None, as_json=False) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[1:4] == [
        "1 of 2 played, 1 failed",
        "2 of 2 played, mean reward 0.500, 1 failed",
        "1 episodes failed; the first: no rule",
    ]


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"temperature": -1.0}, "temperature: must be ≥ 0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_turns": 0}, "max_turns: must be ≥ 1"),
        ({"max_samples": 0}, "max_samples=0 must be at least 1"),
    ],
)
def test_an_option_out_of_its_bounds_is_refused_before_a_model_is_served(
    option: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        run_inference(model_path="no-such-model", **option)


def test_tasks_are_all_rows_a_list_or_as_many_seeds_as_asked_for() -> None:
    assert list(chosen_tasks(None, 3, None)) == [0, 1, 2]
    assert list(chosen_tasks(None, 3, 2)) == [0, 1]
    assert list(chosen_tasks([2, 2, 0], 3, None)) == [2, 0]
    assert list(chosen_tasks(None, None, 4)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="task 3 does not exist: there are 3 rows"):
        chosen_tasks([3], 3, None)
    with pytest.raises(ConfigError, match="number of episodes must be given"):
        chosen_tasks(None, None, None)


def test_data_needs_a_game_that_is_hosted_here() -> None:
    assert hosted_env(None, None, None) is None
    with pytest.raises(ConfigError, match="need a game hosted in this process"):
        hosted_env(None, "rows.jsonl", None)
    env = hosted_env(BanditGame, "rows.jsonl", {"arms": 3})
    assert env is not None
    assert env.kwargs == {"arms": 3}
    assert Path(env.train_data[0]).is_absolute()


# -- Games of the user's own are hosted in the user's process --------------------------------------


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


class SlowToMake(EchoGame):
    """Loads something that takes over a minute."""

    def __init__(self) -> None:
        time.sleep(61)
        super().__init__()


@pytest.mark.full
async def test_a_game_may_take_as_long_to_be_made_as_a_reset_may(url: str) -> None:
    slow = GameEnvironment(SlowToMake, {"env": {"reset_timeout_s": 300}})
    with slow:
        slow.setup(url)
    hasty = GameEnvironment(SlowToMake, {"env": {"reset_timeout_s": 0.5}})
    with pytest.raises(GameError, match=r"SlowToMake hung in __init__ for 0\.5 s"):
        hasty.setup(url)


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
    assert config["game"].endswith("test_inference_client:EchoGame")
    # What cannot travel is only shown: the object itself stays in this process.
    assert config["kwargs"] == {"word": "ja", "listener": repr(print)}
    assert env.game_kwargs["listener"] is print


# -- URLs name a broker, or a job at a broker ------------------------------------------------------


def test_a_server_url_names_broker_user_and_job() -> None:
    address = parse_server_url("nats://127.0.0.1:4222/local/01abc")
    assert address.broker_url == "nats://127.0.0.1:4222"
    assert (address.scope.user, address.scope.job) == ("local", "01abc")
    assert address.server_url == "nats://127.0.0.1:4222/local/01abc"


def test_a_host_and_port_alone_mean_nats() -> None:
    assert parse_broker_url("127.0.0.1:4222") == "nats://127.0.0.1:4222"


def test_the_servers_of_a_cluster_stand_in_one_url() -> None:
    address = parse_server_url("tls://a:4222,b,tls://c:4333/ada/01abc")
    assert address.broker_url == "tls://a:4222,b,c:4333"
    assert (address.scope.user, address.scope.job) == ("ada", "01abc")
    assert parse_server_url(address.server_url) == address


@pytest.mark.parametrize("url", ["nats://a,tls://b", "nats://a,", "nats://a,http://b"])
def test_servers_that_do_not_go_together_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a broker"):
        parse_broker_url(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8780", "nats://", ""])
def test_another_kind_of_url_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a broker") as caught:
        parse_broker_url(url)
    assert "nats://host:port" in caught.value.hint


def test_a_broker_url_alone_names_no_job() -> None:
    with pytest.raises(ConfigError, match="does not name a job") as caught:
        parse_server_url("nats://127.0.0.1:4222")
    assert "submit_job" in caught.value.hint


def test_the_gateway_of_the_local_stack_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERMQ_HOME", str(tmp_path))
    monkeypatch.delenv("TINKERMQ_GATEWAY_URL", raising=False)
    home = Home()
    assert find_openai() is None
    with home.lock():
        state = StackState(url="nats://x", pid=1, home=str(tmp_path), started=0.0)
        home.write(state.model_copy(update={"gateway": "http://127.0.0.1:8780"}))
        assert find_openai() == "http://127.0.0.1:8780/v1"
    monkeypatch.setenv("TINKERMQ_GATEWAY_URL", "http://there")
    assert find_openai() == "http://there/v1"
    assert find_openai("http://given/") == "http://given/v1"
