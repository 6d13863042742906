"""Conversations stay with the server that holds what their prompts begin with."""

from typing import Any

import pytest
from tinkermq.actors.gateway.holders import Beginnings, PrefixHolders, beginnings_of
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.infer import CompletionRequest
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.request import served_request
from tinkermq.schemas.wire.errors import BusyError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.canned import canned_server
from tests.actors.gateway.http import openai_client

LOADS = {"one": 3.0, "two": 1.0}
SYSTEM = {"role": "system", "content": "You are brief."}


def chat(*texts: str, adapter: str = "", user: str = "ann", **more: Any) -> Beginnings:
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    request = CHAT.read({"model": "m", "messages": [SYSTEM, *turns], **more})
    query = served_request(request, "r").model_copy(update={"adapter": adapter})
    return beginnings_of(user, "job", query)


def text(prompt: str | list[int]) -> Beginnings:
    return beginnings_of("ann", "job", CompletionRequest(request="r", prompts=[prompt]))


LONG = "word " * 1000
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.mark.parametrize(
    ("taken", "asked", "first"),
    [
        (chat("a"), chat("a", "b", "c"), "one"),  # its next turn
        (chat("a"), chat("a"), "one"),  # another sample
        (chat("a"), chat("b"), "two"),  # only the system prompt is the same
        (chat("a"), chat("a", adapter="run@2"), "two"),
        (chat("a"), chat("a", tools=[TOOL]), "two"),
        (text(LONG), text(LONG + "and more"), "one"),
        (text(LONG), text("other " + LONG), "two"),
        (text(list(range(2000))), text(list(range(2100))), "one"),
        (text("short"), text("short"), "one"),
    ],
)
def test_the_server_that_holds_the_longest_beginning_is_asked_first(
    taken: Beginnings, asked: Beginnings, first: str
) -> None:
    holders = PrefixHolders()
    holders.note(taken, "one")
    assert holders.order(asked, LOADS) == [first, *({*LOADS} - {first})]
    assert holders.order(asked, {"two": 1.0, "three": 0.0})[0] == "three"  # the holder has gone


def test_requests_of_this_gateway_count_and_the_oldest_beginnings_are_forgotten() -> None:
    holders = PrefixHolders(most=2)
    with holders.asking("job", "two"), holders.asking("job", "two"), holders.asking("job", "two"):
        assert holders.order(chat("a"), LOADS) == ["one", "two"]
        others = chat("a")._replace(job="other")  # its servers have the same names
        assert holders.order(others, LOADS) == ["two", "one"]
    for words in ("a", "b", "a", "c"):
        holders.note(chat(words), "one")
    assert [holders.order(chat(words), LOADS)[0] for words in "abc"] == ["one", "two", "one"]


def test_a_user_of_many_conversations_pushes_out_none_of_the_others() -> None:
    holders = PrefixHolders(most=6)
    for words in ("a", "b"):
        holders.note(chat(words), "one")
    for words in "abcdefghi":
        holders.note(chat(words, user="bob"), "one")
    assert [holders.order(chat(words), LOADS)[0] for words in "ab"] == ["one", "one"]
    of_bob = [holders.order(chat(words, user="bob"), LOADS)[0] for words in "efghi"]
    assert of_bob == ["two", "one", "one", "one", "one"]  # the newest fill what is left
    for number in range(9):
        holders.note(chat("a", user=f"user{number}"), "one")
    assert holders.order(chat("a", user="user8"), LOADS)[0] == "one"


async def test_a_conversation_stays_until_its_server_would_let_it_wait_or_ends(
    broker: Broker, scope: JobScope
) -> None:
    async with canned_server(broker, scope) as first, openai_client(broker) as client:

        async def ask(*messages: Any) -> str:
            made = await client.chat.completions.create(model="my-run@4", messages=list(messages))
            return made.choices[0].message.content or ""

        async with canned_server(broker, scope, actor="server-1", joins=True) as second:
            first.words, second.words = ["first"], ["second"]
            question = {"role": "user", "content": "hi"}
            while not second.asked:  # the gateway has noticed that there are two
                await ask({"role": "user", "content": f"{len(first.asked)}"})
            told = await ask(question)
            turn = [question, {"role": "assistant", "content": told}, question]
            assert {await ask(*turn[: 1 + 2 * (n % 2)]) for n in range(8)} == {told}
            holder, other = (first, second) if told == "first" else (second, first)
            holder.error = BusyError("it would wait", hint="ask another server")
            moved = await ask(*turn)
            assert moved == other.words[0]
            holder.error = None
            longer = [*turn, {"role": "assistant", "content": moved}, question]
            assert await ask(*longer) == moved  # it stays where it is now
        assert await ask(*longer) == "first"
