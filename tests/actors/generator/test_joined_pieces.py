"""Pieces of a conversation join to the tokens of the whole, turns end as templates write it."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer, Conversation
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.schemas.wire.errors import DataError, ModelError
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.actors.generator.test_special_text import TOKENIZERS, bytes_level, metaspace

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# Llama 2's and Mistral's: a turn of the user begins a text, a space stands before the answer.
LLAMA2 = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{%- else -%}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
GEMMA = (
    "{{ bos_token }}{%- for m in messages -%}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)
# GLM's: nothing ends a turn; the mark of the next role does.
GLM = (
    "{{ '[gMASK]<sop>' }}{%- for m in messages -%}"
    "{{ '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' + m.content }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)
GLM_MARKS = ["[gMASK]", "<sop>", "<|observation|>"]
# Vicuna's: roles in words, the end of text ends a turn.
VICUNA = (
    "{{ bos_token }}{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
    "{{ ' ASSISTANT: ' + m.content + eos_token }}{%- else -%}{{ 'USER: ' + m.content }}"
    "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ ' ASSISTANT:' }}{%- endif -%}"
)
# Alpaca's: no special token at all.
ALPACA = (
    "{%- for m in messages -%}"
    "{{ ('### Response:' if m.role == 'assistant' else '### Instruction:') + '\\n' }}"
    "{{ m.content + '\\n\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '### Response:\\n' }}{%- endif -%}"
)
# Llama 3.1's: a turn that calls a tool ends otherwise than one that speaks.
TWO_ENDS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|eom_id|>' if m.tool_calls else '<|im_end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
APPENDING = {"chatml": CHATML, "llama2": LLAMA2, "gemma": GEMMA, "vicuna": VICUNA}
MESSAGES = [
    {"role": "user", "content": "ab a?"},
    {"role": "assistant", "content": "ab b"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b, a ab."},
    {"role": "user", "content": "b ab"},
    {"role": "assistant", "content": "a"},
]


def with_marks(made: PreTrainedTokenizerFast, template: str, *marks: str) -> ChatTokenizer:
    made.add_special_tokens(
        {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>", "[/INST]", *marks]},
        replace_extra_special_tokens=False,
    )
    made.chat_template = template
    return ChatTokenizer(made)


def whole_of(chat: ChatTokenizer, messages: list[dict[str, Any]], *, prompt: bool) -> list[int]:
    tokenizer: PreTrainedTokenizerBase = chat._tokenizer
    made: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
    )
    return list(made)


def ids_of(chat: ChatTokenizer, *names: str) -> list[int]:
    made: Any = chat._tokenizer.convert_tokens_to_ids(list(names))
    return list(made)


def learnt(spoken: Conversation) -> list[list[int]]:
    """Return the tokens of each turn that is learnt."""
    starts = np.flatnonzero(np.diff(spoken.mask, prepend=0) == 1)
    ends = spoken.turn_ends
    return [spoken.token_ids[a : b + 1].tolist() for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", APPENDING)
def test_a_conversation_has_the_tokens_of_the_whole_rendering(kind: str, template: str) -> None:
    chat = with_marks(TOKENIZERS[kind](), APPENDING[template])
    chat.check_template()
    spoken = chat.conversation(MESSAGES)
    whole = whole_of(chat, MESSAGES, prompt=False)
    assert spoken.token_ids.tolist() == whole[: len(spoken.token_ids)]
    assert not chat.decode(whole[len(spoken.token_ids) :]).strip()  # a line break may follow
    end = chat.stop_token_ids[0]
    assert [turn.count(end) for turn in learnt(spoken)] == [1, 1, 1]
    assert [turn[-1] for turn in learnt(spoken)] == [end, end, end]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("template", APPENDING)
def test_the_pieces_of_an_episode_join_to_the_whole_rendering(kind: str, template: str) -> None:
    chat = with_marks(TOKENIZERS[kind](), APPENDING[template])
    spoken = learnt(chat.conversation(MESSAGES))
    ids = chat.first_prompt(MESSAGES[:1]).tolist()
    for number, said in enumerate(spoken[:-1]):
        ids += [*said, *chat.next_turn(said, [MESSAGES[2 * number + 2]]).tolist()]
        told = MESSAGES[: 2 * number + 3]
        assert ids == whole_of(chat, told, prompt=True)
        unended = said[:-1]  # cut before its end: that is made up for
        rest = chat.next_turn(unended, [MESSAGES[2 * number + 2]]).tolist()
        assert rest[-5:] == ids[-5:]
        assert rest.count(chat.stop_token_ids[0]) > 0


def test_what_is_learnt_first_is_the_token_of_the_whole_rendering() -> None:
    chat = with_marks(metaspace(), CHATML)
    first = [turn[0] for turn in learnt(chat.conversation(MESSAGES))]
    assert chat._tokenizer.convert_ids_to_tokens(first) == ["ab", "b", "a"]
    assert chat._tokenizer.convert_ids_to_tokens(chat.encode("ab")) == ["▁ab"]


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("text", ["\nab", " ab", "ab\n", "", "\n\n", "a  b"])
def test_an_answer_that_would_join_its_prompt_is_encoded_behind_it(scheme: str, text: str) -> None:
    chat = with_marks(metaspace(scheme), CHATML)
    messages = [MESSAGES[0], {"role": "assistant", "content": text}, *MESSAGES[2:4]]
    spoken = chat.conversation(messages)
    assert (
        spoken.token_ids.tolist() == whole_of(chat, messages, prompt=False)[: len(spoken.token_ids)]
    )


def test_a_tokenizer_that_joins_pieces_is_refused_at_start_up() -> None:
    tokenizer = bytes_level()
    state = tokenizer.backend_tokenizer
    state.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = json.loads(state.to_str())
    vocabulary = made["model"]["vocab"]
    vocabulary["Ċa"] = len(tokenizer)
    made["model"]["merges"] = [["Ċ", "a"]]
    joining = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token="<|im_end|>"
    )
    joining.chat_template = CHATML
    with pytest.raises(ModelError, match="otherwise than its pieces: with turn 1, from token"):
        ChatTokenizer(joining).check_template()
    ChatTokenizer(joining).check_template(multi_turn=False)


def glm() -> ChatTokenizer:
    tokenizer = make_tokenizer(GLM_MARKS)
    tokenizer.chat_template = GLM
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    return ChatTokenizer(tokenizer)


def test_where_nothing_ends_a_turn_the_next_role_does() -> None:
    chat = glm()
    chat.check_template()
    user, observation, eos = ids_of(chat, "<|user|>", "<|observation|>", "<|endoftext|>")
    assert {user, observation, eos} <= set(chat.stop_token_ids)
    assert chat.stop_token_ids[0] == eos
    assert not chat.ends_turns
    spoken = chat.conversation(MESSAGES)
    assert spoken.token_ids.tolist() == [*whole_of(chat, MESSAGES, prompt=False), eos]
    assert [turn[-1] for turn in learnt(spoken)] == [user, user, eos]
    assert spoken.token_ids.tolist().count(eos) == 1


def test_an_episode_of_such_a_template_has_the_tokens_of_the_whole() -> None:
    chat = glm()
    ids = chat.first_prompt(MESSAGES[:1]).tolist()
    told = list(MESSAGES[:1])
    for reply, role in (("4", "user"), ("5", "tool"), ("6", "user")):
        observation = {"role": role, "content": "on"}
        mark = "<|observation|>" if role == "tool" else "<|user|>"
        said = [*chat.encode_reply(reply), chat._tokenizer.convert_tokens_to_ids(mark)]
        ids += [*said, *chat.next_turn(said, [observation]).tolist()]
        told += [{"role": "assistant", "content": reply}, observation]
        assert ids == whole_of(chat, told, prompt=True)
        assert chat.decode(said) == reply


def test_a_turn_that_is_cut_is_gone_on_behind_without_an_end() -> None:
    chat = glm()
    said = chat.encode_reply("4")
    ids = chat.first_prompt(MESSAGES[:1]).tolist() + said
    ids += chat.next_turn(said, [MESSAGES[2]]).tolist()
    told = [MESSAGES[0], {"role": "assistant", "content": "4"}, MESSAGES[2]]
    assert ids == whole_of(chat, told, prompt=True)


def test_a_conversation_whose_last_word_is_not_the_assistants_ends_with_the_next_role() -> None:
    chat = glm()
    spoken = chat.conversation(MESSAGES[:3])
    assert learnt(spoken)[0][-1] == chat._tokenizer.convert_tokens_to_ids("<|user|>")


def test_without_any_mark_turns_end_as_they_are_written() -> None:
    tokenizer = bytes_level()
    tokenizer.chat_template = ALPACA
    chat = ChatTokenizer(tokenizer)
    chat.check_template()
    spoken = chat.conversation(MESSAGES)
    eos = chat.stop_token_ids[0]
    assert spoken.token_ids.tolist() == [*whole_of(chat, MESSAGES, prompt=False), eos]
    assert [chat.decode(turn) for turn in learnt(spoken)] == [
        "ab b\n\n",
        "b, a ab.\n\n",
        "a\n\n",
    ]
    empty = [MESSAGES[0], {"role": "assistant", "content": ""}, *MESSAGES[2:4]]
    tokenizer.chat_template = ALPACA.replace("m.content + '\\n\\n'", "m.content")
    with pytest.raises(DataError, match=r"message 1 .* says nothing"):
        ChatTokenizer(tokenizer).conversation(empty)


def test_a_turn_ends_with_the_mark_that_the_template_writes_for_its_kind() -> None:
    tokenizer = bytes_level()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|eom_id|>"]}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = TWO_ENDS
    chat = ChatTokenizer(tokenizer)
    calls = [{"function": {"name": "x", "arguments": {"a": 1}}}]
    called = {"role": "assistant", "content": "look", "tool_calls": calls}
    messages = [MESSAGES[0], called, {"role": "tool", "content": "1"}, MESSAGES[1]]
    spoken = chat.conversation(messages)
    assert spoken.token_ids.tolist() == whole_of(chat, messages, prompt=False)
    eom, end = ids_of(chat, "<|eom_id|>", "<|im_end|>")
    assert [turn[-1] for turn in learnt(spoken)] == [eom, end]
    assert all(end not in turn[:-1] for turn in learnt(spoken))


CLOCK = "{{ '<|im_start|>system\\n' + strftime_now('%d %b %Y %H:%M:%S.%f') + '<|im_end|>\\n' }}"
DATED = {
    "first": CLOCK + CHATML,
    "every turn": CHATML.replace("m.content", "(m.content + strftime_now(' %S.%f'))"),
    "prompt": CHATML.replace("assistant\\n", "assistant' + strftime_now('%f') + '\\n"),
    "guarded": "{%- if strftime_now is defined -%}" + CLOCK + "{%- endif -%}" + CHATML,
    "assigned": "{%- set now = strftime_now -%}{{ now('%S.%f') }}" + CHATML,
}


@pytest.mark.parametrize("name", DATED)
def test_an_episode_is_told_one_time(name: str) -> None:
    tokenizer = bytes_level()
    tokenizer.chat_template = DATED[name]
    chat = ChatTokenizer(tokenizer)
    if name != "prompt":  # it stands in no history: such a template rewrites
        chat.check_template()
    moment = datetime(2026, 2, 3, 4, 5, 59, 999999, tzinfo=UTC).timestamp()
    one, elsewhere = chat.at(moment), ChatTokenizer(tokenizer).at(moment)
    asked = one.first_prompt(MESSAGES[:1]).tolist()
    assert asked == elsewhere.first_prompt(MESSAGES[:1]).tolist()
    assert asked == one.prompt(MESSAGES[:1])
    assert "999999" in one.decode(asked)
    assert asked != chat.at(moment + 1.5).first_prompt(MESSAGES[:1]).tolist()
    end = chat.stop_token_ids[0]
    assert (
        one.next_turn([end], MESSAGES[:1]).tolist()
        == elsewhere.next_turn([end], MESSAGES[:1]).tolist()
    )


def test_a_template_that_does_not_ask_for_the_time_is_the_same_at_any() -> None:
    chat = with_marks(bytes_level(), CHATML)
    assert chat.at(0.0) is chat


def test_a_template_that_leaves_a_reply_out_is_not_learnt_from() -> None:
    for shown in ("m.content[:3]", "m.content | upper", "''"):
        tokenizer = bytes_level()
        tokenizer.chat_template = CHATML.replace("m.content", f"({shown})")
        chat = ChatTokenizer(tokenizer)
        with pytest.raises(ModelError, match="does not show an assistant's reply"):
            chat.conversation(MESSAGES)
