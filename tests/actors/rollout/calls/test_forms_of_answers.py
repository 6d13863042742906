"""Programs that demand a form of an answer or show images, in each engine."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import pytest_asyncio
from tinkermq.actors.policy.chat import ChatTokenizer, open_chat
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_tree import rows_of
from tinkermq.broker.client.connection import Broker
from tinkermq.envs.agents.episode import EpisodeLimit
from tinkermq.schemas.agent import (
    CallDelivered,
    CallPart,
    CallRequest,
)
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.model_apis.canonical import ModelMessage, pictures_of
from tinkermq.schemas.output_format import OutputFormat
from tinkermq.schemas.wire.errors import ConfigError, DataError, ModelError
from tinkermq.schemas.wire.subjects import JobScope
from transformers import PreTrainedModel

from tests.actors.engine.conftest import EngineKind, StartEngine
from tests.actors.rollout.calls.asking import Asking, held, opened, request, text_of
from tests.support.images import IMAGE, IMAGE_ID, load, png, seeing_logprobs
from tests.support.models import HERMES, plain_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="package")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}},
    "required": ["n", "b"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("go", "do")
]
FORM = OutputFormat(json_schema=SCHEMA)


def hermes(asking: Asking) -> Asking:
    """Have the tiny model's template write calls as Hermes models do."""
    tokenizer = asking.chat.tokenizer
    names = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    tokenizer.chat_template = names + HERMES
    asking.chat = ChatTokenizer(tokenizer)
    return asking


async def said(calls: CallAnswers, asking: Asking, asked: CallRequest) -> str:
    last = await calls.answer(asked, asking.tell)
    calls.note_delivered(CallDelivered(calls=last.calls, whole=True))
    return text_of(last)


async def test_an_answer_has_its_form_and_is_trained_as_it_was_drawn(
    asking: Asking, model: PreTrainedModel
) -> None:
    calls = asking.calls(max_turn=60)
    text = await said(calls, asking, request("hi", format=FORM))
    jsonschema.validate(json.loads(text), SCHEMA)
    (row,) = rows_of(calls.tree, 200).rows
    trained = row.mask[1:] == 1
    expected = plain_logprobs(model, row.token_ids[:1], row.token_ids[1:])
    np.testing.assert_allclose(row.logprobs[1:][trained], expected[trained], atol=1e-4)
    masked = calls.tree.calls[0].generated.masked
    assert masked is not None
    assert len(masked) == trained.sum()
    assert 0.2 < masked.mean() <= 1


async def test_the_same_request_with_and_without_a_form_are_two(asking: Asking) -> None:
    calls = asking.calls(max_turn=60)
    free = await said(calls, asking, request("hi"))
    formed = await said(calls, asking, request("hi", format=FORM))
    again = await said(calls, asking, request("hi", format=FORM, is_retry=True))
    assert formed == again != free
    assert len(calls.tree.calls) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("single", [False, True])
async def test_a_demanded_call_is_one_of_an_allowed_tool(
    asking: Asking, stream: bool, single: bool
) -> None:
    hermes(asking)
    calls = asking.calls(max_turn=95)
    form = OutputFormat(functions=["do"], is_single=single)
    asked = request("hi", tools=TOOLS, format=form, stream=stream)
    await calls.answer(asked, asking.tell)
    call = calls.tree.calls[0]
    assert call.reply.calls, call.reply
    assert not call.reply.text or call.generated.finish_reason == "length"
    for one in call.reply.calls:
        assert one.name == "do"
        jsonschema.validate(one.value, SCHEMA)
    if single:
        assert len(call.reply.calls) == 1
        assert call.generated.finish_reason == "stop"


async def test_where_tools_may_be_called_an_answer_is_json_or_a_call(asking: Asking) -> None:
    hermes(asking)
    calls = asking.calls(max_turn=95)
    form = OutputFormat(json_schema=SCHEMA, functions=["go", "do"], is_single=True)
    last = await calls.answer(request("hi", tools=TOOLS, format=form, num_choices=6), asking.tell)
    for number in last.calls:
        reply = calls.tree.calls[number].reply
        jsonschema.validate(reply.calls[0].value if reply.calls else json.loads(reply.text), SCHEMA)


async def test_a_conversation_goes_on_behind_an_answer_with_a_form(asking: Asking) -> None:
    calls = asking.calls(max_turn=40)
    form = OutputFormat(json_schema={"enum": ["ab", "cd", "ef"]})
    first = await said(calls, asking, request("hi", format=form))
    second = await said(calls, asking, request("hi", first, "on", format=form))
    assert json.loads(first) in ("ab", "cd", "ef")
    assert json.loads(second) in ("ab", "cd", "ef")
    assert calls.tree.calls[1].parent is calls.tree.calls[0]


async def test_an_answer_that_another_began_goes_on_within_its_form(asking: Asking) -> None:
    whole_calls = asking.calls(max_turn=60)
    last = await whole_calls.answer(request("hi", format=FORM, stream=True), asking.tell)
    told = asking.parts[0].model_copy(update={"deltas": []})
    whole = whole_calls.tree.calls[0].generated
    half = len(whole.token_ids) // 2
    delta = last.deltas[0] if last.deltas else asking.parts[-1].deltas[0]
    begun = told.model_copy(
        update={
            "deltas": [
                delta.model_copy(
                    update={
                        "text": "",
                        "token_ids": whole.token_ids[:half].tolist(),
                        "logprobs": whole.logprobs[:half].tolist(),
                        "versions": whole.versions[:half].tolist(),
                        "finish": None,
                    }
                )
            ]
        }
    )
    calls = asking.calls(max_turn=60, episode="other")
    await calls.answer(request("hi", format=FORM, begun=begun), asking.tell)
    generated = calls.tree.calls[0].generated
    assert generated.token_ids[:half].tolist() == whole.token_ids[:half].tolist()
    jsonschema.validate(json.loads(calls.tree.calls[0].reply.text), SCHEMA)
    assert generated.masked is not None
    assert not generated.masked[:half].any()


async def test_the_log_keeps_what_a_form_took_out(
    asking: Asking, broker: Broker, recorded: JobScope
) -> None:
    log = await opened(held(broker, recorded, 1))
    log.hold("e-0", "host", anew=True)
    calls = asking.calls(log, max_turn=60)
    await said(calls, asking, request("hi", format=FORM))
    before = calls.tree.calls[0].generated.masked
    later = asking.calls(await opened(held(broker, recorded, 2)), max_turn=60)
    after = later.tree.calls[0].generated.masked
    assert before is not None
    assert after is not None
    assert float(after.sum()) == pytest.approx(float(before.sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"format": FORM, "is_prefill": True}, "both begin the answer and require a form"),
        ({"format": OutputFormat()}, "an output format is empty"),
        (
            {"format": OutputFormat(json_schema={"type": "string", "pattern": "(?=a)b"})},
            "look-around",
        ),
        (
            {
                "format": OutputFormat(
                    json_schema={
                        "type": "object",
                        "properties": {"deep": {"type": "string", "pattern": "(?!x)"}},
                    }
                )
            },
            "at schema.properties.deep",
        ),
    ],
)
async def test_a_form_that_cannot_be_had_is_refused(
    asking: Asking, fields: dict[str, Any], said: str
) -> None:
    calls = asking.calls()
    texts = ("hi", "So") if fields.get("is_prefill") else ("hi",)
    with pytest.raises(ConfigError, match=said):
        await calls.answer(request(*texts, tools=TOOLS, **fields), asking.tell)
    assert not calls.tree.calls


@pytest.mark.parametrize("schema", [None, SCHEMA])
async def test_where_the_template_writes_other_calls_a_demanded_call_is_told_to_be_without_effect(
    asking: Asking, schema: dict[str, Any] | None
) -> None:
    calls = asking.calls()
    form = OutputFormat(json_schema=schema, functions=["go"])
    await calls.answer(request("hi", tools=TOOLS, format=form), asking.tell)
    assert calls.tree.calls[0].generated.masked is None
    assert calls.without_effect == {"tool_choice" if schema is None else "response_format"}


async def test_penalties_are_obeyed_where_the_job_says_so(asking: Asking) -> None:
    told = {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    texts: list[list[int]] = []
    for sampling in ("job", "request"):
        for penalties in ({"temperature": 0.0}, told):
            calls = asking.calls(sampling=sampling, episode=f"{sampling} {len(penalties)}")
            await calls.answer(request("hi", **penalties), asking.tell)
            texts.append(calls.tree.calls[0].generated.token_ids.tolist())
    job, job_told, plain, penalized = texts
    assert job == job_told
    assert plain != penalized
    assert len(set(penalized)) > len(set(plain)) or len(plain) < 12


async def test_forms_of_many_programs_are_compiled_once(asking: Asking) -> None:
    calls = asking.calls(max_turn=60)
    texts = await asyncio.gather(
        *(said(calls, asking, request(f"hi {n}", format=FORM)) for n in range(4))
    )
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)


async def test_the_likeliest_tokens_are_told_with_the_texts_of_tokens(asking: Asking) -> None:
    calls = asking.calls()
    last = await calls.answer(request("hi", top_logprobs=3, logprobs=True), asking.tell)
    (delta,) = last.deltas
    assert len(delta.tokens) == len(delta.top_tokens) == len(delta.token_ids)
    for token, own, texts, logprobs in zip(
        delta.tokens, delta.logprobs, delta.top_tokens, delta.top_logprobs, strict=True
    ):
        assert len(texts) == 3
        assert logprobs == sorted(logprobs, reverse=True)
        if texts.count(token) == 1 and "\ufffd" not in token:
            assert logprobs[texts.index(token)] == pytest.approx(own, abs=1e-4)
    again = await calls.answer(
        request("hi", top_logprobs=3, logprobs=True, is_retry=True), asking.tell
    )
    assert again.deltas[0].tokens == delta.tokens
    plain = await calls.answer(request("hi there"), asking.tell)
    assert not plain.deltas[0].tokens


# -- Calls with images: what the engine saw, what a row holds of them, and what is refused ---------

SMALL, TALL = png(16, 16), png(24, 40, 1)


@pytest_asyncio.fixture(loop_scope="package")
async def looking(start: StartEngine, seeing: Path, engine_kind: EngineKind) -> Asking:
    """Each engine with a tiny model that sees images."""
    chat = open_chat(ModelConfig(path=str(seeing)))
    return Asking(await start(seeing), chat, seeing, engine_kind)


def shown(*messages: tuple[Any, ...], **fields: Any) -> CallRequest:
    """Return a request whose messages, a user's first, hold texts and images."""
    told = [
        ModelMessage(role="assistant" if place % 2 else "user", content=content)
        for place, content in enumerate(messages)
    ]
    return CallRequest(request="r", messages=told, **fields)


def assert_seen(calls: CallAnswers, folder: Path) -> None:
    """Assert that each token has the log-prob of the model's own pass over what was shown."""
    model, reader = load(folder), load_image_reader(str(folder))
    assert reader is not None
    for call in calls.tree.calls:
        images = tuple(pictures_of(call.path_messages))
        drawn = call.generated.token_ids
        prompt = call.path_ids[: -len(drawn)]
        expected = seeing_logprobs(model, reader, prompt, drawn, images)
        np.testing.assert_allclose(call.generated.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_images_are_seen_wherever_a_program_shows_them(looking: Asking) -> None:
    calls = looking.calls()

    async def ask(*messages: tuple[Any, ...], **fields: Any) -> str:
        last = await calls.answer(shown(*messages, **fields), looking.tell)
        calls.note_delivered(CallDelivered(calls=last.calls, whole=True))
        return text_of(last)

    first = await ask(("look: ", SMALL, " so?"))
    second = await ask(("look: ", SMALL, " so?"), (first,), ("and ", TALL))
    await ask(("look: ", SMALL, " so?"), (first,), ("and ", TALL), (second,), ("on",))
    await ask(("look: ", SMALL, " so?"), (first,), ("and ", png(24, 40, 2)))  # another one
    assert [call.parent and call.parent.number for call in calls.tree.calls] == [None, 0, 1, 0]
    assert [(call.given_ids == IMAGE_ID).sum() for call in calls.tree.calls] == [4, 15, 0, 15]
    assert_seen(calls, looking.folder)


@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_behind_an_images_token_that_the_policy_has_said_no_image_is_shown(
    looking: Asking,
) -> None:
    said = [*looking.chat.encode("so"), IMAGE_ID]
    numbers = {"logprobs": [-1.0] * 3, "versions": [0] * 3, "text": "so"}
    begun = CallPart(names=["c00000"], deltas=[Delta(choice=0, token_ids=said, **numbers)])
    calls = looking.calls()
    first = await calls.answer(shown(("look: ", SMALL), begun=begun), looking.tell)
    assert IMAGE_ID in calls.tree.calls[0].generated.token_ids
    answer = "so" + text_of(first)
    text = await calls.answer(shown(("look: ", SMALL), (answer,), ("on",)), looking.tell)
    more = await calls.answer(shown(("look: ", SMALL), (answer,), ("on", TALL)), looking.tell)
    assert (text.parent, text.branch) == (0, "")
    assert (more.parent, more.branch) == (None, "template")
    last = calls.tree.calls[2]
    images = list(pictures_of(last.path_messages))
    assert images == [SMALL, TALL]
    assert (last.given_ids == IMAGE_ID).sum() == 4 + 15


@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_images_that_cannot_be_shown_cost_their_call_alone(looking: Asking) -> None:
    calls = looking.calls()
    for content, words in (
        ((b"no image",), "cannot be opened"),
        ((SMALL[:60],), "damaged|cannot be opened"),
        ((SMALL, SMALL), "are adjacent"),
    ):
        with pytest.raises(DataError, match=words):
            await calls.answer(shown(content), looking.tell)
    named = await calls.answer(shown((f"what is {IMAGE}?",)), looking.tell)
    assert named.parent is None
    assert IMAGE_ID not in calls.tree.calls[0].given_ids  # what a text says is no image
    first = await calls.answer(shown((SMALL,)), looking.tell)
    with pytest.raises(DataError, match="cannot be opened"):
        await calls.answer(shown((SMALL,), (text_of(first),), (b"no image",)), looking.tell)
    on = await calls.answer(shown((SMALL,), (text_of(first),), ("on",)), looking.tell)
    assert on.parent == 1


async def test_a_model_of_text_refuses_images_also_behind_an_answer(asking: Asking) -> None:
    calls = asking.calls()
    first = await calls.answer(request("hi"), asking.tell)
    with pytest.raises(ModelError, match="reads text only"):
        await calls.answer(shown(("hi",), (text_of(first),), ("see ", SMALL)), asking.tell)
    with pytest.raises(ModelError, match="reads text only"):
        await calls.answer(shown((SMALL,)), asking.tell)
    assert len(calls.tree.calls) == 1


@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_the_images_of_an_episode_fit_its_share_of_a_message(looking: Asking) -> None:
    room = len(SMALL) + len(TALL)
    calls = looking.calls(message_bytes=-(-room * 4 // 3))
    first = await calls.answer(shown((SMALL,)), looking.tell)
    history = ((SMALL,), (text_of(first),), ("and ", TALL))
    await calls.answer(shown(*history), looking.tell)
    await calls.answer(shown((TALL,)), looking.tell)  # each counts once
    with pytest.raises(EpisodeLimit, match=rf"share of {room:,}: a task's 1 episodes"):
        await calls.answer(shown((png(16, 16, 3),)), looking.tell)
    assert calls.limit_hit == "length"
