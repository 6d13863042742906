"""What programs say of their own episodes."""

from typing import Any

import httpx
import pytest
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy

from tests.support.program_clients import chat_body, http_client, response_body
from tests.support.scripted_generator import Script

pytestmark = pytest.mark.usefixtures("generator")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
async def http(proxy: ModelProxy, episode: ProgramEpisode) -> Any:
    """Plain HTTP with the episode's key."""
    async with http_client(proxy, episode) as client:
        yield client


async def post(http: httpx.AsyncClient, verb: str, expected: int = 200, **body: Any) -> Any:
    """Post something of the episode; return the reply."""
    answer = await http.post(f"/v1/episode/{verb}", json=body)
    assert answer.status_code == expected, answer.text
    return answer.json()


async def test_a_program_learns_of_its_episode(
    http: httpx.AsyncClient, episode: ProgramEpisode
) -> None:
    told = (await http.get("/v1/episode")).json()
    assert told["input"] == {"question": "2 + 2"}
    assert told["seed"] == 7
    assert told["split"] == "train"
    assert told["left"] == {"seconds": None}
    assert (told["calls"], told["reward"], told["status"]) == (0, None, "")
    assert told["job"] == episode.job


async def test_rewards_are_set_and_added_once(
    http: httpx.AsyncClient, episode: ProgramEpisode
) -> None:
    await post(http, "reward", reward=0.5)
    await post(http, "reward", reward=1)
    assert episode.reward == 1.0
    for _ in range(2):
        await post(http, "reward", reward=0.25, mode="add")
    await post(http, "reward", reward=0.25, mode="add", info={"step": 2})
    assert episode.reward == 1.5
    for _ in range(2):
        named = {"idempotency-key": "third"}
        body = {"reward": 0.25, "mode": "add"}
        await http.post("/v1/episode/reward", json=body, headers=named)
    assert episode.reward == 1.75
    assert episode.info == {"step": 2}
    assert episode.changed.is_set()


async def test_a_call_is_named_by_its_number_its_answer_or_its_tool_call(
    http: httpx.AsyncClient, episode: ProgramEpisode, script: Script
) -> None:
    script.say = lambda request, choice: '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    chat = (await http.post("/v1/chat/completions", json=chat_body(tools=TOOLS))).json()
    response = (await http.post("/v1/responses", json=response_body())).json()
    tool_call = chat["choices"][0]["message"]["tool_calls"][0]["id"]
    for call, number in ((0, 0), ("c0", 0), (tool_call, 0), (chat["id"], 0), (response["id"], 1)):
        reply = await post(http, "reward", reward=0.5, call=call, mode="add")
        assert reply["call"] == number
    assert episode.call_rewards == {0: 2.0, 1: 0.5}
    assert episode.reward is None
    await post(http, "note", call=tool_call, role="search", train=False)
    await post(http, "note", call=response["id"], train=False)
    await post(http, "note", call="1", train=True)
    assert episode.to_info() == {
        "call_rewards": {"0": 2.0, "1": 0.5},
        "untrained_calls": [0],
        "branch_names": {"0": "search"},
    }


async def test_a_branch_has_a_reward_and_a_name_by_the_call_that_it_begins_with(
    http: httpx.AsyncClient, episode: ProgramEpisode
) -> None:
    chat = (await http.post("/v1/chat/completions", json=chat_body())).json()
    assert not episode.has_partial_rewards
    reply = await post(http, "reward", reward=0.5, branch=chat["id"])
    assert reply == {"reward": 0.5, "call": None, "branch": 0}
    assert (await post(http, "reward", reward=1, branch="c0", mode="add"))["reward"] == 1.5
    assert episode.has_partial_rewards
    await post(http, "note", branch=0, role="planner")
    assert episode.to_info() == {"branch_rewards": {"0": 1.5}, "branch_names": {"0": "planner"}}
    await post(http, "reward", 404, reward=1, branch=7)
    refused = await post(http, "reward", 400, reward=1, branch=0, call=0)
    assert "of a call or of a branch" in refused["error"]["message"]


async def test_the_end_is_said_once(http: httpx.AsyncClient, episode: ProgramEpisode) -> None:
    info = {"tests": [1, 2]}
    said = {"status": "failed", "reward": -1, "success": False, "message": "lost", "info": info}
    assert await post(http, "end", **said) == {"status": "failed", "reward": -1.0}
    assert await post(http, "end", status="done", reward=5) == {"status": "failed", "reward": -1.0}
    assert episode.said_end.is_set()
    assert episode.to_info() == {"success": False, "message": "lost", **info}
    refused = await post(http, "reward", 410, reward=1)
    assert "post rewards before the end" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("reward", {}, "reward must be a finite number, and is None"),
        ("reward", {"reward": True}, "reward must be a finite number"),
        ("reward", {"reward": "1"}, "reward must be a finite number"),
        ("reward", {"reward": 1, "mode": "twice"}, "mode is 'twice'"),
        ("reward", {"reward": 1, "cal": 3}, "there is no field 'cal' here"),
        ("reward", {"reward": 1, "call": 1.5}, "call must be a number or an id"),
        ("reward", {"reward": 1, "branch": 1.5}, "branch must be a number or an id"),
        ("reward", {"reward": 1, "info": 3}, "info must be an object"),
        ("reward", {"reward": 1, "info": {"a": "x" * 300_000}}, "info is over 262,144 bytes"),
        ("end", {"status": "won"}, "status is 'won'"),
        ("end", {"success": "yes"}, "success must be true or false"),
        ("end", {"message": 3}, "message must be a text"),
        ("note", {}, "call is missing"),
        ("note", {"call": None}, "call is missing"),
    ],
)
async def test_what_cannot_be_taken_is_named(
    http: httpx.AsyncClient, episode: ProgramEpisode, verb: str, body: Any, says: str
) -> None:
    refused = await post(http, verb, 400, **body)
    assert says in refused["error"]["message"]
    assert episode.to_info() == {}
    assert not episode.said_end.is_set()


@pytest.mark.parametrize("call", [0, "c7", "call_none_000", "resp_none", "²", "9" * 40])
async def test_a_call_that_never_was_is_not_found(http: httpx.AsyncClient, call: Any) -> None:
    refused = await post(http, "reward", 404, reward=1, call=call)
    assert "was answered in this episode" in refused["error"]["message"]


async def test_infinite_rewards_and_half_characters_are_no_json(http: httpx.AsyncClient) -> None:
    for raw in (b'{"reward": Infinity}', b'{"reward": NaN}', b'{"info": "\\ud800"}', b"[1]"):
        answer = await http.post("/v1/episode/reward", content=raw)
        assert answer.status_code == 400


async def test_other_trainers_ways_to_say_it_are_understood(
    http: httpx.AsyncClient, episode: ProgramEpisode
) -> None:
    chat = (await http.post("/v1/chat/completions", json=chat_body())).json()

    async def give(path: str, body: Any) -> float | None:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return episode.reward

    assert await give("/rl/set_reward", {"reward": 0.5}) == 0.5
    assert await give("/rl/set_reward", {"reward": 2, "interaction_id": chat["id"]}) == 0.5
    assert episode.call_rewards == {0: 2.0}
    assert await give("/sessions/some/reward_info", {"reward_info": {"reward_score": 0.75}}) == 0.75
    assert await give("/sessions/some/reward_info", {"reward": 0.25}) == 0.25
    event = {"event_type": "reward", "data": {"value": 1.0}}
    assert await give("/rollouts/r1/attempts/a1/events", event) == 1.0
    assert await give("/rollouts/r1/attempts/a1/events", {"event_type": "trace"}) == 1.0
    assert not episode.said_end.is_set()
    assert await give("/rl/end_session", {}) == 1.0
    assert episode.status == "done"
