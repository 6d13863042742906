"""What is rendered behind a turn is what the template writes there, whatever came before it."""

import numpy as np
import pytest
from tinkermq.actors.policy.template_facts import HistoryRenderer
from tinkermq.envs.model_apis.canonical import CanonicalCall, CanonicalMessage

from tests.actors.generator.agents.programs import TEMPLATES, TOOLS, chat_of, user

NO_TOOLS = ("phi3",)
ONE_CALL = ("llama3_1", "gptoss")
REWRITES = ("qwen3", "qwen3_5_think", "glm4moe")
"""Templates that drop the reasoning of earlier turns once a user speaks."""


def said(text: str, *names: str, reasoning: str | None = None) -> CanonicalMessage:
    calls = tuple(CanonicalCall("search", '{"query": "x"}', name) for name in names)
    return CanonicalMessage("assistant", (text,) if text else (), calls, reasoning)


def found(name: str) -> CanonicalMessage:
    return CanonicalMessage("tool", (f"found {name}",), call_id=name)


def histories(*, tools: bool) -> list[list[CanonicalMessage]]:
    plain = [user("go")], [user("first"), said("an answer"), user("second")]
    if not tools:
        return [*plain]
    thought = said("", "callaaaa1", reasoning="hm")
    return [*plain, [user("go"), thought, found("callaaaa1")]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_follows_a_turn_does_not_depend_on_what_came_before_it(name: str) -> None:
    renderer = HistoryRenderer(chat_of(name))
    tools = [] if name in NO_TOOLS else TOOLS
    turns: list[tuple[CanonicalMessage, list[CanonicalMessage]]] = [
        (said("a reply"), [user("next")]),
        (said("a reply"), []),
        (said("a reply"), [user("a"), said("foreign"), user("b")]),
    ]
    if tools:
        turns.append((said("", "callbbbb2"), [found("callbbbb2")]))
        turns.append((said("I look.", "callbbbb2"), [found("callbbbb2"), user("and?")]))
    if tools and name not in ONE_CALL:
        both = said("", "callbbbb2", "callcccc3")
        turns.append((both, [found("callbbbb2"), found("callcccc3")]))
    for history in histories(tools=bool(tools)):
        for reply, new in turns:
            assert renderer.continues(history, reply, new, tools), (history, reply, new)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_rewrites_history_is_told(name: str) -> None:
    renderer = HistoryRenderer(chat_of(name))
    history = [user("go"), said("an answer", reasoning="hm"), user("on")]
    later = [user("next"), said("more"), user("last")]
    appends = renderer.appends(history, said("a reply", reasoning="so"), later, [])
    assert appends == (name not in REWRITES)


def test_the_end_of_a_turn_is_given_where_it_was_not_said() -> None:
    chat = chat_of("qwen2_5")
    renderer, (end, *_) = HistoryRenderer(chat), chat.stop_token_ids
    whole = renderer.following(said("a reply"), [5, end], [user("next")], [])
    cut = renderer.following(said("a reply"), [5], [user("next")], [])
    assert whole is not None
    assert cut is not None
    assert cut.tolist() == [end, *whole.tolist()]
    nothing = renderer.following(said("a reply"), np.empty(0, np.int32), [user("next")], [])
    assert nothing is not None
    assert nothing.tolist() == cut.tolist()
