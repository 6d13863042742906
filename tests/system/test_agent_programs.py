"""Agent programs through the whole stack: real SDKs call the model that is trained under them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tinkermq.broker.jobs import JobStore
from tinkermq.clients import (
    AgentEnvironment,
    AgentEpisode,
    AgentEpisodes,
    AsyncSchedulerClient,
    AsyncServiceClient,
)

from tests.support.configs import small_job
from tests.support.gateway import run_gateway
from tests.support.harbor_tasks import Task
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Job, Stack
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="session")

LIMITS = {"max_prompt_tokens": 256, "max_turn_tokens": 8, "max_response_tokens": 128}


def agent_job(model: Path, **sections: Any) -> dict[str, Any]:
    """Return a job whose programs the client runs."""
    return small_job(
        model,
        rollout={**LIMITS, "group_size": 3},
        training={"num_steps": 2, "batch_size": 2, "save_freq": 1, "keep_rollouts": True},
        env={"game": "agent", "hosts": 0},
        agent={"client": True, "timeout_s": 60},
        **sections,
    )


async def two_turns(task: dict[str, Any], model: AgentEpisode) -> float:
    """Ask twice, the second time as a tool would have answered."""
    async with model.async_openai() as client:
        messages: list[Any] = [{"role": "user", "content": f"seed {model.seed}"}]
        first = await client.chat.completions.create(model="policy", messages=messages)
        messages += [first.choices[0].message.model_dump(), {"role": "user", "content": "on"}]
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    return float(len(text) % 3)


async def trained(stack: Stack, config: dict[str, Any], program: Any, tmp_path: Path) -> Any:
    """Train with a function as the program; return the job's record when it has ended."""
    async with AsyncSchedulerClient(stack.server.url, timeout=PATIENCE_S) as scheduler:
        job = await scheduler.submit_job({**config, "output_dir": str(tmp_path)})
        env = AgentEnvironment(program, config)
        async with AsyncServiceClient(job["server_url"]) as client:
            with env:
                await client.set_config(config, env)
                await client.fit(env, verbose=False)
        return await scheduler.job_status(job["job_id"])


async def two_turns_and_their_rewards(task: dict[str, Any], model: AgentEpisode) -> float:
    """Ask twice, and reward the first call and the branch that begins with the second."""
    reward = await two_turns(task, model)
    model.reward(0.25, call=0)
    model.reward(reward - 1, branch=1)
    return reward


@pytest.mark.full
async def test_a_function_is_trained_with_the_openai_sdk(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    credit = {"advantage": "grpo_per_turn", "branch_credit": "own", "gamma": 0.9}
    job = agent_job(model, algorithm=credit)
    ended = await trained(stack, job, two_turns_and_their_rewards, tmp_path)
    assert ended["status"] == "COMPLETED"
    lines = (Path(ended["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["step"], last["agent/reward_of_calls"]) == (2, 0.25)
    record = await JobStore(stack.broker).get("local", ended["job_id"])
    await assert_replay_is_identical(Job(stack, record))


_AGENT = """
import json, os, sys
from openai import OpenAI

task = json.load(open(os.environ["TINKERMQ_TASK"]))
client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
answer = client.chat.completions.create(model="policy", messages=messages)
open("answer.txt", "w").write(answer.choices[0].message.content)
assert "reward_model" not in json.dumps(task), task
"""
_GRADE = """
import json, os

row = json.load(open(os.environ["TINKERMQ_ROW"]))
said = open("answer.txt").read()
print(json.dumps({"reward": float(len(said) % 3), "success": row["answer"] in said}))
"""


async def test_a_command_is_trained_in_the_pools_own_sandbox(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "agent.py").write_text(_AGENT)
    (tmp_path / "grader").mkdir()
    (tmp_path / "grader" / "grade.py").write_text(_GRADE)
    rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(8)]
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    config = small_job(
        model,
        rollout={**LIMITS, "group_size": 2},
        training={"num_steps": 1, "batch_size": 2, "max_staleness": 0, "test_freq": 1},
        agent={
            "command": ["{python}", "agent.py", "{prompt}"],
            "files": str(tmp_path / "files"),
            "reward": ["{python}", "{grader}/grade.py"],
            "reward_files": str(tmp_path / "grader"),
            "timeout_s": 60,
        },
    )
    config["env"] = {"train_data": [str(data)], "val_data": [str(data)], "num_val": 1}
    job = await stack.submit(config)
    await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows_of = [row for group in groups for row in group.trajectories]
    assert rows_of
    assert {row.info["outcome"] for row in rows_of} == {"done"}
    validated = await job.validations()
    assert {step: values["val/num_episodes"] for step, values in validated.items()} == {0: 1, 1: 1}
    await assert_every_task_once(job)


@pytest.mark.full
async def test_a_folder_of_harbor_tasks_is_trained_with_the_rewards_of_their_tests(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "agent.py").write_text(_AGENT)
    numbers = """'{"reward": '$((n % 3))', "length": '$n'}'"""
    test = f"n=$(wc -c < /app/answer.txt); echo {numbers} > /logs/verifier/reward.json"
    task = Task("Say something.", test, "")
    for number in range(8):
        task.write(tmp_path / "tasks" / f"task-{number}")
    config = small_job(
        model,
        rollout={**LIMITS, "group_size": 2},
        training={"num_steps": 1, "batch_size": 2, "max_staleness": 0, "test_freq": 1},
        agent={
            "tasks": f"harbor:{tmp_path / 'tasks'}",
            "val_share": 0.4,
            "command": ["{python}", "{files}/agent.py", "{prompt}"],
            "files": str(tmp_path / "files"),
            "timeout_s": 60,
        },
    )
    config["env"] = {"num_val": 1}
    job = await stack.submit(config)
    await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows_of = [row for group in groups for row in group.trajectories]
    assert rows_of
    for row in rows_of:
        assert row.info["outcome"] == "done"
        assert float(sum(row.rewards)) == row.info["length"] % 3
    validated = await job.validations()
    assert {step: values["val/num_episodes"] for step, values in validated.items()} == {0: 1, 1: 1}
    await assert_every_task_once(job)


@pytest.mark.full
async def test_programs_elsewhere_are_trained_through_the_gateway(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"say {n}"}) for n in range(8)))
    config = agent_job(model)
    config["env"] = {"train_data": [str(data)], "num_val": 0}
    job = await stack.submit(config)
    url = f"{stack.server.url}/{job.scope.user}/{job.scope.job}"
    programs: list[asyncio.Task[None]] = []
    said: list[str] = []
    async with run_gateway(stack.server.url, tmp_path) as gateway:
        episodes = await asyncio.to_thread(AgentEpisodes, url, gateway=gateway.url)

        async def start_them() -> None:
            async for episode in episodes:
                said.extend(message["content"] for message in episode.task["prompt"])
                programs.append(asyncio.create_task(elsewhere(dict(episode.variables))))

        starting = asyncio.create_task(start_them())
        await job.until("COMPLETED")
        await asyncio.wait_for(starting, PATIENCE_S)  # which ends with the job
        await asyncio.to_thread(episodes.cleanup)
        await asyncio.gather(*programs, return_exceptions=True)
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows = [row for group in groups for row in group.trajectories]
    assert {row.info["outcome"] for row in rows} == {"done"}
    assert {row.info["where"] for row in rows} == {"elsewhere"}
    assert said
    assert set(said) <= {f"say {n}" for n in range(8)}  # the job's data, read here
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)


async def elsewhere(env: dict[str, str]) -> None:
    """Do what a program does that knows its environment variables and nothing else."""
    assert env["TINKERMQ_EPISODE_URL"].endswith("/v1/episode")
    async with AsyncOpenAI(
        base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"]
    ) as client:
        first = await client.responses.create(model=env["OPENAI_MODEL"], input="one")
        second = await client.responses.create(
            model=env["OPENAI_MODEL"], input="two", previous_response_id=first.id
        )
        end = {"reward": float(len(second.output_text) % 3), "info": {"where": "elsewhere"}}
        await client.post("/episode/end", body=end, cast_to=object)
