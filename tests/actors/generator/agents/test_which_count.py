"""Which conversations of a program are trained: all that can have had a part in the outcome."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.generator.agents import reading, rows
from tinkermq.actors.generator.agents.call_tree import ModelCall
from tinkermq.actors.generator.agents.exact_calls import ExactCalls
from tinkermq.actors.generator.agents.reading import Readers
from tinkermq.actors.generator.agents.rows import rows_of, trained_calls
from tinkermq.actors.generator.episodes.chat import ChatTokenizer
from tinkermq.envs.agents.messages import CanonicalCall, CanonicalMessage

from tests.actors.generator.agents.programs import TOOLS, chat_of, user
from tests.actors.generator.agents.test_exact_calls import CALL, ask, changed

UNBOUND = 1 << 30
LETTERS = "abcdefghij "
TASK = "mend the test that fails in module seven"


def system(text: str) -> CanonicalMessage:
    return CanonicalMessage("system", (text,))


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen2_5")


@pytest.fixture
def exact(chat: ChatTokenizer) -> ExactCalls:
    return ExactCalls(chat)


def trained(exact: ExactCalls) -> set[int]:
    return {number for row in rows_of(exact.tree, UNBOUND).rows for number in row.calls}


def helped(
    exact: ExactCalls, answer: str, told: str, asked: str = "find it"
) -> tuple[ModelCall, ModelCall]:
    """Let a main conversation tell itself something of a helper's answer."""
    first = ask(exact, [user(TASK)], "I ask one")
    helper = ask(exact, [system("You find files."), user(asked)], answer, [])
    ask(exact, [user(TASK), first.reply, user(told)], "so that is it")
    return first, helper


ANSWER = "I have looked at it all.\nIt stands in src/lib/parser.py, line 17.\nThat is all."


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (ANSWER, f"The helper says: {ANSWER}"),
        (ANSWER, "It stands in src/lib/parser.py, line 17."),
        (ANSWER, "look at: in src/lib/parser"),
        ("Paris", "the capital is Paris."),
        ("7", "7"),
    ],
)
def test_an_answer_of_which_a_part_was_read_is_trained(
    exact: ExactCalls, answer: str, told: str
) -> None:
    helped(exact, answer, told)
    assert trained(exact) == {0, 1, 2}


@pytest.mark.parametrize(
    ("answer", "told", "asked"),
    [
        (ANSWER, "nothing was found at all", "find it"),
        (ANSWER, "rc/lib/parser", "find it"),
        ("7", "17 and 77", "find it"),
        ("Title: mend the test that fails", "mend the test that fails in seven", TASK),
        ("mend or leave", "mend or leave it", "say: mend or leave"),
    ],
    ids=["other words", "too little", "within another word", "of its prompt", "all of its prompt"],
)
def test_an_answer_of_which_nothing_was_read_is_not(
    exact: ExactCalls, answer: str, told: str, asked: str
) -> None:
    helped(exact, answer, told, asked)
    assert trained(exact) == {0, 2}


def test_what_a_reader_was_told_before_is_not_read_in_an_answer(exact: ExactCalls) -> None:
    known = user("the tests are in the folder tests/unit")
    first = ask(exact, [known], "I look")
    ask(exact, [system("Say where."), user("where?")], "in the folder tests/unit, I guess", [])
    ask(exact, [known, first.reply, user("in the folder tests/unit are ten")], "good")
    assert trained(exact) == {0, 2}


def test_what_a_helper_fills_into_a_call_is_read_as_what_it_says_is(exact: ExactCalls) -> None:
    first = ask(exact, [user(TASK)], "I ask one")
    ask(
        exact, [system("Answer."), user("how many?")], CALL.replace('"x"', '"forty-two"'), TOOLS[:1]
    )
    ask(exact, [user(TASK), first.reply, user("They are forty-two.")], "good", [])
    ask(exact, [user(TASK), first.reply, user("They are forty-two.")], "good")
    assert 1 in trained(exact)


def test_who_reads_at_the_end_is_trained_with_those_that_went_on(exact: ExactCalls) -> None:
    """An orchestrator of one call has fewer calls than its helpers, other tools, and no reader."""
    for name in ("one", "two"):
        asked = [system(f"You are {name}."), user("find the file")]
        first = ask(exact, asked, f"I look, says {name}", TOOLS)
        ask(exact, [*asked, first.reply, user("on")], f"it is in folder number {name}", TOOLS)
    told = " and ".join(call.reply.text for call in exact.tree.calls[1::2])
    ask(exact, [user(f"Put together: {told}")], "the files are in one and two", [])
    assert trained(exact) == {0, 1, 2, 3, 4}


def test_a_title_of_what_was_said_is_not_trained_where_the_work_goes_on(exact: ExactCalls) -> None:
    history = [user(TASK)]
    for number in range(3):
        call = ask(exact, history, f"I look at file number {number} of the module")
        if number == 1:
            told = f"Title for: {TASK} {call.reply.text}"
            ask(exact, [system("Write titles."), user(told)], "Mending tests of module 7", [])
        history += [call.reply, user("and?")]
    assert trained(exact) == {0, 1, 3}


def test_a_title_is_not_taken_for_the_only_call_of_the_main_conversation(
    exact: ExactCalls,
) -> None:
    long = "A title that is longer than the work itself, which is seldom good for a title"
    ask(exact, [system("Write a title."), user(TASK)], long, [])
    ask(exact, [user(TASK)], "done")
    assert trained(exact) == {1}


def test_of_two_conversations_of_one_call_the_reader_is_the_main_one(exact: ExactCalls) -> None:
    helper = ask(exact, [system("You look."), user(TASK)], ANSWER * 2, TOOLS[:1])
    reader = ask(exact, [system("You mend."), user(helper.reply.text)], "mended", TOOLS[1:])
    made = rows_of(exact.tree, UNBOUND)
    assert [(row.calls, row.kind) for row in made.rows] == [
        ((reader.number,), "main"),
        ((helper.number,), "sub-agent"),
    ]


@pytest.mark.parametrize("prompt", ["one", "changing"])
@pytest.mark.parametrize("keeps", [True, False])
def test_a_program_that_begins_anew_with_each_call_is_trained_whole(
    exact: ExactCalls, prompt: str, keeps: bool
) -> None:
    """It answers in a word that stands in the prompt, and may keep its history or none."""
    history: list[CanonicalMessage] = []
    for number in range(5):
        rules = "Say left or right." + (f" It is {number} o'clock." if prompt == "changing" else "")
        seen = user(f"You stand at {number}: left or right?")
        asked = [system(rules), *(history if keeps else ()), seen]
        call = ask(exact, asked, ("left", "right")[number % 2], [])
        history += [seen, call.reply]
    assert trained(exact) == set(range(5))


@pytest.mark.parametrize("answer", ["left", "right"])
def test_an_answer_in_a_later_history_is_read_however_short(exact: ExactCalls, answer: str) -> None:
    """Another conversation goes on, so that not all without tools count."""
    first = ask(exact, [user(TASK)], "I look.")
    ask(exact, [user(TASK), first.reply, user("on")], "I look again.")
    rules = "left or right, at {}"
    begun = ask(exact, [system(rules.format(1)), user("?")], answer, [])
    asked = [system(rules.format(2)), user("?"), begun.reply, user("and now?")]
    last = ask(exact, asked, "right", [])
    ask(exact, [*asked, last.reply, user("end")], "it ends", [])
    assert trained(exact) == {0, 1, 2, 3, 4}


def test_what_did_not_arrive_is_not_trained_though_its_twin_was_read(exact: ExactCalls) -> None:
    first = ask(exact, [user(TASK)], "I ask one")
    asked = [system("You find files."), user("find it")]
    lost = ask(exact, asked, ANSWER, [])
    lost.delivered = False
    again = ask(exact, asked, ANSWER, [])
    ask(exact, [user(TASK), first.reply, user(again.reply.text)], "good")
    assert trained(exact) == {0, 2, 3}


# What is drawn: programs with helpers of which parts are read, and with titles of their tasks.


def words(random: Random, length: int) -> str:
    """Return letters that stand nowhere else, without a space at an end."""
    return "".join(random.choice(LETTERS) for _ in range(length)).replace(" ", "x", 1).strip()


def drawn(chat: ChatTokenizer, seed: int) -> tuple[ExactCalls, set[int]]:
    """Return the calls of a program, and the numbers of those that nothing reads."""
    random, exact, dead = Random(seed), ExactCalls(chat), set[int]()
    history = [user(words(random, 60))]
    for step in range(random.randrange(3, 6)):
        call = ask(exact, history, words(random, 30))
        told = [words(random, 20), history[0].text[5:30]]
        for _ in range(random.randrange(3)):
            asked = [system(f"helper {words(random, 20)}"), user(words(random, 20))]
            helper = ask(exact, asked, words(random, random.choice((4, 12, 40, 90))), [])
            text = helper.reply.text.strip()
            at = random.randrange(max(1, len(text) - 15))
            told.append(text[at : at + random.randrange(16, 30)] if len(text) > 16 else text)
        if random.random() < 0.5 and step:
            task = history[0].text
            asked = [system(f"titles {words(random, 20)}"), user(f"Title: {task}")]
            title = task[: random.randrange(20, 40)]
            dead.add(ask(exact, asked, title, []).number)
        random.shuffle(told)
        history += [call.reply, user(" | ".join(told))]
    ask(exact, history, words(random, 30))
    return exact, dead


def assert_what_was_read_counts(chat: ChatTokenizer, num_seeds: int, rows: Any = rows) -> None:
    for seed in range(num_seeds):
        exact, dead = drawn(chat, seed)
        found = rows.trained_calls(exact.tree)
        assert {call.number for call in exact.tree.calls if call not in found} == dead, seed


@pytest.mark.parametrize("num_seeds", [10, pytest.param(300, marks=pytest.mark.long)])
def test_of_drawn_programs_what_was_read_is_trained_and_nothing_else(
    chat: ChatTokenizer, num_seeds: int
) -> None:
    assert_what_was_read_counts(chat, num_seeds)


def by_hand(calls: Sequence[ModelCall], answer: ModelCall) -> set[int]:
    """Find readers by looking at each part of 16 characters."""
    text = answer.reply.text.strip()
    parts = {text[at : at + 16] for at in range(max(1, len(text) - 15))}
    given = {call.number: [one.text for one in call.given] for call in calls}
    late = {call.number for call in calls if answer.number < call.num_seen}
    fresh = {
        part
        for part in parts
        if not any(part in told for n in given if n not in late for told in given[n])
    }
    return {
        n for n in late for told in given[n] if text in told or any(part in told for part in fresh)
    }


@pytest.mark.parametrize("num_seeds", [10, pytest.param(300, marks=pytest.mark.long)])
def test_readers_are_found_as_by_hand(chat: ChatTokenizer, num_seeds: int) -> None:
    for seed in range(num_seeds):
        calls = drawn(chat, seed)[0].tree.calls
        readers = Readers(calls)
        for answer in calls:
            if len(answer.reply.text) >= 16:
                assert {one.number for one in readers.of(answer)} == by_hand(calls, answer)


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("if not readers & earlier:", "if True:"),
        ("found |= readers\n        return found & later", "pass\n        return found & later"),
        ("for width in (1, 2, 4, 8):", "for width in (1, 2, 4, 8, 16):"),
        ("        elif text:\n", "        elif False:\n"),
    ],
    ids=["what stood there before", "parts", "longer runs", "short answers"],
)
def test_a_broken_rule_of_reading_is_noticed(chat: ChatTokenizer, line: str, other: str) -> None:
    broken = changed(rows, "from .reading import Readers\n", "")
    broken.__dict__["Readers"] = changed(reading, line, other).Readers
    with pytest.raises(AssertionError):
        assert_what_was_read_counts(chat, 10, broken)


def test_many_conversations_are_sorted_out_in_a_moment(chat: ChatTokenizer) -> None:
    """The texts are long, and each call is a root, as of a program that edits its history."""
    exact = ExactCalls(chat)
    base = ask(exact, [user("go")], "an answer")
    text = words(Random(0), 100_000)
    calls = exact.tree.calls
    for number in range(1, 40):
        given = (user(text), user(f"number {number}: {words(Random(number), 2000)}"))
        reply = replace(base.reply, content=(words(Random(-number), 2000),))
        calls.append(replace(base, number=number, given=given, reply=reply, num_seen=number))
    assert trained_calls(exact.tree) == set(calls)
    readers = Readers(calls)
    assert not any(readers.of(call) for call in calls)


def test_texts_of_any_letters_have_runs() -> None:
    message = CanonicalMessage("user", ("é\ud800 🦆" * 5,), (CanonicalCall("a", "{"),))
    runs: Callable[[str], Any] = reading._runs
    assert len(runs(message.text)) == 4
    assert np.array_equal(runs("x" * 15), np.empty(0))
    assert len(runs("x" * 400)) == 1
