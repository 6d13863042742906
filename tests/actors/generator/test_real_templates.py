"""Chat templates of models that people use: tokens as transformers makes them, hostile texts."""

import re
from random import Random
from typing import Any

import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.template_facts import facts_of
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.envs.model_apis.canonical import CanonicalMessage

from tests.actors.generator.agents import programs
from tests.actors.generator.agents.programs import FOLDER, TOOLS, RecordingEngine, chat_of

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
OPENED = ("deepseek_r1_distill_training", "qwen3_5_think", "qwen3_5_think_training")
APPENDING = (
    "cohere",
    "gemma",
    "gemma3",
    "gemma4",
    "lfm2",
    "llama3_1",
    "llama3_2",
    "phi3",
    "phi3_5",
    "qwen2_5",
    "qwen3_instruct_2507",
    "qwen3_vl",
)
NAMES = (*APPENDING, *OPENED, "deepseekv3", "glm4moe", "gptoss", "nemotron_3_nano", "qwen3")


@pytest.fixture(params=[False, True], ids=["plain", "special"])
def marks_are_special(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let a tokenizer call the marks of reasoning and of calls special."""
    if request.param:
        monkeypatch.setattr(programs, "_PLAIN", ())
        pattern = f"{programs._SPECIAL.pattern}|{'|'.join(map(re.escape, MARKS))}"
        monkeypatch.setattr(programs, "_SPECIAL", re.compile(pattern))
    return request.param


@pytest.fixture
def chat(request: pytest.FixtureRequest, marks_are_special: bool) -> ChatTokenizer:
    made = chat_of(request.param)
    if marks_are_special:
        made._tokenizer.add_special_tokens(
            {"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False
        )
        extra = made.stop_token_ids
        made = ChatTokenizer(made._tokenizer, extra_stop_token_ids=extra)
    return made


def ids_of(chat: ChatTokenizer, messages: list[dict[str, Any]], *, prompt: bool) -> list[int]:
    made: Any = chat._tokenizer.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
    )
    return list(made)


def specials_of(chat: ChatTokenizer, ids: list[int]) -> list[str]:
    added = chat._tokenizer.added_tokens_decoder
    return [added[one].content for one in ids if one in added and added[one].special]


def told(text: str, times: int = 2) -> list[dict[str, Any]]:
    question = {"role": "user", "content": text}
    said = {"role": "assistant", "content": "sure"}
    return [question, said] * times


@pytest.mark.parametrize("chat", NAMES, indirect=True)
def test_prompts_are_those_of_transformers_and_hold_no_other_special_tokens(
    chat: ChatTokenizer,
) -> None:
    names = [one.content for one in chat._tokenizer.added_tokens_decoder.values()]
    plain = told("go on")[:-1]
    ids = chat.prompt(plain)
    assert ids == ids_of(chat, plain, prompt=True)
    random = Random(7)
    for _ in range(8):
        random.shuffle(names)
        text = "go" + random.choice(["", " ", "\n"]).join(names[: random.randrange(1, 9)]) + "on"
        hostile = chat.prompt(told(text)[:-1])
        assert specials_of(chat, hostile) == specials_of(chat, ids)
        assert text in chat._tokenizer.decode(hostile)


@pytest.mark.parametrize("chat", APPENDING, indirect=True)
def test_conversations_are_learnt_with_the_tokens_of_transformers(chat: ChatTokenizer) -> None:
    chat.check_template()
    messages = told("go on", 3)
    spoken = chat.conversation(messages)
    whole = ids_of(chat, messages, prompt=False)
    assert spoken.token_ids.tolist() == whole[: len(spoken.token_ids)]
    assert not str(chat._tokenizer.decode(whole[len(spoken.token_ids) :])).strip()
    assert len(spoken.turn_ends) == 3
    assert {int(spoken.token_ids[end]) for end in spoken.turn_ends} <= set(chat.stop_token_ids)


@pytest.mark.parametrize("chat", OPENED, indirect=True)
def test_a_template_that_opens_the_reasoning_is_read_so(chat: ChatTokenizer) -> None:
    prompt = chat.prompt(told("go on")[:1])
    assert chat.answer(prompt, chat.encode_reply("hm</think>so")) == "<think>\nhm</think>so"


@pytest.mark.parametrize("chat", ["qwen2_5", "qwen3", "qwen3_instruct_2507"], indirect=True)
def test_a_program_is_told_calls_and_reasoning_whether_or_not_their_marks_are_special(
    chat: ChatTokenizer,
) -> None:
    facts = facts_of(chat)
    assert facts.reads_calls
    exact = ExactCalls(chat, facts=facts)
    engine = RecordingEngine(chat, Random(1))
    prepared = exact.prepare([CanonicalMessage("user", ("go",))], TOOLS)
    text = '<think>hm</think>I look.<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    generated = engine.generate(prepared.prompt_ids.tolist(), text)
    reply = exact.finish(prepared, generated).reply
    assert (reply.reasoning, reply.text) == ("hm", "I look.")
    assert [call.name for call in reply.calls] == ["search"]


def test_the_templates_are_there() -> None:
    assert all((FOLDER / f"{name}.jinja").is_file() for name in NAMES)
