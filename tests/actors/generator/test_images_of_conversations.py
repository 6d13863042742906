"""Conversations with images are learnt from: what the learner scores is what the model sees."""

import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.chat import ChatTokenizer, open_chat
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.rollout.demonstrations import demonstrate
from tinkermq.actors.rollout.groups import GroupFailed
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.envs.data import ChatData
from tinkermq.envs.write_data import write_rows
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, check_group
from tinkermq.schemas.task import Task
from tinkermq.schemas.wire.images import data_url, images_of, shows_later

from tests.support.images import IMAGE_ID, load, make_vision_model, png, seeing_logprobs

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


def config_of(folder: Path) -> JobConfig:
    rollout = {"max_prompt_tokens": 64, "max_turn_tokens": 8, "max_response_tokens": 64}
    given = {"model": {"path": str(folder)}, "sft": {"data": ["c"]}, "rollout": rollout}
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
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder)
    chat, reader, plain = open_chat(config.model), load_image_reader(str(folder)), load(folder)
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
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder)
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
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(folder)
    seeing, blind = open_chat(config.model), ChatTokenizer(make_tokenizer())
    by_model = {"messages": [told(text("draw")), {"role": "assistant", "content": [LATER]}]}
    damaged = {
        "type": "image",
        "image": f"data:image/png;base64,{base64.b64encode(b'no').decode()}",
    }
    for chat, row, words in (
        (blind, ROWS[0], "reads text alone"),
        (seeing, by_model, "message 1 of a conversation is the assistant's, and holds an image"),
        (seeing, {"messages": [told(damaged), said("?")]}, "cannot be opened"),
    ):
        with (
            contextlib.closing(rows(tmp_path, row)) as data,
            pytest.raises(GroupFailed, match=words),
        ):
            demonstrated(data, chat, 0, config)
