"""Real chat templates: what they can do for programs, how histories render, recorded programs."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.histories import num_shared
from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tinkermq.actors.rollout.call_tree import rows_of
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.actors.rollout.template_facts import (
    HistoryRenderer,
    call_format,
    facts_of,
    first_prompt,
    next_turn,
    read_text,
)
from tinkermq.envs.agents.call_selection import main_root
from tinkermq.envs.tools import ToolResult
from tinkermq.schemas.model_apis.canonical import CanonicalCall, ModelMessage, parse_reply
from tinkermq.schemas.model_apis.chat import read_chat
from tinkermq.schemas.model_apis.messages import read_messages
from tinkermq.schemas.model_apis.request import ModelRequest
from tinkermq.schemas.model_apis.responses import read_response
from tinkermq.schemas.wire.errors import ModelError

from tests.actors.rollout.calls import programs
from tests.actors.rollout.calls.programs import (
    FOLDER,
    TEMPLATES,
    TOOLS,
    RecordingEngine,
    chat_of,
    user,
)
from tests.envs.tool_games import Adding

TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
ASKED = ModelMessage(role="user", content=("What is it?",))
CALLED = ModelMessage(
    role="assistant",
    content=("I look.",),
    calls=(CanonicalCall("search", '{"query": "x"}', "c00000000"),),
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
        ("muse_glimmer", "tool calls are not read"),
    ],
)
def test_what_a_template_cannot_do_is_told(name: str, told: str) -> None:
    assert told in "; ".join(facts_of(chat_of(name)).limitations())


def test_a_system_message_in_the_middle_is_shown_as_the_template_takes_it() -> None:
    chat = chat_of("qwen3_5_think")
    system = [
        ModelMessage(role="system", content=(text,)) for text in ("be brief", "be kind", "be quick")
    ]
    history = [
        *system[:2],
        ASKED,
        ModelMessage(role="assistant", content=("So.",)),
        system[2],
        ASKED,
    ]
    prompt = chat.decode(ExactCalls(chat).prepare(history).prompt_ids)
    assert "be brief\n\nbe kind" in prompt
    assert "user\n<system-reminder>\nbe quick\n</system-reminder>" in prompt
    begun = [message.for_template() for message in history]
    shown = chat.render(begun, prompt=False)
    assert chat.render([*begun, system[0].for_template()], prompt=False).startswith(shown)


def test_a_program_is_told_that_a_template_shows_no_system_message() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "in messages", "in messages if message['role'] != 'system'", 1
    )
    chat = ChatTokenizer(tokenizer)
    told = "; ".join(facts_of(chat).limitations())
    assert "requests with a system message are refused: the template leaves it out" in told
    history = [ModelMessage(role="system", content=("be brief",)), ASKED]
    with pytest.raises(ModelError, match="takes no system message"):
        ExactCalls(chat).prepare(history)


@pytest.mark.parametrize("name", PARSED)
def test_calls_in_a_models_own_format_are_read(name: str) -> None:
    chat = chat_of(name)
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


BEHIND_CALLS = {
    "gemma4": 'response:search{value:<|"|>found x<|"|>}<tool_response|>',
    "gemma4_v5": 'response:search{value:<|"|>found x<|"|>}<tool_response|>',
    "gptoss": "<|start|>functions.search to=assistant<|channel|>commentary<|message|>"
    '"found x"<|end|><|start|>assistant',
    "glm4moe_training": "\n<tool_response>\nfound x\n</tool_response><|assistant|>",
}
"""Templates that show a result otherwise, or not at all, without its call; and what they show."""


class Searching(Adding):
    def get_tools(self) -> list[dict[str, Any]]:
        return [TOOL]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult(f"found {arguments['query']}")


@pytest.mark.parametrize(
    "name",
    [*BEHIND_CALLS, "qwen2_5", "lfm2_2_5", "llama3_1", "nemotron_3_nano", "qwen3_training"],
)
def test_a_game_with_tools_shows_results_as_a_served_model_does(name: str) -> None:
    """The model calls a tool, two at once where it can, and then writes no call that is one."""
    chat, exact, game = chat_of(name), ExactCalls(chat_of(name)), Searching()
    history, ids = [ASKED], first_prompt(chat, [ASKED.for_template()], [TOOL]).tolist()
    for num in (1, 2 if facts_of(chat).takes_parallel_calls else 1):
        calls = tuple(CanonicalCall("search", '{"query": "x"}', f"c{n:08}") for n in range(num))
        turn = ModelMessage(role="assistant", calls=calls).for_template()
        known = [message.for_template() for message in history]
        prompt = chat.render(known, prompt=True, tools=[TOOL])
        whole = chat.render([*known, turn], prompt=False, tools=[TOOL])
        drawn = chat.encode(whole[num_shared(prompt, whole) :])
        drawn = drawn[: next(n for n, i in enumerate(drawn) if i in chat.stop_token_ids) + 1]
        generation = RecordingEngine(chat, Random(0)).generate(ids, chat.decode(drawn))
        prepared = exact.prepare(history, [TOOL])
        assert prepared.prompt_ids.tolist() == ids
        call = exact.finish(
            prepared, generation, read_text(chat, ids, generation.token_ids, [TOOL])
        )
        call.delivered = True
        text = chat.answer(ids, generation.token_ids)
        observation = game.step(text).messages()
        assert [message["content"] for message in observation] == ["found x"] * num
        results = next_turn(chat, text, generation.token_ids, observation, [TOOL])
        if num == 1 and name in BEHIND_CALLS:
            assert chat.decode_all(results).endswith(BEHIND_CALLS[name])
        ids += [*generation.token_ids.tolist(), *results.tolist()]
        history = [*history, call.reply]
        history += [
            ModelMessage(role="tool", content=("found x",), call_id=each.id)
            for each in call.reply.calls
        ]
    assert exact.prepare(history, [TOOL]).prompt_ids.tolist() == ids
    unread = next_turn(chat, "no call", [], [{"role": "tool", "content": "Error: odd"}], [TOOL])
    assert "Error: odd" in chat.decode_all(unread)


def test_several_results_of_a_template_with_one_call_a_turn_each_name_their_own() -> None:
    chat, head = chat_of("gptoss"), " to=functions.{}<|channel|>commentary json<|message|>{{}}"
    text = "<|end|><|start|>assistant".join(map(head.format, ("search", "look")))
    observation = [{"role": "tool", "content": found} for found in ("one", "two")]
    ids = next_turn(chat, text, [chat.stop_token_ids[1]], observation, [TOOL])
    assert (
        chat.decode_all(ids)
        == "".join(
            f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            f'"{found}"<|end|>'
            for name, found in (("search", "one"), ("look", "two"))
        )
        + "<|start|>assistant"
    )


def test_a_template_that_leaves_out_results_is_no_template_of_a_game_with_tools() -> None:
    with pytest.raises(ModelError, match="omits a message of the tool"):
        first_prompt(chat_of("cohere2"), [ASKED.for_template()], [TOOL])


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
    chat = chat_of(name)
    prompt = chat.encode(chat.render([ASKED.for_template()], prompt=True, tools=[TOOL]))
    told = read_text(chat, prompt, chat.encode(said), [TOOL])
    reply = parse_reply(told, "c00000", calls=True, thinking="</think>" in said)
    assert not reply.calls


@pytest.mark.parametrize(
    ("name", "format_name"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("gemma4", "gemma4"),
        ("gptoss", "harmony"),
        ("lfm2_2_5", "lfm2"),
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
    assert (read.name if read else None) == format_name
    assert facts_of(chat).reads_calls == (name != "phi3")


def test_a_call_is_read_though_its_mark_begins_like_the_one_that_the_prompt_opens() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{%- for call in m.tool_calls or [] -%}"
        "{{ '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor -%}"
        "{{ '<|im_end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
    )
    chat = ChatTokenizer(tokenizer)
    form = call_format(chat)
    assert form is not None
    assert form.name == "hermes"
    assert facts_of(chat).reads_calls


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
    chat = chat_of(name)
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
        chat = chat_of(name)
        prompt = chat.encode(chat.render([ASKED.for_template()], prompt=True, tools=[TOOL]))
        told = read_text(chat, prompt, chat.encode(said), [TOOL])
        reply = parse_reply(told, "c", calls=True, thinking="</think>" in said)
        assert [(call.name, call.value) for call in reply.calls] == [("search", {})]


# -- What is rendered behind a turn is what the template writes there, whatever came before it -----


NO_TOOLS = ("phi3",)
ONE_CALL = ("llama3_1", "gptoss")
REWRITES = ("qwen3", "qwen3_5_think", "glm4moe")
"""Templates that drop the reasoning of earlier turns once a user speaks."""


def said(text: str, *names: str, reasoning: str | None = None) -> ModelMessage:
    calls = tuple(CanonicalCall("search", '{"query": "x"}', name) for name in names)
    return ModelMessage(
        role="assistant", content=(text,) if text else (), calls=calls, reasoning=reasoning
    )


def found(name: str) -> ModelMessage:
    return ModelMessage(role="tool", content=(f"found {name}",), call_id=name)


def histories(*, tools: bool) -> list[list[ModelMessage]]:
    plain = [user("go")], [user("first"), said("an answer"), user("second")]
    if not tools:
        return [*plain]
    thought = said("", "callaaaa1", reasoning="hm")
    return [*plain, [user("go"), thought, found("callaaaa1")]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_follows_a_turn_does_not_depend_on_what_came_before_it(name: str) -> None:
    renderer = HistoryRenderer(chat_of(name))
    tools = [] if name in NO_TOOLS else TOOLS
    turns: list[tuple[ModelMessage, list[ModelMessage]]] = [
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


# -- What agent programs were recorded to send, read into the tree of their calls ------------------
#
# The recordings are of programs as they are published (see tests/agents). Their long texts are
# shortened, each to what tells it apart from others.


GOLDEN = Path(__file__).parents[3] / "agents" / "golden"
READERS = {
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_response,
    "/v1/messages": read_messages,
}
ONE_ROW = [(0, 1)]
ROWS = {
    "codex": [(0, 1, 2)],
    "codex-compacted": [(0, 1), (2,), (3, 4)],
    "langgraph-chat": ONE_ROW,
    "langgraph-messages": ONE_ROW,
    "langgraph-responses": ONE_ROW,
    "langgraph-trimmed": [(0, 1, 2), (3,), (4,)],
    "mini-swe-agent": [(0, 1, 2)],
    "mini-swe-agent-rejected": [(0,), (1, 2, 3)],
    "openai-agents-as_tool": [(0, 3), (1, 2)],
    "openai-agents-chat": ONE_ROW,
    "openai-agents-handoff": [(0,), (1, 2)],
    "openai-agents-responses": ONE_ROW,
    "openai-agents-streamed": ONE_ROW,
    "opencode": [(0,), (1, 2, 3)],
    "pi": [(0, 1, 2)],
    "pydantic-ai-chat": ONE_ROW,
    "pydantic-ai-messages": ONE_ROW,
    "pydantic-ai-responses": ONE_ROW,
    "smolagents-code": [(0,), (1,)],
    "smolagents-tools": [(0,), (1,)],
}
"""Which calls are trained, by row. smolagents writes each answer anew before it sends it back."""


class Replay:
    """A recording, played to an engine that writes down what it had."""

    def __init__(self, name: str, chat: ChatTokenizer) -> None:
        self.exact, self.engine = ExactCalls(chat), RecordingEngine(chat, Random(0))
        for request, answer in requests_of(name):
            prepared = self.exact.prepare(
                request.messages, request.tools, is_prefill=request.is_prefill
            )
            generated = self.engine.generate(prepared.prompt_ids.tolist(), answer)
            self.exact.finish(prepared, generated).delivered = True
        self.calls = self.exact.tree.calls
        self.made = rows_of(self.exact.tree, 1 << 30)


def requests_of(name: str) -> list[tuple[ModelRequest, str]]:
    """Return the requests of a recording, each with its answer."""
    lines = (GOLDEN / f"{name}.jsonl").read_text("utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    return [(READERS[line["path"]](line["body"]), line["answer"]) for line in told]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    """A template that drops earlier reasoning when a user speaks."""
    return chat_of("qwen3")


def test_each_recording_is_read() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_program_has_the_rows_that_its_conversations_make(name: str, chat: ChatTokenizer) -> None:
    replay = Replay(name, chat)
    assert sorted(row.calls for row in replay.made.rows) == ROWS[name]
    for row in replay.made.rows:
        for at in np.flatnonzero(row.mask):
            drawn = (int(row.token_ids[at]), float(row.logprobs[at]))
            assert drawn in replay.engine.contexts[row.token_ids[:at].tobytes()]
        num_drawn = sum(len(replay.calls[call].generated.token_ids) for call in row.calls)
        assert row.mask.sum() == num_drawn


def test_a_title_that_nobody_reads_can_be_left_out(chat: ChatTokenizer) -> None:
    replay = Replay("opencode", chat)
    title, *work = replay.calls
    assert main_root(replay.calls) is work[0], "the title comes first, and is not the main one"
    for which in ("main", "not /You are a title generator/", "/opencode/"):
        assert rows_of(replay.exact.tree, 1 << 30, which).untrained == (title.number,), which


@pytest.mark.parametrize("name", ["codex-compacted", "langgraph-trimmed", "openai-agents-as_tool"])
def test_the_main_conversation_goes_on_after_a_compaction(name: str, chat: ChatTokenizer) -> None:
    """A helper is another one, in which it is the same agent with another system message."""
    replay = Replay(name, chat)
    made = rows_of(replay.exact.tree, 1 << 30, "main")
    assert made.untrained == ((1, 2) if name == "openai-agents-as_tool" else ())


@pytest.mark.parametrize("program", ["langgraph", "pydantic-ai"])
def test_a_program_has_the_same_tokens_whichever_api_it_speaks(
    program: str, chat: ChatTokenizer
) -> None:
    ids = [
        Replay(f"{program}-{api}", chat).calls[-1].path_ids.tolist()
        for api in ("chat", "responses", "messages")
    ]
    assert ids[0] == ids[1] == ids[2]


def test_what_codex_sends_besides_is_named_and_left_out() -> None:
    request, _ = requests_of("codex")[0]
    assert {"tools: namespace", "tools: web_search"} <= set(request.without_effect)
    assert "exec_command" in [tool["function"]["name"] for tool in request.tools]


def test_three_calls_of_one_answer_keep_their_results(chat: ChatTokenizer) -> None:
    for name in ("langgraph-chat", "pydantic-ai-responses"):
        replay = Replay(name, chat)
        results = [message.text for message in replay.calls[1].given]
        assert results == ["x is 7", "y is 7", "z is 7"]


# -- Chat templates of models that people use: tokens as transformers makes them, hostile texts ----


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
def marked(request: pytest.FixtureRequest, marks_are_special: bool) -> ChatTokenizer:
    made = chat_of(request.param)
    if marks_are_special:
        made._tokenizer.add_special_tokens(
            {"additional_special_tokens": list(MARKS)}, replace_extra_special_tokens=False
        )
        extra = made.stop_token_ids
        made = ChatTokenizer(made._tokenizer, extra_stop_token_ids=extra)
    return made


def ids_of(marked: ChatTokenizer, messages: list[dict[str, Any]], *, prompt: bool) -> list[int]:
    made: Any = marked._tokenizer.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
    )
    return list(made)


def specials_of(marked: ChatTokenizer, ids: list[int]) -> list[str]:
    added = marked._tokenizer.added_tokens_decoder
    return [added[one].content for one in ids if one in added and added[one].special]


def told(text: str, times: int = 2) -> list[dict[str, Any]]:
    question = {"role": "user", "content": text}
    said = {"role": "assistant", "content": "sure"}
    return [question, said] * times


@pytest.mark.parametrize("marked", NAMES, indirect=True)
def test_prompts_are_those_of_transformers_and_hold_no_other_special_tokens(
    marked: ChatTokenizer,
) -> None:
    names = [one.content for one in marked._tokenizer.added_tokens_decoder.values()]
    plain = told("go on")[:-1]
    ids = marked.prompt(plain)
    assert ids == ids_of(marked, plain, prompt=True)
    random = Random(7)
    for _ in range(8):
        random.shuffle(names)
        text = "go" + random.choice(["", " ", "\n"]).join(names[: random.randrange(1, 9)]) + "on"
        hostile = marked.prompt(told(text)[:-1])
        assert specials_of(marked, hostile) == specials_of(marked, ids)
        assert text in marked._tokenizer.decode(hostile)


@pytest.mark.parametrize("marked", APPENDING, indirect=True)
def test_conversations_are_learnt_with_the_tokens_of_transformers(
    marked: ChatTokenizer,
) -> None:
    marked.check_template()
    messages = told("go on", 3)
    spoken = marked.conversation(messages)
    whole = ids_of(marked, messages, prompt=False)
    assert spoken.token_ids.tolist() == whole[: len(spoken.token_ids)]
    assert not str(marked._tokenizer.decode(whole[len(spoken.token_ids) :])).strip()
    assert len(spoken.turn_ends) == 3
    assert {int(spoken.token_ids[end]) for end in spoken.turn_ends} <= set(marked.stop_token_ids)


KEEPING = {
    "qwen3": "<think>\nhm\n</think>\n\n",
    "qwen3_5_think": "hm\n</think>\n\n",
    "qwen3_6": "hm\n</think>\n\n",
    "glm4moe": "\n<think>hm</think>\n",
    "nemotron_3_nano": "hm\n</think>\n\n",
    "deepseek_r1_distill": "hm\n</think>\n\n",
    "deepseekv3": "hm\n</think>\n\n",
    "lfm2_2_5": "<think>\nhm\n</think>\n\n",
    "gemma4": "<|channel>thought\nhm\n<channel|>",
    "gptoss": "<|channel|>analysis<|message|>hm<|end|>"
    "<|start|>assistant<|channel|>final<|message|>",
}
"""Templates that leave the reasoning of earlier turns out, and how their models write it."""


@pytest.mark.parametrize("name", KEEPING)
def test_an_episode_keeps_reasoning_that_a_template_leaves_out(name: str) -> None:
    chat = chat_of(name)
    chat.check_template()
    assert chat.keeps_reasoning
    asked = [{"role": "user", "content": f"go on {number}"} for number in range(3)]
    ids = chat.first_prompt(asked[:1]).tolist()
    shown = chat.decode_all(ids)
    for message in asked[1:]:
        said = [*chat.encode_reply(f"{KEEPING[name]}sure"), chat.stop_token_ids[0]]
        ids += [*said, *chat.next_turn(said, [message]).tolist()]
    whole = chat.decode_all(ids)
    assert whole.startswith(shown)
    assert whole.count(f"{KEEPING[name]}sure") == 2
    assert [whole.count(message["content"]) for message in asked] == [1, 1, 1]
    told = [asked[0], {"role": "assistant", "content": "sure"}] * 2 + asked[2:]
    assert whole.endswith(chat.render(told, prompt=True)[-len(asked[2]["content"]) - 12 :])


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5_think", "glm4moe", "nemotron_3_nano", "lfm2_2_5"]
)
def test_a_recorded_conversation_has_the_tokens_of_an_episode(name: str) -> None:
    chat = chat_of(name)
    begun = "" if name == "glm4moe" else "\n"
    thought = f"<think>{begun}hm{begun}</think>\n{begun}sure"
    messages = told("go on", 3)
    for message in messages[1::2]:
        message["content"] = thought
    spoken = chat.conversation(messages)
    starts = np.flatnonzero(np.diff(spoken.mask, prepend=0) == 1)
    ids: list[int] = []
    for start, end, message in zip(starts, spoken.turn_ends, messages[::2], strict=True):
        before = chat.first_prompt([message]) if not ids else chat.next_turn(ids[-1:], [message])
        ids += [*before.tolist(), *spoken.token_ids[start : end + 1].tolist()]
    assert spoken.token_ids.tolist() == ids
    assert chat.decode_all(ids).count("</think>") == 3


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "nemotron_3_nano", "lfm2_2_5", "gptoss"])
def test_a_template_is_given_reasoning_under_the_name_that_it_reads(name: str, key: str) -> None:
    told = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "sure", key: "hm"}]
    shown = chat_of(name).render(told, prompt=False)
    assert shown.index("go") < shown.rindex("hm") < shown.rindex("sure")


@pytest.mark.parametrize("name", ["gptoss", "lfm2_2_5", "qwen3"])
def test_reasoning_beside_a_text_and_a_call_is_shown(name: str) -> None:
    turn = CALLED.replaced(reasoning="because")
    shown = chat_of(name).render([user("go").for_template(), turn.for_template()], prompt=False)
    assert shown.index("because") < shown.index("I look.") < shown.rindex("search")


def test_games_of_several_turns_are_played_with_each_template_that_shows_texts() -> None:
    refused: dict[str, str] = {}
    for file in sorted(FOLDER.glob("*.jinja")):
        try:
            chat_of(file.stem).check_template()
        except ModelError as error:
            refused[file.stem] = error.message
    parts = {name for name in refused if re.match("idefics|smolvlm|llava", name)}
    assert refused.keys() - {"llama3"} == parts, refused  # these tokenizers have no bos_token


@pytest.mark.parametrize("marked", ["qwen2_5", "qwen3", "qwen3_instruct_2507"], indirect=True)
def test_a_program_is_told_calls_and_reasoning_whether_or_not_their_marks_are_special(
    marked: ChatTokenizer,
) -> None:
    facts = facts_of(marked)
    assert facts.reads_calls
    exact = ExactCalls(marked)
    engine = RecordingEngine(marked, Random(1))
    prepared = exact.prepare([ModelMessage(role="user", content=("go",))], TOOLS)
    text = '<think>hm</think>I look.<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    generated = engine.generate(prepared.prompt_ids.tolist(), text)
    reply = exact.finish(prepared, generated).reply
    assert (reply.reasoning, reply.text) == ("hm", "I look.")
    assert [call.name for call in reply.calls] == ["search"]


def test_the_templates_are_there() -> None:
    assert all((FOLDER / f"{name}.jinja").is_file() for name in NAMES)
