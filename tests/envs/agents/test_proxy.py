"""The proxy as the makers' own libraries use it, and what programs post to it."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import pytest
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.generation import Decoding
from tinkermq.schemas.output_format import OutputFormat

from tests.support.program_clients import (
    anthropic_client,
    chat_body,
    http_client,
    messages_body,
    openai_client,
    response_body,
)
from tests.support.scripted_generator import Script
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("generator")


PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
ACTS = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}"


async def whole_delivery(script: Script, *calls: int) -> None:
    """Wait until the generator has heard that some calls have arrived."""
    told = [(list(calls), True)]
    await until(
        lambda: [(each.calls, each.whole) for each in script.delivered][-1:] == told, "delivery"
    )


async def test_a_chat_is_answered(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with openai_client(proxy, episode) as client:
        raw = await client.chat.completions.with_raw_response.create(**chat_body())
    answer = raw.parse()
    assert answer.choices[0].message.content == "You said: Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 5)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert raw.headers["x-tinkermq-call"] == "0"
    assert raw.headers["x-tinkermq-parent"] == "root"
    assert raw.headers["x-tinkermq-reused"] == "4"
    await whole_delivery(script, 0)
    assert (episode.num_calls, episode.num_open) == (1, 0)
    assert episode.changed.is_set()


async def test_a_streamed_chat_says_the_same_bit_by_bit(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}}
    script.stops_at = 2
    chunks: list[Any] = []
    async with openai_client(proxy, episode) as client:
        stream = await client.chat.completions.create(**chat_body(stream=True), **options)
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content:
                script.go_on.set()  # only now comes the rest
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == "You said: Hello"
    assert texts[1] in ("You", "You sa")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    await whole_delivery(script, 0)
    assert script.asked[0].stream


async def test_several_choices_are_calls_of_their_own(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with openai_client(proxy, episode) as client:
        answer = await client.chat.completions.create(**chat_body(n=3))
        stream = await client.chat.completions.create(**chat_body(n=3, stream=True))
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    assert [choice.message.content for choice in answer.choices] == texts
    assert texts == ["You said: Hello", "You said: Hello (1)", "You said: Hello (2)"]
    await whole_delivery(script, 3, 4, 5)


async def test_tools_reasoning_and_parallel_calls_come_in_each_api(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.say = lambda request, choice: f"{ACTS}\n{CALL}"
    function = {"name": "search", "description": "d", "parameters": PARAMETERS}
    async with openai_client(proxy, episode) as client:
        tools: Any = [{"type": "function", "function": function}]
        chat = await client.chat.completions.create(**chat_body(tools=tools))
        flat: Any = [{"type": "function", "strict": False, **function}]
        response = await client.responses.create(**response_body(tools=flat))
    async with anthropic_client(proxy, episode) as client:
        schema: Any = [{"name": "search", "description": "d", "input_schema": PARAMETERS}]
        message = await client.messages.create(**messages_body(tools=schema))
    told = chat.choices[0].message
    assert told.content == "I look."
    assert cast("Any", told).reasoning_content == "Let me see."
    assert [call.id[-3:] for call in told.tool_calls or []] == ["000", "001"]
    assert chat.choices[0].finish_reason == "tool_calls"
    kinds = [item.type for item in response.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    blocks = [block.type for block in message.content]
    assert blocks == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    assert script.asked[0].tools == script.asked[1].tools == script.asked[2].tools


async def test_responses_are_streamed_kept_and_continued(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with openai_client(proxy, episode) as client:
        async with client.responses.stream(**response_body()) as stream:
            kinds = [event.type async for event in stream]
            first = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert first.output_text == "You said: Hello"
        again = await client.responses.retrieve(first.id)
        assert again.model_dump() == first.model_dump(exclude={"parsed"}) or (
            again.output_text == first.output_text
        )
        second = await client.responses.create(
            **response_body("More"), previous_response_id=first.id
        )
        assert second.output_text == "You said: More"
        assert script.asked[1].previous == 0
        told: list[Any] = [
            item.to_dict() async for item in client.responses.input_items.list(second.id)
        ]
        assert [(one["role"], one["content"][0]["text"]) for one in told] == [("user", "More")]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.input_items.list(first.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="Previous response with id") as caught:
            await client.responses.create(**response_body(), previous_response_id="resp_other")
        assert caught.value.param == "previous_response_id"


async def test_messages_are_answered_streamed_and_counted(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    script.thinking = True
    script.say = lambda request, choice: "Well.</think>\n\nHello."
    async with anthropic_client(proxy, episode) as client:
        whole = await client.messages.create(**messages_body())
        async with client.messages.stream(
            **messages_body("Bye", extra_body={"temperature": 0.3})
        ) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(
            model="any", messages=[{"role": "user", "content": "Hello"}]
        )
    assert "".join(texts) == "Hello."
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert [block.type for block in streamed.content] == ["thinking", "text"]
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (7, 4)
    assert counted.input_tokens == 11
    assert script.asked[1].decoding.sampling == {"temperature": 0.3}
    assert script.asked[2].count_only
    assert episode.num_calls == 2


async def test_libraries_that_block_are_answered(
    proxy: ModelProxy, episode: ProgramEpisode
) -> None:
    env = proxy.env_of(episode)

    def ask() -> list[str]:
        with openai.OpenAI(
            base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"]
        ) as client:
            chat = client.chat.completions.create(**chat_body())
            streamed = [
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(**chat_body(stream=True))
            ]
        with anthropic.Anthropic(
            base_url=env["ANTHROPIC_BASE_URL"], auth_token=env["ANTHROPIC_AUTH_TOKEN"]
        ) as client:
            message = client.messages.create(**messages_body())
        return [chat.choices[0].message.content or "", "".join(streamed), message.content[0].text]

    assert await asyncio.to_thread(ask) == ["You said: Hello"] * 3


async def test_tokens_are_told_where_they_are_asked_for(
    proxy: ModelProxy, episode: ProgramEpisode
) -> None:
    async with http_client(proxy, episode) as http:
        chat = (
            await http.post("/v1/chat/completions", json=chat_body(return_token_ids=True))
        ).json()
        plain = (await http.post("/v1/chat/completions", json=chat_body("b"))).json()
        told = {"x-tinkermq-tokens": "1"}
        response = await http.post("/v1/responses", json=response_body(), headers=told)
        streams = [
            (await http.post(path, json={**body, "stream": True}, headers=told)).text
            for path, body in (
                ("/v1/chat/completions", chat_body("s")),
                ("/v1/responses", response_body("s")),
                ("/v1/messages", messages_body("s")),
            )
        ]
    assert chat["prompt_token_ids"] == list(range(11))
    assert chat["choices"][0]["token_ids"] == list(range(5))
    assert chat["tinkermq"]["answers"] == [
        {"call": 0, "token_ids": list(range(5)), "logprobs": [-0.5] * 5, "versions": [1] * 5}
    ]
    assert "tinkermq" not in plain
    assert "prompt_token_ids" not in plain
    assert response.json()["tinkermq"]["prompt_token_ids"] == list(range(11))
    for stream in streams:
        assert '"tinkermq":' in stream
        assert stream.count('"token_ids":') == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_told_to_who_asks_for_them(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script, stream: bool
) -> None:
    env = proxy.env_of(episode)

    def ask() -> list[Any]:
        with openai.OpenAI(base_url=env["OPENAI_BASE_URL"], api_key=env["OPENAI_API_KEY"]) as c:
            asked = {**chat_body(), "logprobs": True, "top_logprobs": 2, "n": 2}
            made: Any = c.chat.completions.create(**asked, stream=stream)
            if not stream:
                return [choice.logprobs.content for choice in made.choices]
            told: list[Any] = [[], []]
            for chunk in made:
                for choice in chunk.choices:
                    if choice.logprobs is not None:
                        told[choice.index] += choice.logprobs.content
            return told

    first, second = await asyncio.to_thread(ask)
    assert "".join(one.token for one in first) == "You said: Hello"
    assert "".join(one.token for one in second) == "You said: Hello (1)"
    assert all(one.logprob == -0.5 for one in first)
    assert first[0].bytes == list(first[0].token.encode())
    assert [top.token for top in first[0].top_logprobs] == ["t0", "t1"]
    assert script.asked[0].decoding.top_logprobs == 2


FORMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"response_format": {"type": "json_object"}},
        {"json_schema": {"type": "object"}},
    ),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["a"]}}}},
        {"json_schema": {"enum": ["a"]}},
    ),
    (
        "/v1/messages",
        {"tools": [{"name": "go", "input_schema": {}}], "tool_choice": {"type": "any"}},
        {"functions": ["go"]},
    ),
]


async def test_the_form_that_a_program_demands_reaches_the_generator(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    bodies = {
        "/v1/chat/completions": chat_body(),
        "/v1/responses": response_body(),
        "/v1/messages": messages_body(),
    }
    async with http_client(proxy, episode) as http:
        for path, fields, _ in FORMS:
            answer = await http.post(path, json={**bodies[path], **fields})
            assert answer.status_code == 200, answer.text
        bad = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "not": {}}}}
        refused = await http.post("/v1/chat/completions", json=chat_body(response_format=bad))
    assert [asked.decoding.format for asked in script.asked] == [
        OutputFormat(**told) for *_, told in FORMS
    ]
    assert not any(name in asked.without_effect for asked in script.asked for name in FIELDS)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format.json_schema.schema.not"


FIELDS = ("response_format", "tool_choice", "text", "output_config")
SERVED_ONLY: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "chat_template_kwargs": {"enable_thinking": False},
    "ignore_eos": True,
    "logit_bias": {"5": 1},
    "min_p": 0.5,
    "min_tokens": 2,
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "stop_token_ids": [1],
}
"""What an episode's learner would not compute."""


async def test_whatever_a_program_asks_besides_is_taken_and_told(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    async with http_client(proxy, episode) as http:
        head = await http.head("/")
        root = await http.get("/")
        models = await http.get("/v1/models")
        model = await http.get("/v1/models/some/name")
        answers = [
            await http.post("/v1/messages?beta=true&x=1", json=messages_body(metadata={"a": 1})),
            await http.post(
                "/chat/completions", json=chat_body(store=True, tool_choice="required")
            ),
            await http.post("/v1/chat/completions", json=chat_body(**SERVED_ONLY)),
            await http.post("/v1/chat/completions", json=chat_body(min_p=0, logit_bias={})),
            await http.post("/v1/v1/chat/completions", json=chat_body("again")),
        ]
    assert (head.status_code, root.status_code) == (200, 200)
    assert models.json()["data"][0]["id"] == "policy"
    assert model.json()["id"] == "some/name"
    assert [answer.status_code for answer in answers] == [200] * 5
    assert sorted(script.asked[2].without_effect) == sorted(SERVED_ONLY)
    assert script.asked[2].decoding == script.asked[3].decoding == Decoding()
    assert not script.asked[3].without_effect
    assert script.asked[0].without_effect == ["metadata"]
    assert script.asked[1].without_effect == ["store", "tool_choice"]


async def test_what_a_response_was_asked_with_is_listed_page_by_page(
    proxy: ModelProxy, episode: ProgramEpisode
) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    asked: Any = [
        {"role": "user", "content": "2+2?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    async with openai_client(proxy, episode) as client:
        made = await client.responses.create(**response_body(asked, instructions="be brief"))
        items = client.responses.input_items
        listed = [one.type async for one in items.list(made.id, order="asc", limit=2)]
        assert listed == ["message", *kinds]
        assert [one.type async for one in items.list(made.id)] == listed[::-1]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"limit": 0}, "must be 1 to 100"),
            ({"after": "x"}, "no item 'x'"),
        ]
        for query, words in refused:
            with pytest.raises(openai.BadRequestError, match=words):
                await items.list(made.id, **query)


async def test_a_custom_tool_is_called_with_its_text(
    proxy: ModelProxy, episode: ProgramEpisode, script: Script
) -> None:
    call = {"name": "patch", "arguments": {"input": "*** begin"}}
    script.say = lambda request, choice: f"<tool_call>{json.dumps(call)}</tool_call>"
    async with openai_client(proxy, episode) as client:
        tools: Any = [{"type": "custom", "name": "patch", "description": "patches"}]
        response = await client.responses.create(**response_body(tools=tools))
        nested: Any = [{"type": "custom", "custom": {"name": "patch"}}]
        asked = chat_body(tools=nested)
        answer = (await client.chat.completions.create(**asked)).choices[0]
        asked["messages"] += [
            answer.message.model_dump(exclude_none=True),
            {"role": "tool", "content": "ok"},
        ]
        await client.chat.completions.create(**asked)
    told = response.output[0]
    assert told.type == "custom_tool_call"
    assert told.input == "*** begin"
    (called,) = answer.message.tool_calls or []
    assert called.type == "custom"
    assert (called.custom.name, called.custom.input) == ("patch", "*** begin")
    echoed = script.asked[-1].messages[1].calls
    assert [(name, json.loads(arguments)) for name, arguments, _ in echoed] == [
        ("patch", {"input": "*** begin"})
    ]


async def test_programs_in_networks_of_their_own_call_through_a_socket(
    proxy: ModelProxy, episode: ProgramEpisode, tmp_path: Path
) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "model.sock"))
    env = proxy.env_of(episode, "http://model")
    assert env["ANTHROPIC_BASE_URL"] == "http://model"
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "model.sock"))
    path = f"http://model/e/{episode.key}/v1/chat/completions"
    async with proxy.listen(listening), httpx.AsyncClient(transport=transport) as http:
        answer = await http.post(path, json=chat_body())
    assert answer.json()["choices"][0]["message"]["content"] == "You said: Hello"
    assert listening.fileno() == -1


# -- What programs say of their own episodes -------------------------------------------------------

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
    assert "for a call or for a branch" in refused["error"]["message"]


async def test_the_end_is_said_once(http: httpx.AsyncClient, episode: ProgramEpisode) -> None:
    info = {"tests": [1, 2]}
    said = {"status": "failed", "reward": -1, "success": False, "message": "lost", "info": info}
    assert await post(http, "end", **said) == {"status": "failed", "reward": -1.0}
    assert await post(http, "end", status="done", reward=5) == {"status": "failed", "reward": -1.0}
    assert episode.said_end.is_set()
    assert episode.to_info() == {"success": False, "message": "lost", **info}
    refused = await post(http, "reward", 401, reward=1)
    assert "post rewards before the end" in refused["error"]["message"]


@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("reward", {}, "reward must be a finite number, and is None"),
        ("reward", {"reward": True}, "reward must be a finite number"),
        ("reward", {"reward": "1"}, "reward must be a finite number"),
        ("reward", {"reward": 1, "mode": "twice"}, "mode is 'twice'"),
        ("reward", {"reward": 1, "cal": 3}, "'cal' is not supported here"),
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
