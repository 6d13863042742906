"""Validation on a generator: its engines are at exactly the version that a task names."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Engine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.rollout.agent_loop import EpisodeFailed, blaming
from tinkermq.actors.rollout.validation import (
    TaskEpisodes,
    Validator,
    failed_episode,
    is_infrastructure,
    join_rows,
)
from tinkermq.actors.weights.follower import WeightFollower
from tinkermq.actors.weights.store import WeightStore
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.tasks import TaskQueue, ValidationLog, publish_validation_tasks
from tinkermq.envs.agents.episode import NoCalls
from tinkermq.envs.evaluation import score_of, validation_metrics
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.metric import ValidationResult
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import (
    BrokerError,
    EngineError,
    GameError,
    NotFoundError,
    RewardError,
    SandboxError,
    TinkermqError,
)
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.playing import Playing, playing
from tests.support.contexts import job_context
from tests.support.groups import make_trajectory
from tests.support.models import make_tiny_model
from tests.support.waiting import PATIENCE_S, eventually, until

# -- weights ---------------------------------------------------------------------------------------


class LoadedVersions:
    """Stands at the GPU's edge: notes which versions are loaded, and how."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, str]] = []

    async def load_weights(self, version: int, _: Mapping[str, Any], kv: str) -> None:
        """Note a version."""
        self.loaded.append((version, kv))


@asynccontextmanager
async def following(
    store: WeightStore,
) -> AsyncIterator[tuple[WeightFollower, list[tuple[int, str]]]]:
    """Follow the versions of a store, as a generator does."""
    engine = LoadedVersions()
    weights = WeightFollower(store, {MAIN: cast("Engine", engine)}, "keep")
    running = asyncio.create_task(weights.follow_versions())
    try:
        yield weights, engine.loaded
    finally:
        running.cancel()
        await asyncio.wait({running})


async def publish(store: WeightStore, version: int) -> None:
    data = memoryview(np.full(4, version, np.float32).tobytes())
    await store.publish(version, {"w": TensorBytes("float32", (4,), data)})


async def test_new_versions_wait_while_one_is_pinned(broker: Broker, scope: JobScope) -> None:
    store = WeightStore(broker, scope)
    await publish(store, 0)
    async with following(WeightStore(broker, scope)) as (weights, loaded):
        await weights.wait_for(0)
        await weights.pin(0)
        await publish(store, 1)
        async with weights.using(0):  # training goes on with what is loaded
            pass
        newer = asyncio.create_task(weights.wait_for(1))
        done, _ = await asyncio.wait({newer}, timeout=0.5)
        assert not done
        weights.unpin()
        await asyncio.wait_for(newer, PATIENCE_S)
        assert [version for version, _ in loaded] == [0, 1]


async def test_engines_go_back_only_when_no_group_of_a_newer_version_runs(
    broker: Broker, scope: JobScope
) -> None:
    store = WeightStore(broker, scope)
    for version in (0, 1):
        await publish(store, version)
    async with following(WeightStore(broker, scope)) as (weights, loaded):
        await weights.wait_for(1)
        async with weights.using(1):
            pinning = asyncio.create_task(weights.pin(0))
            done, _ = await asyncio.wait({pinning}, timeout=0.5)
            assert not done
            assert weights.version == 1
        await asyncio.wait_for(pinning, PATIENCE_S)
        assert (weights.version, loaded[-1]) == (0, (0, "recompute"))
        assert weights.is_back
        waiting = asyncio.create_task(enter(weights, 0))  # would start at an older version
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        weights.unpin()
        await asyncio.wait_for(waiting, PATIENCE_S)
        assert (weights.version, weights.is_back) == (1, False)


async def enter(weights: WeightFollower, version: int) -> None:
    async with weights.using(version):
        assert weights.version >= version


async def test_a_version_that_was_removed_pins_nothing(broker: Broker, scope: JobScope) -> None:
    store = WeightStore(broker, scope)
    for version in (3, 4):
        await publish(store, version)
    await store.keep({4})
    async with following(WeightStore(broker, scope)) as (weights, _):
        await weights.wait_for(4)
        with pytest.raises(NotFoundError, match="version 3 were removed, the newest is 4"):
            await weights.pin(3)
        await weights.pin(4)
        await publish(store, 5)
        weights.unpin()
        await asyncio.wait_for(weights.wait_for(5), PATIENCE_S)


# -- tasks -----------------------------------------------------------------------------------------


class Validation:
    """A process that validates versions of a tiny model, and what its engine drew."""

    def __init__(self, play: Playing, validator: Validator, store: WeightStore) -> None:
        self.play = play
        self.validator = validator
        self.store = store
        self.queue = TaskQueue(play.broker, play.scope, validation=True)
        self.log = ValidationLog(play.broker, play.scope)
        self.drawn: dict[str, set[int]] = {}
        generate = play.engine.generate

        async def noted(*args: Any, **kwargs: Any) -> Any:
            generation = await generate(*args, **kwargs)
            versions = self.drawn.setdefault(kwargs["request_id"], set())
            versions.update(generation.versions.tolist())
            return generation

        play.engine.generate = noted  # pyright: ignore[reportAttributeAccessIssue]

    async def results(self, version: int, num: int) -> list[ValidationResult]:
        """Wait for the results of a version."""

        async def there() -> list[ValidationResult] | None:
            results = await self.log.read(version)
            return results if len(results) == num else None

        return await eventually(there, f"{num} results of version {version}")

    def drawn_by(self, version: int) -> set[int]:
        """Return the versions that drew the tokens of a version's episodes."""
        own = [drawn for name, drawn in self.drawn.items() if name.startswith(f"gen-{version}-")]
        return set[int]().union(*own)


@asynccontextmanager
async def validating(
    broker: Broker, scope: JobScope, folder: Path, versions: int, **evaluation: Any
) -> AsyncIterator[Validation]:
    """Publish versions of a tiny model and play what validates them."""
    await create_job_streams(broker, scope, LimitsConfig(), validation=True)
    settings = {"samples": 2, **evaluation}
    async with playing(broker, scope, folder, "EchoGame", evaluation=settings) as play:
        context = await job_context(broker, scope, "gen", play.config)
        weights = WeightStore(broker, scope)
        model = load_causal_lm(str(folder), dtype=torch.float32).state_dict()
        for version in range(versions):
            tensors = {
                name: TensorBytes(
                    "float32",
                    tuple(one.shape),
                    memoryview(one.float().contiguous().numpy().tobytes()),
                )
                for name, one in model.items()
            }
            await weights.publish(version, tensors)
        chat = ChatTokenizer(load_tokenizer(str(folder)))
        episodes = await TaskEpisodes.start(context, {MAIN: play.engine}, chat, play.hosts)
        follower = WeightFollower(WeightStore(broker, scope), {MAIN: play.engine}, "keep")
        validation = Validation(play, Validator(context, episodes, follower), weights)
        running = asyncio.create_task(validation.validator.play_tasks())
        try:
            yield validation
        finally:
            running.cancel()
            await asyncio.wait({running})
            await validation.queue.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("validation") / "model", heads=2)


def tasks_of(version: int, num: int, samples: int = 2) -> list[Task]:
    return [Task(task=n, sample=n, seed=n, version=version, group_size=samples) for n in range(num)]


async def test_each_task_is_played_by_exactly_the_version_that_it_names(
    broker: Broker, scope: JobScope, tiny: Path
) -> None:
    async with validating(broker, scope, tiny, versions=3) as validation:
        await publish_validation_tasks(validation.queue, tasks_of(2, 3))
        newest = await validation.results(2, 3)
        await publish_validation_tasks(validation.queue, tasks_of(0, 2))  # the engines go back
        await publish_validation_tasks(validation.queue, tasks_of(1, 2))
        for version in (0, 1):
            results = await validation.results(version, 2)
            assert all(len(one.episodes) == 2 for one in results)
        for version in (0, 1, 2):
            assert validation.drawn_by(version) == {version}
        scores = [score for one in newest for score in one.episodes]
        assert all(score is not None and score.num_tokens > 0 for score in scores)


async def test_a_version_that_is_gone_is_refused_with_its_reason(
    broker: Broker, scope: JobScope, tiny: Path
) -> None:
    async with validating(broker, scope, tiny, versions=2) as validation:
        await validation.store.keep({1})
        await publish_validation_tasks(validation.queue, tasks_of(0, 2))
        blames = [one.blame for one in await validation.results(0, 2)]
        assert all(blame and "version 0 were removed" in blame.message for blame in blames)
        await publish_validation_tasks(validation.queue, tasks_of(1, 1))
        [played] = await validation.results(1, 1)
        assert played.blame is None


async def test_episodes_that_last_beyond_the_deadline_count_as_failed(
    broker: Broker, scope: JobScope, tiny: Path
) -> None:
    async with validating(broker, scope, tiny, versions=1, deadline_s=1e-6) as validation:
        await publish_validation_tasks(validation.queue, tasks_of(0, 2))
        results = await validation.results(0, 2)
        assert [one.episodes for one in results] == [[None, None], [None, None]]


async def test_an_engine_that_has_ended_ends_validation_instead_of_failing_every_episode(
    broker: Broker, scope: JobScope, tiny: Path
) -> None:
    async with validating(broker, scope, tiny, versions=1) as validation:
        episodes = validation.validator._episodes
        await until(lambda: validation.play.engine.version == 0, "the engine")
        await validation.play.engine.close()
        [task] = tasks_of(0, 1)
        with pytest.raises(ExceptionGroup) as raised:
            await episodes.play(task)
        assert raised.group_contains(EngineError, match="was closed")


# -- programs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "apart"),
    [
        (SandboxError("no namespace"), True),
        (BrokerError("away"), True),
        (EngineError("ended"), True),
        (RewardError("no number"), False),
        (NoCalls("no answered call"), False),
        (GameError("crashed"), False),
    ],
)
def test_only_infrastructure_is_not_counted(error: TinkermqError, apart: bool) -> None:
    with pytest.raises(EpisodeFailed) as raised, blaming("environment"):
        raise error
    assert is_infrastructure(raised.value) is apart


def test_an_episode_of_several_rows_counts_once_with_all_its_rewards() -> None:
    rows = [
        make_trajectory([1, 2], [([3, 4], [])], [1.0], kind="main", info={"outcome": "done"}),
        make_trajectory([1], [([5], [6]), ([7], [])], [0.25, 0.5], kind="edited"),
    ]
    whole = join_rows(rows)
    assert (whole.reward, whole.num_generated) == (1.75, 4)
    assert whole.token_ids[whole.turn_ends].tolist() == [4, 5, 7]
    assert whole.mask[whole.turn_ends].all()
    failed = EpisodeFailed(NoCalls("none"), "environment", 0)
    scores = [score_of(one, -1.0) for one in (whole, failed_episode(failed.blame))]
    numbers = validation_metrics([[*scores, None]], 3)
    assert numbers["val/mean_score"] == 0.875
    assert numbers["val/success_rate"] == 0.5
    assert numbers["val/num_turns"] == 3.0
    assert (numbers["val/num_episodes"], numbers["val/failed_episodes"]) == (2, 1)
    assert numbers["val_agent/outcome_done"] == 0.5
    assert numbers["val_agent/outcome_no_calls"] == 0.5
    assert "val_game/success" not in numbers
