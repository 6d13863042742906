"""Tools of MCP servers are a game: the real package's servers, and hostile ones."""

import asyncio
import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tinkermq.envs.adapters.mcp import McpGame
from tinkermq.envs.adapters.mcp_channels import GameServer
from tinkermq.envs.adapters.mcp_client import close_all, connect
from tinkermq.envs.check import check_game
from tinkermq.envs.dataset import Record
from tinkermq.envs.running.episodes import GameHung, Opening
from tinkermq.envs.running.runners import make_runner
from tinkermq.envs.sandbox.sandbox import descendants
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.config.sections import RewardConfig
from tinkermq.schemas.wire.errors import ConfigError, GameError, TinkermqError

from tests.envs.adapters.scripted_mcp import answers
from tests.support.cancelling import cancel_everywhere
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
REAL, SCRIPTED = HERE / "mcp_servers.py", HERE / "scripted_mcp.py"


GAMES: list[McpGame] = []


@pytest.fixture(autouse=True)
async def _closed_sessions() -> Any:
    yield
    while GAMES:
        GAMES.pop().close()
    await asyncio.sleep(0)
    await close_all()


def call(name: str, **arguments: Any) -> str:
    """Return a call as models of Hermes and Qwen write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def scripted(mode: str, **keys: Any) -> dict[str, Any]:
    """Return the settings of a server that does what `mode` says."""
    return {
        "name": mode,
        "command": "{python}",
        "args": ["-S", str(SCRIPTED), mode],
        "read": [str(SCRIPTED)],
        "start_timeout_s": 60,
        **keys,
    }


def real(name: str, **keys: Any) -> dict[str, Any]:
    """Return the settings of a server of the real package, over stdio."""
    return {**scripted(name), "args": [str(REAL), name], "read": [str(REAL)], **keys}


async def opened(*servers: dict[str, Any], **arguments: Any) -> McpGame:
    game = McpGame(servers=list(servers), **arguments)
    GAMES.append(game)
    await game.reset(ground_truth="4")
    return game


async def said(game: McpGame, *calls: str) -> list[str]:
    """Return what tools answer to the calls of a turn."""
    return (await game.step("".join(calls))).tool_results


def names(game: McpGame) -> list[str]:
    return [tool["function"]["name"] for tool in game.get_tools()]


# -- the real package ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shop_url() -> Iterator[str]:
    """Serve the shop of the real package over HTTP."""
    with served("shop") as url:
        yield url


@pytest.fixture(scope="module")
def slow_url() -> Iterator[str]:
    """Serve the server that waits, over HTTP."""
    with served("slow") as url:
        yield url


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """Serve a server of the real package over HTTP."""
    name, *options = words
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, str(REAL), name, str(port), *options], stderr=subprocess.DEVNULL
    ) as server:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        server.terminate()


async def test_a_real_server_over_stdio_is_played_with_its_resource_and_prompt():
    prompt = {"name": "greeting", "arguments": {"name": "Bo"}}
    shop = real("shop", resources=["shop://rules"], prompts=[prompt])
    game = await opened(shop, system_prompt="Be polite.")
    assert game.get_system_prompt() == (
        "Be polite.\n\nshop://rules\nOne basket each.\n\nYou serve Bo."
    )
    assert names(game) == ["add", "basket_content", "fail", "repeat", "price_of"]
    add = game.get_tools()[0]["function"]
    assert add["description"] == "Put something into the basket."
    assert add["parameters"]["properties"]["item"]["type"] == "string"
    texts = await said(game, call("add", item="pear"), call("add", item="fig", count=2))
    assert texts == ["1 in the basket", "3 in the basket"]
    [text] = await said(game, call("price_of", item="fig"))
    assert text == "3"
    result = await game.step("It costs 3.")
    assert (result.done, result.reward) == (True, 0.0)


def over_http(url: str, **keys: Any) -> dict[str, Any]:
    return {"name": "shop", "url": url, "start_timeout_s": 60, **keys}


async def test_each_episode_has_a_session_of_its_own_unless_they_share_one(shop_url: str):
    for shared, found in (
        (False, ["1 in the basket"] * 2),
        (True, [f"{n} in the basket" for n in (1, 2)]),
    ):
        shop = over_http(shop_url, shared=shared)
        games = [await opened(shop, allowed_hosts=["127.0.0.1"]) for _ in range(2)]
        texts = [(await said(game, call("add", item="pear")))[0] for game in games]
        assert texts == found


@pytest.mark.parametrize(
    ("is_http", "limit_s", "is_shared"),
    # other programs end, and nobody could ask them
    [
        (True, 4.0, True),
        (True, 4.0, False),
        (True, 60.0, True),
        (True, 60.0, False),
        (False, 60.0, True),
    ],
)
async def test_a_call_that_nobody_waits_for_any_more_is_cancelled_at_a_real_server(
    is_http: bool, limit_s: float, is_shared: bool, slow_url: str
):
    def settings(limit_s: float) -> GameServer:
        own = {"name": "slow", "url": slow_url} if is_http else real("slow")
        keys = {"shared": is_shared, "call_timeout_s": limit_s}
        return GameServer.model_validate({**own, **keys})

    async def counted(wanted: list[int]) -> bool:
        text, _ = await (await connect(settings(60.0))).call("waits", {})
        return json.loads(text) == wanted

    text, _ = await (await connect(settings(60.0))).call("waits", {})
    begun, cancelled = json.loads(text)
    waiting = asyncio.create_task((await connect(settings(limit_s))).call("wait", {}))
    if limit_s == 60.0:
        await eventually(lambda: counted([begun + 1, cancelled]), "the call to begin")
        waiting.cancel()
    with pytest.raises((GameHung, asyncio.CancelledError)):
        await waiting
    await eventually(lambda: counted([begun + 1, cancelled + 1]), "the server to cancel it")


@pytest.mark.parametrize("options", [["json"], ["stateless"], ["json", "stateless"]])
async def test_servers_without_sessions_and_streams_are_played_as_those_with_them(
    options: list[str],
):
    with served("shop", *options) as url:
        game = await opened(over_http(url), allowed_hosts=["127.0.0.1"])
        for _ in range(2):
            assert await said(game, call("repeat", text="x", times=3)) == ["xxx"]
        await close_all()


async def test_a_stream_that_a_real_server_lets_go_of_is_continued_and_no_tool_is_called_twice():
    with served("lets_go") as url:
        game = await opened(over_http(url), allowed_hosts=["127.0.0.1"])
        for number, pauses in enumerate((1, 0, 3), 1):
            assert await said(game, call("count", pauses=pauses)) == [f"{number} calls"]
        game.close()
        await close_all()


async def test_what_a_real_server_refuses_is_read_by_the_policy(shop_url: str):
    game = await opened(over_http(shop_url), allowed_hosts=["127.0.0.1"])
    texts = await said(
        game, call("fail", reason="empty"), call("add", item=7), call("steal"), "<tool_call>{"
    )
    assert texts[0] == "Error executing tool fail"
    assert texts[1] == "Error: add.item: 7 is of type integer, it must be string"
    assert texts[2].startswith("Error: there is no tool 'steal'; the tools are add,")
    assert texts[3].startswith("Error: this call cannot be read")
    result = await game.step(call("repeat", text="x" * 1000, times=50_000))
    assert result.tool_results == ["error: the answer is longer than 4,194,304 bytes"]
    assert result.info == {"failed_calls": 2, "tool_calls": 5, "refused_calls": 3}
    [cut] = await said(game, call("repeat", text="x", times=20_000))
    assert cut.endswith("[4,000 more characters left out]")


async def test_a_list_of_tools_restricts_a_server_and_a_resource_that_is_not_there_is_told(
    shop_url: str,
):
    hosts = ["127.0.0.1"]
    game = await opened(over_http(shop_url, tools=["fail", "add"]), allowed_hosts=hosts)
    assert names(game) == ["add", "fail"]
    with pytest.raises(ConfigError, match=r"has no tool 'buy', which its `tools` names"):
        names(await opened(over_http(shop_url, tools=["buy"]), allowed_hosts=hosts))
    with pytest.raises(GameError, match=r"gave no resource or prompt: error: .*shop://none"):
        await opened(over_http(shop_url, resources=["shop://none"]), allowed_hosts=hosts)


def test_every_check_of_a_real_server_passes_with_a_reward_by_function(
    shop_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "shop_rewards.py").write_text(
        "def paid(solution_str, ground_truth, **_):\n"
        "    return float(ground_truth in solution_str)\n"
    )
    rows = [{"prompt": f"How much is {n}?", "answer": str(n)} for n in range(4)]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvConfig(
        game="mcp",
        kwargs={"servers": [over_http(shop_url)], "allowed_hosts": ["127.0.0.1"]},
        train_data=[str(tmp_path / "data.jsonl")],
        reward=RewardConfig(source="function", function="shop_rewards:paid"),
    )
    results = check_game(config)
    assert [result for result in results if not result.ok] == []
    assert "the reward function answers" in [result.name for result in results]


# -- names and settings ----------------------------------------------------------------------------


async def test_tools_of_several_servers_that_clash_are_named_after_their_servers():
    game = await opened(scripted("plain"), scripted("dotted"), scripted("asks"))
    with pytest.raises(GameError, match=r"'a.b' of .* and 'a/b' of .* would both be called"):
        game.get_tools()
    game = await opened(scripted("plain"), scripted("dotted", tools=["a.b"]), scripted("asks"))
    assert names(game) == ["plain_echo", "a_b", "asks_echo"]
    assert await said(game, call("plain_echo", text="1"), call("a_b", text="2")) == ["1", "2"]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("control", r"has a tool of the name 'echo\\x1b\[2J'"),
        ("deep", "the tool echo cannot be offered: its schema nests over 32 levels"),
        ("large", "the tool echo cannot be offered: its schema has 300,"),
        ("array", "the tool echo cannot be offered: its parameters are .* no object schema"),
        ("typed", "the tool echo cannot be offered: its description is"),
        ("numbers", "answered tools/list with 1, which is not a valid answer"),
        ("nameless", "answered tools/list with .* which is not a valid answer"),
        ("many", "lists more than 512 tools"),
        ("pages", "lists tools without end|lists more than 512 tools"),
        ("none", "the MCP servers offer no tool"),
        ("version", r"speaks MCP '2099-01-01'"),
        ("untyped", r"speaks MCP \['2025-11-25'\]"),
        ("ends", "exited with code 1"),
    ],
)
async def test_a_server_that_cannot_be_used_is_told_with_the_reason(mode: str, words: str):
    game = await opened(scripted(mode))
    with pytest.raises(TinkermqError, match=words) as caught:
        game.get_tools()
    assert mode in caught.value.message or mode == "none"
    if mode == "ends":
        assert "no licence for this machine" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"servers": []}, "env.kwargs.servers is "),
        ({"servers": [{"name": "x"}]}, r"servers\[0\]: .*give command or url; neither is set"),
        ({"servers": [{"command": "a", "url": "http://b"}]}, "both is set"),
        ({"servers": [{"url": "ftp://b"}]}, r"servers\[0\].url"),
        ({"servers": [{"comand": "a"}]}, r"servers\[0\].comand"),
        ({"servers": [{"command": "a", "headers": {"x": "y"}}]}, "headers"),
        ({"servers": [{"command": "a", "prompts": [{"nam": "y"}]}]}, "does not name a prompt"),
        ({"servers": [{"command": "a", "name": "x"}] * 2}, "several .* have the name x"),
        (
            {"servers": [{"url": "http://a.example/mcp"}]},
            "the host a.example, which is not allowed",
        ),
        ({"servers": [{"url": "http://[a/mcp"}], "allowed_hosts": ["a"]}, "which is not allowed"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_their_key(
    arguments: dict[str, Any], words: str
):
    with pytest.raises(ConfigError, match=words) as caught:
        McpGame(**arguments)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"command": "no-such-server"}, "the sandbox has no program 'no-such-server'"),
        ({"read": ["/no/such/folder"]}, "'/no/such/folder' does not exist"),
        ({"env_variables": ["NO_SUCH_KEY"]}, "the variable NO_SUCH_KEY, .* is not set"),
        ({"args": ["-c", "import time; time.sleep(600)"], "start_timeout_s": 3}, "did not start"),
    ],
)
async def test_a_command_that_cannot_be_run_is_told(keys: dict[str, Any], words: str):
    game = await opened(scripted("plain", **keys))
    with pytest.raises(TinkermqError, match=words) as caught:
        game.get_tools()
    assert caught.value.message.startswith(("the MCP server plain", "the variable"))


WRONG_IDS = [
    ("strange_id", "sent an answer with the id 'abc', which no request has"),
    ("later_id", r"sent an answer with the id \d+, which no request has"),
    ("nothing", "sent an answer with the id None, which no request has"),
]
STRANGE_ANSWERS = [
    ("text_id", "hello"),
    ("float_id", "hello"),
    ("batch", "hello"),
    ("no_id", "error: what was that"),
    ("null_id", "error: what was that"),
]


@pytest.mark.parametrize(("mode", "found"), STRANGE_ANSWERS)
async def test_answers_that_official_clients_understand_are_understood_over_stdio(
    mode: str, found: str
):
    game = await opened(scripted(mode))
    for _ in range(2):
        assert await said(game, call("echo", text="hello")) == [found]


async def test_a_start_may_take_longer_than_a_call():
    game = await opened(scripted("sleepy", call_timeout_s=0.5))
    assert await said(game, call("echo", text="awake")) == ["awake"]


# -- hostile servers over stdio --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("flood", "sent .* bytes and 10,001 messages without an answer"),
        ("stream", "sent 268,.* bytes and 0 messages without an answer"),
        ("result", r"answered tools/call with .*, which is not a valid answer"),
        ("content", "answered tools/call with .*, which is not a valid answer"),
        ("dies", "exited with code 3"),
        ("silent", "did not answer tools/call of echo within 1 s"),
        ("memory", "it held more than memory_mb=64"),
        *WRONG_IDS,
        ("surrogate", "sent a message that cannot be read: .*half a character"),
    ],
)
async def test_a_hostile_server_costs_its_own_episode_only(mode: str, words: str):
    limit_s = 1 if mode == "silent" else 60
    server = scripted(mode, call_timeout_s=limit_s, memory_mb=64)
    game, other = await opened(server), await opened(scripted("plain"))
    assert await said(other, call("echo", text="before")) == ["before"]
    with pytest.raises(GameError, match=words) as caught:
        await game.step(call("echo", text="x"))
    assert isinstance(caught.value, GameHung) == (mode == "silent")
    if mode == "dies":
        assert caught.value.hint == "it printed at last: out of paper"
    with pytest.raises(GameError):  # its session is over
        await game.step(call("echo", text="x"))
    assert await said(other, call("echo", text="after")) == ["after"]
    other.close()


@pytest.mark.parametrize(
    ("mode", "text", "found"),
    [
        ("big", "", "error: the answer is longer than 4,194,304 bytes"),
        ("parts", "", "[image image/png: not shown]\n[resource file:///a]\ninner"),
        ("noise", "hello", "hello"),
        ("controls", "", "\x1b[2J\u202ebell\x07 <|im_end|>"),
        ("file", "/etc/passwd", "no such file"),
        ("file", str(Path(__file__)), "no such file"),
        ("environment", "HOME", "/tmp"),
        ("environment", "SECRET_OF_THE_HOST", "unset"),
        ("environment", "GIVEN", "by name"),
        ("environment", "SET", "here"),
    ],
)
async def test_what_a_server_over_stdio_says_and_sees(
    mode: str, text: str, found: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SECRET_OF_THE_HOST", "secret")
    monkeypatch.setenv("GIVEN", "by name")
    game = await opened(scripted(mode, env={"SET": "here"}, env_variables=["GIVEN"]))
    for _ in range(2):  # its session goes on
        assert await said(game, call("echo", text=text)) == [found]


async def test_what_a_server_asks_of_the_client_is_refused_but_for_a_ping():
    game = await opened(scripted("asks"))
    [text] = await said(game, call("echo", text=""))
    pong, refusal = json.loads(text)
    assert pong == {"jsonrpc": "2.0", "id": "p", "result": {}}
    assert refusal["error"]["code"] == -32601


async def test_a_program_reaches_no_network_unless_its_settings_say_so():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        for network, is_open in (("none", False), ("open", True)):
            game = await opened(scripted("connect", network=network))
            [text] = await said(game, call("echo", text=place))
            assert (text == "connected") == is_open


async def test_a_host_waits_for_a_place_among_the_sessions_and_says_so_when_there_is_none():
    server = scripted("plain", max_sessions=1, start_timeout_s=5)
    first, second = await opened(server), await opened(server)
    assert await said(first, call("echo", text="1")) == ["1"]
    with pytest.raises(GameError, match=r"1 sessions with .* are open, and none ended within 5 s"):
        await second.step(call("echo", text="2"))
    first.close()
    assert await said(second, call("echo", text="2")) == ["2"]


async def test_a_shared_server_that_has_died_is_started_again_for_the_next_episode():
    server = scripted("dies", shared=True)
    for _ in range(2):
        game = await opened(server)
        with pytest.raises(GameError, match="exited with code 3"):
            await game.step(call("echo", text="x"))


async def test_a_host_plays_on_while_a_call_hangs_and_an_episode_that_is_dropped_ends_its_server():
    config = EnvConfig(game="mcp", kwargs={"servers": [scripted("silent")]}, step_timeout_s=6)
    row = Record([{"role": "user", "content": "What is 2 + 2?"}], "4")
    runner = make_runner(config)
    facts = await runner.start()
    assert [tool["function"]["name"] for tool in facts.tools] == ["echo"]
    try:
        for episode in ("hangs", "lives"):
            await runner.reset(Opening(episode, 0, row))
        waiting = asyncio.ensure_future(runner.step("hangs", call("echo", text="x")))
        result = await runner.step("lives", "The answer is 4.")
        assert (result.done, result.info["tool_calls"]) == (True, 0)
        await until(lambda: num_programs("silent") == 1, "the server of the call")
        with pytest.raises(GameHung, match="hung in step for 6 s"):
            await waiting
        await until(lambda: num_programs("silent") == 0, "its end")
    finally:
        await runner.stop()


def num_programs(mode: str) -> int:
    """Return how many scripted servers of ours with a mode run, as the kernel lists them."""
    words = (str(SCRIPTED).encode(), mode.encode())
    found = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            found += tuple(line.rstrip(b"\0").split(b"\0")[-2:]) == words
    return found


# -- hostile servers over HTTP ---------------------------------------------------------------------


class _Hostile(BaseHTTPRequestHandler):
    """Answers as the path says; the other modes are those of the scripted server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def do_DELETE(self) -> None:
        self._say(200, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(body)
        mode = self.path.strip("/").partition("?")[0]
        with contextlib.suppress(OSError):
            if "method" in request:
                self._answer(mode, request)
            else:  # what we have asked for is answered
                self._say(202, b"")

    def _answer(self, mode: str, request: dict[str, Any]) -> None:
        is_call = request["method"] == "tools/call"
        match mode:
            case "elsewhere":
                self._say(307, b"", headers={"Location": "http://localhost:1/mcp"})
            case "moved":
                self._say(307, b"", headers={"Location": "/plain"})
            case "circle":
                self._say(308, b"", headers={"Location": "/circle?again"})
            case "garbage":
                self._say(307, b"", headers={"Location": "http://[::1/"})
            case "key" if self.headers.get("Authorization") != "Bearer sesame":
                self._say(401, b"")
            case "page":
                self._say(200, b"<html>", kind="text/html")
            case "missing":
                self._say(404, b"\x1b[2Jnot here")
            case "gone" if is_call:
                self._say(404, b"no such session")
            case "silent" if is_call:
                time.sleep(5)
            case "accepted" if is_call:
                self._say(202, b"")
            case "refusal" if is_call:
                error = {"code": -32602, "message": "no such argument"}
                body = {"jsonrpc": "2.0", "id": request["id"], "error": error}
                self._say(400, json.dumps(body).encode())
            case "broken" if is_call:
                self._say(200, b'{"jsonrpc": "2.0", "id": 2')
            case "broken_event" if is_call:
                self._stream([b'data: {"jsonrpc": "2.0", "id": 2\n\n: and on\n\n'])
            case "released" | "released_for_good" | "released_into_nothing" if is_call:
                self._stream([b"id: 1\nretry: 5\ndata:\n\nid: 2\ndata: half of an ev"])
            case "forgetful" | "forgetful_late":
                self._forget(mode, request)
            case "session":
                self._say(200, b"{}", headers={"Mcp-Session-Id": "two words"})
            case "gzip":
                self._say(200, gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
            case "endless" if is_call:
                self._stream(b"data: x\n\n" * 1000 for _ in range(10**9))
            case "line" if is_call:
                self._stream(b"x" * 65536 for _ in range(10**9))
            case "short" if is_call:
                self._stream([b": nothing\n\n"])
            case "cut" if is_call:
                self._say(200, b"{", length=100)
                self.close_connection = True
            case "list" if is_call:
                self._say(200, b"[1]")
            case "events":
                self._stream(self._events(request))
            case _ if "id" not in request:
                self._say(202, b"")
            case _:
                body = json.dumps(next(answers(mode, request))).encode()
                if self.path.endswith("?stream"):
                    self._stream([b"data: " + body + b"\n\n"])
                else:
                    self._say(200, body)

    def do_GET(self) -> None:
        mode = self.path.strip("/")
        if mode == "released_for_good":
            self._say(405, b"")
        elif mode == "released_into_nothing":
            self._stream([b": nothing\n\n"])
        elif self.headers["Last-Event-ID"] != "1":
            self._say(400, b"which event?")
        else:
            request = {"id": 2, "method": "tools/call", "params": {"arguments": {"text": "hello"}}}
            answer = json.dumps(next(answers("plain", request))).encode()
            self._stream([b"id: 3\r", b"\rid: 2\r\ndata: " + answer + b"\r", b"\n\r\n"])

    def _forget(self, mode: str, request: dict[str, Any]) -> None:
        """End each session at its second request; one that is late, at its second call."""
        sessions, named = self.server.sessions, self.headers["Mcp-Session-Id"]  # pyright: ignore[reportAttributeAccessIssue]
        if request["method"] == "initialize":
            named = f"session-{len(sessions)}"
            sessions[named] = 0
        elif request["method"] == "tools/call":
            sessions[named] += 1
            if sessions[named] > 1 or (mode == "forgetful" and named == "session-0"):
                self._say(404, b"no such session")
                return
        if "id" not in request:
            self._say(202, b"")
            return
        body = json.dumps(next(answers(mode, request))).encode()
        self._say(200, body, headers={"Mcp-Session-Id": named})

    def _events(self, request: dict[str, Any]) -> Iterator[bytes]:
        yield b": a comment\r\n\r\nevent: message\ndata: no JSON\n\n"
        if "id" in request:
            ping = {"jsonrpc": "2.0", "id": "p", "method": "ping"}
            yield f"data: {json.dumps(ping)}\n\n".encode()
            first, _, second = json.dumps(next(answers("plain", request))).partition(", ")
            yield f"id: 1\ndata: {first},\r\ndata: {second}\n\n".encode()

    def _say(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        length: int = 0,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, chunks: Any) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture(scope="module")
def hostile_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hostile) as server:
        server.sessions = {}  # pyright: ignore[reportAttributeAccessIssue]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def of_url(url: str, **keys: Any) -> McpGame:
    return await opened({"name": "web", "url": url, **keys}, allowed_hosts=["127.0.0.1"])


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("elsewhere", "redirects to 'http://localhost:1/mcp'"),
        ("circle", "redirects to '/circle"),
        ("garbage", "cannot be reached: .*Invalid URL in location header"),
        ("key", "refused with status 401: it needs a key"),
        ("page", "answered 'text/html' to initialize"),
        ("missing", "answered with status 404: .*not here"),
        ("session", "named its session 'two words'"),
        ("gzip", "compresses, though asked not to"),
        ("version", "speaks MCP '2099-01-01'"),
    ],
)
async def test_a_url_that_cannot_be_used_is_told_with_the_reason(
    mode: str, words: str, hostile_url: str
):
    game = await of_url(f"{hostile_url}/{mode}")
    with pytest.raises(GameError, match=words) as caught:
        game.get_tools()
    assert "\x1b" not in caught.value.message


async def test_a_server_that_is_not_there_is_told():
    game = await of_url("http://127.0.0.1:1/mcp")
    with pytest.raises(GameError, match="cannot be reached: ConnectError"):
        game.get_tools()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("gone", "answered with status 404: no such session"),
        ("silent", "did not answer tools/call of echo within 1 s"),
        ("endless", "sent .* bytes and 10,001 messages without an answer"),
        ("short", "ended its stream without an answer to tools/call"),
        ("cut", "cannot be reached: RemoteProtocolError"),
        ("list", r"answered tools/call with \[1\]"),
        *((f"{mode}{form}", words) for mode, words in WRONG_IDS for form in ("", "?stream")),
        ("accepted", "accepted tools/call with status 202, which announces no answer"),
        ("broken", "sent a message that cannot be read"),
        ("broken_event", "sent a message that cannot be read"),
        ("released_for_good", "does not continue it: status 405"),
        ("released_into_nothing", "does not continue it: it sends nothing"),
        ("result", "answered tools/call with .*, which is not a valid answer"),
    ],
)
async def test_a_hostile_server_over_http_costs_its_own_episode_only(
    mode: str, words: str, hostile_url: str
):
    limit_s = 1 if mode == "silent" else 60
    game, other = [
        await of_url(f"{hostile_url}/{path}", call_timeout_s=limit_s) for path in (mode, "plain")
    ]
    assert await said(other, call("echo", text="before")) == ["before"]
    with pytest.raises(GameError, match=words) as caught:
        await game.step(call("echo", text="x"))
    assert isinstance(caught.value, GameHung) == (mode == "silent")
    with pytest.raises(GameError, match="is closed"):
        await game.step(call("echo", text="x"))
    assert await said(other, call("echo", text="after")) == ["after"]


@pytest.mark.parametrize(
    ("mode", "found"),
    [
        ("plain", "hello"),
        ("moved", "hello"),
        ("events", "hello"),
        *((f"{mode}{form}", text) for mode, text in STRANGE_ANSWERS for form in ("", "?stream")),
        ("refusal", "error: no such argument"),
        ("big", "error: the answer is longer than 4,194,304 bytes"),
        ("line", "error: the answer is longer than 4,194,304 bytes"),
    ],
)
async def test_what_a_server_over_http_answers(mode: str, found: str, hostile_url: str):
    game = await of_url(f"{hostile_url}/{mode}")
    for _ in range(2):
        assert await said(game, call("echo", text="hello")) == [found]


async def test_a_stream_is_continued_behind_the_last_event_that_came_whole(hostile_url: str):
    game = await of_url(f"{hostile_url}/released")
    assert await said(game, call("echo", text="hello")) == ["hello"]


async def test_a_session_that_has_ended_begins_anew_if_no_state_can_be_lost(hostile_url: str):
    game = await of_url(f"{hostile_url}/forgetful")  # ends before the first call
    assert await said(game, call("echo", text="hello")) == ["hello"]
    with pytest.raises(GameError, match=r"has ended the session \(status 404\)"):
        await game.step(call("echo", text="again"))
    shared = await of_url(f"{hostile_url}/forgetful_late", shared=True)
    for _ in range(3):
        assert await said(shared, call("echo", text="hello")) == ["hello"]


async def test_a_key_comes_from_the_variable_that_is_named_for_it(
    hostile_url: str, monkeypatch: pytest.MonkeyPatch
):
    game = await of_url(f"{hostile_url}/key", key_variable="KEY_OF_THE_SHOP")
    with pytest.raises(ConfigError, match=r"the variable KEY_OF_THE_SHOP, .* is not set"):
        game.get_tools()
    monkeypatch.setenv("KEY_OF_THE_SHOP", "sesame")
    assert await said(game, call("echo", text="open")) == ["open"]


async def test_a_session_cancelled_at_any_await_of_its_start_leaves_no_program_and_no_place():
    server = GameServer.model_validate(scripted("plain", max_sessions=1))
    others = num_programs("plain")

    async def play() -> None:
        session = await connect(server)
        try:
            await session.call("echo", {"text": "hello"})
        finally:
            session.close()

    async def given_back() -> None:
        await until(lambda: num_programs("plain") <= others, "the program to end")

    assert await cancel_everywhere(play, given_back) > 3
