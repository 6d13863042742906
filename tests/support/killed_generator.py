"""A job of programs whose generator is killed while it answers them: what must be true then."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkermq.clients import AgentEnvironment, AgentEpisode
from tinkermq.clients.base import JobAddress

from tests.support.configs import small_job
from tests.support.jobs import DEADLINE_S, Job
from tests.support.proofs import assert_every_task_once, assert_replay_is_identical
from tests.support.stack import Stack


def job_of_long_calls(model: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job whose programs make calls that take long; `sections` are laid over."""
    config = small_job(
        model,
        rollout={
            "group_size": 2,
            "max_prompt_tokens": 128,
            "max_turn_tokens": 300,
            "max_response_tokens": 900,
        },
        learner={"max_row_tokens": 2048, "microbatch_tokens": 2048},
        training={"num_steps": 3, "batch_size": 2, "save_freq": 1, "keep_rollouts": True},
        env={"game": "agent", "hosts": 0},
        agent={"client": True, "timeout_s": 120},
        generator={"count": 1, "max_requests": 8},
    )
    return {**config, **{name: {**config[name], **keys} for name, keys in sections.items()}}


async def open_streams_go_on(
    stack: Stack, config: Mapping[str, Any], deadline_s: float = DEADLINE_S
) -> Job:
    """Train programs of two streamed calls whose generator is killed within one; prove that
    nothing was lost, nothing done twice, and that the log replays."""
    job = await stack.submit(dict(config))
    await job.until("RUNNING", deadline_s=deadline_s)
    pids = [await job.pid("generator-0")]
    told: dict[str, list[str]] = {}
    tries = Counter[str]()

    async def program(task: dict[str, Any], model: AgentEpisode) -> float:
        tries[model.id.rsplit("-", 1)[0]] += 1
        messages: list[Any] = [{"role": "user", "content": f"seed {model.seed}"}]
        for _ in range(2):
            text = ""
            async with model.async_openai(max_retries=0) as client:
                stream = await client.chat.completions.create(
                    model="policy", messages=messages, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if len(text) > 8 and told and pids:
                        os.kill(pids.pop(), signal.SIGKILL)
            told.setdefault(model.id, []).append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        return float(len(text) % 2)

    env = AgentEnvironment(program, {"agent": {"timeout_s": 120}})
    with env:
        await asyncio.to_thread(env.setup, JobAddress(stack.server.url, job.scope).server_url)
        await job.until("COMPLETED", deadline_s=deadline_s)
    assert not pids
    groups = [entry.group for entry in await job.entries() if entry.group]
    assert sum(group.tokens_continued for group in groups) > 0
    for group in groups:
        for row in group.trajectories:
            assert row.num_tries == 1
            assert row.info["agent"]["calls"] == 2
    assert set(tries.values()) == {1}
    await assert_every_task_once(job)
    await assert_replay_is_identical(job)
    return job
