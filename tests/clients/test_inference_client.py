"""Which model and which job a caller means, and what it is told when that is not clear."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import AsyncInferenceSchedulerClient, run_inference
from tinkermq.clients.cli.evaluation import resolve_served
from tinkermq.clients.inference.inference_client import (
    ModelSource,
    find_source,
    with_options,
)
from tinkermq.clients.inference.play import chosen_tasks, hosted_env
from tinkermq.clients.inference.run_inference import open_served
from tinkermq.clients.pool import Pool
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.wire.codec import merged
from tinkermq.schemas.wire.errors import ConfigError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.conftest import new_record


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
    _, env = await resolve_served(pool, ended.name)
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
    with pytest.raises(ConfigError, match="of kind infer that trains nothing"):
        await find_source(Pool(broker), serving.name)


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
        (None, None, None, "not said which model plays"),
        ("job", None, "model", "not said which model plays"),
        ("http://pool:8080/v1", None, None, "does not say which job is meant"),
        ("nats://pool:4222/local/a", "b", None, "names job a, job_id is 'b'"),
    ],
)
async def test_an_unclear_job_is_refused(
    server: str | None, job: str | None, model: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with open_served(server, job, model_path=model):
            pass


def test_tasks_are_all_rows_a_list_or_as_many_seeds_as_asked_for() -> None:
    assert list(chosen_tasks(None, 3, None)) == [0, 1, 2]
    assert list(chosen_tasks(None, 3, 2)) == [0, 1]
    assert list(chosen_tasks([2, 2, 0], 3, None)) == [2, 0]
    assert list(chosen_tasks(None, None, 4)) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="task 3 does not exist: there are 3 rows"):
        chosen_tasks([3], 3, None)
    with pytest.raises(ConfigError, match="how many to play"):
        chosen_tasks(None, None, None)


def test_data_needs_a_game_that_is_hosted_here() -> None:
    assert hosted_env(None, None, None) is None
    with pytest.raises(ConfigError, match="need a game that is hosted here"):
        hosted_env(None, "rows.jsonl", None)
    env = hosted_env(BanditGame, "rows.jsonl", {"arms": 3})
    assert env is not None
    assert env.kwargs == {"arms": 3}
    assert Path(env.train_data[0]).is_absolute()
