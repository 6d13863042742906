"""Runs with other packages' games, images in programs, judges, upgrades and changing actors."""

import asyncio
import base64
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.runtime import EXIT_DRAINED
from tinkermq.clients import (
    AgentEnvironment,
    AgentEpisode,
    AsyncInferenceSchedulerClient,
    AsyncServiceClient,
)
from tinkermq.envs.write_data import write_rows

from tests.support.configs import example, small_job
from tests.support.images import IMAGE_ID, make_vision_model, png
from tests.support.jobs import Job
from tests.support.proofs import (
    assert_every_task_once,
    assert_no_task_twice,
    assert_replay_is_identical,
)
from tests.support.stack import Stack
from tests.support.stack_fixtures import warm_model
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("name", ["gymnasium", "textarena"])
async def test_an_asynchronous_run_trains_and_tells_success_by_type(
    stack: Stack, model: Path, name: str
) -> None:
    env = {**example(name)["env"], "num_val": 6, "workers": 1}
    limits = {
        "max_turns": 2,
        "max_prompt_tokens": 1024,
        "max_turn_tokens": 8,
        "max_response_tokens": 1024,
    }
    training = {"num_steps": 2, "batch_size": 2, "test_freq": 2, "save_freq": 2}
    learner = {"max_row_tokens": 2048, "microbatch_tokens": 4096}
    job = await stack.submit(
        small_job(model, env=env, rollout=limits, learner=learner, training=training)
    )
    await job.until("COMPLETED")
    validation = (await job.validations())[2]
    assert validation["val/num_episodes"] == 6
    assert validation["val/failed_episodes"] == 0
    assert "val/success_rate" in validation
    kinds = {key for key in validation if key.endswith("/success_rate")}
    assert len(kinds) > 2 if name == "textarena" else kinds == {"val/success_rate"}


# Agent programs that show images to a small vision model, in all three APIs, through the stack.


SMALL, TALL = png(16, 16), png(24, 40, 1)


def images_job(model: Path) -> dict[str, Any]:
    """Return a job whose programs the client runs."""
    return small_job(
        model,
        rollout={
            "group_size": 3,
            "max_prompt_tokens": 256,
            "max_turn_tokens": 8,
            "max_response_tokens": 128,
        },
        training={"num_steps": 2, "batch_size": 2, "save_freq": 1, "keep_rollouts": True},
        env={"game": "agent", "hosts": 0},
        agent={"client": True, "timeout_s": 60},
    )


def as_url(image: bytes) -> str:
    """Return an image as OpenAI's APIs take it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


async def by_chat(model: AgentEpisode) -> str:
    """Show an image, and another one behind the answer."""
    async with model.async_openai() as client:

        async def ask(messages: list[Any]) -> Any:
            answer = await client.chat.completions.create(model="policy", messages=messages)
            return answer.choices[0].message

        def seen(text: str, image: bytes) -> Any:
            shown = {"type": "image_url", "image_url": {"url": as_url(image)}}
            return {"role": "user", "content": [{"type": "text", "text": text}, shown]}

        first = await ask(messages := [seen("look", SMALL)])
        messages += [first.model_dump(), seen("and", TALL)]
        return (await ask(messages)).content


async def by_responses(model: AgentEpisode) -> str:
    """Do the same with Responses, the second time as what follows the first."""
    async with model.async_openai() as client:

        def seen(text: str, image: bytes) -> Any:
            told = {"type": "input_text", "text": text}
            shown = {"type": "input_image", "image_url": as_url(image), "detail": "auto"}
            return [{"role": "user", "content": [told, shown]}]

        first = await client.responses.create(model="policy", input=seen("look", SMALL))
        second = await client.responses.create(
            model="policy", input=seen("and", TALL), previous_response_id=first.id
        )
        return second.output_text


async def by_messages(model: AgentEpisode) -> str:
    """Do the same with Messages."""
    async with model.async_anthropic() as client:

        async def ask(messages: list[Any]) -> Any:
            return await client.messages.create(model="policy", max_tokens=8, messages=messages)

        def seen(text: str, image: bytes) -> Any:
            data = base64.b64encode(image).decode()
            source = {"type": "base64", "media_type": "image/png", "data": data}
            told = {"type": "text", "text": text}
            return {"role": "user", "content": [told, {"type": "image", "source": source}]}

        first = await ask(messages := [seen("look", SMALL)])
        messages += [{"role": "assistant", "content": first.content}, seen("and", TALL)]
        return "".join(block.text for block in (await ask(messages)).content)


async def test_images_of_programs_are_trained_and_replayed(stack: Stack, tmp_path: Path) -> None:
    async def program(task: dict[str, Any], model: AgentEpisode) -> float:
        said = [await ask(model) for ask in (by_chat, by_responses, by_messages)]
        return float(len("".join(said)) % 3)

    job = await stack.submit(images_job(make_vision_model(tmp_path / "model")))
    await job.until("RUNNING")
    url = f"{stack.server.url}/{job.scope.user}/{job.scope.job}"
    with AgentEnvironment(program, job.record.config) as env:
        async with AsyncServiceClient(url) as client:
            await client.set_config(job.record.config, env)
        await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group]
    for group in groups:
        assert sorted(group.images) == sorted([SMALL, TALL])  # once for all calls of all episodes
        for row in group.trajectories:
            shown = [
                part["image"]
                for message in row.messages
                for part in message["content"]
                if isinstance(part, dict) and part["type"] == "image"
            ]
            # One alone where the policy has said an image's token: the second begins a row.
            given = ((row.token_ids == IMAGE_ID) & (row.mask == 0)).sum()
            assert given == {1: 4, 2: 4 + 15}[len(shown)]
    lags = [metric.values.get("staleness/abs_log_ratio/lag_0") for metric in await job.metrics()]
    assert all(lag < 1e-4 for lag in lags if lag is not None)
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


# -- Generators and environment hosts join a running job and leave it; the run goes on -------------


async def members(job: Job, since: int) -> tuple[set[str], set[str]]:
    """Return the generators and the environment hosts that made the groups after `since`."""
    groups = [entry.group for entry in await job.entries(since) if entry.group is not None]
    hosts = {episode.host for group in groups for episode in group.sampled}
    return {group.source for group in groups}, hosts


async def test_generators_and_environment_hosts_come_and_go_while_a_job_runs(
    stack: Stack, model: Path
) -> None:
    env = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.4}, "num_val": 0}
    training = {"num_steps": 10_000, "max_staleness": 4, "save_freq": 0}
    config = small_job(model, env=env, training=training, generator={"max_episodes": 8})
    job = await stack.submit(config)
    await job.until_step(2)
    assert await _shares_work(job, generators={"generator-0"}, num_hosts=1)

    await job.scale("generator", 2)
    await job.scale("environment", 2)
    helper = stack.start_by_hand("generator", job, "by-hand")
    try:
        everybody = {"generator-0", "generator-1", "by-hand"}
        assert await _shares_work(job, generators=everybody, num_hosts=2)

        helper.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(helper.wait, PATIENCE_S) == EXIT_DRAINED
    finally:
        helper.kill()
        helper.wait()
    await job.scale("generator", 1)
    await job.scale("environment", 1)

    async def only_the_first() -> bool:
        return set(await job.actors()) == {"learner", "generator-0", "environment-0"}

    await job.eventually(only_the_first, "the others to leave")
    assert await _shares_work(job, generators={"generator-0"}, num_hosts=1)
    await job.stop(complete=True)
    await job.until("COMPLETED")
    await assert_no_task_twice(job)


async def _shares_work(job: Job, generators: set[str], num_hosts: int) -> bool:
    """Wait until exactly these make the groups that come from now on."""
    since = await job.rollout_log.last_seq()

    async def seen() -> bool:
        nonlocal since
        sources, hosts = await members(job, since)
        if sources - generators or len(hosts) > num_hosts:  # what leavers had begun
            since = await job.rollout_log.last_seq()
        await asyncio.sleep(0.3)
        return sources == generators and len(hosts) == num_hosts

    return await job.eventually(seen, f"groups by {generators} and {num_hosts} hosts")


# -- A run whose rewards come from a judge: a model that an inference job serves -------------------


PROMPT = "a line Score: N of 6"


def lessons(folder: Path) -> dict[str, Any]:
    """Return a job that teaches a model the one form in which a judge's score is read."""
    rng = random.Random(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": PROMPT},
                {"role": "assistant", "content": f"Score: {rng.randrange(7)}"},
            ]
        }
        for _ in range(512)
    ]
    limits = {"max_prompt_tokens": 64, "max_turn_tokens": 16, "max_response_tokens": 32}
    return {
        "name": "taught",
        "model": {"path": str(warm_model("bandit"))},
        "sft": {"data": [str(write_rows(folder / "lessons.jsonl", rows))]},
        "rollout": limits,
        "learner": {"lr": 3e-3, "max_row_tokens": 512, "microbatch_tokens": 4096},
        "training": {"num_steps": 60, "batch_size": 32, "save_freq": 30},
    }


async def test_a_served_model_judges_every_episode(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    taught = await stack.submit(lessons(tmp_path))
    await taught.until("COMPLETED")
    async with AsyncInferenceSchedulerClient(stack.server.url, timeout=PATIENCE_S) as client:
        judge = await client.submit_inference_job(
            "taught@last", max_model_len=64, config={"output_dir": str(tmp_path)}
        )
        says = {"judge_prompt": PROMPT, "judge_scale": 6, "judge_tokens": 16}
        reward = {"source": "judge", "judge": judge["name"], "game_weight": 10, **says}
        config = small_job(model, env={"reward": reward}, training={"num_steps": 3})
        job = await stack.submit(config)
        await job.until("COMPLETED")
        await client.complete_job(judge["job_id"])
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    groups = [entry.group for entry in await job.entries() if entry.group is not None]
    episodes = [item for group in groups for item in group.sampled]
    scores = {round(item.reward - 10 * item.info["game_reward"], 4) for item in episodes}
    assert len(scores) == 1  # a judge is greedy
    assert scores <= {round(digit / 6, 4) for digit in range(7)}


# -- An upgrade of the pool: each of its processes is restarted under a running job ----------------


SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}


async def test_scheduler_node_and_server_are_restarted_and_no_job_is_lost(
    stack: Stack, model: Path
) -> None:
    job = await stack.submit(small_job(model, env=SLOW, training={"num_steps": 24}))
    told = await job.until_step(3)
    before = {name: actor.pid for name, actor in (await job.actors()).items()}

    await stack.restart("scheduler")
    told = await job.until_step(told.step + 2)
    await stack.restart("nats-server")
    told = await job.until_step(told.step + 2)
    now = {name: actor.pid for name, actor in (await job.actors()).items()}
    assert now == before, "an actor of the job was restarted, too"

    await stack.restart("node")
    again = await job.until_event("training_started", count=2)
    assert again.data["step"] >= told.step, "the node left without a checkpoint"
    await job.until("COMPLETED")
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
