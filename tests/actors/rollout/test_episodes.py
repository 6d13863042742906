"""Episodes: continued elsewhere, with roles, cut, oversampled; the gold answer stays hidden."""

import asyncio
import contextlib
import math
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.policies import learning_roles, opponent_versions
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, save_tiny_model
from tinkermq.actors.rollout.agent_loop import AgentLoop, EpisodePlan, EpisodeSampling
from tinkermq.actors.rollout.groups import GroupFailed, GroupRunner
from tinkermq.actors.rollout.players import Players, load_base, start_engine
from tinkermq.actors.training.batch import assemble
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.partial_rollouts import Fenced
from tinkermq.envs import AbstractGame, StepResult
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.job import EnvConfig, GeneratorConfig, JobConfig
from tinkermq.schemas.config.sections import RolloutConfig, SelfPlayConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import ConfigError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.playing import Playing, playing
from tests.support.models import changed, plain_logprobs, until
from tests.support.variants import variants

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
        for one in whole.trajectories:
            times = [whole.started, one.first_token, *one.turn_times, whole.finished]
            assert (times, len(one.turn_times)) == (sorted(times), len(one.turn_ends))
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


@pytest.mark.full
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


BEHIND_CALLS = (
    "{{ tools | tojson if tools else '' }}{%- set call = namespace(name='') -%}"
    "{%- for m in messages -%}{%- if m.role != 'tool' -%}{{ '<|' + m.role + '|>' + m.content }}"
    "{%- set call.name = m.tool_calls[0].function.name if m.tool_calls else '' -%}"
    "{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|end|>' }}"
    "{%- elif call.name -%}{{ '<|user|>' + call.name + ' gave ' + m.content + '<|end|>' }}"
    "{%- endif -%}{%- endfor -%}{{ '<|assistant|>' if add_generation_prompt else '' }}"
)
"""Leaves a result out that has no call before it."""


@pytest.mark.parametrize(
    ("game", "template"),
    variants(
        [("EchoGame", CHAT_TEMPLATE), ("TwiceEcho", CHAT_TEMPLATE), ("TwiceEcho", BEHIND_CALLS)],
        ("EchoGame", CHAT_TEMPLATE),
    ),
)
async def test_a_game_whose_host_is_gone_is_played_again_with_the_recorded_turns(
    broker: Broker, recorded: JobScope, folder: Path, tmp_path: Path, game: str, template: str
) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(template)
    async with playing(broker, recorded, folder, game) as play:
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
    roles = Counter(m["role"] for one in group.trajectories for m in one.messages[3:])
    num_turns = sum(len(one.turn_ends) for one in group.trajectories) - len(group.trajectories)
    assert roles["tool"] == (2 * num_turns if game == "TwiceEcho" else 0)
    chat = ChatTokenizer(load_tokenizer(str(folder)))
    shown = "".join(chat.decode_all(one.token_ids) for one in group.trajectories)
    assert shown.count("<|user|>unknown gave ") == roles["tool"] * (template == BEHIND_CALLS)


@pytest.mark.parametrize("isolation", variants(["thread", "process"], "thread"))
async def test_an_episode_that_a_limit_ends_earns_what_its_game_gives_for_it(
    broker: Broker, recorded: JobScope, folder: Path, isolation: str
) -> None:
    sections = {
        "env": {"game": "tests.support.games:EndsEarly", "isolation": isolation},
        "rollout": {"max_turns": 2},
    }
    async with playing(broker, recorded, folder, "EndsEarly", **sections) as play:
        group = await play.run(TASK)
    for episode in group.trajectories:
        assert episode.finish == "turns"
        assert list(episode.rewards) == [0.0, 12.0]
        assert episode.info == {"cut_after": 2}


@pytest.mark.full
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
        assert "the replayed game gave another answer to turn" in blame.message
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


@pytest.mark.full
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


# Games with roles as a generator plays them: who speaks, with whose weights, and what is kept.


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second model."""
    return save_tiny_model(tmp_path_factory.mktemp("other"), width=32, layers=1, seed=9)


Run = Callable[[Task], Awaitable[Group]]


@asynccontextmanager
async def playing_table(
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
    async with playing_table(broker, scope, folder) as run:
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
    async with playing_table(broker, scope, folder, policies={"low": str(other)}) as run:
        group = await run(task())
    models = {
        role: load_causal_lm(str(path), dtype=torch.float32)
        for role, path in (("high", folder), ("low", other))
    }
    for item in group.trajectories:
        own = plain_logprobs(models[item.role], item.token_ids[:1], item.token_ids[1:])
        made = np.flatnonzero(item.mask)
        np.testing.assert_allclose(item.logprobs[made], own[made - 1], atol=1e-4)


@pytest.mark.full
async def test_an_earlier_version_plays_and_is_not_in_the_group(
    broker: Broker, scope: JobScope, folder: Path
) -> None:
    async with playing_table(broker, scope, folder, self_play={"past_share": 1.0}) as run:
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
        (
            "DuetGame",
            {"policies": {"tenor": "MODEL"}},
            {},
            "policies.tenor is not a role of the",
        ),
        ("AloneGame", {"policies": {"low": "MODEL"}}, {}, "policies.low is not a role of the"),
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
    async with playing_table(broker, scope, folder, game, **filled) as run:
        with pytest.raises(GroupFailed, match=problem) as failed:
            await run(task(**fields))
    assert failed.value.blame.code == "config"


# -- Why each turn ended goes with the episode, whoever ended the episode itself -------------------


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


# -- More episodes than a group has: the first to end are the group, and the bias is told ----------


MANY_TURNS = {"max_turns": 12, "max_turn_tokens": 4, "max_response_tokens": 280}


async def test_short_episodes_are_kept_and_the_numbers_say_so(
    broker: Broker, recorded: JobScope, folder: Path
) -> None:
    task = Task(task=1, seed=1, group_size=12)
    async with playing(
        broker, recorded, folder, "CoinGame", rollout={**MANY_TURNS, "group_size": 12}
    ) as play:
        everybody = await play.run(task)
        await play.recorder(task, 1).end()
    async with playing(
        broker,
        recorded,
        folder,
        "CoinGame",
        rollout={**MANY_TURNS, "group_size": 6, "oversample": 6},
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
    rollout = {**MANY_TURNS, "group_size": 2, "oversample": 8}
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
        with pytest.raises(GroupFailed, match=f"{key} does not support games with roles"):
            await play.runner.run_group(Task(task=0, seed=0, group_size=3), "try")


# -- The gold answer of a row never reaches the model: neither as text nor as token ----------------


TRUTH = "gold-42"


class TellingGame(AbstractGame):
    """Returns the gold answer where a model must not read it."""

    def get_system_prompt(self) -> str:
        """Return no system prompt."""
        return ""

    def get_initial_user_message(self) -> str:
        """Return nothing: the question is in the data."""
        return ""

    def reset(self, ground_truth: str = "", **_: Any) -> str:
        """Return the gold answer, which a dataset game must not show."""
        self._truth, self._turn = ground_truth, 0
        return ground_truth

    def step(self, action: str) -> StepResult:
        """Tell the gold answer in `info` only."""
        self._turn += 1
        return StepResult("no", 0.0, self._turn > 1, info={"ground_truth": self._truth})

    def get_state(self) -> dict[str, Any]:
        """Tell the gold answer to whoever records states."""
        return {"ground_truth": self._truth}


async def test_what_a_model_reads_holds_no_gold_answer(
    broker: Broker,
    scope: JobScope,
    folder: Path,
    tmp_path: Path,
) -> None:
    row = verl_row("6*7", TRUTH, data_source="telling", split="train", index=0)
    path = str(write_rows(tmp_path / "rows.jsonl", [row]))
    env = EnvConfig(game=f"{__name__}:TellingGame", train_data=[path], val_data=[path])
    host, stopping = EnvironmentHost(broker, scope, env, seed=0), asyncio.Event()
    hosting = asyncio.create_task(host.run(stopping))
    tokenizer = load_tokenizer(str(folder))
    rollout = RolloutConfig(max_turns=2, max_turn_tokens=4, max_response_tokens=64)
    hosts = Environments(broker, scope, env, lambda _: nullcontext())
    chat = ChatTokenizer(tokenizer)
    engine = await TransformersEngine.start(str(folder), max_slots=2, max_context=160)
    loop = AgentLoop(engine, chat, hosts, rollout, EpisodeSampling.of(rollout))
    played = await loop.run(EpisodePlan("e0", Start("train", 0, 0), greedy=True))
    await engine.close()
    stopping.set()
    await hosting
    assert len(played.turn_ends) == 2
    assert played.info == {"ground_truth": TRUTH}  # for the record of the episode
    assert TRUTH not in str(played.messages)
    assert TRUTH not in str(tokenizer.decode(played.token_ids.tolist()))


# -- The engine that a configuration asks for ------------------------------------------------------


CONFIG = {
    "model": {"path": "some/model"},
    "env": {"game": "bandit"},
    "generator": {"engine": "vllm"},
}


async def test_vllm_where_it_is_not_installed_is_refused_with_the_remedy() -> None:
    config = JobConfig.model_validate(CONFIG)
    with pytest.raises(
        ConfigError, match="which cannot be imported on this machine: No module"
    ) as caught:
        await start_engine(config)
    assert "pip install 'tinkermq[vllm]'" in caught.value.hint
    with pytest.raises(ConfigError, match="which cannot be imported on this machine"):
        await load_base(config, [])


def test_a_setting_of_vllm_is_refused_for_another_engine() -> None:
    with pytest.raises(ValidationError, match="kv_cache_mb has no effect while engine is 'tran"):
        GeneratorConfig.model_validate({"kv_cache_mb": 64})


# -- Which earlier versions are played against, and who learns in a task ---------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [(0, [0]), (1, [0]), (10, [0]), (11, [0, 10]), (35, [10, 20, 30]), (41, [20, 30, 40])],
)
def test_the_pool_holds_the_newest_kept_versions_before_the_present_one(
    version: int, expected: list[int]
) -> None:
    config = SelfPlayConfig(past_share=0.5, pool_every=10, pool_size=3)
    assert opponent_versions(config, version) == expected


def test_without_a_share_nothing_is_kept() -> None:
    assert opponent_versions(SelfPlayConfig(), 100) == []


def test_a_version_stays_in_the_pool_until_newer_ones_push_it_out() -> None:
    config = SelfPlayConfig(past_share=1.0, pool_every=4, pool_size=2)
    for version in range(1, 40):
        gone = set(opponent_versions(config, version)) - set(opponent_versions(config, version + 1))
        assert gone <= {min(opponent_versions(config, version))}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_that_share_of_the_tasks_has_one_learning_role_and_each_role_its_turn(share: float) -> None:
    config = SelfPlayConfig(past_share=share)
    found = [tuple(learning_roles(config, ["x", "o"], seed)) for seed in range(2000)]
    assert found == [tuple(learning_roles(config, ["x", "o"], seed)) for seed in range(2000)]
    counts = Counter(found)
    assert counts[("x", "o")] / 2000 == pytest.approx(1 - share, abs=0.04)
    assert counts[("x",)] == pytest.approx(counts[("o",)], abs=120)
