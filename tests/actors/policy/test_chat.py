"""Chat templating: what is appended between turns, and which templates are refused."""

import json
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.histories import Conversation
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.schemas.wire.errors import DataError, ModelError
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.actors.policy.test_text import TOKENIZERS, bytes_level, metaspace

CHATML = (
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# The shape of Qwen3's: reasoning is removed from every turn but the last, tool answers become user
# turns, and enable_thinking=false puts an empty reasoning block into the generation prompt.
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last -%}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n')"
    " + '<|im_end|>\\n' }}"
    "{%- elif m.role == 'tool' -%}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}{%- endif -%}"
)


def chat_of(template: str, **kwargs: object) -> ChatTokenizer:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(
        {
            "eos_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|endoftext|>"],
        }
    )
    tokenizer.chat_template = template
    return ChatTokenizer(tokenizer, kwargs)


def text_of(chat: ChatTokenizer, ids: np.ndarray) -> str:
    text = chat._tokenizer.decode(ids.tolist())
    assert isinstance(text, str)
    return text


def ids_of(chat: ChatTokenizer, text: str) -> list[int]:
    return chat._tokenizer.encode(text, add_special_tokens=False)


def test_the_newline_after_the_end_of_turn_belongs_to_the_observation() -> None:
    chat = chat_of(CHATML)
    done = ids_of(chat, "4<|im_end|>")
    cut = ids_of(chat, "4")
    observation = [{"role": "tool", "content": "ok"}]
    after = "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(chat, chat.next_turn(done, observation)) == after
    assert text_of(chat, chat.next_turn(cut, observation)) == "<|im_end|>" + after


def test_a_turn_that_ended_on_another_stop_token_is_closed() -> None:
    chat = chat_of(CHATML)
    generated = ids_of(chat, "4<|endoftext|>")
    delta = text_of(chat, chat.next_turn(generated, [{"role": "user", "content": "x"}]))
    assert delta.startswith("<|im_end|>\n<|im_start|>user")


def test_stop_tokens_are_the_end_of_turn_and_those_of_the_model() -> None:
    chat = chat_of(CHATML)
    assert chat.stop_token_ids == (ids_of(chat, "<|im_end|>")[0],)
    extra = ChatTokenizer(chat._tokenizer, extra_stop_token_ids=[5, 5])
    assert extra.stop_token_ids == (*chat.stop_token_ids, 5)


def test_actions_are_decoded_without_special_tokens_and_without_loss() -> None:
    chat = ChatTokenizer(make_tokenizer())
    assert chat.decode(ids_of(chat, " 4 · 2 = 8 € \n<|end|>")) == " 4 · 2 = 8 € \n"


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}], ids=["thinking", "not"])
def test_reasoning_that_a_template_leaves_out_stays_in_an_episode(kwargs: dict[str, bool]) -> None:
    chat = chat_of(QWEN3, **kwargs)
    chat.check_template()
    assert chat.keeps_reasoning
    begun = text_of(chat, chat.first_prompt([{"role": "user", "content": "2+2?"}]))
    assert begun.endswith("</think>\n\n") == bool(kwargs)
    said = "<think>\nhm\n</think>\n\n4<|im_end|>"
    again = text_of(chat, chat.next_turn(ids_of(chat, said), [{"role": "user", "content": "so?"}]))
    assert again == "\n<|im_start|>user\nso?<|im_end|>\n" + begun[begun.rindex("<|im_start|>") :]


def test_a_recorded_conversation_keeps_the_reasoning_of_each_answer() -> None:
    chat = chat_of(QWEN3)
    question, thought = {"role": "user", "content": "2+2?"}, "<think>\nhm\n</think>\n\n4"
    answer = {"role": "assistant", "content": thought}
    spoken = chat.conversation([question, answer, question, answer])
    once = f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{thought}<|im_end|>\n"
    assert text_of(chat, spoken.token_ids) + "\n" == once * 2


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "add"}}]])
def test_a_turn_is_learnt_as_generated_where_the_template_hides_its_reasoning(tools: Any) -> None:
    chat = chat_of(
        "{%- if tools -%}{{ '<|im_start|>tools\\n' + tools[0].function.name }}{%- endif -%}"
        + CHATML.replace("m.content", "m.content.split('</think>')[-1]").replace(
            "assistant\\n", "assistant\\n<think>\\n"
        )
    )
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    spoken = chat.conversation([{"role": "user", "content": "2+2?"}, answer], tools)
    learnt_ids = spoken.token_ids[spoken.mask == 1]
    assert text_of(chat, learnt_ids) == "hm\n</think>\n\n4<|im_end|>"


def test_an_answer_that_cannot_follow_its_prompt_is_refused() -> None:
    chat = chat_of(QWEN3, enable_thinking=False)
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    with pytest.raises(DataError, match="cannot follow the prompt") as refused:
        chat.conversation(messages)
    assert "model.template_kwargs" in refused.value.hint


def test_template_kwargs_hold_at_every_turn() -> None:
    chat = chat_of(QWEN3, enable_thinking=False)
    delta = text_of(chat, chat.next_turn([], [{"role": "user", "content": "x"}]))
    assert delta.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (CHATML.replace("+ m.content +", "+ m.content | upper +"), "assistant's reply"),
        (CHATML.replace("messages -%}", "messages[-2:] -%}", 1), "rewrites the history"),
        (CHATML.replace("m.role + ", "m.role + messages|length|string + ", 1), "rewrites"),
    ],
)
def test_templates_that_change_earlier_turns_are_refused(template: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        chat_of(template).check_template()


REFUSES_SYSTEM = (
    "{%- for m in messages -%}{%- if m.role == 'system' -%}"
    "{{ raise_exception('no system role') }}{%- endif -%}" + CHATML.split("-%}", 1)[1]
)
LEAVES_SYSTEM_OUT = CHATML.replace("messages -%}", "messages if m.role != 'system' -%}", 1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (REFUSES_SYSTEM, r"roles: system user \(no system role\)"),
        (LEAVES_SYSTEM_OUT, "the template leaves it out"),
    ],
)
def test_a_system_message_is_refused_by_a_template_that_does_not_show_it(
    template: str, reason: str
) -> None:
    chat = chat_of(template)
    chat.check_template()
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    whole = [*messages, {"role": "assistant", "content": "z"}]
    for show in (
        lambda: chat.first_prompt(messages),
        lambda: chat.prompt(messages),
        lambda: chat.conversation(whole),
    ):
        with pytest.raises(ModelError, match=f"takes no system message.*{reason}") as refused:
            show()
        assert "chat_template.jinja" in refused.value.hint
    assert len(chat.first_prompt(messages[1:]))


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(tokenizer)


def test_tools_are_shown_by_a_template_that_takes_them() -> None:
    tools = "{%- if tools -%}{{ '<|im_start|>tools\\n' + tools[0].function.name }}{%- endif -%}"
    messages = [{"role": "user", "content": "x"}]
    shown = [{"type": "function", "function": {"name": "add"}}]
    chat = chat_of(tools + CHATML)
    assert text_of(chat, np.array(chat.prompt(messages, shown))).startswith(
        "<|im_start|>tools\nadd"
    )
    assert chat.prompt(messages) == chat_of(CHATML).prompt(messages)
    with pytest.raises(ModelError, match="omits tools"):
        chat_of(CHATML).prompt(messages, shown)


def test_a_conversation_that_cannot_be_learnt_is_refused() -> None:
    question = {"role": "user", "content": "2+2?"}
    with pytest.raises(DataError, match="no message of the assistant"):
        chat_of(CHATML).conversation([question])
    with pytest.raises(ModelError, match="omits tools"):
        chat_of(CHATML).conversation([question], [{"name": "add"}])
    answer, last_two = (
        {"role": "assistant", "content": "4"},
        CHATML.replace("messages -%}", "messages[-2:] -%}", 1),
    )
    assert len(chat_of(last_two).conversation([question, answer]).turn_ends) == 1
    with pytest.raises(ModelError, match="rewrites the history"):
        chat_of(last_two).conversation([question, answer, question, answer])


# The shape of Qwen2.5's: tools stand in the system message, tool answers in user turns.
QWEN2_TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\\n# Tools' }}"
    "{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
) + QWEN3
# The shape of Mistral's: tools stand before the last message of the user.
TOOLS_LAST = (
    "{%- for m in messages -%}"
    "{%- set users = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list -%}"
    "{%- if m.role == 'user' and tools and users | length == 1 -%}"
    "{{ '[TOOLS]' + (tools | tojson) }}{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
TOOLS = [{"type": "function", "function": {"name": "code_interpreter", "parameters": {}}}]
ASKED = [{"role": "user", "content": "2+2?"}]


def test_tools_stand_in_the_first_prompt_and_their_answers_are_appended() -> None:
    chat = chat_of(QWEN2_TOOLS)
    first = chat.first_prompt(ASKED, TOOLS)
    assert '"name": "code_interpreter"' in text_of(chat, first)
    generated = ids_of(chat, '<tool_call>{"name": "code_interpreter"}</tool_call><|im_end|>')
    answer = {"role": "tool", "content": "4"}
    ids = [*first, *generated, *chat.next_turn(generated, [answer])]
    call = {"role": "assistant", "content": text_of(chat, np.array(generated[:-1]))}
    assert ids == chat.prompt([*ASKED, call, answer], TOOLS)
    more = [answer, {"role": "tool", "content": "5"}]
    ids = [*first, *generated, *chat.next_turn(generated, more)]
    assert ids == chat.prompt([*ASKED, call, *more], TOOLS)
    assert text_of(chat, chat.first_prompt(ASKED)) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_leaves_tools_out_is_refused() -> None:
    with pytest.raises(ModelError, match="omits tools"):
        chat_of(CHATML).first_prompt(ASKED, TOOLS)


def test_tools_that_a_template_moves_stay_in_the_first_prompt() -> None:
    chat = chat_of(TOOLS_LAST)
    ids = chat.first_prompt(ASKED, TOOLS).tolist()
    said = ids_of(chat, "4<|im_end|>")
    for _ in range(2):
        ids += [*said, *chat.next_turn(said, ASKED).tolist()]
    shown = text_of(chat, np.array(ids))
    assert shown.index("code_interpreter") < shown.index("2+2?")
    assert shown.count("code_interpreter") == 1
    answer = {"role": "assistant", "content": "4"}
    spoken = chat.conversation([*[*ASKED, answer] * 2, *ASKED, answer], TOOLS)
    assert spoken.token_ids.tolist() == [*ids, *said]


# -- Pieces of a conversation join to the tokens of the whole, turns end as templates write it -----


CHATML_PIECES = (
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
APPENDING = {"chatml": CHATML_PIECES, "llama2": LLAMA2, "gemma": GEMMA, "vicuna": VICUNA}
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


def ids_of_names(chat: ChatTokenizer, *names: str) -> list[int]:
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
    chat = with_marks(metaspace(), CHATML_PIECES)
    first = [turn[0] for turn in learnt(chat.conversation(MESSAGES))]
    assert chat._tokenizer.convert_ids_to_tokens(first) == ["ab", "b", "a"]
    assert chat._tokenizer.convert_ids_to_tokens(chat.encode("ab")) == ["▁ab"]


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("text", ["\nab", " ab", "ab\n", "", "\n\n", "a  b"])
def test_an_answer_that_would_join_its_prompt_is_encoded_behind_it(scheme: str, text: str) -> None:
    chat = with_marks(metaspace(scheme), CHATML_PIECES)
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
    joining.chat_template = CHATML_PIECES
    with pytest.raises(ModelError, match="differently from its pieces: with turn 1, from token"):
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
    user, observation, eos = ids_of_names(chat, "<|user|>", "<|observation|>", "<|endoftext|>")
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
    eom, end = ids_of_names(chat, "<|eom_id|>", "<|im_end|>")
    assert [turn[-1] for turn in learnt(spoken)] == [eom, end]
    assert all(end not in turn[:-1] for turn in learnt(spoken))


CLOCK = "{{ '<|im_start|>system\\n' + strftime_now('%d %b %Y %H:%M:%S.%f') + '<|im_end|>\\n' }}"
DATED = {
    "first": CLOCK + CHATML_PIECES,
    "every turn": CHATML_PIECES.replace("m.content", "(m.content + strftime_now(' %S.%f'))"),
    "prompt": CHATML_PIECES.replace("assistant\\n", "assistant' + strftime_now('%f') + '\\n"),
    "guarded": "{%- if strftime_now is defined -%}" + CLOCK + "{%- endif -%}" + CHATML_PIECES,
    "assigned": "{%- set now = strftime_now -%}{{ now('%S.%f') }}" + CHATML_PIECES,
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
    chat = with_marks(bytes_level(), CHATML_PIECES)
    assert chat.at(0.0) is chat


def test_a_template_that_leaves_a_reply_out_is_not_learnt_from() -> None:
    for shown in ("m.content[:3]", "m.content | upper", "''"):
        tokenizer = bytes_level()
        tokenizer.chat_template = CHATML_PIECES.replace("m.content", f"({shown})")
        chat = ChatTokenizer(tokenizer)
        with pytest.raises(ModelError, match="does not show an assistant's reply"):
            chat.conversation(MESSAGES)
