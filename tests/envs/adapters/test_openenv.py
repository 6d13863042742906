"""Environments of OpenEnv's servers, with a server of our own that speaks the same wire."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import openenv_server
import pytest
from openenv_server import (
    CALL_ACTION,
    FORM_ACTION,
    TEXT_ACTION,
    TOOLS,
    Behaviour,
    Serving,
    make_app,
    observed,
    serving,
)
from structlog.testing import capture_logs
from tinkermq.envs.adapters.openenv import OpenEnvGame, text_of
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Record
from tinkermq.envs.running.episodes import Opening
from tinkermq.envs.running.runners import make_runner
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import GameError

pytestmark = pytest.mark.full

SERVER = Path(openenv_server.__file__)
PATIENCE_S = 60


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@contextlib.asynccontextmanager
async def playing(url=(), *, step_timeout_s=30.0, **kwargs):
    """Yield what a host plays its games with, and what it found of the environment."""
    chosen = {**({"url": url} if url else {}), **kwargs}
    config = EnvConfig(game="openenv", kwargs=chosen, step_timeout_s=step_timeout_s)
    runner = make_runner(config)
    try:
        yield runner, await runner.start()
    finally:
        await runner.stop()


async def opened(runner, episode, seed=0, **row):
    """Begin an episode; return its first prompt."""
    record = Record(prompt=[], ground_truth="", **row) if row else None
    (message,) = await runner.reset(Opening(episode, seed, record))
    return message["content"]


async def until(condition):
    """Wait until something holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def refusal(behaviour, **kwargs):
    """Return the error with which a host refuses a server."""
    with serving(behaviour) as (url,), pytest.raises(GameError) as error:
        async with playing(url, **kwargs):
            pass
    return error.value


# -- what an environment is ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behaviour",
    [
        Behaviour(),
        Behaviour(action=CALL_ACTION, tools=TOOLS, max_sessions=1),
        Behaviour(action=FORM_ACTION, splits={"test": 3, "train": 5}),
    ],
    ids=["text", "tools", "form"],
)
def test_every_check_of_an_environment_passes(behaviour):
    with serving(behaviour) as (url,):
        results = check_game(EnvConfig(game="openenv", kwargs={"url": url}))
    assert [result for result in results if not result.ok] == []


async def test_an_action_of_one_text_is_what_the_policy_says():
    with serving(Behaviour()) as (url,):
        async with playing(url, instructions="Say a word.") as (runner, facts):
            assert (facts.name, facts.tools) == ("echo", [])
            assert (await opened(runner, "a", seed=7)).startswith("Say a word.\n\nseed=")
            answer = await runner.step("a", "<think>hm</think>hello")
            assert (answer.observation, answer.reward, answer.done) == ("olleh", 0.5, False)
            assert answer.role == "user"
            answer = await runner.step("a", "stop")
            assert (answer.observation, answer.reward, answer.done) == ("pots", 0.4, True)


async def test_the_tools_of_an_mcp_environment_are_offered_and_called():
    with serving(Behaviour(action=CALL_ACTION, tools=TOOLS)) as (url,):
        async with playing(url) as (runner, facts):
            assert [tool["function"]["name"] for tool in facts.tools] == ["add", "finish"]
            assert facts.tools[0]["function"]["parameters"] == TOOLS[0]["inputSchema"]
            await opened(runner, "a")
            answer = await runner.step("a", call("add", a=1, b=2) + call("add", a=3, b=4))
            assert (answer.tool_results, answer.reward) == (["3", "7"], 2.0)
            answer = await runner.step("a", call("add", a="x"))
            assert answer.role == "tool"
            assert answer.observation.startswith("Error: add: ")
            answer = await runner.step("a", call("finish"))
            assert (answer.reward, answer.done) == (1.0, True)


async def test_an_action_of_several_fields_is_one_tool():
    with serving(Behaviour(action=FORM_ACTION)) as (url,):
        async with playing(url) as (runner, facts):
            (tool,) = facts.tools
            assert tool["function"]["name"] == "act"
            assert tool["function"]["description"] == "Move on the board."
            assert list(tool["function"]["parameters"]["properties"]) == ["direction", "steps"]
            await opened(runner, "a")
            answer = await runner.step("a", call("act", direction="up", steps=2))
            assert json.loads(answer.observation) == {"moved": "up", "steps": 2}
            assert answer.reward == 0.0, "no reward counts as none"
            answer = await runner.step("a", call("act", direction="left"))
            assert "is none of" in answer.observation


async def test_an_action_without_fields_is_a_tool_without_arguments():
    with serving(Behaviour(action={"type": "object", "properties": {}})) as (url,):
        async with playing(url) as (_, facts):
            assert facts.tools[0]["function"]["parameters"]["properties"] == {}


async def test_a_refused_action_is_told_to_the_policy_and_the_episode_goes_on():
    with serving(Behaviour()) as (url,):
        async with playing(url) as (runner, _):
            await opened(runner, "a")
            answer = await runner.step("a", "refuse")
            assert (answer.observation, answer.reward) == ('Error: ["no"]', 0.0)
            assert (await runner.step("a", "ab")).observation == "ba"


def test_observations_are_shown_as_texts():
    assert text_of({"reply": "hi", "metadata": {"x": 1}, "note": None}) == "hi"
    assert text_of({"reply": "hi", "count": 2}) == '{"reply": "hi", "count": 2}'
    assert text_of({"reply": "hi", "count": 2}, "count") == "2"
    assert text_of({"metadata": {"x": 1}}) == ""
    assert text_of({"tool_name": "a", "result": {"x": 1}, "error": None}) == '{"x": 1}'
    assert (
        text_of({"tool_name": "a", "error": {"message": "no such tool"}}) == "Error: no such tool"
    )
    image = {"type": "image", "data": "…"}
    parts = {"content": [{"type": "text", "text": "see"}, image], "is_error": True}
    assert text_of({"tool_name": "a", "result": parts}) == "Error: see\n[image]"
    with pytest.raises(GameError, match="no field 'score', it has"):
        text_of({"reply": "hi"}, "score")


# -- tasks -----------------------------------------------------------------------------------------


async def test_a_seed_chooses_the_same_task_each_time():
    with serving(Behaviour(splits={"test": 3, "train": 1000})) as (url,):
        async with playing(url) as (runner, _):
            prompts = [await opened(runner, f"{n}", seed=n % 8) for n in range(16)]
        assert prompts[:8] == prompts[8:]
        assert len({prompt.split("index=")[1].split()[0] for prompt in prompts}) > 4
        assert all("split=train" in prompt for prompt in prompts)
        async with playing(url, split="test", task_range=[2, 9]) as (runner, _):
            assert "index=2 seed=" in await opened(runner, "a")


async def test_a_row_chooses_its_task():
    with serving(Behaviour()) as (url,):
        async with playing(url, reset={"level": 2}) as (runner, _):
            row = {"extra_info": {"split": "test", "index": 3}}
            prompts = [await opened(runner, name, seed=4, **row) for name in "ab"]
    assert prompts[0] == prompts[1]
    assert "index=3 level=2 seed=" in prompts[0]
    assert prompts[0].endswith("split=test")


async def test_a_split_or_tasks_that_are_not_there_are_refused():
    error = await refusal(Behaviour(splits={"train": 2}), split="val")
    assert "no split 'val', it has ['train']" in error.message
    assert "lists no tasks" in (await refusal(Behaviour(), split="train")).message
    assert (
        "none of the 2 tasks"
        in (await refusal(Behaviour(splits={"train": 2}), task_range=[5, 9])).message
    )
    assert "has 0 tasks" in (await refusal(Behaviour(splits={"train": 0}))).message


# -- sessions --------------------------------------------------------------------------------------


async def test_episodes_wait_for_the_sessions_of_a_full_server_which_is_said():
    server = Behaviour(max_sessions=2)
    with serving(server) as (url,), capture_logs() as logs:
        async with playing(url) as (runner, _):

            async def play(name):
                await opened(runner, name)
                await runner.step(name, "ab")
                return await runner.step(name, "stop")

            answers = await asyncio.gather(*(play(f"{number}") for number in range(20)))
    assert [answer.done for answer in answers] == [True] * 20
    assert (server.most_open, server.num_resets) == (2, 20)
    (said,) = [log for log in logs if log["event"] == "openenv_server_full"]
    assert (said["max_sessions"], said["server"]) == (2, url)


async def test_a_wait_for_a_session_has_an_end():
    with serving(Behaviour(max_sessions=1)) as (url,):
        async with playing(url, wait_s=2.5) as (runner, _), playing(url, wait_s=1.5) as (other, _):
            await opened(runner, "a")
            with pytest.raises(GameError) as error:
                await opened(runner, "b")
            held = f"({url}: 1 of ours"
            assert f"no session within 2.5 s, 1 episodes wait {held}" in error.value.message
            with pytest.raises(GameError) as error:
                await opened(other, "b")
            assert f"the last answer: {url} has no session left (1 of 1)" in error.value.message


async def test_a_session_that_another_gives_back_is_taken():
    with serving(Behaviour(max_sessions=1)) as (url,):
        async with playing(url) as (runner, _), playing(url, copies=2) as (other, _):
            await opened(runner, "a")
            waiting = asyncio.ensure_future(opened(other, "b"))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            runner.drop("a")
            assert "seed=" in await asyncio.wait_for(waiting, PATIENCE_S)


async def test_episodes_are_spread_over_several_servers():
    servers = [Behaviour(max_sessions=8) for _ in range(3)]
    with serving(*servers) as urls:
        async with playing(list(urls)) as (runner, _):
            await asyncio.gather(*(opened(runner, f"{number}") for number in range(24)))
            assert [server.num_open for server in servers] == [8, 8, 8]


async def test_a_session_is_closed_when_its_episode_is_dropped_or_ends():
    server = Behaviour()
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            await opened(runner, "a")
            await opened(runner, "b")
            assert server.num_open == 2
            runner.drop("a")
            await until(lambda: server.num_open == 1)
            await runner.step("b", "stop")
            await until(lambda: server.num_open == 0)
            await opened(runner, "c")
        await until(lambda: server.num_open == 0)


async def test_a_step_past_its_limit_ends_its_session():
    released = threading.Event()

    async def wait():
        while not released.is_set():
            await asyncio.sleep(0.01)

    def late(message):
        return wait() if message["type"] == "step" else None

    server = Behaviour(answer=late)
    with serving(server) as (url,):
        async with playing(url, step_timeout_s=0.2) as (runner, _):
            await opened(runner, "a")
            with pytest.raises(GameError, match="hung in step"):
                await runner.step("a", "x")
            assert server.num_open == 1
            released.set()
            await until(lambda: server.num_open == 0)


async def test_a_server_that_is_away_is_asked_again_before_an_episode_begins():
    serving_first = Serving(make_app(Behaviour()))
    url, port = serving_first.url, serving_first.socket.getsockname()[1]
    async with playing(url) as (runner, _):
        serving_first.stop()
        waiting = asyncio.ensure_future(opened(runner, "a"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        again = Serving(make_app(Behaviour()), port)
        try:
            assert "seed=" in await asyncio.wait_for(waiting, PATIENCE_S)
        finally:
            again.stop()


async def test_a_server_that_dies_costs_the_episodes_it_had_and_no_others():
    first, second = Behaviour(), Behaviour()
    dying = Serving(make_app(first))
    with serving(second) as (url,):
        async with playing([dying.url, url]) as (runner, _):
            for name in "abcd":
                await opened(runner, name)
            assert (first.num_open, second.num_open) == (2, 2)
            dying.stop()
            played = await asyncio.gather(
                *(runner.step(name, "ab") for name in "abcd"), return_exceptions=True
            )
            lost = [one for one in played if isinstance(one, GameError)]
            assert len(lost) == 2
            assert "ended the session during a step" in lost[0].message
            assert dying.url in lost[0].message
            for name in "efgh":
                await opened(runner, name)
            assert second.num_open == 6


# -- servers that mean no good ---------------------------------------------------------------------


def endless(_):
    return (observed({"n": number}) for number in range(10**9))


def error_answer(code):
    data = {"message": "\x1b[31mno", "code": code}
    return lambda _: {"type": "error", "data": data}


def answered(**data):
    return {"type": "observation", "data": data}


async def test_a_reward_and_an_end_that_stand_in_the_observation_alone_are_used():
    inner = {"echoed": "x", "reward": 0.25, "done": True}
    server = Behaviour(
        answer=lambda message: answered(observation=inner) if message["type"] == "step" else None
    )
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            await opened(runner, "a")
            result = await runner.step("a", "x")
            assert (result.reward, result.done, result.observation) == (0.25, True, "x")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda _: "x" * (50 << 20), "sent a message of more than 4,194,304 bytes"),
        (lambda _: [1], "not of the protocol of OpenEnv 0.3 to 0.10"),
        (lambda _: "no JSON", "it is not valid JSON"),
        (lambda _: "[" * 100_000, "nests too deep"),
        (lambda _: '{"type": "observation", "data": {"observation": {"a": "\\ud800"}}}', "half"),
        (lambda _: b"\xff\xfe", "not of the protocol"),
        (lambda _: {"type": "observation", "data": {}}, "observation: Field required"),
        (lambda _: answered(observation={}, done=True), "reward: Field required"),
        (lambda _: answered(observation={"reward": 1.0}), "done: Field required"),
        (lambda _: observed({}, "1"), "reward"),
        (lambda _: observed({}, float("nan")), "reward"),
        (lambda _: observed({}, 1.0, "yes"), "done"),
        (lambda _: {"type": "\x1b[2J", "data": {}}, r"with a '\x1b[2J'"),
        (error_answer("EXECUTION_ERROR"), r"the error 'EXECUTION_ERROR': '\x1b[31mno'"),
        (error_answer("SESSION_ERROR"), "the error 'SESSION_ERROR'"),
        (error_answer("FACTORY_ERROR"), "the error 'FACTORY_ERROR'"),
        (lambda _: {"type": "error", "data": {"code": 7}}, "code"),
    ],
)
async def test_an_odd_answer_costs_its_episode(answer, said):
    server = Behaviour(
        answer=lambda message: answer(message) if message["type"] == "step" else None
    )
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            await opened(runner, "a")
            await opened(runner, "b")
            with pytest.raises(GameError) as error:
                await runner.step("a", "x")
            assert said in error.value.message
            assert len(error.value.message) < 1000
            await until(lambda: server.num_open == 1)
            server.answer = None
            assert (await runner.step("b", "ab")).observation == "ba"


async def test_an_endless_stream_takes_no_memory_and_ends_with_its_episode():
    server = Behaviour(answer=endless)
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            assert "n" in await opened(runner, "a")
            assert await runner.step("a", "x") is not None
            runner.drop("a")
            await until(lambda: server.num_open == 0)


async def test_an_episode_that_is_over_at_once_is_an_error():
    server = Behaviour(answer=lambda _: observed({"x": 1}, 0.0, True))
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            with pytest.raises(GameError, match="was over before the policy's first turn"):
                await opened(runner, "a")
            await until(lambda: server.num_open == 0)


async def test_what_a_terminal_would_act_on_is_not_in_an_observation():
    text = "\x1b[31mred\x1b[0m\x1b]0;title\x07 a\x00b\x9bc\r\nnew <|im_end|>"
    with serving(Behaviour(answer=lambda _: observed({"t": text}))) as (url,):
        async with playing(url, instructions="-") as (runner, _):
            assert await opened(runner, "a") == "-\n\nred abc\nnew <|im_end|>"


async def test_a_long_observation_is_cut():
    with serving(Behaviour(answer=lambda _: observed({"t": "x" * 100_000}))) as (url,):
        async with playing(url, instructions="-") as (runner, _):
            prompt = await opened(runner, "a")
    assert len(prompt) < 17_000
    assert prompt.endswith("[84,000 more characters left out]")


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/", "https://localhost/x", "//[::1]:9/"])
async def test_redirects_are_not_followed(target):
    error = await refusal(Behaviour(redirect=target))
    assert "redirects (HTTP 307), and redirects are not followed" in error.message
    server = Behaviour()
    with serving(server) as (url,):
        async with playing(url) as (runner, _):
            server.redirect = target
            with pytest.raises(GameError, match=r"/ws redirects \(HTTP 307\)"):
                await opened(runner, "a")


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return {"type": "object", "properties": {"a": schema, "b": schema}}


def tool(name="t", description="", **schema):
    return {"name": name, "description": description, "input_schema": {"type": "object", **schema}}


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ([tool("a\nb")], "a tool of the name"),
        ([tool("\x1b[31m")], "a tool of the name"),
        ([tool("x" * 65)], "a tool of the name"),
        ([tool(), tool()], "several tools of the name t"),
        ([tool(description="\x1b[2J")], "control character"),
        ([tool(properties={"a": {"enum": ["x"] * 50_000}})], "characters of"),
        ([{**tool(), "input_schema": deep(50)}], "levels deep"),
        ([{**tool(), "input_schema": {"type": "string"}}], "no object schema"),
        ([{**tool(), "input_schema": 3}], "no object schema"),
        ([3], "a tool of the name"),
        ([tool(f"t{number}") for number in range(1000)], "1000 tools"),
        ([], "offers no tool"),
    ],
)
async def test_a_tool_that_cannot_be_offered_is_refused(tools, said):
    error = await refusal(Behaviour(action=CALL_ACTION, tools=tools))
    assert said in error.message


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"anyOf": [TEXT_ACTION, FORM_ACTION]}, "no object schema"),
        (deep(50), "levels deep"),
        ({"type": "object", "properties": {"a": {"enum": ["x"] * 50_000}, "b": {}}}, "characters"),
        ([], "action: Input should be a valid dictionary"),
    ],
)
async def test_an_action_that_no_tool_can_express_is_refused(action, said):
    assert said in (await refusal(Behaviour(action=action))).message


async def test_what_describes_an_environment_is_bounded():
    error = await refusal(Behaviour(description="x" * (5 << 20)))
    assert "sent a message of more than 4,194,304 bytes" in error.message


# -- what a user gets wrong ------------------------------------------------------------------------


async def test_a_server_that_is_not_there_is_named():
    with pytest.raises(GameError) as error:
        async with playing("http://127.0.0.1:1"):
            pass
    assert "http://127.0.0.1:1/schema does not answer" in error.value.message
    assert "start the server" in error.value.hint


async def test_a_url_of_another_server_is_named():
    with serving(Behaviour()) as (url,), pytest.raises(GameError) as error:
        async with playing(f"{url}/elsewhere"):
            pass
    assert f"no OpenEnv server of a known version at {url}/elsewhere" in error.value.message
    assert "OpenEnv 0.3 to 0.10" in error.value.hint


async def test_a_key_comes_from_the_environment_of_the_host(monkeypatch):
    error = await refusal(Behaviour(key="s3cret"))
    assert "refuses the request (HTTP 401)" in error.message
    assert "key_variable" in error.hint
    error = await refusal(Behaviour(key="s3cret"), key_variable="OPENENV_TEST_KEY")
    assert "OPENENV_TEST_KEY is not set" in error.message
    monkeypatch.setenv("OPENENV_TEST_KEY", "s3cret")
    with serving(Behaviour(key="s3cret")) as (url,):
        async with playing(url, key_variable="OPENENV_TEST_KEY") as (runner, _):
            assert "seed=" in await opened(runner, "a")


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({}, "one of url and package"),
        ({"url": "http://h", "package": "m:app"}, "one of url and package"),
        ({"url": "ftp://h"}, "url='ftp://h' is not the URL of a server"),
        ({"url": "localhost:8000"}, "not the URL of a server"),
        ({"url": "http://user:word@h"}, "not the URL of a server"),
        ({"url": "http://h:99999"}, "not the URL of a server"),
        ({"url": [3]}, "not the URL of a server"),
        ({"url": "http://h", "task_range": [3, 3]}, "task_range=[3, 3] is not a range"),
        ({"package": "m:app", "copies": 0}, "copies=0"),
    ],
)
def test_arguments_that_cannot_be_are_refused(kwargs, said, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(GameError) as error:
        OpenEnvGame(**kwargs)
    assert said in error.value.message


# -- servers that are started ----------------------------------------------------------------------


def package(**more):
    return {
        "package": "openenv_server:app",
        "variables": {"PYTHONPATH": str(SERVER.parent), "OF_TESTS": str(os.getpid()), **more},
        "start_s": float(PATIENCE_S),
    }


async def test_a_package_is_started_and_ends_with_its_host():
    async with playing(**package(MAX_SESSIONS="1"), copies=2) as (runner, facts):
        assert facts.name == "echo"
        for name in "ab":
            await opened(runner, name)
        assert (await runner.step("b", "ab")).observation == "ba"
        children = _children()
        assert len(children) == 2
        os.kill(children[0], signal.SIGKILL)
        played = await asyncio.gather(
            *(runner.step(name, "ab") for name in "ab"), return_exceptions=True
        )
        assert sum(isinstance(one, GameError) for one in played) == 1
        for name in "cd":  # one of them needs the server that was killed
            runner.drop("a")
            runner.drop("b")
            await opened(runner, name)
    await until(lambda: not _children())


async def test_a_package_that_is_killed_while_it_starts_is_started_again():
    killed: list[int] = []

    def kill_first() -> None:
        while not killed:
            killed.extend(_children())
        os.kill(killed[0], signal.SIGKILL)

    killing = asyncio.create_task(asyncio.to_thread(kill_first))
    async with playing(**package()) as (runner, facts):
        assert facts.name == "echo"
        await opened(runner, "a")
        await killing
        assert _children() != killed
    await until(lambda: not _children())


def _children():
    """Return the servers of packages that run, without those of other runs of the tests."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            variables = (folder / "environ").read_bytes().split(b"\0")
            if b"openenv_server:app" in words and b"OF_TESTS=%d" % os.getpid() in variables:
                found.append(int(folder.name))
    return found


def test_a_package_ends_with_a_host_that_is_killed(tmp_path):
    program = f"""
        import time
        from tinkermq.envs.adapters.openenv import OpenEnvGame
        OpenEnvGame(**{package()!r}).get_tools()
        print("ready", flush=True)
        time.sleep(99)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        assert _children()
        host.kill()
    deadline = time.monotonic() + PATIENCE_S
    while _children():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_package_that_cannot_be_started_says_why():
    cases: list[tuple[Any, str]] = [
        ({"package": "no_such_module:app"}, "no_such_module"),
        ({"package": "m:app", "python": "/no/python"}, "cannot be started with env.kwargs.python"),
    ]
    for kwargs, said in cases:
        with pytest.raises(GameError) as error:
            async with playing(start_s=float(PATIENCE_S), **kwargs):
                pass
        assert said in error.value.message
