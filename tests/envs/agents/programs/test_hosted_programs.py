"""Programs as the episodes of an environment host, asked for over the broker."""

import asyncio

import pytest
from tinkermq.envs.agents.leases import make_program_runner
from tinkermq.envs.host import EnvironmentHost
from tinkermq.schemas.config.agent import AgentConfig
from tinkermq.schemas.config.job import EnvConfig

from tests.envs.agents.programs.conftest import LIMITS, PRELUDE
from tests.envs.hosting import Client
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S

CODE = """
answer = ask(json.load(open(os.environ["TINKERMQ_TASK"]))["question"])
url, key = os.environ["TINKERMQ_EPISODE_URL"], os.environ["TINKERMQ_EPISODE_KEY"]
print(answer, os.environ["TINKERMQ_EPISODE"], os.environ["TINKERMQ_SPLIT"])
open(os.environ["TINKERMQ_REWARD"], "w").write("0.5")
"""


@pytest.mark.parametrize("network", ["model", "open"])
async def test_a_program_finds_its_generator_through_the_host(broker, scope, tmp_path, network):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "two and two"}\n{"question": "three and three"}\n')
    agent = AgentConfig(command=["{python}", "-S", "-c", PRELUDE + CODE], network=network, **LIMITS)
    programs = make_program_runner(agent, broker, scope)
    config = EnvConfig(game="agent", train_data=[str(rows)])
    host = EnvironmentHost(broker, scope, config, programs=programs)
    stopping = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(host.run(stopping))
        ready = asyncio.ensure_future(host.ready.wait())
        await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
        client = Client(broker, scope, host)
        assert (await client.describe()).num_train == 2
        async with ScriptedGenerator(broker, scope, Script()).playing("t1-1"):
            opened = await client.reset("t1-1", sample=1)
            assert opened.messages == [{"role": "user", "content": "seed 0"}]
            result = await client.step("t1-1", 0, "")
        assert (result.reward, result.done) == (0.5, True)
        assert result.info["outcome"] == "done"
        assert result.info["output"] == "You said: three and three t1-1 train\n"
        await client.close("t1-1")
        stopping.set()


SDK = """
import openai, os
client = openai.OpenAI()
messages = [{"role": "user", "content": "first"}]
for _ in range(2):
    chunks = client.chat.completions.create(model="policy", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    print(text)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "second"}]
open(os.environ["TINKERMQ_REWARD"], "w").write('{"reward": 1, "success": true}')
"""


async def test_the_makers_own_library_runs_in_the_sandbox_and_streams(broker, scope):
    pytest.importorskip("openai")
    settings = {**LIMITS, "memory_mb": 1024, "processes": 64}
    agent = AgentConfig(command=["{python}", "-c", SDK], **settings)
    host = EnvironmentHost(
        broker, scope, EnvConfig(game="agent"), programs=make_program_runner(agent, broker, scope)
    )
    stopping = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(host.run(stopping))
        await host.ready.wait()
        client = Client(broker, scope, host)
        async with ScriptedGenerator(broker, scope, Script()).playing("t1-1"):
            await client.reset("t1-1")
            while (result := await stepped(client, "t1-1")) is None:
                pass
        assert (result.reward, result.info["success"]) == (1.0, True)
        assert result.info["output"] == "You said: first\nYou said: second\n"
        stopping.set()


async def stepped(client, episode):
    """Ask for the end of a program once; None while it lasts."""
    try:
        return await client.step(episode, 0, "")
    except AssertionError:
        return None
