"""Calls with images: what the engine saw, what a row holds of them, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tinkermq.actors.policy.chat import open_chat
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.envs.agents.episode import EpisodeLimit
from tinkermq.envs.model_apis.canonical import pictures_of
from tinkermq.schemas.agent import (
    CallDelivered,
    CallDelta,
    CallMessage,
    CallPart,
    CallRequest,
)
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.wire.errors import DataError, ModelError

from tests.actors.generator.agents.asking import Asking, request, text_of
from tests.actors.generator.conftest import EngineKind, StartEngine
from tests.support.images import IMAGE, IMAGE_ID, load, png, seeing_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="package")
SMALL, TALL = png(16, 16), png(24, 40, 1)


@pytest_asyncio.fixture(loop_scope="package")
async def looking(start: StartEngine, seeing: Path, engine_kind: EngineKind) -> Asking:
    """Each engine with a tiny model that sees images."""
    chat = open_chat(ModelConfig(path=str(seeing)))
    return Asking(await start(seeing), chat, seeing, engine_kind)


def shown(*messages: tuple[Any, ...], **fields: Any) -> CallRequest:
    """Return a request whose messages, a user's first, hold texts and images."""
    roles = ("user", "assistant")
    told = [
        CallMessage(role=roles[place % 2], content=list(content))  # type: ignore[arg-type]
        for place, content in enumerate(messages)
    ]
    return CallRequest(request="r", messages=told, **fields)


def assert_seen(calls: CallAnswers, folder: Path) -> None:
    """Assert that each token has the log-prob of the model's own pass over what was shown."""
    model, reader = load(folder), load_image_reader(str(folder))
    assert reader is not None
    for call in calls.tree.calls:
        images = tuple(one.encoded for one in pictures_of(call.path_messages))
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
    begun = CallPart(names=["c00000"], deltas=[CallDelta(choice=0, token_ids=said, **numbers)])
    calls = looking.calls()
    first = await calls.answer(shown(("look: ", SMALL), begun=begun), looking.tell)
    assert IMAGE_ID in calls.tree.calls[0].generated.token_ids
    answer = "so" + text_of(first)
    text = await calls.answer(shown(("look: ", SMALL), (answer,), ("on",)), looking.tell)
    more = await calls.answer(shown(("look: ", SMALL), (answer,), ("on", TALL)), looking.tell)
    assert (text.parent, text.branch) == (0, "")
    assert (more.parent, more.branch) == (None, "template")
    last = calls.tree.calls[2]
    images = [one.encoded for one in pictures_of(last.path_messages)]
    assert images == [SMALL, TALL]
    assert (last.given_ids == IMAGE_ID).sum() == 4 + 15


@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_images_that_cannot_be_shown_cost_their_call_alone(looking: Asking) -> None:
    calls = looking.calls()
    for content, words in (
        ((b"no image",), "cannot be opened"),
        ((SMALL[:60],), "damaged|cannot be opened"),
        ((SMALL, SMALL), "side by side"),
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
    with pytest.raises(ModelError, match="reads text alone"):
        await calls.answer(shown(("hi",), (text_of(first),), ("see ", SMALL)), asking.tell)
    with pytest.raises(ModelError, match="reads text alone"):
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
    with pytest.raises(EpisodeLimit, match=rf"may have {room:,}: the 1 episodes"):
        await calls.answer(shown((png(16, 16, 3),)), looking.tell)
    assert calls.limit_hit == "length"
