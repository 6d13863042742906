"""Stateful chats: what was said before is continued by its tokens, not by its text."""

import asyncio
import json
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.gateway.openai.answering import ServedAnswer, read_query
from tinkermq.actors.generator.engine.engine import Drawn, Generation
from tinkermq.actors.generator.episodes.chat import ChatTokenizer
from tinkermq.actors.server.answers import Answers
from tinkermq.actors.server.conversations import Conversations
from tinkermq.actors.server.histories import history_of
from tinkermq.envs.model_apis.chat import CHAT
from tinkermq.schemas.infer import ChatRequest, InferPart

from tests.actors.generator.agents.programs import TOOLS, chat_of, spelled


class ScriptedEngine:
    """Says texts, spelled as no tokenizer would, and writes its contexts down."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self.chat = chat
        self.texts: list[str] = []
        self.prompts: list[list[int]] = []
        self.said: list[list[int]] = []
        self.cancelled = False

    async def generate(
        self,
        prompt: list[int],
        sampling: Any,
        *,
        request_id: str,
        on_token: Callable[[Drawn], None] | None = None,
        images: Any = (),
    ) -> Generation:
        """Say the next text, to its end or until it is cancelled."""
        del sampling, request_id, images
        self.prompts.append(list(prompt))
        ids = [*spelled(self.chat, self.texts.pop(0), Random(3)), self.chat.stop_token_ids[0]]
        self.cancelled = False
        self.said.append(ids)
        for token in ids:
            if on_token is None:
                break
            on_token(Drawn(token, -0.5, 1))
            await asyncio.sleep(0)
            if self.cancelled:
                break
        n = len(ids)
        columns = np.array(ids, np.int32), np.full(n, -0.5, np.float32), np.ones(n, np.int32)
        return Generation(*columns, "cancelled" if self.cancelled else "stop")

    def cancel(self, name: str) -> None:
        """End the answer."""
        del name
        self.cancelled = True


class Client:
    """Sends its conversation with each call, in the words in which it was answered."""

    def __init__(self, chat: ChatTokenizer, **room: Any) -> None:
        self.engine: Any = ScriptedEngine(chat)
        self.conversations = Conversations(chat, **room)
        self.answers = Answers(
            self.engine,
            chat,
            lambda: "m",
            max_context=9999,
            max_open=9,
            conversations=self.conversations,
        )
        self.messages: list[dict[str, Any]] = []

    async def ask(self, text: str, reply: str, **more: Any) -> InferPart:
        """Say something, hear the reply, remember both as the gateway tells them."""
        self.messages.append({"role": "user", "content": text})
        return await self.go_on(reply, **more)

    async def go_on(self, reply: str, **more: Any) -> InferPart:
        self.engine.texts = [reply] * more.get("n", 1)
        asked = {"model": "m", "messages": self.messages, "stateful": True, **more}
        read, query = read_query(json.dumps(asked).encode(), CHAT)
        assert isinstance(query, ChatRequest)
        answer = ServedAnswer(CHAT, read, query)
        first: list[InferPart] = []

        async def tell(part: InferPart) -> None:
            first.append(part)
            list(answer.push(part))

        last = await self.answers.chat(query, tell)
        list(answer.push(last.model_copy(update={"last": True})))
        self.messages.append(answer.whole()["choices"][0]["message"])
        return last


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen2_5")


def following(client: Client, turn: int) -> bool:
    """Whether a prompt begins with all that the engine had and said the turn before."""
    before = client.engine.prompts[turn - 1] + client.engine.said[turn - 1]
    return client.engine.prompts[turn][: len(before)] == before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_goes_on_behind_the_tokens_that_were_drawn(
    chat: ChatTokenizer, stream: bool
) -> None:
    client = Client(chat)
    begun = await client.ask("hello", "<think>\nhm</think>\n\nthe answer ", stream=stream)
    assert (begun.rendered, begun.reused_tokens) == ("first", 0)
    more = await client.ask("and?", "look at it", stream=stream, return_token_ids=True)
    assert (more.rendered, following(client, 1)) == ("", True)
    assert more.reused_tokens == len(client.engine.prompts[0] + client.engine.said[0])
    assert more.prompt_tokens == len(client.engine.prompts[1])
    await client.ask("on", "again", stream=stream)
    assert following(client, 2)
    plain = chat.prompt(history_as_text(client.messages[:-1]), ())
    assert plain != client.engine.prompts[2]


def history_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": one["role"], "content": one["content"]} for one in messages]


async def test_calls_of_tools_and_their_results_are_continued(chat: ChatTokenizer) -> None:
    client = Client(chat)
    call = '<tool_call>{"name": "search", "arguments":  {"query":"x"}}</tool_call>'
    await client.ask("go on", f"look \n{call}", tools=TOOLS)
    (told,) = client.messages[-1]["tool_calls"]
    client.messages.append({"role": "tool", "tool_call_id": told["id"], "content": "found"})
    more = await client.go_on("the result", tools=TOOLS)
    assert (more.rendered, following(client, 1)) == ("", True)
    other = [*TOOLS, {"type": "function", "function": {"name": "other", "parameters": {}}}]
    assert (await client.ask("on", "again", tools=other)).rendered == "unknown"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("llama3_1", '{"name": "search", "parameters": {"query": "x"}}'),
        (
            "glm4moe",
            "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
        ),
    ],
)
async def test_calls_in_a_models_own_format_are_served_as_calls_and_continued(
    template: str, said: str, stream: bool
) -> None:
    client = Client(chat_of(template))
    await client.ask("go on", said, tools=TOOLS, stream=stream)
    told = client.messages[-1]
    (call,) = told["tool_calls"]
    assert (told["content"], call["function"]["name"]) == (None, "search")
    assert json.loads(call["function"]["arguments"]) == {"query": "x"}
    client.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "found"})
    more = await client.go_on("the result", tools=TOOLS, stream=stream)
    assert (more.rendered, following(client, 1)) == ("", True)
    plain = Client(chat_of(template))
    await plain.ask("go on", said, stream=stream)
    assert plain.messages[-1]["content"] == said  # without tools it is text


async def test_every_answer_of_several_can_be_continued_and_a_stop_text_is_no_part_of_it(
    chat: ChatTokenizer,
) -> None:
    client = Client(chat)
    await client.ask("hello", "the answer is in the search", n=2, stop=[" in the"])
    assert client.messages[-1]["content"] == "the answer is"
    more = await client.ask("and?", "again")
    assert more.rendered == ""
    said = chat.decode(client.engine.prompts[-1][len(client.engine.prompts[0]) :])
    assert said.startswith("the answer is")
    assert "search" not in said


async def test_what_is_not_known_or_was_changed_is_rendered_and_says_so(
    chat: ChatTokenizer,
) -> None:
    client, other = Client(chat), Client(chat)
    await client.ask("hello", "the answer")
    await client.ask("and?", "look at it")
    other.messages = list(client.messages)
    elsewhere = await other.ask("on", "again")
    assert (elsewhere.rendered, elsewhere.reused_tokens) == ("unknown", 0)
    assert other.engine.prompts[0] == chat.prompt(history_as_text(other.messages[:-1]), ())
    assert (await other.ask("and now?", "go on")).rendered == ""
    client.messages[3] = {"role": "assistant", "content": "no"}
    edited = await client.ask("on", "again")
    assert edited.rendered == "edited"
    assert edited.reused_tokens == len(client.engine.prompts[0] + client.engine.said[0])
    client.messages.append({"role": "user", "content": "hi", "name": "ada"})
    named = await client.go_on("again")
    assert (named.rendered, named.reused_tokens) == ("fields", 0)


async def test_what_is_kept_is_bounded_and_expires(chat: ChatTokenizer) -> None:
    free = Client(chat)
    await free.ask("hello 0", "the answer")
    room = 3 * free.conversations.num_bytes + 500
    client = Client(chat, max_bytes=room)
    for number in range(20):
        client.messages = []
        await client.ask(f"hello {number}", "the answer")
        assert client.conversations.num_bytes <= room
    assert len(client.conversations) == 3
    assert (await client.ask("and?", "again")).rendered == ""
    hasty = Client(chat, idle_s=0)
    await hasty.ask("hello", "the answer")
    await asyncio.sleep(0.01)
    assert (await hasty.ask("and?", "again")).rendered == "unknown"
    small = Client(chat, max_bytes=1)
    await small.ask("hello", "the answer")
    assert (len(small.conversations), small.conversations.num_bytes) == (0, 0)


async def test_a_chat_that_is_not_stateful_is_rendered_and_not_kept(chat: ChatTokenizer) -> None:
    client = Client(chat)
    part = await client.ask("hello", "the answer", stateful=False)
    assert (part.rendered, len(client.conversations)) == (None, 0)


def test_reasoning_is_read_from_the_text_of_a_turn_wherever_it_was_opened() -> None:
    for text in ("<think>hm</think>\nso", "hm</think>\nso"):
        (turn,) = history_of([{"role": "assistant", "content": text}]) or []
        assert (turn.reasoning, turn.text) == ("hm", "so")
    assert history_of([{"role": "user", "content": 5}]) is None


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_is_told_the_reasoning_that_its_prompt_opened(
    stream: bool, stateful: bool
) -> None:
    client = Client(chat_of("qwen3_5_think"))
    await client.ask("hello", "hm\n</think>\n\nso", stream=stream, stateful=stateful)
    assert client.messages[-1]["content"] == "<think>\nhm\n</think>\n\nso"
    cut = Client(chat_of("qwen3_5_think"))
    await cut.ask("hello", "maybe 5, or", stream=stream, stateful=stateful, n=2)
    assert cut.messages[-1]["content"] == "<think>\nmaybe 5, or"


async def test_a_special_mark_of_a_call_reaches_the_parser() -> None:
    chat = chat_of("qwen2_5")
    chat._tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<tool_call>", "</tool_call>"]}
    )
    client = Client(ChatTokenizer(chat._tokenizer))
    text = '<tool_call>{"name": "search", "arguments": {"q": "a"}}</tool_call>'
    assert chat._tokenizer.decode(chat.encode(text), skip_special_tokens=True) != text
    await client.ask("hello", text, tools=list(TOOLS), stateful=False)
    (call,) = client.messages[-1]["tool_calls"]
    assert call["function"]["name"] == "search"
