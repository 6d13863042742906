"""Why each turn ended goes with the episode, whoever ended the episode itself."""

from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.actors.training.batch import assemble
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.rollout import Trajectory
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.playing import playing

STOP = 1
"""The end of a turn, in the tokenizer of the tiny models."""
LONG, SHORT = 24, 2


def lengths_of_turns(one: Trajectory) -> list[int]:
    """Count the generated tokens of each turn."""
    return [int(part.sum()) for part in np.split(one.mask, one.turn_ends + 1)[:-1]]


@pytest.mark.parametrize("max_turn_tokens", [LONG, SHORT])
async def test_a_turn_was_cut_unless_it_ends_with_a_stop_token(
    broker: Broker, recorded: JobScope, folder: Path, max_turn_tokens: int
) -> None:
    rollout = {"max_turn_tokens": max_turn_tokens, "group_size": 8, "temperature": 3.0}
    async with playing(broker, recorded, folder, "EchoGame", rollout=rollout) as play:
        group = await play.runner.run_group(Task(task=1, seed=4, group_size=8), "try")
    for one in group.trajectories:
        assert one.finish == "done"
        last = one.token_ids[one.turn_ends].tolist()
        assert one.finish_reasons == ["stop" if each == STOP else "length" for each in last]
        for length, reason in zip(lengths_of_turns(one), one.finish_reasons, strict=True):
            assert reason == "stop" or length == max_turn_tokens
        assert one.ended_by == ("done" if one.finish_reasons[-1] == "stop" else "length")
    assert any("length" in one.finish_reasons for one in group.trajectories)


async def test_an_answer_of_one_turn_that_was_cut_counts_as_cut_though_its_game_is_done(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    rollout = {"max_turns": 1, "max_turn_tokens": 4, "group_size": 16, "temperature": 4.0}
    async with playing(broker, recorded, folder, "AnyArm", rollout=rollout) as play:
        group = await play.runner.run_group(Task(task=2, seed=4, group_size=16), "try")
    cut = [STOP not in one.token_ids[one.mask == 1] for one in group.trajectories]
    assert {one.finish for one in group.trajectories} == {"done"}
    assert [one.ended_by == "length" for one in group.trajectories] == cut
    assert sum(cut) > 8
    assert assemble([group]).truncated_S.tolist() == cut
    numbers = group_numbers([group], 0, play.config.rollout.response_limit, 0.0)
    assert numbers["rollout/finish_length"] == numbers["response_length/clip_ratio"] == np.mean(cut)
    assert numbers["rollout/finish_done"] == 1 - np.mean(cut)
    assert numbers["rollout/cut_turn_share"] == np.mean(cut)
