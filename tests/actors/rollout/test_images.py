"""Episodes and conversations with images, from the file to what the learner scores."""

import asyncio
import base64
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from nats.aio.msg import Msg
from tinkermq.actors.policy.chat import ChatTokenizer, make_chat, open_chat
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.rollout.agent_loop import (
    AgentLoop,
    EpisodeFailed,
    EpisodePlan,
    EpisodeSampling,
)
from tinkermq.actors.rollout.demonstrations import demonstrate
from tinkermq.actors.rollout.groups import GroupFailed
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer, _all
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.jetstream.streams import (
    create_job_streams,
    delete_job_streams,
)
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.data import ChatData
from tinkermq.envs.games.geo3k import make_data
from tinkermq.envs.host import EnvironmentHost
from tinkermq.envs.host_client import Environments, Start
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.rollout import Group, check_group
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.errors import DataError, ModelError
from tinkermq.schemas.wire.images import data_url, images_of, shows_later
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.engine.conftest import EngineKind, StartEngine
from tests.support.groups import make_group
from tests.support.images import IMAGE, IMAGE_ID, load, make_vision_model, png, seeing_logprobs


def _config(model: Path, data: Path, **rollout: Any) -> JobConfig:
    train, val = make_data(data, 2, 2)
    limits = {"max_turns": 2, "max_prompt_tokens": 24, "max_turn_tokens": 6}
    return JobConfig.model_validate(
        {
            "model": {"path": str(model)},
            "env": {"game": "geo3k_tool", "train_data": [str(train)], "val_data": [str(val)]},
            "rollout": {"group_size": 3, **limits, "max_response_tokens": 80, **rollout},
        }
    )


@pytest_asyncio.fixture(loop_scope="package")
async def seen(nats_server: NatsServer) -> AsyncIterator[tuple[Broker, JobScope]]:
    """A connection in the engines' event loop, and a job with its streams."""
    async with await connect(nats_server.url, name="test") as broker:
        scope = JobScope("local", f"job-seen-{uuid.uuid4().hex[:8]}")
        await create_job_streams(broker, scope, LimitsConfig())
        yield broker, scope
        await delete_job_streams(broker, scope)


@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize("seeing", ["qwen2_vl"], indirect=True)
async def test_the_learner_computes_the_logprobs_that_the_engine_recorded(
    seen: tuple[Broker, JobScope],
    start: StartEngine,
    engine_kind: EngineKind,
    seeing: Path,
    tmp_path: Path,
) -> None:
    broker, scope = seen
    config = _config(seeing, tmp_path)
    host, stopping = EnvironmentHost(broker, scope, config.env, seed=0), asyncio.Event()
    hosting = asyncio.create_task(host.run(stopping))
    chat = make_chat(config)
    engine = await start(seeing)
    hosts = Environments(broker, scope, config.env, lambda _: nullcontext())
    loop = AgentLoop(engine, chat, hosts, config.rollout, EpisodeSampling.of(config.rollout))
    heard: list[bytes] = []

    async def overhear(message: Msg) -> None:
        heard.append(message.data)

    listening = await broker.nc.subscribe(">", cb=overhear)
    plans = [EpisodePlan(f"e{number}", Start("train", 0, 0)) for number in range(3)]
    group = make_group(await asyncio.gather(*(loop.run(plan) for plan in plans)))
    prompt = group.trajectories[0].token_ids[: int(group.trajectories[0].mask.argmax())]
    assert (prompt == IMAGE_ID).sum() == 4
    if engine_kind == "transformers":  # the prompt is shorter than what vLLM shares
        assert engine.stats().reused_tokens > 2 * len(prompt)  # the group's, and cached turns
    shared = group.with_shared_images()
    (image,) = shared.images
    assert len(heard) >= 6  # reset and two steps, asked and answered
    # in each answer to resets once, of which there is one unless the machine is slow; in no turn
    assert 1 <= sum(data.count(image) for data in heard) <= len(plans)
    await listening.unsubscribe()
    assert shared.trajectories[0].messages[0]["content"][0] == {"type": "image", "image": 0}
    assert [item.turn_ends.size for item in shared.trajectories] == [2, 2, 2]
    small = loop.__class__(
        engine,
        chat,
        hosts,
        config.rollout.model_copy(update={"max_prompt_tokens": len(prompt) - 1}),
        EpisodeSampling(1.0),
    )
    with pytest.raises(EpisodeFailed, match=f"has {len(prompt)} tokens"):
        await small.run(EpisodePlan("small", Start("train", 0, 0)))
    stopping.set()
    await hosting
    await engine.close()
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=1)
    trainer.check_readable(shared)
    batch = assemble([shared])
    ours_N, _ = trainer._score_all(trainer._packer.pack(batch, _all(batch)), batch, trainer._scorer)
    np.testing.assert_allclose(ours_N.numpy(), batch.behaviour_N.numpy(), atol=1e-4)


def test_an_image_takes_the_tokens_of_its_size_and_equal_texts_differ_by_it(
    folder: Path, tmp_path: Path
) -> None:
    chat = make_chat(_config(make_vision_model(tmp_path / "model"), tmp_path))

    def asked(image: Any, text: str = "?") -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": text}]
        return [{"role": "user", "content": parts}]

    for width, height, tokens in ((16, 16, 4), (40, 24, 15), (400, 300, 54)):
        ids = chat.first_prompt(asked(png(width, height)))
        assert (ids == IMAGE_ID).sum() == tokens
        assert ids.tolist() == chat.prompt(asked({"bytes": png(width, height), "path": None}))
    named = chat.first_prompt(asked(png(16, 16), f"what is {IMAGE}?"))
    assert (named == IMAGE_ID).sum() == 4  # what a text says is no image
    assert f"what is {IMAGE}?" in chat.decode(named)
    with pytest.raises(DataError, match=r"not there in bytes, but as 'a\.png'"):
        chat.first_prompt(asked("a.png"))
    with pytest.raises(DataError, match="cannot be opened"):
        chat.first_prompt(asked(b"GIF89a"))
    with pytest.raises(DataError, match=r"\d+ × 1 pixels cannot be seen"):
        chat.first_prompt(asked(png(900, 1)))
    text_only: ChatTokenizer = make_chat(_config(folder, tmp_path))
    with pytest.raises(ModelError, match="reads text only"):
        text_only.first_prompt(asked(png(8, 8)))


# -- Conversations with images are learnt from: what the learner scores is what the model sees -----


torch.set_num_threads(1)
SMALL, TALL = png(16, 16), png(24, 40, 1)


def told(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


FIRST = {"type": "image_url", "image_url": {"url": data_url(SMALL)}}
LATER = {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(TALL).decode()}"}
ROWS: list[dict[str, Any]] = [
    {"messages": [told(FIRST, text("what?")), said("a dot")]},
    {"messages": [told(FIRST, text("and?")), said("a dot"), told(LATER, text("?")), said("two")]},
    {"messages": [told(text("no image")), said("none"), told(LATER), said("one now")]},
]


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def config_of(vlm: Path) -> JobConfig:
    rollout = {"max_prompt_tokens": 64, "max_turn_tokens": 8, "max_response_tokens": 64}
    given = {"model": {"path": str(vlm)}, "sft": {"data": ["c"]}, "rollout": rollout}
    return JobConfig.model_validate(given)


def demonstrated(data: ChatData, chat: ChatTokenizer, sample: int, config: JobConfig) -> Group:
    task = Task(task=sample, sample=sample, seed=1, group_size=config.rollout.group_size)
    return demonstrate(task, data, chat, config, "g-0")


def rows(tmp_path: Path, *given: dict[str, Any]) -> ChatData:
    """Return data with bytes, which parquet alone can hold, or with data URLs."""
    holds_bytes = any("images" in row for row in given)
    file = tmp_path / ("rows.parquet" if holds_bytes else "rows.jsonl")
    return ChatData([write_rows(file, given)])


def test_what_is_said_after_each_image_is_scored_by_what_was_seen_until_then(
    vlm: Path, tmp_path: Path
) -> None:
    config = config_of(vlm)
    chat, reader, plain = open_chat(config.model), load_image_reader(str(vlm)), load(vlm)
    assert reader is not None
    with contextlib.closing(rows(tmp_path, *ROWS)) as data:
        groups = [demonstrated(data, chat, number, config) for number in range(3)]
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=1)
    for group in groups:
        check_group(group, vocab_size=trainer._scorer.vocab_size, max_tokens=128, version=0)
        trainer.check_readable(group)
    assert [len(group.images) for group in groups] == [1, 2, 1]
    assert [shows_later(group.trajectories[0].messages) for group in groups] == [False, True, True]
    batch = assemble(groups)
    everything = torch.ones_like(batch.group_S, dtype=torch.bool)
    micros = trainer._packer.pack(batch, everything)
    ours_N, _ = trainer._score_all(micros, batch, trainer._scorer)
    at = 0
    for group in groups:
        (row,) = group.trajectories
        images = images_of(row.messages, group.images)
        ends = np.flatnonzero(np.diff(row.mask.astype(np.int8), append=0) == -1) + 1
        begin = 0
        for end in ends.tolist():
            ids = row.token_ids[:end]
            first = begin + int(row.mask[begin:].argmax())
            shown = [image for image in images if counted(ids[:first], images, image, reader)]
            expected = seeing_logprobs(plain, reader, ids[:first], ids[first:], tuple(shown))
            np.testing.assert_allclose(ours_N[at : at + end - first].numpy(), expected, atol=1e-4)
            at, begin = at + end - first, end
    assert at == batch.num_tokens


def counted(ids: Any, images: tuple[bytes, ...], image: bytes, reader: Any) -> bool:
    """Whether an image has been shown by the end of some ids."""
    until = sum(reader.count_tokens(one) for one in images[: images.index(image) + 1])
    return int((ids == IMAGE_ID).sum()) >= until


def test_a_column_of_images_fills_the_tags_of_texts_and_the_parts_without_one(
    vlm: Path, tmp_path: Path
) -> None:
    config = config_of(vlm)
    chat = open_chat(config.model)
    asked = {"role": "user", "content": "<image>what?"}
    by_tag = {"messages": [asked, said("a dot")], "images": [SMALL]}
    parts = [told({"type": "image"}, text("what?")), said("a dot")]
    by_part = {"messages": json.dumps(parts), "images": [{"bytes": SMALL, "path": None}]}
    with contextlib.closing(rows(tmp_path, *ROWS)) as data:
        expected = demonstrated(data, chat, 0, config)
    for row in (by_tag, by_part):
        with contextlib.closing(rows(tmp_path, row)) as data:
            group = demonstrated(data, chat, 0, config)
        assert group.images == expected.images == [SMALL]
        assert group.trajectories[0].token_ids.tolist() == (
            expected.trajectories[0].token_ids.tolist()
        )
    too_many = {**by_tag, "images": [SMALL, TALL]}
    words = r"row 0 of .*: a row has 2 images, its prompt names 1"
    with (
        contextlib.closing(rows(tmp_path, too_many)) as data,
        pytest.raises(GroupFailed, match=words),
    ):
        demonstrated(data, chat, 0, config)


def test_images_that_cannot_be_learnt_from_are_given_up_with_the_reason(
    vlm: Path, tmp_path: Path
) -> None:
    config = config_of(vlm)
    seeing, blind = open_chat(config.model), ChatTokenizer(make_tokenizer())
    by_model = {"messages": [told(text("draw")), {"role": "assistant", "content": [LATER]}]}
    damaged = {
        "type": "image",
        "image": f"data:image/png;base64,{base64.b64encode(b'no').decode()}",
    }
    for chat, row, words in (
        (blind, ROWS[0], "reads text only"),
        (seeing, by_model, "message 1 of a conversation is the assistant's, and holds an image"),
        (seeing, {"messages": [told(damaged), said("?")]}, "cannot be opened"),
    ):
        with (
            contextlib.closing(rows(tmp_path, row)) as data,
            pytest.raises(GroupFailed, match=words),
        ):
            demonstrated(data, chat, 0, config)
