"""More episodes than a group has: the first to end are the group, and the bias is told."""

from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.actors.rollout.groups import GroupFailed
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.playing import playing
from tests.support.models import until

LONG = {"max_turns": 12, "max_turn_tokens": 4, "max_response_tokens": 280}


async def test_short_episodes_are_kept_and_the_numbers_say_so(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    task = Task(task=1, seed=1, group_size=12)
    async with playing(
        broker, recorded, folder, "CoinGame", rollout={**LONG, "group_size": 12}
    ) as play:
        everybody = await play.run(task)
        await play.recorder(task, 1).end()
    async with playing(
        broker, recorded, folder, "CoinGame", rollout={**LONG, "group_size": 6, "oversample": 6}
    ) as play:
        group = await play.run(task.model_copy(update={"group_size": 6}))
        await play.recorder(task, 1).end()
    lengths = {one.token_ids.tobytes(): one.num_generated for one in everybody.trajectories}
    kept = [lengths.pop(one.token_ids.tobytes()) for one in group.trajectories]
    assert len(kept) == len(lengths) == len(group.tokens_cut) == 6
    cut = sorted(lengths.values())
    # what is told of the others is a lower bound of how long they get
    assert all(low <= full for low, full in zip(sorted(group.tokens_cut), cut, strict=True))
    numbers = group_numbers([group], 0, 280, 0.5)
    told = {key.rpartition("/")[2]: numbers[key] for key in numbers if "oversample" in key}
    assert told == pytest.approx(
        {
            "kept_length": np.mean(kept),
            "cut_length": np.mean(group.tokens_cut),
            "estimated_length": sum([*kept, *group.tokens_cut]) / 6,
            "cut_token_share": sum(group.tokens_cut) / sum([*kept, *group.tokens_cut]),
        }
    )
    assert told["kept_length"] < min(told["estimated_length"], np.mean([*kept, *cut]))


async def test_the_games_of_episodes_that_were_cut_are_closed(
    broker: Broker, scope: JobScope, folder: Path
) -> None:
    rollout = {**LONG, "group_size": 2, "oversample": 8}
    async with playing(
        broker, scope, folder, "CoinGame", rollout=rollout, generator={"max_requests": 16}
    ) as play:
        task = Task(task=1, seed=1, group_size=2)
        group = await play.runner.run_group(task, "try")
        assert (len(group.trajectories), len(group.tokens_cut)) == (2, 8)
        (host,) = play.hosting
        await until(lambda: host.num_running == 0)


@pytest.mark.parametrize("key", ["oversample", "segment_tokens"])
async def test_a_game_with_roles_is_refused_with_the_key(
    broker: Broker, scope: JobScope, folder: Path, key: str
) -> None:
    sections = {"generator": {}, "rollout": {"oversample": 2}}
    if key == "segment_tokens":
        sections = {"generator": {"segment_tokens": 8}, "rollout": {}}
    async with playing(broker, scope, folder, "DuetGame", **sections) as play:
        with pytest.raises(GroupFailed, match=f"{key} is not built for games with roles"):
            await play.runner.run_group(Task(task=0, seed=0, group_size=3), "try")
