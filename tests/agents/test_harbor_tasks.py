"""mini-swe-agent as it is published, on Harbor tasks in the sandbox."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.calls.programs import chat_of
from tests.agents.engine import ScriptedEngine
from tests.agents.published import PUBLISHED
from tests.agents.scripts import MINI, Script, calling
from tests.agents.test_published_programs import assert_exact, played
from tests.support.harbor_tasks import TASKS, write_tasks

pytestmark = pytest.mark.agents
MINI_AGENT = next(one for one in PUBLISHED if one.id == "mini-swe-agent")


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen3")


@pytest.mark.parametrize("solves", [True, False], ids=["solves", "does nothing"])
@pytest.mark.parametrize("name", ["adds-numbers", "fixes-script"])
async def test_mini_swe_agent_is_trained_on_a_task_with_the_reward_of_its_tests(
    name: str, *, solves: bool, chat: ChatTokenizer, broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    if MINI_AGENT.lacking:
        pytest.skip(MINI_AGENT.lacking)
    command = TASKS[name].solution if solves else "pwd"
    turns = [calling("I will look.", "bash", {"command": "ls"})]
    turns += [calling("I know what to do.", "bash", {"command": command}), MINI[-1]]
    engine = ScriptedEngine(chat, Script(turns))
    agent = replace(MINI_AGENT, agent={"reward": []})
    tasks = f"harbor:{write_tasks(tmp_path / 'tasks')}"
    row = list(TASKS).index(name)
    rows = await played(agent, engine, chat, broker, scope, tmp_path, tasks, row)
    info = rows[0].info
    assert (info["outcome"], info["exit_code"]) == ("done", 0), info["output"]
    assert float(np.sum(rows[0].rewards)) == float(solves), info
    assert_exact(rows, engine)
    assert (len(rows), info["agent"]["calls"]) == (1, 3)
