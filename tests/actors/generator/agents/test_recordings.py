"""What agent programs were recorded to send, read into the tree of their calls.

The recordings are of programs as they are published (see tests/agents). Their long texts are
shortened, each to what tells it apart from others.
"""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.rollout.call_tree import rows_of
from tinkermq.actors.rollout.exact_calls import ExactCalls
from tinkermq.envs.agents.call_selection import main_root
from tinkermq.envs.model_apis.chat import read_chat
from tinkermq.envs.model_apis.messages import read_messages
from tinkermq.envs.model_apis.request import ModelRequest
from tinkermq.envs.model_apis.responses import read_response

from tests.actors.generator.agents.programs import RecordingEngine, chat_of

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
    for which in ("main", "alive", "not /You are a title generator/", "/opencode/"):
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
