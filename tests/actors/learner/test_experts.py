"""A mixture of experts trains as dense models do, and generators get the weights that it has."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy
from tinkermq.actors.training.checkpoint_copy import trained_weights
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ModelError

from tests.actors.learner.test_ranks_kinds import check
from tests.support.models import make_tiny_model, plain_logprobs, random_prompt
from tests.support.saving import make_store, make_trainer, save, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with four experts each."""
    return make_tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")


def test_experts_and_router_train_and_go_on_bit_for_bit_from_a_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    first = make_trainer(folder)
    begun = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    train(first, range(1, 4))
    for name, tensor in first.model.state_dict().items():
        assert not torch.equal(tensor, begun[name]), name
    saved = save(make_store(tmp_path), first, folder, 3)
    stored = load_causal_lm(str(saved), dtype=torch.float32).state_dict()
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    again = make_trainer(folder, saved)
    for trainer in (first, again):
        train(trainer, range(4, 6))
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_a_generator_with_swapped_weights_has_the_log_probs_of_the_learner(folder: Path) -> None:
    trainer = make_trainer(folder)
    train(trainer, range(1, 4))
    weights = trained_weights(trainer.model)
    prompt = random_prompt(np.random.default_rng(0))

    async def generate():
        engine = await TransformersEngine.start(str(folder), max_slots=2, max_context=128)
        await engine.load_weights(1, weights, "recompute")
        result = await engine.generate(prompt, Sampling(40), request_id="1")
        await engine.close()
        return result

    result = asyncio.run(generate())
    expected = plain_logprobs(trainer.model, prompt, result.token_ids)  # pyright: ignore[reportArgumentType]
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_an_adapter_lies_in_the_attention_of_a_mixture_of_experts(folder: Path) -> None:
    lora = LoraConfig(rank=4, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = load_policy(str(folder), lora, dtype=torch.float32)
    assert all(".self_attn." in name for name in policy_tensors(model))


@pytest.mark.filterwarnings("ignore:The following:RuntimeWarning")  # PEFT's, before the refusal
@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["gate"]])
def test_an_adapter_of_experts_or_router_is_refused(folder: Path, targets: list[str]) -> None:
    with pytest.raises(ModelError, match="adapters of experts and routers are not trained") as told:
        load_policy(str(folder), LoraConfig(rank=4, targets=targets), dtype=torch.float32)
    assert "q_proj, k_proj, v_proj, o_proj" in str(told.value)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_two_ranks_train_experts_as_one_does(folder: Path, kind: str) -> None:
    check(folder, kind, "float32")
