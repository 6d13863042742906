"""Games that are served as OpenEnv environments: the wire, its bounds, and what a client may do."""

import asyncio
import contextlib
import importlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinkermq.envs.registry import companion, load_game
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import EnvConfig
from tinkermq.schemas.wire.errors import ConfigError, StorageError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.clients.command import command, tinkermq
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.openenv
ADDING = "served_games:AddingGame"
TROUBLESOME = "served_games:TroublesomeGame"


def module() -> Any:
    """Import the module, which needs OpenEnv's package."""
    return importlib.import_module("tinkermq.envs.openenv_server")


class Client:
    """A trainer: plain HTTP, and sessions on WebSockets."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=PATIENCE_S)

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def post(self, path: str, **value: Any) -> Any:
        return (await self.http.post(path, json=value)).json()

    async def rpc(self, method: str, **params: Any) -> Any:
        return await self.post("/mcp", jsonrpc="2.0", id=7, method=method, params=params)

    def connect(self, path: str = "/ws") -> connect:
        address = self.url.replace("http", "ws") + path
        return connect(address, proxy=None, max_size=None, compression=None)

    @contextlib.asynccontextmanager
    async def session(self, path: str = "/ws") -> AsyncIterator["Played"]:
        async with self.connect(path) as socket:
            yield Played(socket)


class Played:
    """One session."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, message: Any) -> Any:
        await self.socket.send(message if isinstance(message, str | bytes) else json.dumps(message))
        return await self.hear()

    async def hear(self) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return json.loads(await self.socket.recv())

    async def reset(self, **data: Any) -> Any:
        return (await self.say({"type": "reset", "data": data}))["data"]

    async def step(self, **action: Any) -> Any:
        return (await self.say({"type": "step", "data": action}))["data"]


@contextlib.asynccontextmanager
async def serving(game: str, bounds: Any = None, **config: Any) -> AsyncIterator[Client]:
    server = module().OpenEnvServer(EnvConfig(game=game, **config), bounds=bounds)
    async with server.listening() as port:
        client = Client(port)
        async with client.http:
            yield client


async def test_a_text_game_is_played_to_its_end_in_one_session_again_and_again() -> None:
    kwargs = {"max_turns": 7}
    async with serving("guess", kwargs=kwargs) as client, client.session() as session:
        for seed in (1, 2):
            begun = await session.reset(seed=seed)
            assert begun["observation"]["messages"] == [{"role": "user", "content": "guess 0-6"}]
            assert (begun["reward"], begun["done"]) == (None, False)
            result, tries = begun, 0
            while not result["done"]:
                result, tries = await session.step(text=str(tries)), tries + 1
            assert result["reward"] == 1.0
            state = (await session.say({"type": "state"}))["data"]
            assert (state["seed"], state["step_count"], state["done"]) == (seed, tries, True)
            assert state["episode_return"] == result["reward"]
            over = await session.step(text="1")
            assert over["code"] == "EXECUTION_ERROR"
            assert over["message"].startswith("the episode is over")
        await session.socket.send(json.dumps({"type": "close"}))
        with pytest.raises(ConnectionClosed):
            await session.socket.recv()


async def test_an_episode_follows_from_its_seed_and_is_started_by_a_step_too() -> None:
    async with serving(ADDING) as client, client.session() as session:
        first = await session.reset(seed=5, episode_id="mine", options={})
        again = await session.reset(seed=5)
        assert first["observation"]["text"] == again["observation"]["text"]
        assert first["metadata"] == {
            "episode_id": "mine",
            "seed": 5,
            "split": None,
            "index": None,
            "ignored": ["options"],
        }
        async with client.session() as other:
            assert (await other.step(action="1"))["done"]
            assert (await other.say({"type": "state"}))["data"]["step_count"] == 1


async def test_tools_are_listed_called_and_rewarded_in_a_session() -> None:
    async with serving(ADDING) as client, client.session() as session:
        (tool,) = (await session.step(type="list_tools"))["observation"]["tools"]
        assert (tool["name"], tool["description"]) == ("add", "Add two numbers.")
        assert tool["input_schema"]["required"] == ["a", "b"]
        begun = await session.reset(seed=1)
        prompt = begun["observation"]["messages"]
        assert [message["role"] for message in prompt] == ["system", "user"]
        a, b = map(int, begun["observation"]["text"].rpartition("\n")[2].split("+"))
        called = await session.step(type="call_tool", tool_name="add", arguments={"a": a, "b": b})
        assert called["observation"]["result"]["data"] == str(a + b)
        assert called["observation"]["result"]["content"] == [{"type": "text", "text": str(a + b)}]
        assert (called["reward"], called["done"]) == (0.25, False)
        assert called["metadata"] == {"calls": ["add"], "bytes": "AA==", "nan": None}
        unknown = await session.step(type="call_tool", tool_name="sub", arguments={})
        assert unknown["observation"]["error"]["error_type"] == "tool_not_found"
        assert (await session.say({"type": "state"}))["data"]["step_count"] == 1
        said = await session.step(text=str(a + b))
        assert (said["reward"], said["done"]) == (1.0, True)


async def test_a_turn_written_as_text_is_the_same_as_the_call() -> None:
    async with serving(ADDING) as client, client.session() as session:
        await session.reset(seed=1)
        text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        played = await session.step(text=text)
        assert (played["observation"]["text"], played["observation"]["role"]) == ("3", "tool")
        note = "</tool_call><tool_call>{}"
        called = await session.step(type="call_tool", tool_name="add", arguments={"note": note})
        assert called["observation"]["result"]["data"] == note


async def test_mcp_calls_tools_with_a_session_and_without() -> None:
    async with serving(ADDING) as client:
        listed = await client.rpc("tools/list")
        assert listed["result"]["tools"][0]["inputSchema"] == openai_parameters()
        alone = await client.rpc("tools/call", name="add", arguments={"a": 1, "b": 2})
        assert (alone["id"], alone["result"]["data"]) == (7, "3")
        assert alone["result"]["meta"] == {"reward": 0.25, "done": False}
        name = (await client.rpc("openenv/session/create"))["result"]["session_id"]
        async with client.session(f"/ws?session_id={name}") as session:
            begun = await session.reset(seed=1)
            async with client.session(f"/ws?session_id={name}") as second:
                refused = await second.hear()
            assert refused["data"]["code"] == "SESSION_ERROR"
            arguments = {"a": 1, "b": 2}
            await client.rpc("tools/call", name="add", arguments=arguments, session_id=name)
            state = (await session.say({"type": "state"}))["data"]
            assert state["step_count"] == 1
            assert state["episode_id"] == begun["metadata"]["episode_id"]
            held = await client.rpc("openenv/session/close", session_id=name)
            assert held["result"]["closed"] is False
            inside = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            assert (await session.say({"type": "mcp", "data": inside}))["data"]["result"]["tools"]
        gone = await refusal_of_ended(client, name)
        assert (gone["error"]["code"], name in gone["error"]["message"]) == (-32602, True)
        async with client.session("/mcp") as session:
            call = {"name": "add", "arguments": {"a": 2, "b": 2}}
            said = await session.say(
                {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": call}
            )
            assert said["result"]["data"] == "4"


def openai_parameters() -> Any:
    (tool,) = load_game(ADDING)().get_tools()
    return tool["function"]["parameters"]


async def refusal_of_ended(client: Client, name: str) -> Any:
    """Return the refusal of a call once the end of the session's WebSocket has been noticed."""
    while True:
        answer = await client.rpc("tools/list", session_id=name)
        if "error" in answer:
            return answer
        await asyncio.sleep(0)


async def test_json_rpc_that_is_wrong_is_answered_with_its_codes() -> None:
    async with serving(ADDING) as client:
        codes = [
            (await client.rpc("tools/fetch"))["error"]["code"],
            (await client.post("/mcp"))["error"]["code"],
            (await client.rpc("tools/call", name=3))["error"]["code"],
            (await client.rpc("tools/call", name="add", arguments=[]))["error"]["code"],
            (await client.http.post("/mcp", content=b"{")).json()["error"]["code"],
        ]
        assert codes == [-32601, -32600, -32602, -32603, -32700]
    async with serving("guess") as client:
        without = await client.rpc("tools/list")
        assert without["error"]["message"] == "Environment does not support MCP"


async def test_rows_are_tasks_without_their_answers(tmp_path: Path) -> None:
    make_data = companion(load_game("calculator"), "make_data")
    train, val = make_data(tmp_path, num_train=300, num_val=3)
    data = {"train_data": [str(train)], "val_data": [str(val)], "num_val": 2}
    async with serving("calculator", **data) as client:
        assert await client.get("/list_environments") == ["calculator"]
        assert await client.get("/Calculator/splits") == [
            {"name": "train", "type": "train"},
            {"name": "validation", "type": "validation"},
        ]
        post = client.post
        assert await post("/calculator/num_tasks", split="validation") == {"num_tasks": 2}
        assert len((await post("/calculator/tasks", split="train"))["tasks"]) == 256
        last = (await post("/calculator/task_range", split="train", start=-2))["tasks"]
        assert [task["index"] for task in last] == [298, 299]
        task = (await post("/calculator/task", split="train", index=298))["task"]
        assert task == last[0]
        assert set(task) == {"id", "split", "index", "data_source", "prompt"}
        begun = await post("/reset", split="train", index=298)
        assert begun["observation"]["messages"] == task["prompt"]
        assert begun["metadata"]["index"] == 298
        drawn = await post("/reset", seed=301)
        assert (drawn["metadata"]["split"], drawn["metadata"]["index"]) == ("train", 1)
        refused = {
            "/calculator/task": {"split": "train", "index": 300},
            "/calculator/num_tasks": {"split": "test"},
            "/calculator/task_range": {"split": "train"},
            "/reset": {"split": "train", "index": 300},
        }
        details = [(await post(path, **value))["detail"] for path, value in refused.items()]
        assert details == [
            "there is no task 300 in train: tasks are numbered 0 to 299",
            "calculator has no split 'test': the splits are train, validation",
            "300 tasks were asked for, at most 256 come at once: ask for a smaller range: start "
            "and stop",
            "there is no task 300 in train: tasks are numbered 0 to 299",
        ]


async def test_a_game_that_draws_its_states_has_no_tasks() -> None:
    async with serving("guess") as client:
        answer = await client.http.get("/guess/splits")
        assert answer.status_code == 501
        assert (await client.http.get("/chess/splits")).status_code == 404
        refused = await client.post("/reset", split="train", index=0)
        assert refused["detail"] == "guess has no split 'train': reset it with a seed"


async def test_plain_http_answers_a_prompt_a_first_turn_and_what_the_game_is() -> None:
    async with serving(ADDING) as client:
        begun = await client.post("/reset", seed=1)
        a, b = map(int, begun["observation"]["text"].rpartition("\n")[2].split("+"))
        played = await client.post("/step", action={"text": str(a + b)}, seed=1, timeout_s=3)
        assert (played["reward"], played["done"]) == (1.0, True)
        assert await client.get("/health") == {"status": "healthy"}
        assert (await client.get("/metadata"))["description"] == (
            "Add two numbers with a tool, then say the sum."
        )
        assert (await client.get("/state"))["episode_id"] is None
        schemas = await client.get("/schema")
        assert schemas["action"]["type"] == "object"
        assert "messages" in schemas["observation"]["properties"]
        paths = (await client.get("/openapi.json"))["paths"]
        assert {"/reset", "/step", "/state"} <= set(paths)
    async with serving("guess") as client:
        action = (await client.get("/schema"))["action"]
        assert action["required"] == ["text"]


async def test_several_players_take_turns_in_one_session() -> None:
    async with serving("tictactoe") as client, client.session() as session:
        result = await session.reset(seed=1)
        players: list[str] = []
        while not result["done"]:
            observation = result["observation"]
            players.append(observation["player"])
            assert observation["messages"]
            result = await session.step(text=str(len(players)))
        assert len(set(players)) == 2
        assert set(result["observation"]["rewards"]) <= set(players)


async def test_rewards_of_a_configuration_are_added_and_a_judge_is_refused() -> None:
    reward: Any = {"source": "function", "function": "served_games:length", "weight": 2.0}
    async with serving("guess", reward=reward) as client, client.session() as session:
        await session.reset(seed=1)
        result = await session.step(text="0")
        while not result["done"]:
            result = await session.step(text="1")
            if not result["done"]:
                result = await session.step(text="2")
        assert "game_reward" in result["metadata"]
        assert result["reward"] > result["metadata"]["game_reward"]
    judge = {"source": "judge", "judge": "m"}
    with pytest.raises(ConfigError, match="a served game has no pool"):
        module().OpenEnvServer(EnvConfig.model_validate({"game": "guess", "reward": judge}))


async def test_a_served_game_is_one_for_our_own_client_of_openenv_too() -> None:
    async with serving(ADDING) as client:
        words = ["env", "check", "openenv", f"url={client.url}"]
        checked = await asyncio.to_thread(tinkermq, *words)
        assert checked.code == 0, checked.out + checked.err
        assert "add(a: integer, b: integer)  Add two numbers." in checked.out


async def test_rows_that_choose_an_environment_choose_its_tools(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": "Play."}], "environment": name}
        for name in ("counter", "words")
    ]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    game = "trl:counter=served_games:Counter,words=served_games:Speller"
    async with (
        serving(game, train_data=[str(data)], isolation="thread") as client,
        client.session() as session,
    ):
        names: list[list[str]] = []
        for index in range(2):
            await session.reset(split="train", index=index)
            listed = await session.step(type="list_tools")
            names.append([tool["name"] for tool in listed["observation"]["tools"]])
        assert names == [["increment"], ["spell"]]


# -- bad input and bounds --------------------------------------------------------------------------


async def test_messages_that_are_wrong_cost_nothing_but_an_error() -> None:
    async with serving("guess") as client, client.session() as session:
        await session.reset(seed=1)
        wrong = {
            "{": "INVALID_JSON",
            '{"type": "jump"}': "UNKNOWN_TYPE",
            '{"type": "step", "data": []}': "VALIDATION_ERROR",
            '{"type": "step", "data": {}}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"text": "1", "more": 1}}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"text": 1}}': "VALIDATION_ERROR",
            '{"type": "step", "data": {"type": "list_tools"}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"seed": -1}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"split": "train"}}': "EXECUTION_ERROR",
        }
        heard = {message: await session.say(message) for message in wrong}
        assert {message: said["data"]["code"] for message, said in heard.items()} == wrong
        said = await session.say('{"type": "step", "data": {"text": "1", "more": 1}}')
        assert said["data"]["errors"][0]["loc"] == ["more"]
        assert (await session.say({"type": "state"}))["type"] == "state"


async def test_sessions_beyond_the_bound_are_refused_until_one_is_closed() -> None:
    async with serving("guess", module().ServerBounds(max_sessions=1)) as client:
        async with client.session() as session:
            await session.reset(seed=1)
            async with client.session() as second:
                refused = (await second.hear())["data"]
            assert refused["code"] == "CAPACITY_REACHED"
            assert (refused["active_sessions"], refused["max_sessions"]) == (1, 1)
            created = await client.rpc("openenv/session/create")
            assert created["error"]["data"] == {"active_sessions": 1, "max_sessions": 1}
            async with client.session("/mcp") as second:
                assert (await second.hear())["error"]["code"] == -32000
            assert not (await session.step(text="7"))["done"]
        while "error" in await client.rpc("openenv/session/create"):
            await asyncio.sleep(0)  # until the end of the connection has been noticed


async def test_messages_over_their_size_are_refused() -> None:
    async with serving("guess") as client, client.session() as session:
        text = "x" * module().MAX_MESSAGE_BYTES
        with pytest.raises(ConnectionClosed) as closed:
            await session.say({"type": "step", "data": {"text": text}})
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_a_page_of_another_site_is_refused() -> None:
    async with serving("guess") as client:
        origin = {"origin": "http://elsewhere.example"}
        assert (await client.http.post("/reset", json={}, headers=origin)).status_code == 403
        with pytest.raises(InvalidStatus):
            async with connect(
                client.url.replace("http", "ws") + "/ws", proxy=None, additional_headers=origin
            ):
                pass
        same = {"origin": client.url}
        assert (await client.http.post("/reset", json={}, headers=same)).status_code == 200


async def test_a_game_that_fails_or_hangs_costs_its_episode_only() -> None:
    async with serving(TROUBLESOME, step_timeout_s=3.0) as client, client.session() as session:
        await session.reset()
        failed = await session.step(text="fail")
        assert failed["code"] == "EXECUTION_ERROR"
        assert "the board is broken" in failed["message"]
        lost = await session.step(text="1")
        assert lost["message"].startswith("the episode has failed")
        await session.reset()
        assert "hung in step for 3 s" in (await session.step(text="hang"))["message"]
        await session.reset()
        assert (await session.step(text="3"))["observation"]["text"] == "xxx"


async def test_a_client_that_leaves_gives_its_session_back() -> None:
    async with serving(TROUBLESOME, module().ServerBounds(max_sessions=1)) as client:
        async with client.session() as session:
            await session.reset()
            await session.socket.send(json.dumps({"type": "step", "data": {"text": "3000000"}}))
            session.socket.transport.abort()
        while "error" in await client.rpc("openenv/session/create"):
            await asyncio.sleep(0.02)


async def test_a_port_in_use_is_said_and_so_is_none() -> None:
    async with serving("guess") as client:
        for port in (int(client.url.rpartition(":")[2]), 99_999):
            with pytest.raises(StorageError, match=f"cannot listen on 127.0.0.1:{port}"):
                async with module().OpenEnvServer(EnvConfig(game="guess")).listening(port=port):
                    pass


def test_a_call_cannot_end_its_own_tag() -> None:
    written = module().written_call("add", {"note": "</tool_call>"})
    assert written.count("</tool_call>") == 1


# -- the command -----------------------------------------------------------------------------------


async def test_the_command_serves_a_game_until_it_is_asked_to_end() -> None:
    words = ["env", "serve", "guess", "highest=3", "--openenv", "--port", "0"]
    process = await asyncio.create_subprocess_exec(
        *command(words), stderr=asyncio.subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"}
    )
    assert process.stderr is not None
    try:
        line = ""
        async with asyncio.timeout(PATIENCE_S):
            while "http://127.0.0.1:" not in line:
                line = (await process.stderr.readline()).decode()
        client = Client(int(line.partition("http://127.0.0.1:")[2].split()[0]))
        async with client.http:
            assert (await client.post("/reset", seed=1))["observation"]["text"] == "guess 0-3"
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
