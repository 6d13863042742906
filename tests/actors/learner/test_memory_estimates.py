"""The estimate of a learner's memory agrees with what a real step allocates."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.tiny_models import TinyVisionKind, save_tiny_vision_model
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.memory import host_terms, layer_bytes_per_token, learner_load
from tinkermq.schemas.plan.model_shape import find_shape
from tinkermq.schemas.rollout import Group
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from tests.support.allocations import allocated_in_step, equal_sequences, estimated_for_step
from tests.support.groups import make_group, make_trajectory
from tests.support.images import IMAGE_ID, png

pytestmark = pytest.mark.full

torch.set_num_threads(1)

TOLERANCE = 0.15
LENGTH, NUM_EPISODES, ROWS = 257, 6, 2
"""A sequence takes a column less than it has tokens; each of three passes has two rows."""


def _shape(hidden: int, layers: int, heads: int, mlp: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }


SIZES = {
    "1 M": Qwen2Config(**_shape(128, 4, 4, 512, 1024), tie_word_embeddings=True),
    "5 M": Qwen2Config(**_shape(256, 6, 8, 768, 2048), tie_word_embeddings=True),
    "14 M": Qwen2Config(**_shape(320, 8, 10, 1280, 3072), tie_word_embeddings=False),
}
KINDS = {
    "Qwen3": Qwen3Config(
        **_shape(256, 4, 4, 768, 2048) | {"head_dim": 128}, tie_word_embeddings=True
    ),
    "Llama": LlamaConfig(**_shape(256, 4, 4, 768, 2048)),
    "experts": Qwen3MoeConfig(
        **_shape(256, 4, 4, 768, 2048)
        | {"head_dim": 64, "moe_intermediate_size": 256, "num_experts": 8},
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
}


KINDS_OF_VISION: tuple[TinyVisionKind, ...] = ("qwen2_vl", "qwen2_5_vl")
VISION_CASES: list[dict[str, Any]] = [
    {},
    {"learner": {"gradient_checkpointing": True}},
    {"learner": {"dtype": "bfloat16"}},
]


def _saved(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def _config(folder: Path, **sections: dict[str, Any]) -> JobConfig:
    columns = LENGTH - 1
    learner = {
        "lr": 1e-6,
        "max_row_tokens": columns,
        "microbatch_tokens": ROWS * columns,
        "gradient_checkpointing": False,
    }
    lengths = {"max_prompt_tokens": 33, "max_turn_tokens": 128, "max_response_tokens": 223}
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": lengths,
            "algorithm": {"correction": "none"},
            **sections,
            "learner": learner | sections.get("learner", {}),
        }
    )


def _measured(config: JobConfig) -> int:
    return allocated_in_step(config, LENGTH, NUM_EPISODES)


def _assert_close(config: JobConfig) -> None:
    measured, estimated = _measured(config), estimated_for_step(config)
    assert estimated == pytest.approx(measured, rel=TOLERANCE), (measured, estimated)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rank", [0, 8], ids=["full", "adapter"])
@pytest.mark.parametrize("size", ["1 M", "5 M", pytest.param("14 M", marks=pytest.mark.long)])
def test_the_estimate_of_a_step_is_what_torch_allocates(
    tmp_path: Path, size: str, rank: int, checkpointing: bool
) -> None:
    lora = {"lora": {"rank": rank}} if rank else {}
    learner = {"gradient_checkpointing": checkpointing}
    _assert_close(_config(_saved(SIZES[size], tmp_path), learner=learner, **lora))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_for_other_decoders_too(tmp_path: Path, kind: str) -> None:
    _assert_close(_config(_saved(KINDS[kind], tmp_path)))


@pytest.mark.parametrize(
    "sections",
    [
        {"learner": {"dtype": "bfloat16"}},
        {"learner": {"dtype": "bfloat16"}, "lora": {"rank": 8}},
        {"learner": {"dtype": "bfloat16", "gradient_checkpointing": True}},
        {"learner": {"optimizer": "muon"}},
        {"algorithm": {"kl_coef": 0.1}},
    ],
    ids=str,
)
def test_it_is_for_other_settings_too(tmp_path: Path, sections: dict[str, Any]) -> None:
    config = _config(_saved(SIZES["5 M"], tmp_path), **sections)
    if config.algorithm.kl_coef:
        estimated = estimated_for_step(config) + 4 * _num_weights(tmp_path)  # the reference
        assert estimated == pytest.approx(_measured_with_reference(config), rel=TOLERANCE)
        return
    _assert_close(config)


def _seeing(folder: Path, kind: TinyVisionKind) -> Path:
    """Write a model whose vision tower takes a good part of the memory."""
    save_tiny_vision_model(folder, kind=kind)
    config: Any = AutoConfig.from_pretrained(folder)
    wide = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    for name, value in {**wide, "intermediate_size": 384, "num_hidden_layers": 3}.items():
        setattr(config.text_config, name, value)
    config.text_config.layer_types = 3 * ["full_attention"]
    tower = {"depth": 3, "num_heads": 4}
    own = {"embed_dim": 96, "hidden_size": 128, "mlp_ratio": 3}
    if kind == "qwen2_5_vl":
        own = {"hidden_size": 96, "intermediate_size": 256, "out_hidden_size": 128}
    for name, value in {**tower, **own}.items():
        setattr(config.vision_config, name, value)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def _batch_of_images() -> TrainingBatch:
    """Return episodes of 256 columns: a prompt of three images of 64 tokens, and an answer."""
    rng = np.random.default_rng(0)
    prompt = [3, *3 * [*64 * [IMAGE_ID], 70], 71, 72, 73, 74]
    groups: list[Group] = []
    for number in range(NUM_EPISODES):
        images = tuple(png(64, 64, 3 * number + place) for place in range(3))
        answer = rng.integers(8, 264, LENGTH - len(prompt)).tolist()
        seen = [{"type": "image", "image": {"bytes": image, "path": None}} for image in images]
        messages: list[dict[str, Any]] = [{"role": "user", "content": seen}]
        episode = make_trajectory(prompt, [(answer, [])], [1.0], messages=messages)
        groups.append(make_group([episode], number).with_shared_images())
    return assemble(groups)


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind == "qwen2_5_vl" else pytest.param(kind, marks=pytest.mark.long)
        for kind in KINDS_OF_VISION
    ],
)
@pytest.mark.parametrize("sections", VISION_CASES, ids=str)
def test_images_are_counted(tmp_path: Path, kind: TinyVisionKind, sections: dict[str, Any]) -> None:
    lengths = {"max_prompt_tokens": 200, "max_turn_tokens": 56, "max_response_tokens": 56}
    learner = {"share_prompts": False, **sections.get("learner", {})}
    config = _config(_seeing(tmp_path, kind), learner=learner, rollout=lengths)
    measured = allocated_in_step(config, LENGTH, NUM_EPISODES, _batch_of_images())
    estimated = estimated_for_step(config)
    shape = find_shape(str(tmp_path))
    assert shape is not None
    assert shape.vision is not None
    assert shape.vision_weights == pytest.approx(shape.vision.weights, rel=0.02)
    assert estimated == pytest.approx(measured, rel=TOLERANCE), (measured, estimated)
    without = estimated_for_step(config, images=False)
    assert without < (1 - 2 * TOLERANCE) * measured or learner.get("gradient_checkpointing")


def _num_weights(folder: Path) -> int:
    shape = find_shape(str(folder))
    assert shape is not None
    return shape.weights


def _measured_with_reference(config: JobConfig) -> int:
    return _measured(config) + 4 * _num_weights(Path(config.model.path))


@pytest.mark.parametrize("config", [*SIZES.values(), *KINDS.values()], ids=[*SIZES, *KINDS])
def test_weights_are_counted_from_the_config_as_from_the_files(
    tmp_path: Path, config: PreTrainedConfig
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    counted = sum(weight.numel() for weight in model.parameters())
    config.save_pretrained(tmp_path)
    by_config = find_shape(str(tmp_path))
    model.save_pretrained(tmp_path)
    by_files = find_shape(str(tmp_path))
    assert by_config is not None
    assert by_files is not None
    assert by_config.weights == by_files.weights == counted
    assert by_config.active_weights == pytest.approx(by_files.active_weights, rel=0.01)


def test_a_token_of_seven_billion_weights_keeps_six_megabytes_in_16_bits() -> None:
    shape = find_shape("Qwen/Qwen2.5-7B-Instruct")
    assert shape is not None
    assert shape.weights == pytest.approx(7.62e9, rel=0.005)
    sections = {"dtype": "bfloat16", "ranks": 4, "slots": 4}
    config = JobConfig.model_validate(
        {"model": {"path": "m"}, "env": {"game": "none"}, "learner": sections}
    )
    load = learner_load(config, shape, microbatch_tokens=8192, checkpointing=False)
    assert shape.layers * layer_bytes_per_token(load) == pytest.approx(6.3e6, rel=0.03)


@pytest.mark.parametrize("rank", [0, 8], ids=["full", "adapter"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_copy_for_a_checkpoint_is_as_large_as_a_plan_says(
    tmp_path: Path, optimizer: str, rank: int
) -> None:
    lora = {"lora": {"rank": rank}} if rank else {}
    config = _config(_saved(SIZES["5 M"], tmp_path), learner={"optimizer": optimizer}, **lora)
    model = load_model(config.model, config.learner, lora=config.lora)
    trainer = Trainer(model, config, total_steps=2)
    trainer.step(equal_sequences(int(model.config.vocab_size), LENGTH, 1), 1)
    copied = trainer.copy(None).policy
    tensors = [*copied.weights.values(), *_tensors_in(copied.optimizer)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    shape = find_shape(config.model.path)
    assert shape is not None
    (term,) = host_terms(
        learner_load(config, shape, microbatch_tokens=LENGTH, checkpointing=False, on_gpu=False)
    )
    assert sum(sizes.values()) == pytest.approx(term.num_bytes, rel=0.01)


def _tensors_in(state: Any) -> list[torch.Tensor]:
    """Return all tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return [tensor for part in cast("list[Any]", parts) for tensor in _tensors_in(part)]
