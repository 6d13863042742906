"""Which calls of a program are trained, and where they stand among those of their episode."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout import program_loop
from tinkermq.actors.rollout.call_tree import (
    CallTree,
    EpisodeCredit,
    ModelCall,
    PostedRewards,
    rows_of,
)
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.envs.agents.call_selection import Readers, call_lines, main_root, why_untrained
from tinkermq.schemas.agent import CallPlaces
from tinkermq.schemas.model_apis.canonical import ModelMessage

from tests.actors.rollout.calls.programs import TOOLS, chat_of, user
from tests.actors.rollout.calls.test_exact_calls import CALL, ask

UNBOUND = 1 << 30
NO_TITLES = "not /Write a title/"
LETTERS = "abcdefghij "
TASK = "mend the test that fails in module seven"


def system(text: str) -> ModelMessage:
    return ModelMessage(role="system", content=(text,))


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return chat_of("qwen2_5")


@pytest.fixture
def exact(chat: ChatTokenizer) -> ExactCalls:
    return ExactCalls(chat)


# What is drawn: programs with helpers of which parts are read, and with titles of their tasks.


def words(random: Random, length: int) -> str:
    """Return letters that stand nowhere else, without a space at an end."""
    return "".join(random.choice(LETTERS) for _ in range(length)).replace(" ", "x", 1).strip()


def drawn(chat: ChatTokenizer, seed: int) -> ExactCalls:
    """Return the calls of a program."""
    random, exact = Random(seed), ExactCalls(chat)
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
            ask(exact, asked, title, [])
        random.shuffle(told)
        history += [call.reply, user(" | ".join(told))]
    ask(exact, history, words(random, 30))
    return exact


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
        calls = drawn(chat, seed).tree.calls
        readers = Readers(calls)
        for answer in calls:
            if len(answer.reply.text) >= 16:
                assert {one.number for one in readers.of(answer)} == by_hand(calls, answer)


def test_many_conversations_are_sorted_out_in_a_moment(chat: ChatTokenizer) -> None:
    """The texts are long, and each call is a root, as of a program that edits its history."""
    exact = ExactCalls(chat)
    base = ask(exact, [user("go")], "an answer")
    text = words(Random(0), 100_000)
    calls = exact.tree.calls
    for number in range(1, 40):
        given = (user(text), user(f"number {number}: {words(Random(number), 2000)}"))
        reply = base.reply.replaced(content=(words(Random(-number), 2000),))
        calls.append(replace(base, number=number, given=given, reply=reply, num_seen=number))
    readers = Readers(calls)
    assert not any(readers.of(call) for call in calls)


# -- all, main, by a pattern -----------------------------------------------------------------------


def memory_extraction(exact: ExactCalls, num_calls: int = 1) -> None:
    """A program as qwen-code: work, then a helper with tools of its own that reads all of it."""
    history = [system("You are a coder."), user(TASK)]
    for number in range(num_calls):
        answer = ask(exact, history, f"I mended the line {number} of module seven")
        history += [answer.reply, user(f"result {number}")]
    told = "\n".join(message.text for message in history)
    asked = [system("You keep memories."), user(f"Extract memories:\n{told}")]
    for number in range(3):
        answer = ask(exact, asked, f"I wrote memory number {number}", TOOLS[:1])
        asked += [answer.reply, user("and?")]


def instructor(exact: ExactCalls) -> None:
    """Two independent calls with one outcome: in tool mode, then in JSON mode."""
    ask(exact, [user(f"{TASK}, as a tool call")], "a call", TOOLS[:1])
    ask(exact, [system("Answer as JSON."), user(f"{TASK}, as JSON")], '{"module": 7}', [])


def planner(exact: ExactCalls) -> None:
    """A plan without tools, then an executor with tools that begins with it."""
    plan = ask(exact, [user("make a plan")], "first the tests, then the module", [])
    asked = [system("You do it."), user(plan.reply.text)]
    ask(exact, [*asked, ask(exact, asked, "I do it now").reply, user("on")], "it is done")


def long_helper(exact: ExactCalls) -> None:
    """A main conversation of two calls, whose helper takes five."""
    main = ask(exact, [user(TASK)], "I ask a helper about the parser")
    asked = [user("look for: a helper about the parser")]
    for number in range(5):
        found = ask(exact, asked, f"the folder number {number} of it has none", TOOLS[:1])
        asked += [found.reply, user("on")]
    ask(exact, [user(TASK), main.reply, user(f"told: {found.reply.text}")], "done")


def debate(exact: ExactCalls) -> None:
    """Two who answer each other, the first with tools."""
    one, other = [user("you are for it")], [user("you are against it")]
    for number in range(3):
        said = ask(exact, one, f"I say that number {number} speaks for it")
        other += [user(said.reply.text)]
        heard = ask(exact, other, f"I object to it by the number {number}", [])
        one += [said.reply, user(heard.reply.text)]
        other += [heard.reply]


def title_first(exact: ExactCalls) -> None:
    """A title beside a text program without tools."""
    ask(exact, [system("Write a title."), user(TASK)], "Mending it", [])
    first = ask(exact, [user(TASK)], "I look.", [])
    ask(exact, [user(TASK), first.reply, user("on")], "I look again.", [])


def summary_last(exact: ExactCalls) -> None:
    """Work with tools, and a call without that sums it up."""
    first = ask(exact, [user(TASK)], "I looked at the parser")
    last = ask(exact, [user(TASK), first.reply, user("on")], "The parser was mended well")
    ask(exact, [user(f"Sum up: {last.reply.text}")], "The parser was mended, all is well " * 9, [])


def long_memory(exact: ExactCalls) -> None:
    memory_extraction(exact, 2)


def memory_of_history(exact: ExactCalls) -> None:
    """Work in one call, and a helper that is given the history as messages, with more calls."""
    asked = [system("You are a coder."), user(TASK)]
    answer = ask(exact, asked, "I mended it in line 17 of module seven")
    history = [system("You keep memories."), user(TASK), answer.reply, user("Extract memories.")]
    for number in range(4):
        history += [
            ask(exact, history, f"{CALL} number {number}", TOOLS[:1]).reply,
            user("and more?"),
        ]


def memory_without_tools(exact: ExactCalls) -> None:
    """As above, of a text program; its helper has more calls, and longer ones."""
    answer = ask(exact, [user(TASK)], "it stands in line 17 of module seven", [])
    history = [system("You keep memories."), user(f"{TASK}\n{answer.reply.text}")]
    for number in range(3):
        history += [ask(exact, history, f"memory {number}: " + "m" * 200, []).reply, user("on")]


def two_helpers_after_the_end(exact: ExactCalls) -> None:
    """A summary and a title of the summary, both after the work."""
    answer = ask(exact, [user(TASK)], "I mended the parser of module seven")
    summary = ask(exact, [user(f"Sum up: {answer.reply.text}")], "The module parses again now", [])
    ask(exact, [user(f"Write a title: {summary.reply.text}")], "Parsing", [])


def judged_by_itself(exact: ExactCalls) -> None:
    """Three attempts at once, and a call that chooses one of them."""
    attempts = [ask(exact, [user(TASK)], f"attempt of number {n} at the module") for n in range(3)]
    told = "\n".join(one.reply.text for one in attempts)
    ask(exact, [system("Choose."), user(told)], "the second", [])


def one_call(exact: ExactCalls) -> None:
    ask(exact, [user(TASK)], "done")


PROGRAMS: list[tuple[Callable[[ExactCalls], None], int, set[int]]] = [
    (memory_extraction, 0, {0}),
    (long_memory, 0, {0, 1}),
    (instructor, 0, {0}),
    (planner, 1, {1, 2}),
    (long_helper, 0, {0, 6}),
    (debate, 0, {0, 2, 4}),
    (title_first, 1, {1, 2}),
    (summary_last, 0, {0, 1}),
    (memory_of_history, 0, {0}),
    (memory_without_tools, 0, {0}),
    (two_helpers_after_the_end, 0, {0}),
    (one_call, 0, {0}),
]


@pytest.mark.parametrize(("program", "root", "main"), PROGRAMS)
def test_each_answer_is_trained_once_and_the_main_conversation_comes_first(
    exact: ExactCalls, program: Callable[[ExactCalls], None], root: int, main: set[int]
) -> None:
    program(exact)
    calls = exact.tree.calls
    made = rows_of(exact.tree, UNBOUND)
    assert sorted(n for row in made.rows for n in row.calls) == list(range(len(calls)))
    num_tokens = sum(len(call.generated.token_ids) for call in calls)
    assert sum(int(row.mask.sum()) for row in made.rows) == num_tokens
    assert main_root(calls) is calls[root]
    assert made.rows[0].kind == "main"
    assert set(made.rows[0].calls) <= main
    only = rows_of(exact.tree, UNBOUND, "main")
    assert {n for row in only.rows for n in row.calls} == main
    assert set(only.why_not.values()) == ({"other"} if len(main) < len(calls) else set())


def test_of_several_attempts_each_is_trained_and_one_is_the_main_row(exact: ExactCalls) -> None:
    judged_by_itself(exact)
    made = rows_of(exact.tree, UNBOUND)
    assert sorted(row.calls for row in made.rows) == [(0,), (1,), (2,), (3,)]
    assert main_root(exact.tree.calls) in exact.tree.calls[:3]
    only = rows_of(exact.tree, UNBOUND, "main")
    assert only.untrained == tuple(n for n in range(4) if n != only.rows[0].calls[0])


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        ("all", {0, 1, 2, 3}),
        ("main", {0}),
        ("/You are a coder/", {0}),
        ("not /You are a coder/", {1, 2, 3}),
        ("/^You are/", {0}),
        ("/(?i)MEMORIES/", {1, 2, 3}),
        ("not /memories/", {0}),
        ("/You (are|keep)/", {0, 1, 2, 3}),
        ("/nothing like it/", set()),
        ("not /nothing like it/", {0, 1, 2, 3}),
        ("/mend the test/", set()),
    ],
)
def test_a_pattern_is_looked_for_in_the_system_message_of_the_conversation(
    exact: ExactCalls, which: str, wanted: set[int]
) -> None:
    memory_extraction(exact)
    made = rows_of(exact.tree, UNBOUND, which)
    assert {n for row in made.rows for n in row.calls} == wanted
    assert {call.number for call in exact.tree.calls} - wanted == set(made.untrained)


def test_a_conversation_without_a_system_message_is_known_by_its_first_message(
    exact: ExactCalls,
) -> None:
    instructor(exact)
    assert rows_of(exact.tree, UNBOUND, "/as a tool call/").untrained == (1,)
    assert rows_of(exact.tree, UNBOUND, "not /as a tool call/").untrained == (0,)


def test_what_did_not_arrive_or_was_taken_out_is_trained_in_no_case(exact: ExactCalls) -> None:
    instructor(exact)
    exact.tree.calls[0].delivered = False
    for which in ("all", "main", "/./", "not /nothing/"):
        found = why_untrained(exact.tree.calls, which, {0, 1})
        assert list(found.values()) == ["undelivered", "left out"], which


@pytest.mark.parametrize(
    "which", ["mian", "", "/", "//", "not", "title", "/open", "not not /a/", "/(/"]
)
def test_a_value_that_is_no_pattern_is_refused(exact: ExactCalls, which: str) -> None:
    instructor(exact)
    with pytest.raises(ValueError, match=r"does not say which|must be a regular expression"):
        why_untrained(exact.tree.calls, which)


def test_the_main_conversation_does_not_depend_on_how_calls_interleave(
    chat: ChatTokenizer,
) -> None:
    def main_of(order: Sequence[int]) -> bytes:
        exact = ExactCalls(chat)
        threads = [[user(f"you are number {number}")] for number in range(3)]
        for thread in order:
            call = ask(exact, threads[thread], f"said by {thread} at {len(threads[thread])}")
            threads[thread] += [call.reply, user("and then?")]
        found = main_root(exact.tree.calls)
        assert found is not None
        return found.digest

    orders = ([0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 0, 0], [1, 0, 0, 2, 1, 2], [0, 0, 2, 1, 2, 1])
    assert len({main_of(order) for order in orders}) == 1


# Where calls stand among those of their episode, and what becomes of what was posted for them.


Said = ModelMessage


def episode() -> ExactCalls:
    """Return a main conversation that throws an answer away, and two helpers that it reads.

    main: 0, 5 (thrown away), 6, 7; a title that nobody reads: 1; helpers: 2 and 3, 4.
    """
    exact = ExactCalls(chat_of("qwen2_5"))
    first = ask(exact, [user("go")], "I ask both of them")
    ask(
        exact, [Said(role="system", content=("Write a title.",)), user("go")], "A title of work", []
    )
    one = ask(exact, [user("find the file")], "it is in the folder src/lib", [])
    asked = [user("read the file")]
    other = ask(exact, asked, "I have to look for it", [])
    other = ask(exact, [*asked, other.reply, user("on")], "it says nothing about it", [])
    told = user(f"They say: {one.reply.text} and {other.reply.text}")
    ask(exact, [user("go"), first.reply, told], "so what")
    again = ask(exact, [user("go"), first.reply, told, user("think!")], "it is known now")
    ask(exact, [user("go"), first.reply, told, user("think!"), again.reply, user("ok?")], "yes")
    return exact


def places_of(tree: CallTree, info: dict[str, Any], **how: Any) -> tuple[EpisodeCredit, dict]:
    """Return the credit of an episode, and the place of each trained call by name."""
    found = rows_of(tree, how.pop("max_tokens", 1 << 30), NO_TITLES, **how)
    credit = EpisodeCredit(tree, found, PostedRewards.of(info, tree))
    by_call: dict[int, dict[str, Any]] = {}
    for at, row in enumerate(found.rows):
        places = credit.places(row, 2.0, is_main=not at)
        assert isinstance(places, CallPlaces)
        assert (places.outcome, bool(places.rewarded)) == ((2.0, bool(info)) if not at else (0, 0))
        for place, number in enumerate(row.calls):
            names = ("nexts", "depths", "observed", "rewards", "branches", "roles")
            by_call[number] = {name: getattr(places, name)[place] for name in names}
    return credit, by_call


def test_a_call_leads_to_what_continues_it_and_a_helper_to_who_reads_it() -> None:
    tree = episode().tree
    _, by_call = places_of(tree, {})
    nexts = {number: int(place["nexts"]) for number, place in by_call.items()}
    assert nexts == {0: 6, 2: 5, 3: 4, 4: 5, 5: -1, 6: 7, 7: -1}
    depths = {number: int(place["depths"]) for number, place in by_call.items()}
    assert depths == {0: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 2}
    observed = {number: int(place["observed"]) for number, place in by_call.items()}
    assert observed == {number: len(tree.calls[number].given_ids) for number in by_call}
    roles = {number: place["roles"] for number, place in by_call.items()}
    assert roles == {n: "sub-agent" if n in (2, 3, 4) else "main" for n in by_call}


def test_a_branch_has_what_continues_the_call_it_begins_with() -> None:
    info = {
        "branch_rewards": {"3": 0.5, "6": -1, "1": 3, "99": 1, "x": 1},
        "branch_names": {"3": "reader", "0": "boss"},
    }
    credit, by_call = places_of(episode().tree, info)
    branches = {number: int(place["branches"]) for number, place in by_call.items()}
    assert branches == {0: -1, 2: -1, 3: 3, 4: 3, 5: -1, 6: 6, 7: 6}
    assert [by_call[n]["roles"] for n in (0, 2, 3, 4, 7)] == [
        "boss",
        "sub-agent",
        "reader",
        "reader",
        "boss",
    ]
    assert credit.num_lost == 1, "that of the title, which is not trained"


def test_a_reward_of_a_call_that_is_not_trained_is_that_of_the_one_before_it() -> None:
    tree = episode().tree
    info = {"call_rewards": {"0": 1.0, "5": 0.5, "6": 2, "1": 4.0, "7": float("nan")}}
    found = rows_of(tree, 1 << 30, NO_TITLES, {5, 6})
    credit = EpisodeCredit(tree, found, PostedRewards.of(info, tree))
    assert credit.rewards == {0: 3.5}
    assert credit.num_lost == 1
    (main, *_) = found.rows
    assert credit.places(main, 0.0, is_main=True).nexts.tolist() == [7, -1]


@pytest.mark.parametrize(
    "told", [5, "x", [1], {"0": "x"}, {"0": None}, {0: 1.0}, {"-1": 1.0}, {"0": True and "1"}]
)
def test_what_is_no_reward_of_a_call_is_left_out(told: Any) -> None:
    tree = episode().tree
    posted = PostedRewards.of({"call_rewards": told, "branch_names": told}, tree)
    assert posted.calls == {}


def test_people_are_shown_what_was_posted_for_calls_and_branches() -> None:
    tree = episode().tree
    info = {
        "call_rewards": {"0": 0.0, "1": 2},
        "branch_rewards": {"3": -0.5},
        "branch_names": {"3": "reader"},
    }
    posted, found = PostedRewards.of(info, tree), rows_of(tree, 1 << 30)
    told = [program_loop._describe_call(call, found, posted) for call in tree.calls]
    shown = [(line.reward, line.branch_reward, line.name) for line in call_lines({"calls": told})]
    assert shown[:4] == [(0, None, ""), (2, None, ""), (None, None, ""), (None, -0.5, "reader")]
