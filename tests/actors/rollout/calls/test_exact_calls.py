"""Exactness of a program's calls: what is trained is what the engine had and drew."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from tinkermq.actors.engine.engine import Generation
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout import call_tree
from tinkermq.actors.rollout.call_tree import TreeRows, rows_of
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.broker.client.connection import Broker
from tinkermq.schemas.model_apis.canonical import ModelMessage
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.calls.asking import held, opened
from tests.actors.rollout.calls.programs import (
    TEMPLATES,
    TOOLS,
    Program,
    RecordingEngine,
    chat_of,
    lossy,
    user,
)

UNBOUND = 1 << 30
ONE_CALL = ("llama3_1", "gptoss")
"""Templates that take one call a turn."""

MakeProgram = Callable[[int], Program]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen2_5")


@pytest.fixture(scope="module", params=TEMPLATES)
def program_of(request: pytest.FixtureRequest) -> MakeProgram:
    name = request.param
    chat = chat_of(name)
    return lambda seed: Program(chat, seed, tools=name != "phi3", parallel=name not in ONE_CALL)


def assert_exact(program: Program) -> None:
    """Each trained token stands behind what the engine had when it drew it."""
    for row in rows_of(program.exact.tree, UNBOUND).rows:
        for at in np.flatnonzero(row.mask):
            drawn = (int(row.token_ids[at]), float(row.logprobs[at]))
            assert drawn in program.engine.contexts[row.token_ids[:at].tobytes()]


def assert_once(program: Program, rows_of: Callable[..., TreeRows] = rows_of) -> None:
    """Each token that counts is trained once, and the others never."""
    tree = program.exact.tree
    made, counting = (
        rows_of(tree, UNBOUND),
        [call for call in tree.calls if call.delivered and call.num_generated],
    )
    trained = Counter(number for row in made.rows for number in row.calls)
    assert trained == Counter(call.number for call in counting)
    assert sorted([*trained, *made.untrained]) == list(range(len(tree.calls)))
    num_tokens = sum(len(call.generated.token_ids) for call in counting)
    assert sum(int(row.mask.sum()) for row in made.rows) == num_tokens


def run(program: Program, num_calls: int = 15) -> Program:
    for _ in range(num_calls):
        program.step()
    return program


@pytest.mark.parametrize("num_seeds", [2, pytest.param(60, marks=pytest.mark.long)])
def test_whatever_a_program_does_what_is_trained_is_exact_and_stands_there_once(
    program_of: MakeProgram, num_seeds: int
) -> None:
    for seed in range(num_seeds):
        program = run(program_of(seed))
        assert_exact(program)
        assert_once(program)


def test_a_conversation_that_only_grows_is_one_row_the_engines_last_context(
    program_of: MakeProgram,
) -> None:
    program = program_of(0)
    exact, engine = program.exact, program.engine
    history: list[ModelMessage] = [
        ModelMessage(role="system", content=("be brief",)),
        user("begin"),
    ]
    last = np.empty(0, np.int32)
    for number in range(6):
        prepared = exact.prepare([lossy(message, program.random) for message in history])
        generated = engine.generate(prepared.prompt_ids.tolist(), f"<think>a</think> {number}")
        last = np.concatenate([prepared.prompt_ids, generated.token_ids])
        call = exact.finish(prepared, generated)
        history += [call.reply, user(f"and {number}?")]
    call.delivered = True
    (row,) = rows_of(exact.tree, UNBOUND).rows
    assert row.token_ids.tolist() == last.tolist()
    assert (row.kind, row.calls) == ("main", (0, 1, 2, 3, 4, 5))


def ask(
    exact: ExactCalls, history: Sequence[ModelMessage], text: str = "an answer", tools=TOOLS
) -> call_tree.ModelCall:
    """Make a call whose tokens depend on nothing but the prompt and the text."""
    prepared = exact.prepare(history, tools)
    seed = hash(prepared.prompt_ids.tobytes()) & 0xFFFF
    generated = RecordingEngine(exact._chat, Random(seed)).generate(
        prepared.prompt_ids.tolist(), text
    )
    call = exact.finish(prepared, generated)
    call.delivered = True
    return call


CALL = '<tool_call>\n{"name": "search", "arguments": {"query":  "x", "n": 1}}\n</tool_call>'


def spellings(message: ModelMessage) -> list[ModelMessage]:
    """Return a message in the ways in which programs were seen to send it back."""
    return [
        message.replaced(reasoning=None),
        *(
            message.replaced(
                calls=tuple(call._replace(arguments=write(call.value)) for call in message.calls),
            )
            for write in (
                json.dumps,
                lambda value: json.dumps(value, separators=(",", ":")),
                lambda value: json.dumps(dict(reversed(value.items())), indent=1),
            )
        ),
        message.replaced(calls=tuple(call._replace(id="other") for call in message.calls)),
    ]


def test_an_echo_that_means_the_same_continues(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], f"<think>so</think>I look.{CALL}")
    for reply in spellings(first.reply):
        result = ModelMessage(role="tool", content=("found",), call_id=reply.calls[0].id)
        assert ask(exact, [user("go"), reply, result]).parent is first


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: reply.replaced(content=("I look!",)),
        lambda reply: reply.replaced(content=("I look. ",)),
        lambda reply: reply.replaced(calls=()),
        lambda reply: reply.replaced(calls=reply.calls * 2),
        lambda reply: reply.replaced(reasoning="another thought"),
        lambda reply: reply.replaced(calls=(reply.calls[0]._replace(name="read"),)),
        lambda reply: reply.replaced(
            calls=(reply.calls[0]._replace(arguments='{"query": "x", "n": 1.0}'),)
        ),
        lambda reply: reply.replaced(
            calls=(reply.calls[0]._replace(arguments='{"query": "x", "n": true}'),)
        ),
    ],
)
def test_an_edit_continues_what_came_before_it_and_is_not_trained(
    chat: ChatTokenizer, change: Callable[[ModelMessage], ModelMessage]
) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], "first")
    second = ask(exact, [user("go"), first.reply, user("on")], f"<think>so</think>I look.{CALL}")
    edited = change(second.reply)
    third = ask(exact, [user("go"), first.reply, user("on"), edited, user("and?")])
    assert third.parent is first
    assert third.branch == "edited"
    assert edited in third.given
    trained = rows_of(exact.tree, UNBOUND).rows
    assert sum(int(row.mask.sum()) for row in trained) == sum(
        len(call.generated.token_ids) for call in (first, second, third)
    )


def test_requests_with_other_tools_continue_nothing(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], "first")
    other = ask(exact, [user("go"), first.reply, user("on")], tools=TOOLS[:1])
    assert (other.parent, other.branch) == (None, "tools")


def test_equal_answers_are_told_apart_by_the_ids_that_are_echoed(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    calls = [ask(exact, [user("go")], CALL) for _ in range(3)]
    for call in calls:
        result = ModelMessage(role="tool", content=("found",), call_id=call.reply.calls[0].id)
        assert ask(exact, [user("go"), call.reply, result]).parent is call


def test_results_in_another_order_are_the_same_results(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], CALL + CALL.replace("x", "y"))
    results = [
        ModelMessage(role="tool", content=(f"result {call.id}",), call_id=call.id)
        for call in first.reply.calls
    ]
    second = ask(exact, [user("go"), first.reply, *results])
    third = ask(exact, [user("go"), first.reply, *results[::-1], second.reply, user("thanks")])
    assert third.parent is second


def test_the_rows_are_the_same_however_calls_interleave(chat: ChatTokenizer) -> None:
    """Two threads of two calls each, in all orders in which they can be asked and answered."""

    def rows_in(order: Sequence[int]) -> list[tuple[bytes, bytes]]:
        exact = ExactCalls(chat)
        threads = [[user("plan the work of today")], [user("look for what was asked")]]
        for thread in order:
            history = threads[thread]
            call = ask(exact, history, f"answer {len(history)} of thread {thread}")
            history += [call.reply, user("and then?")]
        made = rows_of(exact.tree, UNBOUND).rows
        return [(row.token_ids.tobytes(), row.mask.tobytes()) for row in made]

    orders = set(itertools.permutations([0, 0, 1, 1]))
    assert len({tuple(rows_in(order)) for order in orders}) == 1


def test_what_nobody_read_is_not_trained_and_what_was_read_is(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    ask(
        exact,
        [ModelMessage(role="system", content=("Write a title.",)), user("go")],
        "A title of work",
        [],
    )
    found = ask(exact, [user("find the file")], "it is in the folder src/lib", [])
    first = ask(exact, [user("go")], "I look.")
    ask(exact, [user("go"), first.reply, user(f"The helper says: {found.reply.text}")])
    made = rows_of(exact.tree, UNBOUND, "not /Write a title/")
    assert made.untrained == (0,)
    assert [(row.kind, row.calls) for row in made.rows] == [("main", (2, 3)), ("sub-agent", (1,))]


def test_a_history_that_was_compacted_goes_on_and_its_summary_is_trained(
    chat: ChatTokenizer,
) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], "I look.")
    summary = ask(exact, [user("go"), first.reply, user("sum up")], "all files were looked at")
    after = ask(exact, [user(f"So far: {summary.reply.text}. Go on.")], "done")
    assert (after.parent, after.branch) == (None, "compacted")
    made = rows_of(exact.tree, UNBOUND)
    assert [(row.kind, row.calls) for row in made.rows] == [("main", (0, 1)), ("compacted", (2,))]


def test_an_answer_that_never_arrived_is_not_trained(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], "I look.")
    lost = ask(exact, [user("go"), first.reply, user("on")], "lost")
    lost.delivered = False
    assert rows_of(exact.tree, UNBOUND).untrained == (lost.number,)
    again = ask(exact, [user("go"), first.reply, user("on")], "again")
    assert again.branch == "sample"
    assert rows_of(exact.tree, UNBOUND).rows[0].calls == (0, again.number)


def test_a_row_ends_at_a_calls_end_and_says_what_is_cut(chat: ChatTokenizer) -> None:
    exact = ExactCalls(chat)
    first = ask(exact, [user("go")], "I look.")
    second = ask(exact, [user("go"), first.reply, user("on")], "and look")
    made = rows_of(exact.tree, second.num_tokens - 1)
    assert made.rows[0].calls == (0,)
    assert len(made.rows[0].token_ids) == first.num_tokens
    assert made.num_cut == len(second.generated.token_ids)


def test_what_is_continued_is_what_the_template_writes(chat: ChatTokenizer) -> None:
    """Were the tokens' text its own."""
    exact = ExactCalls(chat)
    history, tools = [user("go")], TOOLS
    for number in range(4):
        prepared = exact.prepare(history, tools)
        told = [message.for_template() for message in history]
        text = chat.render(told, prompt=True, tools=tools)
        assert "".join(map(chat.token_text, prepared.prompt_ids)) == text
        ids = np.array([*chat.encode(f"answer {number}"), chat.stop_token_ids[0]], np.int32)
        cut = ids[:-1] if number == 2 else ids
        vector = np.zeros(len(cut), np.float32)
        history += [
            exact.finish(prepared, Generation(cut, vector, vector.astype(np.int32), "stop")).reply
        ]
        history += [user("on")]
        tools = TOOLS[:1] if number == 1 else tools


@pytest.mark.asyncio(loop_scope="package")
async def test_a_holder_after_two_that_logged_nothing_draws_as_the_first_would(
    broker: Broker, recorded: JobScope
) -> None:
    seeds = [
        (await opened(held(broker, recorded, delivery, 71))).drawing_seed for delivery in (1, 2, 3)
    ]
    assert seeds == [seeds[0]] * 3
    assert seeds[0]
