"""Where calls stand among those of their episode, and what becomes of what was posted for them."""

from typing import Any

import pytest
from tinkermq.actors.rollout import program_loop
from tinkermq.actors.rollout.call_tree import (
    CallTree,
    EpisodeCredit,
    PostedRewards,
    rows_of,
)
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.envs.agents.call_lines import call_lines
from tinkermq.envs.model_apis.canonical import CanonicalMessage
from tinkermq.schemas.agent import CallPlaces

from tests.actors.generator.agents.programs import chat_of, user
from tests.actors.generator.agents.test_exact_calls import ask

Said = CanonicalMessage


def episode() -> ExactCalls:
    """Return a main conversation that throws an answer away, and two helpers that it reads.

    main: 0, 5 (thrown away), 6, 7; a title that nobody reads: 1; helpers: 2 and 3, 4.
    """
    exact = ExactCalls(chat_of("qwen2_5"))
    first = ask(exact, [user("go")], "I ask both of them")
    ask(exact, [Said("system", ("Write a title.",)), user("go")], "A title of work", [])
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
    found = rows_of(tree, how.pop("max_tokens", 1 << 30), "alive", **how)
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
    found = rows_of(tree, 1 << 30, "alive", {5, 6})
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
