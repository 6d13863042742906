"""Episodes that another generator has begun: gone on with, and by one holder only."""

import asyncio
import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, save_tiny_model
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.partial_rollouts import Fenced
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.generator.playing import Playing, playing
from tests.support.models import until

TASK = Task(task=5, seed=3, group_size=3)


async def die_amid(play: Playing, num: int, task: Task = TASK) -> int:
    """Play the task until so many tokens are written down, then leave; return how many are."""
    first = asyncio.create_task(play.run(task))
    await play.until_stored(task, num)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    await until(lambda: play.engine.stats().running == 0)
    return await play.num_stored(task)


def assert_same_episodes(found: Group, wanted: Group) -> None:
    """Assert that two groups have the same episodes, whoever played them."""
    for one, other in zip(found.trajectories, wanted.trajectories, strict=True):
        for name in ("token_ids", "mask", "versions", "turn_ends", "rewards"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
        assert (one.finish, one.messages, one.info) == (other.finish, other.messages, other.info)
        assert one.finish_reasons == other.finish_reasons
        assert len(one.finish_reasons) == len(one.turn_ends)


async def test_an_episode_goes_on_where_it_was_and_draws_what_it_would_have_drawn(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    async with playing(broker, recorded, folder, "EchoGame") as play:
        whole = await play.run(TASK)
        await play.recorder(TASK, 1).end()
        for num in (1, 150):
            num_there = await die_amid(play, num)
            before = play.engine.stats().generated_tokens
            group = await play.run(TASK, delivery=2)
            generated = play.engine.stats().generated_tokens - before
            assert_same_episodes(group, whole)
            assert group.tokens_continued == num_there >= num
            assert generated == sum(one.num_generated for one in group.trajectories) - num_there
            assert {one.num_tries for one in group.trajectories} == {1}
            assert group.tokens_wasted == 0
            await play.recorder(TASK, 2).end()


async def test_versions_and_logprobs_of_the_first_holder_stay(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    async with playing(broker, recorded, folder, "EchoGame") as play:
        await die_amid(play, 60)
        record = await play.stored(TASK)
        await play.engine.load_weights(7, _changed(folder))
        group = await play.run(TASK, delivery=2)
    for segments, episode in zip(record, group.trajectories, strict=True):
        for segment in segments:
            there = slice(segment.start, segment.end)
            np.testing.assert_array_equal(episode.token_ids[there], segment.token_ids)
            np.testing.assert_array_equal(episode.logprobs[there], segment.logprobs)
            np.testing.assert_array_equal(episode.versions[there], segment.versions)
        rest = slice(segments[-1].end, None)
        assert set(episode.versions[rest][episode.mask[rest] == 1]) <= {7}
    assert {one.max_version for one in group.trajectories} == {7}
    assert group.min_version == 0


async def test_a_game_whose_host_is_gone_is_played_again_with_the_recorded_turns(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    async with playing(broker, recorded, folder, "EchoGame") as play:
        whole = await play.run(TASK)
        await play.recorder(TASK, 1).end()
        num_there = await die_amid(play, 130)
        (host,) = play.hosting
        await play.stop_host(host)
        await play.start_host()
        group = await play.run(TASK, delivery=2)
    assert_same_episodes(group, whole)
    assert group.tokens_continued == num_there
    assert {one.num_tries for one in group.trajectories} == {1}


async def test_a_game_that_answers_otherwise_the_second_time_starts_again_and_says_so(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    async with playing(broker, recorded, folder, "MoodyGame") as play:
        num_there = await die_amid(play, 130)
        (host,) = play.hosting
        host._expire(math.inf)  # their leases run out
        group = await play.run(TASK, delivery=2)
    again = [one for one in group.trajectories if one.num_tries == 2]
    assert again
    for one in again:
        (blame,) = one.failures
        assert (blame.boundary, blame.code) == ("environment", "host_gone")
        assert "played again, gave another answer to turn" in blame.message
    assert group.tokens_wasted + group.tokens_continued == num_there
    assert group.tokens_wasted > 0


async def test_who_was_overtaken_stops_and_leaves_the_game_to_the_next(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    async with playing(broker, recorded, folder, "EchoGame") as play:
        first = asyncio.create_task(play.run(TASK))
        await play.until_stored(TASK, 20)
        group = await play.run(TASK, delivery=2)
        with pytest.raises(Fenced, match="taken over by holder-2"):
            await first
        assert {one.num_tries for one in group.trajectories} == {1}
        assert len({one.host for one in group.trajectories}) == 1
        for segments, episode in zip(await play.stored(TASK), group.trajectories, strict=True):
            writers = [segment.writer for segment in segments]
            assert writers == sorted(writers)  # holder-2 behind holder-1, never between
            for one in segments:
                span = episode.token_ids[one.start : one.end]
                np.testing.assert_array_equal(span, one.token_ids)
        with pytest.raises(Fenced):  # it wakes once more, and has the task no longer
            await play.run(TASK)
        await play.recorder(TASK, 2).end()
        assert await play.num_stored(TASK) == 0


def _changed(folder: Path) -> dict:
    import torch
    from tinkermq.actors.policy.model_folder import load_causal_lm

    from tests.support.models import changed

    return changed(load_causal_lm(str(folder), dtype=torch.float32), 1)


async def test_an_episode_that_is_told_the_time_is_told_the_same_elsewhere(
    broker: Broker, recorded: JobScope, tmp_path: Path
) -> None:
    clock = "{{ '<|system|>' + strftime_now('%M:%S.%f') + '<|end|>' }}"
    folder = save_tiny_model(tmp_path / "model", heads=2, template=clock + CHAT_TEMPLATE)
    task = TASK.model_copy(update={"issued": 1234567.25})
    async with playing(broker, recorded, folder, "EchoGame") as play:
        whole = await play.run(task)
        await play.recorder(task, 1).end()
        num_there = await die_amid(play, 60, task)
        elsewhere = ChatTokenizer(load_tokenizer(str(folder)))
        play.runner._players.main._chat = elsewhere
        group = await play.run(task, delivery=2)
    assert_same_episodes(group, whole)
    assert group.tokens_continued == num_there >= 60
    prompt = group.trajectories[0].token_ids[: group.trajectories[0].mask.argmax()]
    assert elsewhere.decode(prompt).startswith("<|system|>56:07.250000")
