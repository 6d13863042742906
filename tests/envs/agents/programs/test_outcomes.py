"""Programs as episodes of a host: how they end, and where their reward comes from."""

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tinkermq.envs.agents.episode import NoCalls
from tinkermq.envs.agents.leases import make_program_runner
from tinkermq.envs.agents.programs.agent_run import (
    ProgramCrashed,
    ProgramReward,
    parse_reward,
    try_number,
)
from tinkermq.envs.agents.programs.launcher import TAIL_BYTES, OutputReader, Printed
from tinkermq.envs.agents.programs.runner import NoFreeSlot
from tinkermq.envs.dataset import Record
from tinkermq.envs.host import EnvironmentHost, HostGone
from tinkermq.schemas.config.agent import AgentConfig, McpServer
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import (
    ConfigError,
    GameError,
    NotFoundError,
    RewardError,
    SandboxError,
    StateError,
    error_from_reply,
)

from tests.envs.agents.programs.conftest import LIMITS, PRELUDE, hosting
from tests.envs.hosting import Client
from tests.support.scripted_generator import Script, ScriptedGenerator
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full

SLEEP = "time.sleep(1000)"
REWARDED = "ask(); post('/reward', reward=0.5)\n"


async def test_a_program_asks_the_model_and_is_rewarded(play):
    result = await play(
        "print(ask()); print(post('/reward', reward=0.5)); print('x', file=sys.stderr)"
    )
    assert (result.reward, result.done, result.observation) == (0.5, True, "")
    assert (result.info["outcome"], result.info["exit_code"]) == ("done", 0)
    assert "four" in result.info["output"]
    assert "x\n" in result.info["output"]


USES_TOOLS = """
import asyncio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    servers = json.load(open(os.environ["TINKERMQ_MCP"]))["mcpServers"]
    assert sys.argv[1] == os.environ["TINKERMQ_MCP"]
    async with Client(stdio_client(StdioServerParameters(**servers["shop"]))) as client:
        tools = (await client.list_tools()).tools
        answer = await client.call_tool("price.of", {"item": "fig"})
        print([tool.name for tool in tools], answer.content[0].text)
    print(servers["web"])

asyncio.run(main())
ask()
post("/reward", reward=0.5)
"""
SHOP = Path(__file__).parents[2] / "adapters" / "mcp_servers.py"


async def test_a_program_starts_its_mcp_server_inside_its_sandbox(play):
    result = await play(
        "",
        command=["{python}", "-c", PRELUDE + USES_TOOLS, "{mcp}"],
        read=[str(SHOP.parent)],
        mcp=[
            {"name": "shop", "command": "{python}", "args": [str(SHOP), "shop"]},
            {"name": "web", "url": "https://a.example/mcp", "headers": {"X-Key": "k"}},
        ],
        network="open",
        memory_mb=1024,
        processes=64,
    )
    assert result.reward == 0.5, result.info["output"]
    assert "'price.of'] 3" in result.info["output"]
    web = {"type": "http", "url": "https://a.example/mcp", "headers": {"X-Key": "k"}}
    assert str(web) in result.info["output"]


async def test_an_mcp_server_that_a_program_cannot_use_is_refused():
    with pytest.raises(
        ConfigError, match=r"agent\.mcp \(server1\): programs do not find 'no-server'"
    ):
        async with hosting(REWARDED, mcp=[{"command": "no-server"}]):
            pass
    command = ["true"]
    with pytest.raises(ValueError, match=r"do not reach the MCP server https://a.example/mcp"):
        AgentConfig(command=command, mcp=[McpServer(url="https://a.example/mcp")])
    with pytest.raises(ValueError, match="several servers of mcp have the name one"):
        AgentConfig(command=command, mcp=[McpServer(name="one", command="x")] * 2)
    with pytest.raises(ValueError, match="mcp"):
        AgentConfig(client=True, mcp=[McpServer(command="x")])


async def test_a_program_that_says_its_end_is_done_though_it_runs_on(play):
    result = await play(f"{REWARDED}post('/end', status='done')\n{SLEEP}")
    assert (result.reward, result.info["outcome"]) == (0.5, "done")


async def test_a_program_may_say_that_it_has_failed(play):
    result = await play("ask(); post('/end', status='failed')", failed_reward=-1)
    assert (result.reward, result.info["outcome"]) == (-1, "failed")


async def test_a_program_that_will_not_end_is_ended_with_all_that_it_started(play):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n os.setsid()\n if os.fork() == 0: " + SLEEP + "\n"
        f"ask()\n{SLEEP}"
    )
    result = await play(code, timeout_s=6, failed_reward=-1)
    assert (result.reward, result.info["outcome"]) == (-1, "timeout")
    assert result.info["exit_code"] == 137


async def test_a_program_that_waits_for_the_model_is_not_stuck(play):
    result = await play("ask(); post('/slow')", idle_s=5, timeout_s=8)
    assert result.info["outcome"] == "timeout"


async def test_a_crash_is_tried_again_and_the_last_try_counts():
    code = "ask(); print('no such luck'); sys.exit(3)"
    async with hosting(code, max_tries=2, failed_reward=-1) as host:
        with pytest.raises(ProgramCrashed, match="exited with code 3 after 1 call") as crashed:
            await host.play("e-1")
        assert "no such luck" in crashed.value.hint
        assert crashed.value.boundary == "environment"
        result = await host.play("e-2")
        assert (result.reward, result.info["outcome"], result.info["exit_code"]) == (-1, "crash", 3)


async def test_a_crash_counts_at_once_where_that_is_wanted(play):
    result = await play(REWARDED + "os.abort()", max_tries=5, on_crash="score")
    assert (result.reward, result.info["outcome"], result.info["exit_code"]) == (0.5, "crash", 134)


async def test_a_program_without_a_call_for_too_long_is_stuck_and_tried_again_once():
    async with hosting(f"ask()\n{SLEEP}", max_tries=5, idle_s=5, failed_reward=-1) as host:
        with pytest.raises(ProgramCrashed, match=r"made no call for agent.idle_s=5 s"):
            await host.play("e-1")
        result = await host.play("e-2")
        assert (result.reward, result.info["outcome"]) == (-1, "stuck")


@pytest.mark.parametrize(
    ("code", "timeout_s", "words"),
    [
        ("print('hello')", 60, "exited with code 0 without one answered call"),
        ("raise SystemExit('no key')", 60, "exited with code 1 without one answered call"),
        (SLEEP, 0.5, "ran out of time .agent.timeout_s=0.5. without one answered call"),
    ],
)
async def test_a_program_that_never_asks_the_model_is_to_blame(play, code, timeout_s, words):
    with pytest.raises(NoCalls, match=words) as error:
        await play(code, max_tries=1, timeout_s=timeout_s)
    assert error.value.boundary == "task"
    assert "it printed" in error.value.hint


async def test_a_program_that_nobody_rewards_is_an_error_of_its_reward(play):
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play("ask()")


async def test_setup_runs_first_in_the_same_folder(play):
    setup = ["sh", "-c", "echo 0.25 > made; echo $TINKERMQ_EPISODE >> made"]
    code = "ask(); worth, who = open('made').read().split(); post('/reward', reward=float(worth))"
    result = await play(code + "; print(who)", setup=setup)
    assert result.reward == 0.25
    assert result.info["output"] == "e-1\n"


async def test_a_setup_that_fails_is_an_error_of_the_sandbox():
    setup = ["sh", "-c", "echo no wheel; exit 4"]
    async with hosting(setup=setup) as host:
        with pytest.raises(SandboxError, match=r"agent.setup exited with code 4") as error:
            await host.begin()
        assert "no wheel" in error.value.hint
    async with hosting(setup=["sleep", "1000"], setup_timeout_s=0.3) as host:
        with pytest.raises(
            SandboxError, match=r"agent.setup took longer than agent.setup_timeout_s"
        ):
            await host.begin()


async def test_a_program_that_cannot_be_run_fails_its_episode():
    async with hosting(command=["./made-later"], setup=["true"]) as host:
        with pytest.raises(GameError, match=r"cannot be run: .*made-later"):
            await host.begin()


async def test_a_host_without_a_place_says_so_and_the_episode_starts_elsewhere():
    async with hosting(f"ask()\n{SLEEP}", per_host=1, setup_timeout_s=0.5) as host:
        await host.begin("e-1")
        with pytest.raises(NoFreeSlot, match=r"no place .* agent.per_host=1") as error:
            await host.begin("f-1")
        told = error_from_reply(error.value.code, error.value.message, error.value.hint)
        assert type(told) is HostGone
        host.runner.drop("e-1")

        async def begins() -> bool:
            with contextlib.suppress(NoFreeSlot):
                return await host.begin("f-1") is not None
            return False

        await eventually(begins, "the place to be free")


async def test_an_episode_that_nobody_wants_any_more_is_ended():
    async with hosting(f"ask()\n{SLEEP}", per_host=1) as host:
        await host.begin("e-1")
        host.runner.drop("e-1")
        assert await host.begin("e-2")
        with pytest.raises(NotFoundError):
            await host.end("e-1")
        with pytest.raises(StateError):
            await host.runner.turn("e-2")
        assert host.endpoint.closed == ["e-1"]


async def test_nothing_is_left_of_episodes_that_are_dropped_at_any_moment():
    async with hosting(f"ask()\n{SLEEP}", per_host=8) as host:
        begun = []
        for number in range(8):
            begun.append(asyncio.ensure_future(host.begin(f"e{number}-1")))
            await asyncio.sleep(0.02)
        for number in range(8):
            host.runner.drop(f"e{number}-1")
            host.runner.drop(f"e{number}-1")
        for one in begun:
            with contextlib.suppress(NotFoundError):
                await one


@pytest.mark.parametrize(
    ("episode", "number"), [("t.4-12", 12), ("t", 1), ("a-b", 1), ("7-2-1", 1)]
)
def test_an_episodes_id_tells_which_try_it_is(episode, number):
    assert try_number(episode) == number


# -- Where the reward of a program comes from, and what is none ------------------------------------


GRADE = """
import json, os, pathlib, sys
row = json.load(open(os.environ["TINKERMQ_ROW"]))
written = pathlib.Path("answer").read_text().strip()
print("a word before")
print(json.dumps({"reward": float(written == row["answer"]), "success": True, "info": row}))
"""
ROW = Record(
    prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}],
    ground_truth="four",
    data_source="sums",
    extra_info={"level": 1, "answer": "four", "solution": "2 + 2 = four"},
)
ANSWER = "open('answer', 'w').write(ask())\n"


@pytest.fixture
def grader(tmp_path):
    folder = tmp_path / "grader"
    folder.mkdir()
    (folder / "grade.py").write_text(GRADE)
    return {"reward": ["{python}", "-S", "{grader}/grade.py"], "reward_files": str(folder)}


async def test_the_reward_command_knows_the_gold_answer_and_what_the_program_wrote(play, grader):
    result = await play(ANSWER, opening={"record": ROW, "seed": 7}, **grader)
    assert (result.reward, result.info["success"]) == (1.0, True)
    assert result.info["answer"] == "four"
    assert result.info["extra_info"] == ROW.extra_info
    assert (result.info["seed"], result.info["data_source"]) == (7, "sums")


async def test_where_a_command_grades_nothing_that_a_program_posts_counts(play, grader):
    posted = "ask(); post('/reward', reward=0.25)\n"
    said = "post('/end', status='done', reward=7, success=True)\n"
    wrong = "open('answer', 'w').write('wrong')\n"
    result = await play(posted + wrong + said, opening={"record": ROW}, **grader)
    assert (result.reward, result.info["uncounted_rewards"]) == (0.0, 1)
    half = {"reward": ["sh", "-c", "echo 0.5"]}
    result = await play(posted + said, **half)
    assert (result.reward, "success" in result.info) == (0.5, False)


async def test_a_posted_reward_comes_before_a_number_written(play):
    posted = "post('/reward', reward=0.25)\n"
    written = "open(os.environ['TINKERMQ_REWARD'], 'w').write('0.75')\n"
    assert (await play(posted + written + "ask()")).reward == 0.25
    result = await play(f"ask()\n{written}")
    assert (result.reward, "success" in result.info) == (0.75, False)
    half = {"reward": ["sh", "-c", "echo 0.5"]}
    assert (await play(f"ask()\n{written}", **half)).reward == 0.5


async def test_time_that_has_run_out_ends_a_program_after_a_word_and_what_it_left_is_graded(
    play, grader
):
    said = "def end(*_):\n print('asked to end', flush=True)\n sys.exit()\n"
    said += "signal.signal(signal.SIGTERM, end)\n"
    limits = {"timeout_s": 6, "grace_s": 30, "failed_reward": -1}
    result = await play(said + ANSWER + SLEEP, opening={"record": ROW}, **limits, **grader)
    assert (result.reward, result.info["outcome"]) == (1.0, "timeout")
    assert "asked to end" in result.info["output"]


async def test_a_program_that_failed_and_cannot_be_graded_gets_the_failed_reward(play, grader):
    result = await play("ask(); sys.exit(1)", failed_reward=-0.5, **grader)
    assert (result.reward, result.info["outcome"]) == (-0.5, "crash")
    assert "agent.reward exited with code 1" in result.info["no_reward"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo 1; exit 2", "exited with code 2"),
        ("true", "printed nothing"),
        ("echo well done", "neither a number nor JSON: 'well done'"),
        ("echo NaN", "not finite"),
        ("sleep 1000", "took longer than agent.reward_timeout_s=0.5"),
        ("yes > big; sleep 1000", "exited with code|wrote more than agent.disk_mb"),
    ],
)
async def test_a_reward_command_that_gives_none_is_told_with_what_it_printed(play, command, words):
    timeout_s = 0.5 if command == "sleep 1000" else 60
    with pytest.raises(RewardError, match=words):
        await play("ask()", reward=["sh", "-c", command], reward_timeout_s=timeout_s)


async def test_the_reward_command_runs_when_all_processes_of_the_program_are_dead(play):
    code = (
        "ask()\nif os.fork() == 0:\n os.setsid()\n"
        " while True: open('beat', 'w').write(str(time.time()))\n"
    )
    look = "import os, time\nfirst = os.stat('beat').st_mtime_ns\ntime.sleep(0.3)\n"
    look += "pids = [one for one in os.listdir('/proc') if one.isdigit()]\n"
    look += "print(float(os.stat('beat').st_mtime_ns == first and len(pids) == 2))"
    code += "while not os.path.exists('beat'): time.sleep(0.01)\n"
    assert (await play(code, reward=["{python}", "-S", "-c", look])).reward == 1.0


async def test_the_reward_command_reaches_no_model_and_no_network(play):
    look = "import os, socket\nkeys = [one for one in os.environ if 'KEY' in one or 'URL' in one]\n"
    look += "print(float(not keys and [name for _, name in socket.if_nameindex()] == ['lo']))"
    for network in ("model", "open"):
        result = await play("ask()", reward=["{python}", "-S", "-c", look], network=network)
        assert result.reward == 1.0


async def test_what_the_program_left_in_the_place_of_its_reward_leads_nowhere(play, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("0.125")
    code = f"ask(); os.symlink({str(secret)!r}, os.environ['TINKERMQ_REWARD'])"
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play(code)
    with pytest.raises(RewardError, match="has ended without a reward"):
        await play("ask(); os.mkfifo(os.environ['TINKERMQ_REWARD'])")


async def test_graders_that_programs_would_see_are_refused(tmp_path):
    (tmp_path / "grader").mkdir()
    with pytest.raises(ConfigError, match=r"programs would see .*grader in .*agent.read"):
        async with hosting(
            reward=["true"], reward_files=str(tmp_path / "grader"), read=[str(tmp_path)]
        ):
            pass
    with pytest.raises(ConfigError, match=r"programs would see .*grader in .*agent.files"):
        async with hosting(
            reward=["true"], reward_files=str(tmp_path / "grader"), files=str(tmp_path)
        ):
            pass
    with pytest.raises(ConfigError, match=r"names {grader}, but agent.reward_files is empty"):
        async with hosting(reward=["{grader}/grade"]):
            pass


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("1", ProgramReward(1.0)),
        (" -2.5e1\n", ProgramReward(-25.0)),
        ('{"reward": 0}', ProgramReward(0.0)),
        ('{"reward": 1, "success": false, "info": {"a": 1}}', ProgramReward(1.0, False, {"a": 1})),
    ],
)
def test_a_reward_is_a_number_or_an_object_with_one(text, worth):
    assert parse_reward(text, "it") == worth


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither a number nor JSON"),
        ("nan", "neither"),
        ("NaN", "not finite"),
        ("-Infinity", "not finite"),
        ("1e999", "not finite"),
        ("9" * 400, "not finite"),
        ("true", "True, which is not a number"),
        ('"1"', "'1', which is not a number"),
        ("[1]", "not a number"),
        ("{}", "None, which is not a number"),
        ('{"reward": "1"}', "not a number"),
        ('{"reward": NaN}', "not finite"),
        ('{"reward": 1, "sucess": true}', "the key 'sucess', which is unknown"),
        ('{"reward": 1, "success": 1}', "has success=1"),
        ('{"reward": 1, "info": []}', "has info="),
        ("[" * 100_000, "neither"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_words(text, words):
    with pytest.raises(RewardError, match=words) as error:
        parse_reward(text, "agent.reward")
    assert "what agent.reward wrote" in error.value.message
    assert len(error.value.message) < 400


# -- Programs as the episodes of an environment host, asked for over the broker --------------------


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
            result = await client.step("t1-1", 0, "")
        assert (result.reward, result.info["success"]) == (1.0, True)
        assert result.info["output"] == "You said: first\nYou said: second\n"
        stopping.set()


# -- Many programs of one host at once: none is lost, none sees another, nothing is left of them ---


CODE_OF_MANY = """
nonce = json.load(open(os.environ["TINKERMQ_TASK"]))["nonce"]
for _ in range(3):
    ask(nonce)
    open("seen", "a").write(nonce)
open(os.environ["TINKERMQ_REWARD"], "w").write(str(len(open("seen").read()) / len(nonce)))
print(nonce)
"""


async def test_sixty_four_programs_of_a_host_run_at_once():
    async with hosting(CODE_OF_MANY, per_host=64) as host:

        async def play(number: int) -> None:
            nonce = f"nonce {number:03}"
            result = await host.play(f"t{number}-1", kwargs={"nonce": nonce})
            assert (result.reward, result.info["output"]) == (3.0, f"{nonce}\n")

        await asyncio.gather(*(play(number) for number in range(96)))
        assert len(host.endpoint.closed) == 96


# -- What is kept of what a program prints on two pipes, in whatever order they are read -----------


def printed(*said: tuple[str, bytes]) -> Printed:
    """Return what a program has printed, pipe by pipe in this order."""
    reader = OutputReader()
    try:
        out, out_in = os.pipe()
        errors, errors_in = os.pipe()
        kept = reader.follow(out, errors)
        for pipe, text in said:
            os.write(out_in if pipe == "out" else errors_in, text)
        os.close(out_in)
        os.close(errors_in)
        assert kept.ended.wait(PATIENCE_S)
        return kept
    finally:
        reader.stop()


def test_errors_are_told_however_much_output_is_read_after_them() -> None:
    kept = Printed()
    kept.errors.add(b"Traceback: no rule")
    kept.both.add(b"Traceback: no rule")
    kept.both.add(b"x" * 2 * TAIL_BYTES)
    tail = kept.tail()
    assert tail.startswith("Traceback: no rule" + "x")
    assert len(tail) == TAIL_BYTES


def test_what_fits_is_told_once_and_output_stays_apart() -> None:
    kept = printed(("out", b"reward 1\n"), ("errors", b"a warning\n"))
    assert sorted(kept.tail().splitlines()) == ["a warning", "reward 1"]
    assert kept.out.text() == "reward 1\n"
    assert printed().tail() == ""


# -- The folders of a machine's hosts, which come and go beside each other -------------------------


COME_AND_GO = """
from concurrent.futures import ThreadPoolExecutor
from tinkermq.envs.agents.programs.folders import ProgramFolders

def come_and_go(number):
    for _ in range(100):
        folders = ProgramFolders()
        assert folders.path.is_dir()
        folders.close()

with ThreadPoolExecutor(8) as threads:
    list(threads.map(come_and_go, range(8)))
"""


def test_hosts_that_come_and_go_leave_each_other_alone_and_nothing_of_a_killed_one(
    tmp_path: Path,
) -> None:
    left = tmp_path / "tinkermq-programs-left"
    left.mkdir()
    (left / "lock").touch()
    elsewhere = tmp_path / "tinkermq-programs-link"
    elsewhere.symlink_to(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COME_AND_GO],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == [elsewhere]
