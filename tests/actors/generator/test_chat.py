"""Chat templating: what is appended between two turns, and which templates are refused."""

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.schemas.wire.errors import DataError, ModelError

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


def test_turns_are_joined_into_what_the_template_renders() -> None:
    chat = chat_of(CHATML)
    chat.check_template()
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}]
    ids = chat.first_prompt(messages).tolist()
    for reply, answer in (("4", "right"), ("thanks", "next")):
        generated = ids_of(chat, reply + "<|im_end|>")
        observation = [{"role": "user", "content": answer}]
        ids += generated + chat.next_turn(generated, observation).tolist()
        messages += [{"role": "assistant", "content": reply}, *observation]
        assert ids == chat.first_prompt(messages).tolist()


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


def test_several_messages_may_follow_one_turn() -> None:
    chat = chat_of(CHATML)
    observation = [{"role": "tool", "content": "1"}, {"role": "user", "content": "2"}]
    text = text_of(chat, chat.next_turn(ids_of(chat, "a<|im_end|>"), observation))
    assert text.count("<|im_start|>") == 3


def test_stop_tokens_are_the_end_of_turn_and_those_of_the_model() -> None:
    chat = chat_of(CHATML)
    assert chat.stop_token_ids == (ids_of(chat, "<|im_end|>")[0],)
    extra = ChatTokenizer(chat._tokenizer, extra_stop_token_ids=[5, 5])
    assert extra.stop_token_ids == (*chat.stop_token_ids, 5)


def test_the_tiny_models_template_appends() -> None:
    chat = ChatTokenizer(make_tokenizer())
    chat.check_template()
    assert chat.stop_token_ids == (1,)
    generated = ids_of(chat, "42<|end|>")
    delta = chat.next_turn(generated, [{"role": "tool", "content": "no"}])
    assert text_of(chat, delta) == "<|tool|>no<|end|><|assistant|>"


def test_actions_are_decoded_without_special_tokens_and_without_loss() -> None:
    chat = ChatTokenizer(make_tokenizer())
    assert chat.decode(ids_of(chat, " 4 · 2 = 8 € \n<|end|>")) == " 4 · 2 = 8 € \n"


def test_a_template_that_strips_reasoning_is_refused() -> None:
    chat = chat_of(QWEN3)
    with pytest.raises(ModelError) as caught:
        chat.check_template()
    assert "rewrites the history: with turn 2" in caught.value.message
    assert "some reasoning" in caught.value.message
    assert "rollout.max_turns" in caught.value.hint
    chat.check_template(multi_turn=False)


def test_an_empty_reasoning_block_that_vanishes_from_the_history_is_refused() -> None:
    chat = chat_of(QWEN3, enable_thinking=False)
    assert text_of(chat, chat.first_prompt([{"role": "user", "content": "x"}])).endswith(
        "<think>\n\n</think>\n\n"
    )
    with pytest.raises(ModelError, match="with turn 1"):
        chat.check_template()


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


def test_a_template_that_refuses_a_role_says_so() -> None:
    chat = chat_of(
        "{%- for m in messages -%}{%- if m.role == 'system' -%}"
        "{{ raise_exception('no system role') }}{%- endif -%}" + CHATML.split("-%}", 1)[1]
    )
    with pytest.raises(ModelError, match=r"roles: system user \(no system role\)"):
        chat.first_prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])


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
    with pytest.raises(ModelError, match="no place for tools"):
        chat_of(CHATML).prompt(messages, shown)


def test_a_conversation_that_has_been_had_has_the_tokens_of_an_episode() -> None:
    chat = chat_of(CHATML)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "tool", "content": "right"},
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "6, I think"},
    ]
    spoken = chat.conversation(messages)
    whole = text_of(chat, spoken.token_ids)
    assert whole + "\n" == chat.render(messages, prompt=False)  # nothing follows the last turn
    first = chat.first_prompt(messages[:2]).tolist()
    turn = [*ids_of(chat, "4"), chat.stop_token_ids[0]]
    between = chat.next_turn(turn, messages[3:5]).tolist()
    last = [*ids_of(chat, "6, I think"), chat.stop_token_ids[0]]
    assert spoken.token_ids.tolist() == first + turn + between + last
    lengths = (len(first), len(turn), len(between), len(last))
    assert spoken.mask.tolist() == [n % 2 for n, size in enumerate(lengths) for _ in range(size)]
    assert spoken.turn_ends.tolist() == [len(first + turn) - 1, sum(lengths) - 1]


def test_a_conversation_that_cannot_be_learnt_is_refused() -> None:
    question, thought = {"role": "user", "content": "2+2?"}, "<think>\nhm\n</think>\n\n4"
    with pytest.raises(DataError, match="no message of the assistant"):
        chat_of(CHATML).conversation([question])
    with pytest.raises(ModelError, match="no place for tools"):
        chat_of(CHATML).conversation([question], [{"name": "add"}])
    answer = {"role": "assistant", "content": thought}
    assert len(chat_of(QWEN3).conversation([question, answer]).turn_ends) == 1
    with pytest.raises(ModelError, match="rewrites the history"):
        chat_of(QWEN3).conversation([question, answer, question, answer])


# The shape of Qwen2.5's: tools stand in the system message, tool answers in user turns.
QWEN2_TOOLS = (
    "{%- if tools -%}{{ '<|im_start|>system\\n# Tools' }}"
    "{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}{{ '<|im_end|>\\n' }}"
    "{%- endif -%}"
) + QWEN3
# The shape of Mistral's: tools stand before the last message of the user.
TOOLS_LAST = (
    "{%- for m in messages -%}"
    "{%- if loop.last and m.role == 'user' and tools -%}{{ '[TOOLS]' + (tools | tojson) }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
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
    assert text_of(chat, chat.first_prompt(ASKED)) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [(CHATML, "has no place for tools"), (TOOLS_LAST, "rewrites the history")],
)
def test_a_template_that_leaves_tools_out_or_moves_them_is_refused(template, words) -> None:
    with pytest.raises(ModelError, match=words):
        chat_of(template).first_prompt(ASKED, TOOLS)
