"""Conversations through the one reader, and what transformers makes of them, in seven families.

A conversation is drawn in the form that transformers documents. Each way in (rows of JSONL and of
parquet, pairs, prompts of games, requests, programs) is given another spelling of it, and what the
model is shown then must be what `apply_chat_template` of transformers makes of the drawn one, text
and tokens.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinkermq.actors.gateway.openai import read_query
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout.template_facts import read_text
from tinkermq.envs.data import ChatData
from tinkermq.envs.dataset import Dataset
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.infer import ChatRequest
from tinkermq.schemas.model_apis.canonical import parse_reply
from tinkermq.schemas.model_apis.chat import CHAT, read_chat
from tinkermq.schemas.wire.errors import ModelError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.actors.rollout.calls.programs import FOLDER

Message = dict[str, Any]

HERMES = """{{ bos_token if false }}{%- if tools %}<|im_start|>system
You may call: {% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>tool
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.tool_calls is defined %}<|im_start|>assistant
{{ message.content }}{% for tool_call in message.tool_calls %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Hermes' templates do: a message with the key `tool_calls` has calls, null or not."""

MISTRAL = """{{ bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and loop.index0 == 0 %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor -%}
] [/AVAILABLE_TOOLS]{% endif %}[INST] {{ message.content }} [/INST]
{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('Tool call IDs are 9 characters long') }}{% endif %}
{%- set out = call.function | tojson %}{{ out[:-1] }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last }}{% endfor %}]</s>
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}
{{- ', "call_id": "' + message.tool_call_id + '"}' }}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}
{%- endif %}{% endfor %}"""
"""As Mistral's templates do: each call needs its id, and its function is dumped as it stands."""

CHATGLM = """[gMASK]<sop>{% for message in messages %}
{%- if message.role == 'tool' %}<|observation|>
{{ message.content }}{% elif message.tool_calls %}
{%- for call in message.tool_calls %}<|assistant|>{{ call.function.name }}
{{ call.function.arguments | tojson }}{% endfor %}{% else %}<|{{ message.role }}|>
{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


class Family:
    """A template, a small tokenizer of its kind, and what it is documented to take."""

    def __init__(
        self,
        template: str,
        special: list[str],
        *,
        metaspace: bool = False,
        system: bool = True,
        parallel: bool = True,
        text_arguments: bool = False,
        null_content: bool = False,
    ) -> None:
        self._named = template
        self.special = special
        self.metaspace = metaspace
        self.system = system
        self.parallel = parallel
        self.text_arguments = text_arguments
        self.null_content = null_content
        self._made: tuple[Any, ChatTokenizer] | None = None

    @property
    def template(self) -> str:
        """The template: one of TRL's by its name, or a text of ours."""
        is_name = len(self._named) < 40
        return (FOLDER / f"{self._named}.jinja").read_text() if is_name else self._named

    def made(self) -> tuple[Any, ChatTokenizer]:
        """Return the tokenizer, and ours around it."""
        if self._made is None:
            tokenizer = self._tokenizer()
            self._made = tokenizer, ChatTokenizer(tokenizer)
        return self._made

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = Tokenizer(models.BPE(byte_fallback=self.metaspace, unk_token="<unk>"))
        if self.metaspace:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
            tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
            alphabet = [chr(n) for n in range(32, 127)] + ["é", "ü", "\n", "▁"]
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        words = ["write the file, then read it again and tell me what is in it\n"] * 3
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=alphabet,
            special_tokens=["<unk>"],
            show_progress=False,
        )
        tokenizer.train_from_iterator(words, trainer)
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in self.special])
        first, last = self.special[0], self.special[-1]
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=first, eos_token=last)
        fast.chat_template = self.template
        return fast

    def documented(self, chat: list[Message]) -> list[Message]:
        """Return a conversation as the family's own examples spell it."""
        chat = copy.deepcopy(chat)
        for message in chat:
            for call in message.get("tool_calls", ()):
                if self.text_arguments:
                    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                    call["function"]["arguments"] = arguments
                if self.null_content:
                    message["content"] = None
        return chat


_IM = ["<|im_start|>", "<|im_end|>"]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
FAMILIES = {
    "Qwen2.5": Family("qwen2_5", _IM),
    "Qwen3": Family("qwen3", _IM),
    "Llama 3": Family(
        "llama3_1",
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        parallel=False,
    ),
    "Mistral": Family(
        MISTRAL, ["<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"], metaspace=True, system=False
    ),
    "Gemma": Family(
        "gemma4_v5", ["<bos>", "<|turn>", "<turn|>"], metaspace=True, system=True, parallel=True
    ),
    "GLM": Family("glm4moe", ["<sop>", "<|observation|>", "<|assistant|>", "<|user|>"]),
    "ChatGLM": Family(CHATGLM, ["<sop>", "<|observation|>", "<|assistant|>", "<|user|>"]),
    "SmolLM2 and Hermes": Family(HERMES, _IM),
    "DeepSeek V3": Family("deepseekv3", _DEEPSEEK, text_arguments=True),
    "DeepSeek R1": Family("deepseek_r1_distill", _DEEPSEEK, text_arguments=True, null_content=True),
}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "which", "default": None},
                },
                "required": ["path"],
            },
        },
    }
    for name in ("write", "read")
]
WORDS = st.text(st.sampled_from("ab é\n{}\"'\\:,[]<>0"), min_size=1, max_size=12).map(
    lambda text: f"w{text}w"
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2, width=16) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["path", "mode", "text"]), VALUES, max_size=3)
RAW = st.builds(lambda value: json.dumps(value), ARGUMENTS).map(lambda text: {"raw": text})
"""Arguments that hold a text that looks like an object: it stays a text."""


@st.composite
def conversations(draw: Any, family: Family) -> list[Message]:
    """Draw a conversation, in the form that transformers documents."""
    chat: list[Message] = []
    if family.system and draw(st.booleans()):
        chat.append({"role": "system", "content": draw(WORDS)})
    number = 0
    for _ in range(draw(st.integers(1, 2))):
        chat.append({"role": "user", "content": draw(WORDS)})
        if draw(st.booleans()):
            count = draw(st.integers(1, 2 if family.parallel else 1))
            calls = [
                {
                    "type": "function",
                    "id": f"call{number + n:05}",
                    "function": {
                        "name": draw(st.sampled_from(["write", "read"])),
                        "arguments": draw(ARGUMENTS | RAW),
                    },
                }
                for n in range(count)
            ]
            number += count
            content = draw(st.just("") | (WORDS if not family.null_content else st.just("")))
            chat.append({"role": "assistant", "content": content, "tool_calls": calls})
            chat += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(WORDS)}
                for call in calls
            ]
        chat.append({"role": "assistant", "content": draw(WORDS)})
    return chat


ABSENT = ("tool_calls", "tool_call_id", "name", "reasoning_content", "function_call", "refusal")


def respelled(chat: list[Message], random: Random) -> list[Message]:
    """Return a conversation in another spelling that means the same."""
    return [_respelled(message, random) for message in copy.deepcopy(chat)]


def _respelled(message: Message, random: Random) -> Message:
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_respelled_call(call, random) for call in calls]
        if not message["content"]:
            message["content"] = random.choice([None, "", []])
    content = message["content"]
    if isinstance(content, str) and content and random.random() < 0.3:
        at = random.randrange(len(content))
        pieces = (content[:at], content[at:])
        empty = random.choice([{}, {"image_url": None}])
        message["content"] = [{"type": "text", "text": text, **empty} for text in pieces]
    if message["role"] == "system":
        message["role"] = random.choice(["system", "developer"])
    if message["role"] == "tool":
        message["role"] = random.choice(["tool", "ipython", "function"])
    if random.random() < 0.5:
        message = {**dict.fromkeys(ABSENT), **message}
    return message


def _respelled_call(call: Message, random: Random) -> Message:
    function = call["function"]
    if random.random() < 0.7:
        how: dict[str, Any] = random.choice(
            [{}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]
        )
        function["arguments"] = json.dumps(function["arguments"], **how)
    if random.random() < 0.3:
        del call["type"]
    if random.random() < 0.3:
        call["index"] = None
    return {"id": call["id"], **function} if random.random() < 0.3 else call


def of_lines(folder: Path, chat: list[Message], tools: Any) -> tuple[list[Message], Any]:
    row = ChatData([write_rows(folder / "a.jsonl", [{"messages": chat, "tools": tools}])]).row(0)
    return row.messages, row.tools


def of_parquet(folder: Path, chat: list[Message], tools: Any) -> tuple[list[Message], Any]:
    def flat(message: Message) -> Message:  # one type for each column of parquet
        calls = message.get("tool_calls")
        content = message.get("content")
        return {
            **message,
            "content": json.dumps(content) if isinstance(content, list) else content,
            "tool_calls": json.dumps(calls) if calls else None,
        }

    if any(isinstance(message.get("content"), list) for message in chat):
        given: Any = json.dumps(chat)
    else:
        given = [flat(message) for message in chat]
    path = write_rows(folder / "a.parquet", [{"messages": given, "tools": json.dumps(tools)}])
    row = ChatData([path]).row(0)
    return row.messages, row.tools


def of_prompts(folder: Path, chat: list[Message], tools: Any) -> tuple[list[Message], Any]:
    path = write_rows(folder / "a.jsonl", [{"prompt": chat, "answer": "x"}])
    return Dataset([path]).record(0).messages(), tools


def of_requests(folder: Path, chat: list[Message], tools: Any) -> tuple[list[Message], Any]:
    body = {"model": "m", "messages": chat, "tools": tools}
    _, query = read_query(json.dumps(body).encode(), CHAT)
    assert isinstance(query, ChatRequest)
    return [message.for_template() for message in query.messages], query.tools


def of_programs(folder: Path, chat: list[Message], tools: Any) -> tuple[list[Message], Any]:
    request = read_chat({"messages": chat, "tools": tools})
    return [message.for_template() for message in request.messages], request.tools


ORIGINS: dict[str, Callable[..., tuple[list[Message], Any]]] = {
    "lines": of_lines,
    "parquet": of_parquet,
    "prompts": of_prompts,
    "requests": of_requests,
    "programs": of_programs,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_origin_shows_a_model_what_transformers_shows_it(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer, chat = family.made()

    @settings(
        max_examples=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(drawn=conversations(family), seed=st.integers(0, 1000))
    def agree(drawn: list[Message], seed: int) -> None:
        documented = family.documented(drawn)
        wanted = [
            tokenizer.apply_chat_template(
                documented, tools=TOOLS, tokenize=False, add_generation_prompt=prompt
            )
            for prompt in (False, True)
        ]
        ids = tokenizer.apply_chat_template(
            documented, tools=TOOLS, add_generation_prompt=True, return_dict=False
        )
        for number, (origin, read) in enumerate(ORIGINS.items()):
            told, tools = read(tmp_path, respelled(drawn, Random(seed + number)), TOOLS)
            shown = [chat.render(told, prompt=p, tools=tools) for p in (False, True)]
            assert shown == wanted, origin
            assert chat.encode(shown[1]) == ids, origin

    agree()


WITH_JSON = [name for name in FAMILIES if name not in ("Gemma", "GLM", "ChatGLM")]
"""Families whose calls have their arguments as JSON, so that all of them come back as they were."""


@pytest.mark.parametrize("name", WITH_JSON)
def test_a_call_that_a_template_writes_is_read_back(name: str) -> None:
    family = FAMILIES[name]
    tokenizer, chat = family.made()
    asked = {"role": "user", "content": "go"}

    @settings(max_examples=15, deadline=None, database=None, derandomize=True)
    @given(arguments=st.lists(ARGUMENTS | RAW, min_size=1, max_size=2 if family.parallel else 1))
    def agree(arguments: list[dict[str, Any]]) -> None:
        calls = [
            {
                "type": "function",
                "id": f"call{number:05}",
                "function": {"name": "write", "arguments": told},
            }
            for number, told in enumerate(arguments)
        ]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        documented = family.documented([asked, turn])
        prompt, whole = (
            tokenizer.apply_chat_template(
                documented[:end], tools=TOOLS, tokenize=False, add_generation_prompt=end == 1
            )
            for end in (1, 2)
        )
        pairs = enumerate(zip(prompt, whole, strict=False))
        common = next((place for place, (one, other) in pairs if one != other), len(prompt))
        said = whole[common:]
        text = read_text(chat, chat.encode(prompt[:common]), chat.encode(said), TOOLS)
        reply = parse_reply(text, "c", calls=True)
        assert [(call.name, call.value) for call in reply.calls] == [
            ("write", told) for told in arguments
        ]

    agree()


@pytest.mark.parametrize("template", ["gemma3", "gemma", "llama3", "phi3", "qwen2_5_vl"])
def test_a_template_that_leaves_calls_out_is_told_of(template: str) -> None:
    family = Family(template, ["<bos>", "<end_of_turn>"])
    _, chat = family.made()
    call = {"type": "function", "function": {"name": "write", "arguments": {}}}
    asked = {"role": "user", "content": "go"}
    assert chat.render([asked, {"role": "assistant", "content": "yes"}], prompt=False)
    with pytest.raises(ModelError, match="omits tool calls"):
        chat.render(
            [asked, {"role": "assistant", "content": "", "tool_calls": [call]}], prompt=False
        )


@pytest.mark.parametrize("shows", ["{{ m.tool_calls[0].function.arguments | tojson }}", ""])
def test_a_template_that_refuses_tools_may_show_calls_all_the_same(shows: str) -> None:
    refusing = (
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% for m in messages %}"
        "{{ m.role }}: {{ m.content }}{% if m.tool_calls %}SHOWS{% endif %}<|end|>{% endfor %}"
    )
    _, chat = Family(refusing.replace("SHOWS", shows), ["<|begin|>", "<|end|>"]).made()
    call = {"type": "function", "function": {"name": "write", "arguments": {"path": "a"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    if shows:
        assert chat.render([turn], prompt=False).endswith('{"path": "a"}<|end|>')
    else:
        with pytest.raises(ModelError, match="omits tool calls"):
            chat.render([turn], prompt=False)


def test_a_template_that_shows_calls_or_content_is_told_of_both() -> None:
    _, chat = FAMILIES["DeepSeek R1"].made()
    call = {"type": "function", "function": {"name": "write", "arguments": {"path": "a"}}}
    turn = {"role": "assistant", "tool_calls": [call]}
    asked = {"role": "user", "content": "go"}
    assert "write" in chat.render([asked, {**turn, "content": ""}], prompt=False)
    with pytest.raises(ModelError, match="only in a message without content"):
        chat.render([asked, {**turn, "content": "I write"}], prompt=False)
