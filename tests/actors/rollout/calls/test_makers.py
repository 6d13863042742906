"""Calls and reasoning as the makers of models write them, read back from small templates of theirs.

The templates are short, but each frames messages, reasoning, calls and results as the maker's does.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pytest
from tinkermq.actors.engine.engine import Drawn
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.choices import GrowingChoice
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.actors.rollout.template_facts import call_format, converter, facts_of, read_text
from tinkermq.envs.reasoning import behind_reasoning
from tinkermq.envs.tools import calls_in
from tinkermq.schemas.call_formats import FORMATS
from tinkermq.schemas.infer import InferPart
from tinkermq.schemas.model_apis.canonical import CanonicalCall, ModelMessage, parse_reply
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.reading import AnswerReader
from tinkermq.schemas.model_apis.responses import RESPONSES

from tests.actors.rollout.calls.programs import RecordingEngine, user

Call = tuple[str, dict[str, Any]]

_FRAME = """{%- macro string(v) %}{{ v if v is string else v | tojson }}{% endmacro -%}
{%- macro python(value) %}{% if value is mapping %}{ {%- for k, v in value.items() -%}
{{ k | tojson }}: {{ python(v) }}{{ ', ' if not loop.last }}{%- endfor -%} }
{%- elif value is string %}{{ value | tojson }}{% elif value is sequence -%}
[{% for v in value %}{{ python(v) }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ value }}
{%- endif %}{% endmacro -%}
{%- macro gemma(value) %}{% if value is string %}QUOTE{{ value }}QUOTE{% elif value is mapping -%}
{ {%- for k, v in value.items() -%}{{ k }}:{{ gemma(v) }}{{ ',' if not loop.last }}{% endfor -%} }
{%- elif value is sequence -%}
[{% for v in value %}{{ gemma(v) }}{{ ',' if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}{% endmacro -%}
{%- if tools %}SYSTEM{{ tools | tojson }}END{% endif %}{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('one system message, and only at the beginning') }}
{%- elif message.role == 'assistant' -%}
ASSISTANT{% if message.reasoning_content %}THINK{% endif %}{{ message.content }}
{%- if message.tool_calls %}CALLS{% endif %}END
{%- elif message.role == 'tool' -%}RESULT{% else %}ROLE{{ message.content }}END
{%- endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT{% endif %}"""
_EACH = "{% for call in message.tool_calls %}{% set f = call.function %}"
_ITEMS = "{% for k, v in f.arguments.items() %}"
_JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_LIST = f"[{_EACH}{_JSON}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"
_KEYED = "{{ k }}={{ python(v) }}{{ ', ' if not loop.last }}{% endfor %})"
_PYTHON = f"[{_EACH}{{{{ f.name }}}}({_ITEMS}{_KEYED}{{{{ ', ' if not loop.last }}}}{{% endfor %}}]"
_QUOTED = _PYTHON.replace("{{ python(v) }}", '{{ "\'" + v + "\'" if v is string else python(v) }}')
_GEMMA = f"{_EACH}OPENcall:{{{{ f.name }}}}{{{{ gemma(f.arguments) }}}}CLOSE{{% endfor %}}"
_DSML = (
    "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
    "{{ string(v) }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}"
)
_IM = {"ASSISTANT": "<|im_start|>assistant\n", "ROLE": "<|im_start|>{{ message.role }}\n"}
_IM |= {"END": "<|im_end|>\n"}
_TURN = {"ASSISTANT": "<start_of_turn>model\n", "ROLE": "<start_of_turn>{{ message.role }}\n"}
_TURN |= {"END": "<end_of_turn>\n"}
_INST = {"ASSISTANT": "", "ROLE": "[INST]", "END": "</s>"}
_SEEK = {"ASSISTANT": "<｜Assistant｜>", "ROLE": "<｜User｜>", "END": "<｜end▁of▁sentence｜>"}
_EOT = {"ASSISTANT": "<|header_start|>assistant<|header_end|>\n\n", "END": "<|eot|>"}
_EOT |= {"ROLE": "<|header_start|>{{ message.role }}<|header_end|>\n\n"}
_HEAR = {"ASSISTANT": "<|start|>assistant", "ROLE": "<|start|>{{ message.role }}<|message|>"}
_THOUGHT = "<think>\n{{ message.reasoning_content }}\n</think>\n\n"


@dataclass(frozen=True)
class Maker:
    """A template's parts, and the marks that its tokenizer calls special."""

    format: str
    frame: dict[str, str]
    calls: str
    special: tuple[str, ...] = ()
    think: str = _THOUGHT
    quote: str = ""
    single: bool = False
    """One call in a turn."""

    @property
    def template(self) -> str:
        """The template."""
        text = _FRAME.replace("CALLS", self.calls).replace("THINK", self.think)
        result = self.frame.get("RESULT", "ROLE{{ message.content }}END")
        text = text.replace("RESULT", result).replace("QUOTE", self.quote)
        system = self.frame["ROLE"].replace("{{ message.role }}", "system")
        text = text.replace("SYSTEM", system)
        for name in ("ROLE", "ASSISTANT", "END"):
            text = text.replace(name, self.frame[name].replace("END", ""))
        return text


MAKERS = {
    "Qwen3.5, Nemotron 3": Maker(
        "qwen_xml",
        _IM,
        f"{_EACH}\n<tool_call>\n<function={{{{ f.name }}}}>\n{_ITEMS}<parameter={{{{ k }}}}>\n"
        "{{ string(v) }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "gpt-oss": Maker(
        "harmony",
        {**_HEAR, "END": "<|end|>"},
        "",
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>"),
        single=True,
    ),
    "FunctionGemma": Maker(
        "gemma",
        _TURN,
        _GEMMA.replace("OPEN", "<start_function_call>").replace("CLOSE", "<end_function_call>"),
        ("<start_of_turn>", "<end_of_turn>", "<start_function_call>", "<escape>"),
        quote="<escape>",
    ),
    "Gemma 4": Maker(
        "gemma4",
        {"ASSISTANT": "<|turn>model\n", "ROLE": "<|turn>{{ message.role }}\n", "END": "<turn|>\n"},
        _GEMMA.replace("OPEN", "<|tool_call>").replace("CLOSE", "<tool_call|>"),
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        think="<|channel>thought\n{{ message.reasoning_content }}\n<channel|>",
        quote='<|"|>',
    ),
    "Gemma 3": Maker(
        "gemma_code",
        _TURN,
        f"```tool_code\n{_PYTHON}\n```",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "GLM 4.5": Maker(
        "glm",
        {"ASSISTANT": "<|assistant|>", "ROLE": "<|{{ message.role }}|>\n", "END": ""},
        f"{_EACH}\n<tool_call>{{{{ f.name }}}}\n{_ITEMS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>"
        "{{ string(v) }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
        ("<|assistant|>", "<|user|>", "<|system|>", "<|tool|>", "<|endoftext|>"),
    ),
    "DeepSeek V3.1": Maker(
        "deepseek",
        _SEEK,
        f"<｜tool▁calls▁begin｜>{_EACH}<｜tool▁call▁begin｜>{{{{ f.name }}}}<｜tool▁sep｜>"
        "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
        ("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>", "<｜tool▁call▁begin｜>"),
    ),
    "DeepSeek V3.2": Maker(
        "deepseek_dsml",
        _SEEK,
        f"<｜DSML｜function_calls>\n{_EACH}"
        f'<｜DSML｜invoke name="{{{{ f.name }}}}">\n{_ITEMS}{_DSML}'
        "</｜DSML｜function_calls>",
        ("<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"),
    ),
    "Kimi K2": Maker(
        "kimi",
        {
            "ASSISTANT": "<|im_assistant|>assistant<|im_middle|>",
            "ROLE": "<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>",
            "END": "<|im_end|>",
            "RESULT": "<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}\n"
            "{{ message.content }}<|im_end|>",
        },
        f"<|tool_calls_section_begin|>{_EACH}<|tool_call_begin|>{{{{ call.id }}}}"
        "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "<|tool_calls_section_end|>",
        ("<|im_assistant|>", "<|im_user|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    ),
    "MiniMax M2": Maker(
        "minimax",
        {"ASSISTANT": "]~b]ai\n", "ROLE": "]~b]{{ message.role }}\n", "END": "[e~[\n"},
        f'\n<minimax:tool_call>\n{_EACH}<invoke name="{{{{ f.name }}}}">\n{_ITEMS}'
        '<parameter name="{{ k }}">{{ string(v) }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}'
        "</minimax:tool_call>",
        ("]~b]", "[e~["),
    ),
    "Mistral v7": Maker(
        "mistral", _INST, f"[TOOL_CALLS]{_LIST}", ("[INST]", "[TOOL_CALLS]", "</s>")
    ),
    "Mistral v13": Maker(
        "mistral",
        _INST,
        f"{_EACH}[TOOL_CALLS]{{{{ f.name }}}}[ARGS]{{{{ f.arguments | tojson }}}}{{% endfor %}}",
        ("[INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "</s>"),
        think="[THINK]{{ message.reasoning_content }}[/THINK]",
    ),
    "Llama 4": Maker(
        "pythonic",
        _EOT,
        f"<|python_start|>{_PYTHON}<|python_end|>",
        ("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
    ),
    "Granite 4": Maker(
        "hermes",
        {
            "ASSISTANT": "<|start_of_role|>assistant<|end_of_role|>",
            "ROLE": "<|start_of_role|>{{ message.role }}<|end_of_role|>",
            "END": "<|end_of_text|>\n",
        },
        f"{_EACH}\n<tool_call>\n{_JSON}\n</tool_call>{{% endfor %}}",
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "Granite 3": Maker("granite", _IM, f"<|tool_call|>{_LIST}", ("<|im_start|>", "<|im_end|>")),
    "LFM2": Maker(
        "lfm2",
        _IM,
        f"<|tool_call_start|>{_QUOTED}<|tool_call_end|>",
        ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "Nemotron": Maker("nemotron", _IM, f"<TOOLCALL>{_LIST}</TOOLCALL>", ("<|im_end|>",)),
    "Hunyuan A13B": Maker("hunyuan", _IM, f"<tool_calls>{_LIST}</tool_calls>", ("<|im_end|>",)),
    "Hunyuan": Maker(
        "hunyuan_fenced",
        _IM,
        f"<tool_calls>\n{_EACH}<tool_call>{{{{ f.name }}}}\n```json\n"
        "{{ f.arguments | tojson }}\n```\n</tool_call>\n{% endfor %}</tool_calls>",
        ("<|im_end|>",),
    ),
}
_CHANNELS = """{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('one system message, and only at the beginning') }}
{%- elif message.role == 'assistant' %}{% if message.reasoning_content -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.reasoning_content }}<|end|>{% endif -%}
{%- if message.tool_calls %}{% if message.content -%}
<|start|>assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>{% endif -%}
{%- set f = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>{% else -%}
<|start|>assistant<|channel|>final<|message|>{{ message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}
{%- elif message.role == 'tool' -%}
<|start|>functions to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""As gpt-oss's: reasoning, calls and texts are messages on channels, and one call ends a turn."""

_TYPES: dict[str, Any] = {
    "text": {"type": "string"},
    "n": {"$ref": "#/$defs/count"},
    "x": {"allOf": [{"type": "number"}, {"description": "how much"}]},
    "ok": {"type": "boolean"},
    "kind": {"enum": ["on", 3, None]},
    "all": {"items": {}},
    "map": {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} it",
            "parameters": {
                "type": "object",
                "properties": _TYPES,
                "$defs": {"count": {"type": "integer"}},
            },
        },
    }
    for name in ("write", "now")
]
CALLS: list[list[Call]] = [
    [("now", {})],
    [("write", {"text": "a"})],
    [("write", {"text": 'He said "no, it\'s [1, 2) {x}: y=3", \\n über 日本 👍\n\n  and\tleft'})],
    [("write", {"n": 3, "x": 0.5, "ok": True, "kind": 3, "all": [1, "a, b]", [False, None]]})],
    [("write", {"text": "a </tool_call> b" + "</tool_call>" * 3})],
    [("write", {"text": "5", "kind": None, "map": {"a": None, "b": {"c": ["d"]}}})],
    [("write", {"text": "one", "n": -1}), ("now", {}), ("write", {"text": "three"})],
]


@cache
def chat_of(name: str) -> ChatTokenizer:
    maker = MAKERS[name]
    tokenizer = make_tokenizer(more=maker.special)
    tokenizer.chat_template = _CHANNELS if maker.format == "harmony" else maker.template
    ends = {"GLM 4.5": "<|endoftext|>", "gpt-oss": "<|return|>"}
    tokenizer.eos_token = ends.get(name, maker.frame["END"].strip())
    return ChatTokenizer(tokenizer)


def turns(name: str) -> Iterator[tuple[list[Call], str, str | None]]:
    """Yield calls, what is said before them, and the reasoning before that."""
    thinks = name not in ("FunctionGemma", "Gemma 3", "Mistral v7", "Granite 3")
    for calls in CALLS:
        if name == "LFM2":  # it writes texts as they are, in quotes
            calls = json.loads(json.dumps(calls).replace("\\\\n", ""))
            calls = [(called, arguments) for called, arguments in calls]
        if len(calls) == 1 or not MAKERS[name].single:
            for said, thought in (("", None), ("a < b [so] {it} is:", None), ("So", "hm\nho")):
                yield calls, said, thought if thinks else None


def written(chat: ChatTokenizer, calls: list[Call], said: str, thought: str | None) -> str:
    """Return the turn as the template writes it behind the prompt."""
    asked: list[dict[str, Any]] = [user("go").for_template()]
    made = tuple(
        CanonicalCall(name, json.dumps(arguments), f"functions.{name}:{number}")
        for number, (name, arguments) in enumerate(calls)
    )
    turn = ModelMessage(role="assistant", content=(said,), calls=made, reasoning=thought)
    prompt = chat.render(asked, prompt=True, tools=TOOLS)
    whole = chat.render([*asked, turn.for_template()], prompt=False, tools=TOOLS)
    assert whole.startswith(prompt)
    return chat._texts.plain(whole[len(prompt) :])


def shown(reply: ModelMessage) -> list[Call]:
    return [(call.name, call.value if isinstance(call.value, dict) else {}) for call in reply.calls]


@pytest.mark.parametrize("name", MAKERS)
def test_calls_are_read_as_their_maker_writes_them_and_written_back(name: str) -> None:
    chat = chat_of(name)
    form = call_format(chat)
    assert form is not None
    assert form.name == MAKERS[name].format
    assert facts_of(chat).reads_calls
    for calls, said, thought in turns(name):
        text = written(chat, calls, said, thought)
        reply = parse_reply(read_text(chat, [], chat.encode(text), TOOLS), "c", calls=True)
        assert (shown(reply), reply.text, reply.reasoning) == (calls, said, thought)
        assert written(chat, shown(reply), reply.text, reply.reasoning) == text
        answer = behind_reasoning(chat.decode(chat.encode(text)))
        assert [(c[0], json.loads(c[1])) for c in calls_in(answer, TOOLS) if c] == calls


@pytest.mark.full
@pytest.mark.parametrize("name", MAKERS)
def test_an_answer_that_arrives_in_pieces_is_read_as_the_whole(name: str) -> None:
    chat = chat_of(name)
    for calls, said, thought in [*turns(name)][4::3]:
        text = chat.decode(chat.encode(written(chat, calls, said, thought)))
        whole = read_text(chat, [], chat.encode(text), TOOLS)
        cuts = [[at] for at in range(len(text))] + [[*range(0, len(text), n)] for n in (1, 3)]
        for cut in cuts:
            convert, told = converter(chat, TOOLS, thinking=False), ""
            for begin, end in zip([0, *cut], [*cut, len(text)], strict=True):
                piece = text[begin:end]
                told += piece if convert is None else convert.push(piece)
                assert whole.startswith(told)
            assert told + (convert.push("", last=True) if convert else "") == whole


@pytest.mark.parametrize("name", MAKERS)
def test_the_next_prompt_begins_with_the_last_one_and_its_answer(name: str) -> None:
    chat, exact = chat_of(name), ExactCalls(chat_of(name))
    engine, history = RecordingEngine(chat, Random(1)), [user("go")]
    before: list[int] = []
    for calls, said, thought in [*turns(name)][5::4]:
        prepared = exact.prepare(history, TOOLS)
        begin = prepared.prompt_ids.tolist()
        assert (prepared.parent is None) == (not before)
        assert begin[: len(before)] == before
        ids = chat.encode(written(chat, calls, said, thought))
        ids = ids[: next((n for n, i in enumerate(ids) if i in chat.stop_token_ids), len(ids))]
        text = chat.decode(ids)
        generated = engine.generate(begin, text)
        reply = exact.finish(prepared, generated, read_text(chat, [], ids, TOOLS))
        reply.delivered = True
        assert shown(reply.reply) == calls
        before = [*begin, *generated.token_ids.tolist()]
        results = [
            ModelMessage(role="tool", content=(f"found {call.id}",), call_id=call.id)
            for call in reply.reply.calls
        ]
        history = [*history, reply.reply, *results]
    last = exact.prepare(history, TOOLS)
    assert last.prompt_ids.tolist()[: len(before)] == before
    if name == "Kimi K2":  # a result names its call as the model wrote it
        assert "## Return of functions.write:0\n" in chat.decode_all(last.prompt_ids)


@pytest.mark.parametrize("name", MAKERS)
def test_later_system_messages_are_shown_alike_in_episodes_and_to_clients(name: str) -> None:
    chat = chat_of(name)
    roles = ("system", "system", "user", "assistant", "system", "user")
    history = [
        ModelMessage(role=role, content=(f"{role} {number}",)) for number, role in enumerate(roles)
    ]
    served = chat.prompt([message.for_template() for message in history])
    assert ExactCalls(chat).prepare(history).prompt_ids.tolist() == served
    episode = chat.prompt([message.for_template() for message in history[:3]])
    spoken = [*chat.encode_reply("assistant 3"), chat.stop_token_ids[0]]
    more = chat.next_turn(spoken, [message.for_template() for message in history[4:]])
    assert "system 0\n\nsystem 1" in chat.decode_all(served)
    if name not in ("GLM 4.5", "gpt-oss"):  # whose last answer ends as no other does
        assert [*episode, *spoken, *more.tolist()] == served


@pytest.mark.full
@pytest.mark.parametrize("name", MAKERS)
def test_a_call_that_is_broken_is_one_that_cannot_be_read_and_no_text_is_lost(name: str) -> None:
    chat = chat_of(name)
    form = call_format(chat)
    assert form is not None
    opened = "to=functions.write" if name == "gpt-oss" else form.opens[0]
    for calls in (CALLS[2], CALLS[3]):
        text = chat.decode(chat.encode(written(chat, calls, "So", None)))
        begin = text.index(opened) + len(opened)
        for end in range(begin, len(text), 5):
            cut = text[:end] if end % 2 else f"{text[: end - 1]}\x00{text[end:]}"
            convert = converter(chat, TOOLS, thinking=False)
            told = cut if convert is None else convert.push(cut, last=True)
            reply = parse_reply(told, "c", calls=True)
            assert reply.calls or "write" in reply.text or end < begin + 24
            found = calls_in(behind_reasoning(cut), TOOLS)
            assert found or "<|message|>" not in cut[begin:] + chat.template * (name != "gpt-oss")


def test_calls_in_python_are_literals_with_names() -> None:
    form = next(form for form in FORMATS if form.name == "lfm2")
    for body, wanted in {
        "[f(a='it\\'s', b=\"x, [y] (z)\", c=-1.5e-3)]": {
            "a": "it's",
            "b": "x, [y] (z)",
            "c": -0.0015,
        },
        "[f(class={'a': [True, null]}, a='''b\n'c' ''')]": {
            "class": {"a": [True, None]},
            "a": "b\n'c' ",
        },
        "f(a='\\d+\\n', b='\\ud83d\\udc4d \\u00fc')": {"a": "\\d+\n", "b": "👍 ü"},
        "[get-it.now(a=())]": {"a": []},
        "[f('positional')]": None,
        "[f(a=__import__('os'))]": None,
        "[f(a=x)]": None,
        "[f(a=1, a=2)]": None,
        "[f(**{'a': 1})]": None,
        "[f(a=_0)]": None,
        "[f(a={'b': 1, 'b': 2})]": None,
        "[f(a='open)]": None,
        "[f(a=1e999)]": None,
        "[f(a=1j)]": None,
        "[f(a=" + "[" * 4000 + ")]": None,
        "[f(a=" + "'" * 4000 + ")]": None,
        "[f(a=" + "9" * 5000 + ")]": None,
    }.items():
        calls = form.read(body, TOOLS)
        assert [json.loads(call.arguments) for call in calls] == (
            [] if wanted is None else [wanted]
        )


def test_channels_are_reasoning_text_and_calls_in_every_api() -> None:
    chat = chat_of("gpt-oss")
    names = [chat.token_text(token) for token in chat.stop_token_ids]
    assert names == ["<|return|>", "<|call|>"]  # more messages follow behind <|end|>
    said = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json"
        '<|message|>{"n": 3}<|call|>'
    )
    for api, body in {
        CHAT: {"messages": [{"role": "user", "content": "go"}], "tools": TOOLS},
        RESPONSES: {"input": "go", "tools": [{"type": "function", **t["function"]} for t in TOOLS]},
        MESSAGES: {
            "messages": [{"role": "user", "content": "go"}],
            "max_tokens": 9,
            "tools": [
                {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]}
                for t in TOOLS
            ],
        },
    }.items():
        choice = GrowingChoice(0, chat, tools=TOOLS, thinking=False)
        reader = AnswerReader(api, api.read({"model": "m", **body}), "c00000", is_call=True)
        for number, token in enumerate(chat.encode(said)):
            choice.add(Drawn(token, -1.0, 0))
            if number % 3 == 0 and (delta := choice.delta(0, 0, ends=False)):
                assert "<|" not in delta.text
        choice.end("stop")
        delta = choice.delta(0, 0, ends=True)
        assert delta is not None
        list(reader.push(InferPart(deltas=[delta])))
        answer = json.dumps(reader.whole())
        assert "hm" in answer
        assert '"I look."' in answer
        assert re.search(r'"(arguments|input)": ("{\\"n\\": 3}"|{"n": 3})', answer)
        assert "<|" not in answer
        assert "think>" not in answer
