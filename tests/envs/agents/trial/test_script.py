"""What the script says, and what is made of the calls that follow: no program, no broker."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tinkermq.envs.agents.messages import CanonicalMessage, joined
from tinkermq.envs.agents.replies import parse_reply
from tinkermq.envs.agents.trial.arguments import example, spaced
from tinkermq.envs.agents.trial.calls import TrialCall, place
from tinkermq.envs.agents.trial.script import scripted_answer
from tinkermq.schemas.output_format import OutputFormat


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    """A tool, as chat templates take it."""
    shape = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": name, "parameters": shape}}


def text(role: Any, said: str) -> CanonicalMessage:
    """A message that is a text."""
    return CanonicalMessage(role, joined([said]))


ASKED = text("user", "What is 17 * 24?")
SYSTEM = text("system", "Be quick.")
TOOLS = [tool("search", query={"type": "string"}), tool("final_answer", answer={"type": "string"})]


def answered(call: TrialCall) -> CanonicalMessage:
    """What the script says to a call; it has it then."""
    said = scripted_answer(call.history, call.tools, call.form)
    reply = parse_reply(said, f"call_{call.number}_", calls=bool(call.tools))
    call.replies = [reply]
    return reply


def follow(
    call: TrialCall, history: Sequence[CanonicalMessage], tools: Any = None
) -> tuple[int | None, set[str]]:
    """Where the next call stands, and what was changed before it."""
    following = TrialCall(call.number + 1, history, call.tools if tools is None else tools)
    placement = place(following, [call])
    return placement.parent, set(placement.changes)


# -- the script ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "x"),
        ({"enum": ["b", "a"]}, "b"),
        ({"type": "integer", "minimum": 7}, 7),
        ({"type": ["null", "number"]}, 2),
        ({"anyOf": [{"type": "null"}, {"type": "boolean"}]}, True),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [2, 2]),
        (
            {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]},
            {"b": None},
        ),
        (
            {"$ref": "#/$defs/one", "$defs": {"one": {"type": "object", "properties": {"n": {}}}}},
            {"n": "x"},
        ),
        ("no schema", "x"),
    ],
)
def test_arguments_fit_their_schema(schema: Any, value: Any) -> None:
    assert example(schema) == value


def test_a_schema_that_refers_to_itself_ends() -> None:
    schema = {"$ref": "#/$defs/one"}
    schema = {**schema, "$defs": {"one": {"type": "object", "properties": {"one": schema}}}}
    assert json.loads(spaced(example(schema)))["one"]


def test_a_tool_is_called_then_another_and_then_it_ends_as_the_program_wants_it() -> None:
    history = [ASKED]
    tools = [*TOOLS, tool("look", at={"type": "integer"})]
    names: list[str] = []
    for number in range(3):
        reply = answered(TrialCall(number, history, tools))
        names += [call.name for call in reply.calls]
        result = text("tool", "found")
        history = [*history, reply, replace(result, call_id=reply.calls[0].id)]
    assert names == ["search", "look", "final_answer"]


def test_answers_hold_what_programs_like_to_lose() -> None:
    reply = answered(TrialCall(0, [ASKED], TOOLS))
    assert reply.reasoning
    assert reply.calls[0].arguments == '{"query":  "x" }'
    plain = answered(TrialCall(0, [ASKED]))
    assert plain.text != plain.text.strip()
    assert not plain.calls


# -- what is made of it ----------------------------------------------------------------------------


def test_an_echo_continues_however_it_is_spelt() -> None:
    call = TrialCall(0, [SYSTEM, ASKED], TOOLS)
    reply = answered(call)
    result = replace(text("tool", "found"), call_id=reply.calls[0].id)
    assert follow(call, [SYSTEM, ASKED, reply, result]) == (0, set())
    bare = replace(
        reply, reasoning=None, calls=(replace(reply.calls[0], arguments='{"query":"x"}', id="1"),)
    )
    assert follow(call, [SYSTEM, ASKED, bare, result]) == (0, {"reasoning", "arguments", "ids"})


def test_what_is_changed_of_an_answer_is_named() -> None:
    call = TrialCall(0, [ASKED], TOOLS)
    reply = answered(call)
    more = text("user", "Go on.")

    def changed(echo: CanonicalMessage) -> set[str]:
        parent, changes = follow(call, [ASKED, echo, more])
        assert parent is None
        return changes

    assert changed(replace(reply, content=("I will look it up.",))) == {"space"}
    assert changed(replace(reply, content=("Calling search",))) == {"text"}
    assert changed(replace(reply, reasoning="I think")) == {"reasoning_text"}
    other = replace(reply.calls[0], arguments='{"query": "y"}')
    assert changed(replace(reply, calls=(other,))) == {"values"}
    assert changed(replace(reply, calls=())) == {"calls"}


def test_why_a_call_continues_none_is_named() -> None:
    call = TrialCall(0, [SYSTEM, ASKED], TOOLS)
    reply = answered(call)
    more = text("user", "Go on.")
    assert follow(call, [SYSTEM, ASKED]) == (None, {"sample"})
    assert follow(call, [SYSTEM, ASKED, more]) == (None, {"dropped"})
    late = text("system", "Be quick: it is late.")
    assert follow(call, [late, ASKED, reply, more]) == (None, {"system"})
    assert follow(call, [SYSTEM, ASKED, reply, more], TOOLS[:1]) == (None, {"tools"})
    title = [text("system", "Name this."), text("user", "Find a title for it.")]
    assert follow(call, title, ()) == (None, {"apart"})


def test_an_answer_that_is_left_out_behind_another_is_named() -> None:
    first = TrialCall(0, [ASKED], TOOLS)
    reply = answered(first)
    result = replace(text("tool", "found"), call_id=reply.calls[0].id)
    second = TrialCall(1, [ASKED, reply, result], TOOLS)
    answered(second)
    complaint = text("user", "Call a tool.")
    third = place(TrialCall(2, [*second.history, complaint], TOOLS), [first, second])
    assert (third.parent, third.num_new, third.changes) == (0, 2, {"dropped"})
    again = place(TrialCall(2, second.history, TOOLS), [first, second])
    assert (again.parent, again.changes) == (0, {"sample"})


def test_equal_words_of_another_conversation_are_no_echo() -> None:
    main = TrialCall(0, [ASKED], TOOLS)
    reply = answered(main)
    other = TrialCall(1, [text("user", "A part of it.")], TOOLS[:1])
    answered(other)
    result = replace(text("tool", "found"), call_id=reply.calls[0].id)
    placement = place(TrialCall(2, [ASKED, reply, result], TOOLS), [main, other])
    assert (placement.parent, placement.changes) == (0, frozenset())


def test_a_summary_of_what_was_said_is_a_compaction() -> None:
    call = TrialCall(0, [SYSTEM, ASKED, text("user", "Now say it all.")])
    reply = answered(call)
    summary = [SYSTEM, text("user", f"So far: {reply.text.strip()}. Go on.")]
    assert follow(call, summary) == (None, {"compacted"})


# -- forms of answers ------------------------------------------------------------------------------


def test_the_script_answers_in_the_form_that_is_demanded() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"]}
    call = TrialCall(0, [ASKED], TOOLS, OutputFormat(json_schema=schema))
    assert json.loads(answered(call).text) == {"a": 3}
    both = TrialCall(0, [ASKED], TOOLS, OutputFormat(json_schema=schema, functions=["search"]))
    (first,) = answered(both).calls
    assert first.name == "search"
    after = [ASKED, both.replies[0], text("tool", "408")]
    assert json.loads(answered(replace(both, history=after)).text) == {"a": 3}
    any_tool = TrialCall(0, [ASKED], TOOLS, OutputFormat(functions=["final_answer", "search"]))
    assert [one.name for one in answered(any_tool).calls] == ["search"]
    ends = replace(any_tool, history=[ASKED, any_tool.replies[0], text("tool", "408")])
    assert [one.name for one in answered(ends).calls] == ["final_answer"]
