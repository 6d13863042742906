"""What real chat templates can do for programs, and answers in each model's own format."""

import pytest
from tinkermq.actors.policy.template_facts import call_format, facts_of, read_text
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.envs.model_apis.canonical import CanonicalCall, CanonicalMessage, parse_reply

from tests.actors.generator.agents.programs import TEMPLATES, chat_of, response_template

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
ASKED = CanonicalMessage("user", ("What is it?",))
CALLED = CanonicalMessage(
    "assistant", ("I look.",), (CanonicalCall("search", '{"query": "x"}', "c00000000"),)
)
PARSED = ("qwen3_5_think", "gemma4", "lfm2_2_5", "nemotron_3_nano", "gptoss", "glm4moe")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_nothing_is_lacking_where_everything_was_proved(name: str) -> None:
    assert not list(facts_of(chat_of(name)).limitations())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("phi3", "tools are refused"),
        ("llama3_1", "several tool calls in one turn is refused"),
        ("qwen3_5_think", "system messages behind the first are shown as words of the user"),
        ("gemma4", "tool calls are not read"),
    ],
)
def test_what_a_template_cannot_do_is_told(name: str, told: str) -> None:
    assert told in "; ".join(facts_of(chat_of(name)).limitations())


def test_a_system_message_in_the_middle_is_shown_as_the_template_takes_it() -> None:
    chat = chat_of("qwen3_5_think")
    system = [CanonicalMessage("system", (text,)) for text in ("be brief", "be kind", "be quick")]
    history = [*system[:2], ASKED, CanonicalMessage("assistant", ("So.",)), system[2], ASKED]
    shaped = facts_of(chat).shaped(history)
    assert [message.role for message in shaped] == ["system", "user", "assistant", "user", "user"]
    assert shaped[0].text == "be brief\n\nbe kind"
    prompt = chat.decode(ExactCalls(chat).prepare(history).prompt_ids)
    assert "<system-reminder>\nbe quick\n</system-reminder>" in prompt
    grown = facts_of(chat).shaped([*history, system[0]])
    assert grown[: len(shaped)] == shaped


@pytest.mark.parametrize("name", PARSED)
def test_calls_in_a_models_own_format_are_read_by_its_own_response_template(name: str) -> None:
    chat = chat_of(name, response_template(name))
    told = [ASKED.for_template(), CALLED.for_template()]
    prompt = chat.render(told[:1], prompt=True, tools=[TOOL])
    whole = chat.render(told, prompt=False, tools=[TOOL])
    common = next(n for n in range(len(prompt), -1, -1) if whole.startswith(prompt[:n]))
    ids = chat.encode(whole[common:])
    reply = parse_reply(read_text(chat, chat.encode(prompt), ids, [TOOL]), "c00000", calls=True)
    assert [(call.name, call.key) for call in reply.calls] == [
        (call.name, call.key) for call in CALLED.calls
    ]
    assert facts_of(chat).reads_calls


FABRICATED = {
    "glm4moe": [
        '<tool_call>search\n{"query": "x"}</tool_call>',
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>unclosed",
        "<tool_call>search\n<arg_key>query</arg_key></tool_call>",
        "<tool_call>search\n5</tool_call>",
    ],
    "lfm2_2_5": [
        '<|tool_call_start|>[search("positional")]<|tool_call_end|>',
        "<|tool_call_start|>[search(5)]<|tool_call_end|>",
    ],
    "nemotron_3_nano": [
        '</think><tool_call>\n<function=search>\n{"query": "x"}\n</function>\n</tool_call>',
        "</think><tool_call>\n<function=search>\n<parameter=query>\nunclosed",
    ],
    "qwen3_5_think": [
        'hm</think>\n\n<tool_call>\n<function=search>\n{"query": "x"}\n</function>\n</tool_call>',
        "hm</think>\n\n<tool_call>\n<function=search>\n<parameter=query>\nunclosed",
        "hm</think>\n\n<tool_call>\n<function=search>\n<query>x</query>\n</function>\n</tool_call>",
    ],
}


@pytest.mark.parametrize(
    ("name", "said"), [(name, said) for name, texts in FABRICATED.items() for said in texts]
)
def test_a_call_is_not_given_arguments_that_the_model_did_not_write(name: str, said: str) -> None:
    chat = chat_of(name, response_template(name))
    prompt = chat.encode(chat.render([ASKED.for_template()], prompt=True, tools=[TOOL]))
    told = read_text(chat, prompt, chat.encode(said), [TOOL])
    reply = parse_reply(told, "c00000", calls=True, thinking="</think>" in said)
    assert not reply.calls


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("qwen2_5", None),
        ("qwen3", None),
        ("llama3_1", "llama"),
        ("qwen3_5_think", "qwen_xml"),
        ("glm4moe", "glm"),
        ("nemotron_3_nano", "qwen_xml"),
        ("phi3", None),
    ],
)
def test_the_template_says_in_which_format_its_model_writes_calls(
    name: str, format_name: str | None
) -> None:
    chat = chat_of(name)
    read = call_format(chat)
    assert (read.__name__ if read else None) == format_name
    assert facts_of(chat).reads_calls == (name != "phi3")


def test_a_call_in_another_models_format_is_text() -> None:
    said = '{"name": "search", "parameters": {"query": "x"}}'
    for name in ("qwen2_5", "glm4moe", "qwen3_5_think"):
        chat = chat_of(name)
        assert read_text(chat, [], chat.encode(said), [TOOL]) == said
    chat = chat_of("llama3_1")
    assert read_text(chat, [], chat.encode(said), []) == said
    reply = parse_reply(read_text(chat, [], chat.encode(said), [TOOL]), "c", calls=True)
    assert [(call.name, call.value) for call in reply.calls] == [("search", {"query": "x"})]


@pytest.mark.parametrize("name", PARSED)
def test_an_answer_that_is_not_well_formed_is_text(name: str) -> None:
    chat = chat_of(name, response_template(name))
    ids = chat.encode("no call { at all")
    assert "no call { at all" in read_text(chat, chat.encode("hi"), ids, [TOOL])


def test_every_template_of_these_tests_says_what_it_can_do() -> None:
    for name in TEMPLATES:
        facts = facts_of(chat_of(name))
        assert facts.continues_users or any(
            "row of its own" in told for told in facts.limitations()
        )


def test_in_a_format_without_an_object_a_call_without_arguments_is_one() -> None:
    for name, said in {
        "glm4moe": "<tool_call>search\n</tool_call>",
        "qwen3_5_think": "hm</think>\n\n<tool_call>\n<function=search>\n</function>\n</tool_call>",
    }.items():
        for answers in (None, response_template(name)):
            chat = chat_of(name, answers)
            prompt = chat.encode(chat.render([ASKED.for_template()], prompt=True, tools=[TOOL]))
            told = read_text(chat, prompt, chat.encode(said), [TOOL])
            reply = parse_reply(told, "c", calls=True, thinking="</think>" in said)
            assert [(call.name, call.value) for call in reply.calls] == [("search", {})]
