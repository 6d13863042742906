"""The learner sees what the engine saw: packed rows with images, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.policy.vision import load_image_reader
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig, ModelConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.rollout import Group, check_group
from tinkermq.schemas.wire.errors import DataError, MessageError

from tests.support.groups import make_group, make_trajectory
from tests.support.images import (
    IMAGE_ID,
    KINDS,
    load,
    make_vision_model,
    picture,
    png,
    seeing_logprobs,
)

torch.set_num_threads(1)
SMALL, TALL, WIDE = png(16, 16), png(24, 40, 1), png(32, 8, 2)
TWO = [3, 70, *[IMAGE_ID] * 4, 80, *[IMAGE_ID] * 15, 81]
ONE = [3, *[IMAGE_ID] * 4, 90, 91]
TEXT = [3, 70, 80]


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model of each class."""
    return make_vision_model(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of them, for what does not depend on the class."""
    return make_vision_model(tmp_path_factory.mktemp("one"), "qwen2_5_vl")


@pytest.fixture(scope="module")
def trainer(one: Path) -> Trainer:
    """A trainer whose model no test changes."""
    config = JobConfig.model_validate({"model": {"path": str(one)}, "env": {"game": "geo3k"}})
    return Trainer(load_model(config.model, config.learner), config, total_steps=4)


def _seen(images: tuple[bytes, ...]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": {"bytes": image, "path": None}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]


def _group(number: int, prompt: list[int], images: tuple[bytes, ...]) -> Group:
    """Four episodes of one or two turns; one of them generated the image's token itself."""
    rng = np.random.default_rng(number)
    episodes = []
    for place in range(4):
        turns = [(rng.integers(8, 264, 3 + place).tolist(), rng.integers(8, 264, 2).tolist())]
        turns.append((rng.integers(8, 264, 2).tolist(), []))
        if place == 2:
            turns[0][0][1] = IMAGE_ID
        turns = turns[place % 2 :]
        rewards = [0.0] * (len(turns) - 1) + [float(place)]
        episodes.append(make_trajectory(prompt, turns, rewards, messages=_seen(images)))
    return make_group(episodes, number).with_shared_images()


def _groups() -> list[Group]:
    asked = [(TWO, (SMALL, TALL)), (ONE, (SMALL,)), (ONE, (WIDE,)), (TEXT, ()), (ONE, (SMALL,))]
    return [_group(number, prompt, images) for number, (prompt, images) in enumerate(asked)]


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_rows_with_images_score_as_the_models_own_pass(
    seeing: Path, share_prompts: bool
) -> None:
    plain, reader = load(seeing), load_image_reader(str(seeing))
    assert reader is not None
    model = load_model(ModelConfig(path=str(seeing)), LearnerConfig())
    scorer = Scorer(model, temperature=1.0)
    groups = _groups()
    batch = assemble(groups)
    micros = pack(
        batch.sequences,
        max_row_tokens=64,
        microbatch_tokens=160,
        share_prompts=share_prompts,
        see=lambda one: (
            reader.read_images(model, one.token_ids, one.images) if one.images else None
        ),
    )
    shown = sum(len(micro.images.images) for micro in micros if micro.images is not None)
    assert shown < 16 if share_prompts else shown == 16  # shared prompts hold their images once
    ours = torch.empty(batch.num_tokens)
    for micro in micros:
        ours[micro.index_N] = scorer.score(micro).logprobs_N.detach()
    expected: list[float] = []
    for sequence in batch.sequences:
        start = int(sequence.mask.argmax())
        prompt, rest = sequence.token_ids[:start], sequence.token_ids[start:]
        one = seeing_logprobs(plain, reader, prompt, rest, sequence.images)
        expected += one[sequence.mask[start:] == 1].tolist()
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4)


def test_a_step_trains_the_eyes_and_the_checkpoint_holds_all_that_is_needed(
    seeing: Path, tmp_path: Path
) -> None:
    config = JobConfig.model_validate(
        {"model": {"path": str(seeing)}, "env": {"game": "geo3k"}, "learner": {"lr": 1e-3}}
    )
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.step(assemble(_groups()), 1)
    moved = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert any("visual" in name for name in moved)
    assert any("language_model" in name for name in moved)
    saved_to = tmp_path / "checkpoint"
    trainer.save(saved_to, load_tokenizer(str(seeing)))
    reader, saved = load_image_reader(str(saved_to)), load(saved_to)
    assert reader is not None
    assert reader.read([TALL]).tokens == (15,)
    for name, value in model.state_dict().items():
        assert saved.state_dict()[name].equal(value)


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"gradient_checkpointing": True, "dtype": "bfloat16"}},
        pytest.param({"algorithm": {"advantage": "gae"}}, marks=pytest.mark.full),
        pytest.param({"algorithm": {"kl_coef": 0.1}, "lora": {"rank": 4}}, marks=pytest.mark.full),
    ],
    ids=["checkpointing", "critic", "adapter"],
)
def test_the_eyes_are_trained_in_every_way_in_which_models_are(
    one: Path, sections: dict[str, Any]
) -> None:
    config = JobConfig.model_validate(
        {"model": {"path": str(one)}, "env": {"game": "geo3k"}, **sections}
    )
    model = load_model(config.model, config.learner, lora=config.lora)
    Trainer(model, config, total_steps=4).step(assemble(_groups()[:1]), 1)
    gradients = [
        each.grad
        for name, each in model.named_parameters()
        if "visual" in name and each.grad is not None
    ]
    assert any(gradient.any() for gradient in gradients)


def test_a_text_alone_leaves_the_eyes_without_a_gradient_but_trains(one: Path) -> None:
    config = JobConfig.model_validate({"model": {"path": str(one)}, "env": {"game": "bandit"}})
    model = load_model(config.model, config.learner)
    report = Trainer(model, config, total_steps=4).step(assemble([_group(3, TEXT, ())]), 1)
    assert report.numbers["actor/grad_norm"] > 0


@pytest.mark.parametrize(
    ("prompt", "images", "words"),
    [
        (ONE, (TALL,), "take 15 tokens"),
        (TEXT, (SMALL,), "take 4 tokens"),
        (ONE, (), "no images"),
        (ONE, (b"none",), "cannot be opened"),
    ],
)
def test_a_group_whose_images_are_not_those_of_its_prompt_is_refused(
    trainer: Trainer, prompt: list[int], images: tuple[bytes, ...], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        trainer.check_readable(_group(0, prompt, images))
    trainer.check_readable(_group(0, ONE, (SMALL,)))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "PDF"])
def test_images_are_decoded_of_four_kinds_only(one: Path, kind: str) -> None:
    reader = load_image_reader(str(one))
    assert reader is not None
    encoded = picture(16, 16, kind=kind)
    if kind in ("PNG", "JPEG", "WEBP", "GIF"):
        assert reader.read([encoded]).tokens == (4,)
        return
    with pytest.raises(DataError, match="cannot be opened") as refused:
        reader.count_tokens(encoded)
    assert "PNG, JPEG, WebP or GIF" in refused.value.hint


@pytest.mark.parametrize("image", [3, {"path": "a.png"}, "https://example.org/a.png"])
def test_an_image_that_is_not_in_the_group_is_refused_whatever_the_model(image: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": image}]}]
    group = make_group([make_trajectory(TEXT, [([9], [])], [1.0], messages=messages)])
    with pytest.raises(MessageError, match="not there in bytes"):
        check_group(group, vocab_size=265, max_tokens=64, version=0)


def test_each_image_travels_once_in_a_group() -> None:
    group = _group(0, TWO, (SMALL, TALL))
    assert group.images == [SMALL, TALL]
    packed = group.to_bytes()
    assert packed.count(SMALL) == packed.count(TALL) == 1
    again = Group.from_bytes(packed)
    assert [one.images for one in assemble([again]).sequences] == [(SMALL, TALL)] * 4
    assert again.with_shared_images().to_bytes() == packed
