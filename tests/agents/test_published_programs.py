"""Agent programs as they are published, from their command to their rows, in real sandboxes.

The engine is scripted, so that they call their tools; all else is what a pool has.
"""

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout.agent_loop import EpisodePlan, EpisodeSampling
from tinkermq.actors.rollout.program_loop import ProgramLoop
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.leases import make_program_runner
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Trajectory
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.calls.programs import chat_of
from tests.agents.engine import ScriptedEngine
from tests.agents.published import PRODUCTS_EXAMPLE, PUBLISHED, PublishedAgent
from tests.agents.scripts import PROMPT, SCRIPTS

pytestmark = pytest.mark.agents
ROOM = 200_000
PLAY_S = 150.0
"""Programs that import large frameworks from a cold disk take their time."""


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen3")


async def played(
    agent: PublishedAgent,
    engine: ScriptedEngine,
    chat: ChatTokenizer,
    broker: Broker,
    scope: JobScope,
    folder: Path,
    task_folder: str = "",
    row: int = 0,
) -> list[Trajectory]:
    """Play one episode of a program, with a host of its own; on a row of `task_folder` if given."""
    data = folder / "train.jsonl"
    data.write_text(json.dumps({"prompt": PROMPT, "answer": "7"}))
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"train_data": [task_folder or str(data)]},
            "learner": {"max_row_tokens": 2 * ROOM, "microbatch_tokens": 2 * ROOM},
            "agent": {**agent.section, "timeout_s": PLAY_S, "memory_mb": 4096},
            "rollout": {
                "max_prompt_tokens": ROOM,
                "max_turn_tokens": 2000,
                "max_response_tokens": ROOM,
            },
        }
    )
    programs = make_program_runner(config.agent, broker, scope, has_tasks=config.has_tasks)
    host = EnvironmentHost(broker, scope, config.env, programs=programs)
    environments = Environments(broker, scope, config.env, lambda _: nullcontext())
    sampling = EpisodeSampling(1.0)
    loop = ProgramLoop(broker, scope, engine, chat, environments, config, sampling)
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.run(stopping))
        await loop.start()
        try:
            plan = EpisodePlan("t1-0", Start(split="train", sample=row, seed=5))
            return await loop.run(plan)
        finally:
            await loop.close()
            stopping.set()


def assert_exact(rows: list[Trajectory], engine: ScriptedEngine) -> None:
    """Each trained token stands behind what the engine had when it drew it, and once."""
    num_trained = 0
    for row in rows:
        ids, mask = np.asarray(row.token_ids), np.asarray(row.mask)
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        for start, end in zip(starts, np.asarray(row.turn_ends) + 1, strict=True):
            (drawn,) = [one for had, one in engine.had if np.array_equal(had, ids[:start])]
            kept = end - start  # what is behind a stop text is cut
            assert kept == len(drawn.token_ids) or drawn.finish_reason == "cancelled"
            np.testing.assert_array_equal(ids[start:end], drawn.token_ids[:kept])
            np.testing.assert_array_equal(row.logprobs[start:end], drawn.logprobs[:kept])
            num_trained += kept
    assert num_trained == sum(int(np.sum(row.mask)) for row in rows)


@pytest.mark.parametrize("agent", [*PUBLISHED, PRODUCTS_EXAMPLE], ids=lambda agent: agent.id)
async def test_a_published_program_is_trained_as_it_is(
    agent: PublishedAgent, chat: ChatTokenizer, broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    if agent.lacking:
        pytest.skip(agent.lacking)
    engine = ScriptedEngine(chat, SCRIPTS[agent.script])
    rows = await played(agent, engine, chat, broker, scope, tmp_path)
    info = rows[0].info
    assert (info["outcome"], info["exit_code"]) == ("done", 0), info["output"]
    assert float(np.sum(rows[0].rewards)) == 1.0, info
    assert_exact(rows, engine)
    assert len(rows) == agent.num_rows, json.dumps(info["calls"], indent=1)
    assert info["agent"]["calls"] == len(engine.had)
    print({"id": agent.id, **info["agent"], "without_effect": info.get("without_effect")})
