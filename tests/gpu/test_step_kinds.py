"""Steps with images, the gradients of varlen kernels, and steps that repeat to the bit."""

import hashlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.learner.memory import with_chosen_settings
from tinkermq.actors.policy.devices import own_card
from tinkermq.actors.policy.tiny_models import IMAGE, make_tokenizer, save_tiny_vision_model
from tinkermq.actors.policy.vision import ImageReader, Processor
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.numerics import settle_numerics
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from benchmarks.learner_step import StepSequences, StepWay, let_go, make_trainer, timed
from tests.gpu.material import Attention, RandomPolicy, token_sequences
from tests.gpu.report import Recorder
from tests.support.groups import make_group, make_trajectory
from tests.support.images import IMAGE_ID, png

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
NEEDED_BYTES = 40 * 2**30


def save_vision_model(folder: Path, *, on_gpu: bool) -> None:
    """Write a model with the tower and twelve layers of Qwen2.5-VL-3B; on a CPU a tiny one."""
    if not on_gpu:
        save_tiny_vision_model(folder, kind="qwen2_5_vl")
        return
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    }
    vision = {"out_hidden_size": 2048}  # all else as the class has it
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model: Any = Qwen2_5_VLForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    reader = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2)
    Processor(make_tokenizer([IMAGE]), ImageReader(reader, IMAGE_ID)).save_pretrained(folder)


def seeing_groups(num_groups: int, pixels: int, image_tokens: int, num_tokens: int) -> list[Group]:
    """Return groups of four answers about one image, of `pixels` a side."""
    rng = torch.Generator().manual_seed(0)
    groups: list[Group] = []
    for number in range(num_groups):
        parts = [{"type": "image", "image": {"bytes": png(pixels, pixels, number), "path": None}}]
        answers = torch.randint(8, 264, (4, num_tokens), generator=rng).tolist()
        episodes = [
            make_trajectory(
                [3, 70, *[IMAGE_ID] * image_tokens, 80],
                [(answer, [])],
                [float(place % 2)],
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}],
            )
            for place, answer in enumerate(answers)
        ]
        groups.append(make_group(episodes, number).with_shared_images())
    return groups


def test_a_step_with_images(on_gpu: bool, tmp_path: Path, record: Recorder) -> None:
    let_go()
    if on_gpu and torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("less than 40 GiB of the GPU are free")
    save_vision_model(tmp_path, on_gpu=on_gpu)
    num_groups, pixels, image_tokens, num_tokens = (16, 448, 256, 256) if on_gpu else (2, 16, 4, 8)
    config = JobConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "env": {"game": "geo3k"},
            "rollout": {
                "max_prompt_tokens": image_tokens + 8,
                "max_turn_tokens": num_tokens,
                "max_response_tokens": num_tokens,
            },
            "learner": {"lr": 1e-6},
        }
    )
    config = with_chosen_settings(config, own_card())
    trainer = Trainer(
        load_model(config.model, config.learner), config, total_steps=3, parallel=Parallel.alone()
    )
    batch = assemble(seeing_groups(num_groups, pixels, image_tokens, num_tokens))
    device = next(trainer.model.parameters()).device
    numbers: list[dict[str, float]] = []
    step = timed(lambda number: numbers.append(trainer.step(batch, number).numbers), 1, device)
    record("vision_step_s", step.seconds)
    record("images/s", num_groups / step.seconds)
    assert not any(one["actor/skipped_updates"] for one in numbers)
    assert min(one["actor/grad_norm"] for one in numbers) > 0


def test_varlen_kernels_have_the_gradients_of_sdpa_with_grouped_heads(
    policy: RandomPolicy, on_gpu: bool, record: Recorder
) -> None:
    sequences = token_sequences(policy.vocab_size, [300, 40, 211])
    names: tuple[Attention, Attention] = ("varlen", "sdpa")
    ours, plain = (policy.learner(name).gradients(sequences) for name in names)
    differences = {
        name: float((ours[name] - each).norm() / each.norm()) for name, each in plain.items()
    }
    record("varlen_backward_difference", max(differences.values()))
    assert max(differences.values()) <= (0.05 if on_gpu else 1e-4), differences


def test_deterministic_steps_arrive_at_the_same_bits(
    policy: RandomPolicy, on_gpu: bool, record: Recorder
) -> None:
    """In a process of its own: the settings must precede CUDA's start."""
    with multiprocessing.get_context("spawn").Pool(1) as process:
        first, second = process.apply(trained_twice, (policy, on_gpu))
    record("deterministic_difference", float(first != second))
    assert first == second


def trained_twice(policy: RandomPolicy, on_gpu: bool) -> list[str]:
    """Return the digest of all weights after three steps from the same weights, twice."""
    settings = policy.config(learner={"deterministic": True}).learner
    settle_numerics(settings, on_gpu=on_gpu)
    digests: list[str] = []
    for _ in range(2):
        way = StepWay(policy.folder, 512, policy.dtype, "auto", True, 3)
        trainer, batch = make_trainer(way, StepSequences(policy.vocab_size, 256, 12))
        for number in range(1, 4):
            trainer.step(batch, number)
        digest = hashlib.sha256()
        for weight in trainer.model.parameters():
            digest.update(weight.detach().float().cpu().numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests
