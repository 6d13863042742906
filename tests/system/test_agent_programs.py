"""Agent programs through the whole stack: real SDKs call the model that is trained under them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.clients import (
    AgentEnvironment,
    AgentEpisode,
    AsyncSchedulerClient,
    AsyncServiceClient,
)

from tests.support.configs import small_job
from tests.support.stack import Stack

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
    async with AsyncSchedulerClient(stack.server.url, timeout=90) as scheduler:
        job = await scheduler.submit_job({**config, "output_dir": str(tmp_path)})
        env = AgentEnvironment(program, config)
        async with AsyncServiceClient(job["server_url"]) as client:
            with env:
                await client.set_config(config, env)
                await client.fit(env, verbose=False)
        return await scheduler.job_status(job["job_id"])


async def test_a_function_is_trained_with_the_openai_sdk(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    ended = await trained(stack, agent_job(model), two_turns, tmp_path)
    assert ended["status"] == "COMPLETED"
    lines = (Path(ended["run_dir"]) / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2


PROGRAM = """
import http.client, json, os, sys
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"model": "policy", "messages": messages})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = json.loads(connection.getresponse().read())["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "on"}]
open("answer", "w").write(messages[-2]["content"] or "")
"""


@pytest.mark.asyncio(loop_scope="session")
async def test_a_command_is_trained_and_its_reward_command_judges_it(
    stack: Stack, model: Path, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "agent.py").write_text(PROGRAM)
    grade = "print(len(open('answer').read()) % 3)"
    config = agent_job(model)
    config["env"] = {"hosts": 1, "num_val": 0}
    config["agent"] = {
        "command": ["{python}", "-S", "agent.py", "{prompt}"],
        "files": str(files),
        "reward": ["{python}", "-S", "-c", grade],
        "timeout_s": 60,
    }
    job = await stack.submit(config)
    await job.until("COMPLETED")
    groups = [entry.group for entry in await job.entries() if entry.group]
    rows = [row for group in groups for row in group.trajectories]
    assert {row.info["outcome"] for row in rows} == {"done"}
    assert {row.info["agent"]["calls"] for row in rows} == {2}
