"""Games with roles as a generator plays them: who speaks, with whose weights, and what is kept."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.actors.rollout.agent_loop import EpisodeSampling
from tinkermq.actors.rollout.groups import GroupFailed, GroupRunner
from tinkermq.actors.rollout.players import Players
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.support.models import changed, plain_logprobs, until


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), width=32, layers=1, seed=9)


Run = Callable[[Task], Awaitable[Group]]


@asynccontextmanager
async def playing(
    broker: Broker, scope: JobScope, folder: Path, game: str = "DuetGame", **sections: Any
) -> AsyncIterator[Run]:
    """Host a game and yield what rolls out its tasks."""
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": f"tests.support.games:{game}"},
            "rollout": {
                "group_size": 3,
                "max_turns": 4,
                "max_prompt_tokens": 48,
                "max_turn_tokens": 4,
                "max_response_tokens": 64,
            },
            "generator": {"max_requests": 8},
            **sections,
        }
    )
    host, stopping = EnvironmentHost(broker, scope, config.env, drain_s=0.01), asyncio.Event()
    hosting = asyncio.create_task(host.run(stopping))
    hosts = Environments(broker, scope, config.env, lambda _: nullcontext())
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    sampling = EpisodeSampling.of(config.rollout)
    players = await Players.start(config, chat, hosts, sampling)
    past = None
    if config.self_play.past_share > 0:
        past = await Players.start(config, chat, hosts, sampling)
        weights = changed(load_causal_lm(str(folder), dtype=torch.float32), 1)
        await past.engines[""].load_weights(7, weights)
    runner = GroupRunner(players, hosts, config, "test", past)
    try:
        yield lambda task: runner.run_group(task, "try")
        await until(lambda: host.num_running == 0)
    finally:
        stopping.set()
        await hosting
        await players.close()
        if past is not None:
            await past.close()


def task(seed: int = 0, **fields: Any) -> Task:
    return Task(task=seed, seed=seed, group_size=3, **fields)


async def test_each_role_has_a_trajectory_with_prompt_mask_and_rewards_of_its_own(
    broker: Broker, scope: JobScope, folder: Path
) -> None:
    async with playing(broker, scope, folder) as run:
        group = await run(task(seed=1))
    roles = sorted(item.role for item in group.trajectories)
    assert roles == ["high"] * 3 + ["low"] * 3
    tokenizer = load_tokenizer(str(folder))
    for item in group.trajectories:
        assert item.messages[0]["content"] == f"you are {item.role}"
        assert [message["role"] for message in item.messages[1:]] == ["user", "assistant"] * 2
        assert item.finish == "done"
        generated = np.flatnonzero(item.mask)
        said = [m["content"] for m in item.messages if m["role"] == "assistant"]
        first, second = np.split(generated, [np.searchsorted(generated, item.turn_ends[0] + 1)])
        for places, text in zip((first, second), said, strict=True):
            ids = item.token_ids[places].tolist()
            kept = [token for token in ids if token not in (0, 1)]  # padding, and a turn's end
            assert tokenizer.decode(kept) == text
        # 1 for each action and 2 for each of the other's, of which the first came before its own
        assert item.reward == 6.0
    whole = sorted(item.rewards.tolist() for item in group.trajectories)
    assert whole == [[3.0, 3.0]] * 3 + [[5.0, 1.0]] * 3


async def test_a_role_is_played_by_the_weights_of_its_own_policy(
    broker: Broker, scope: JobScope, folder: Path, other: Path
) -> None:
    async with playing(broker, scope, folder, policies={"low": str(other)}) as run:
        group = await run(task())
    models = {
        role: load_causal_lm(str(path), dtype=torch.float32)
        for role, path in (("high", folder), ("low", other))
    }
    for item in group.trajectories:
        own = plain_logprobs(models[item.role], item.token_ids[:1], item.token_ids[1:])
        made = np.flatnonzero(item.mask)
        np.testing.assert_allclose(item.logprobs[made], own[made - 1], atol=1e-4)


async def test_an_earlier_version_plays_and_is_not_in_the_group(
    broker: Broker, scope: JobScope, folder: Path
) -> None:
    async with playing(broker, scope, folder, self_play={"past_share": 1.0}) as run:
        groups = [await run(task(seed)) for seed in range(6)]
    learning = {group.trajectories[0].role for group in groups}
    assert learning == {"high", "low"}
    for group in groups:
        assert len(group.trajectories) == 3
        for item in group.trajectories:
            (opponent,) = {"high", "low"} - {item.role}
            assert item.opponents == {opponent: 7}
            assert item.max_version == 0


@pytest.mark.parametrize(
    ("game", "sections", "fields", "problem"),
    [
        ("AloneGame", {"self_play": {"past_share": 0.5}}, {}, "past_share has no effect: the game"),
        ("DuetGame", {"policies": {"tenor": "MODEL"}}, {}, "policies.tenor is no role of the game"),
        ("AloneGame", {"policies": {"low": "MODEL"}}, {}, "policies.low is no role of the game"),
        (
            "DuetGame",
            {"algorithm": {"advantage": "remax"}},
            {"greedy_baseline": True},
            "remax has no baseline in a game with roles",
        ),
    ],
)
async def test_what_the_roles_do_not_bear_is_refused_with_its_key(
    broker: Broker,
    scope: JobScope,
    folder: Path,
    game: str,
    sections: dict[str, dict[str, Any]],
    fields: dict[str, Any],
    problem: str,
) -> None:
    filled = {
        name: {key: str(folder) if value == "MODEL" else value for key, value in section.items()}
        for name, section in sections.items()
    }
    async with playing(broker, scope, folder, game, **filled) as run:
        with pytest.raises(GroupFailed, match=problem) as failed:
            await run(task(**fields))
    assert failed.value.blame.code == "config"
