"""Adapters: what is trained and sent, what is saved, and what they are compared with."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from tinkermq.actors.engine.engine import Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.lora import (
    initial_adapter,
    layer_names,
    other_adapter,
    policy_tensors,
    refuse_other_kind,
)
from tinkermq.actors.policy.model_folder import (
    load_causal_lm,
    load_model_config,
    load_policy,
    load_stop_token_ids,
    load_tokenizer,
)
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.checkpoint import CheckpointStore
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.parallel import snapshot
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.weights.tensors import TensorBytes
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ModelError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.phimoe import PhimoeConfig, PhimoeForCausalLM

from tests.support.families import make_model
from tests.support.groups import random_group
from tests.support.models import bytes_of, make_tiny_model, plain_logprobs

IDS = torch.arange(12)[None] + 40


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("lora") / "base")


def job(model: Path, **sections: dict[str, object]) -> JobConfig:
    given = {"lora": {"rank": 4, "alpha": 8}, "learner": {"lr": 1e-2}, **sections}
    return JobConfig.model_validate(
        {"model": {"path": str(model)}, "env": {"game": "none"}, **given}
    )


def trainer(config: JobConfig, folder: Path | None = None) -> Trainer:
    model = load_model(config.model, config.learner, folder, lora=config.lora, seed=config.seed)
    return Trainer(model, config, total_steps=10)


def train(learner: Trainer, *steps: int) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for step in steps:
        rng = np.random.default_rng(step)
        batch = assemble([random_group(rng, number) for number in range(2)])
        numbers = learner.step(batch, step).numbers
    return numbers


def save(learner: Trainer, run: Path, base: Path, step: int) -> Path:
    store = CheckpointStore(run, keep_last=2, keep_every=0)
    tokenizer = load_tokenizer(str(base))
    return store.save(LearnerState(step=step), lambda folder: learner.save(folder, tokenizer))


def logits(model: PreTrainedModel | torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def num_bytes(tensors: dict[str, TensorBytes]) -> int:
    return sum(len(bytes_of(tensor)) for tensor in tensors.values())


def test_only_the_adapter_is_trained_saved_and_loaded(base: Path, tmp_path: Path) -> None:
    config = job(base)
    learner = trainer(config)
    plain = load_causal_lm(str(base), dtype=torch.float32)
    assert torch.equal(logits(learner.model), logits(plain)), "a fresh adapter changes nothing"
    train(learner, 1, 2)
    trained = logits(learner.model)
    assert not torch.allclose(trained, logits(plain))
    frozen = {name: one for name, one in learner.model.named_parameters() if ".lora_" not in name}
    for name, tensor in plain.named_parameters():
        there = frozen[name if name in frozen else name.replace(".weight", ".base_layer.weight")]
        assert torch.equal(there, tensor)

    folder = save(learner, tmp_path, base, 2)
    assert not list(folder.glob("model*.safetensors"))
    peft = PeftModel.from_pretrained(plain, str(folder))  # as it is, by the library of the field
    assert torch.equal(logits(peft), trained)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).eval()), trained)
    asked = [{"role": "user", "content": "hi"}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(asked, tokenize=False)
    assert torch.equal(logits(trainer(config, folder).model), trained)
    merged = load_causal_lm(str(folder), dtype=torch.float32)  # all that takes a model takes it
    assert torch.allclose(logits(merged), trained, atol=1e-5)
    assert load_model_config(str(folder)).model_type == "qwen3"
    assert load_stop_token_ids(str(folder)) == load_stop_token_ids(str(base))


def test_a_run_that_begins_with_an_adapter_goes_on_with_it_and_takes_the_kl_to_it(
    base: Path, tmp_path: Path
) -> None:
    first = trainer(job(base))
    train(first, 1, 2)
    folder = save(first, tmp_path, base, 2)
    for model in (base, folder):
        learner = trainer(job(model, algorithm={"kl_coef": 0.1}))
        assert torch.equal(logits(learner.model), logits(first.model)) == (model == folder)
        assert train(learner, 1)["actor/kl_loss"] == 0.0  # still the policy that it began with
        assert train(learner, 2)["actor/kl_loss"] > 0.0
        assert set(policy_tensors(learner.model)) == set(policy_tensors(first.model))


def test_what_is_sent_and_saved_of_a_version_is_its_adapter_to_the_bit(
    base: Path, tmp_path: Path
) -> None:
    learner = trainer(job(base))
    train(learner, 1)
    sent = snapshot({MAIN: learner.model}, torch.float32)
    stored = load_file(save(learner, tmp_path, base, 1) / "adapter_model.safetensors")
    assert sent.keys() == stored.keys()
    for name, tensor in stored.items():
        assert (sent[name].dtype, tuple(sent[name].shape)) == ("float32", tuple(tensor.shape))
        assert bytes_of(sent[name]) == tensor.numpy().tobytes()
    assert {name.rpartition("lora_")[2] for name in sent} == {"A.weight", "B.weight"}
    whole = snapshot({MAIN: load_causal_lm(str(base), dtype=torch.float32)}, torch.float32)
    assert num_bytes(sent) < num_bytes(whole) / 3


def test_a_resumed_run_is_the_one_that_was_not_interrupted_to_the_bit(
    base: Path, tmp_path: Path
) -> None:
    config = job(base, lora={"rank": 4, "dropout": 0.1}, algorithm={"kl_coef": 0.1})
    through = trainer(config)
    train(through, 1, 2)
    folder = save(through, tmp_path, base, 2)
    resumed = trainer(config, folder)
    resumed.restore(folder)
    assert train(resumed, 3, 4) == train(through, 3, 4)
    expected = policy_tensors(through.model)
    for name, tensor in policy_tensors(resumed.model).items():
        assert torch.equal(tensor, expected[name])


def test_an_adapter_learns_beside_a_critic_which_trains_all_of_its_own(base: Path) -> None:
    learner = trainer(job(base, algorithm={"advantage": "gae"}, critic={"lr": 1e-3}))
    assert learner.critic is not None
    plain = load_causal_lm(str(base), dtype=torch.float32)
    train(learner, 1, 2)
    assert not torch.equal(logits(learner.model), logits(plain))
    with other_adapter(learner.model, initial_adapter(learner.model, str(base))):
        assert torch.equal(logits(learner.model), logits(plain)), "its base is not the critic's"
    judging = learner.critic.model.decoder.parameters()
    begun = plain.get_decoder().parameters()
    assert not any(torch.equal(one, was) for one, was in zip(judging, begun, strict=True))


def test_dropout_works_in_updates_only(base: Path) -> None:
    dropped = job(base, lora={"rank": 4, "dropout": 0.5})
    plain, first, second = trainer(job(base, lora={"rank": 4})), trainer(dropped), trainer(dropped)
    for learner in (plain, first, second):
        train(learner, 1, 2, 3)
    assert torch.equal(logits(first.model), logits(second.model)), "the seed decides"
    assert not torch.equal(logits(first.model), logits(plain.model))
    assert torch.equal(logits(first.model), logits(first.model))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
async def test_an_engine_swaps_adapters_beside_its_base(
    base: Path, dtype: str, tolerance: float
) -> None:
    lora = LoraConfig(rank=4, targets=["q_proj", "v_proj"])
    engine = await TransformersEngine.start(
        str(base), max_slots=4, max_context=64, lora=lora, dtype=dtype
    )
    model = load_policy(str(base), lora, seed=3, dtype=torch.float32)
    tensors = policy_tensors(model)
    assert len(tensors) == 2 * 2 * 2
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.normal_(std=0.1)
    prompt = np.arange(40, 50, dtype=np.int32)
    sampling = Sampling(max_new_tokens=12, seed=1)
    try:
        before = await engine.generate(prompt, sampling, request_id="before")
        await engine.load_weights(1, tensors)
        after = await engine.generate(prompt, sampling, request_id="after")
    finally:
        await engine.close()
    plain = load_causal_lm(str(base), dtype=torch.float32)
    for generation, by in ((before, plain), (after, model)):
        expected = plain_logprobs(by, prompt, generation.token_ids)
        np.testing.assert_allclose(generation.logprobs, expected, atol=tolerance)
    assert set(after.versions) == {1}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 2, "alpha": 8}, r"has rank 4, lora\.rank is 2"),
        ({"rank": 4, "alpha": 4}, r"has alpha 8, lora\.alpha is 4"),
        ({"rank": 4, "alpha": 8, "exclude": ["q_proj"]}, "has other tensors"),
        (
            {"rank": 4, "alpha": 8, "targets": ["gate"]},
            r"lora\.targets=\['gate'\] matches no layers",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    base: Path, tmp_path: Path, lora: dict[str, object], message: str
) -> None:
    folder = save(trainer(job(base)), tmp_path, base, 1)
    with pytest.raises(ModelError, match=message):
        trainer(job(folder, lora=lora))


@pytest.mark.filterwarnings("ignore:.*did not match any:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*no modules were excluded:UserWarning")
@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"targets": ["q_proj", "v_projj"]}, "targets"),
        ({"exclude": ["layers.2.self_attn.q_proj"]}, "exclude"),
        ({"rank_pattern": {"q_projj": 2}}, "rank_pattern"),
        ({"targets": ["q_proj"], "alpha_pattern": {"v_proj": 2}}, "alpha_pattern"),
    ],
)
def test_a_name_that_names_no_layer_is_refused(
    base: Path, lora: dict[str, object], key: str
) -> None:
    with pytest.raises(ModelError, match=rf"lora\.{key} has .* matches no layer") as caught:
        trainer(job(base, lora={"rank": 4, **lora}))
    assert "q_proj" in caught.value.hint


def test_names_that_name_layers_are_taken(base: Path) -> None:
    lora = {
        "rank": 4,
        "targets": ["q_proj", "model.layers.1.mlp.up_proj"],
        "exclude": ["layers.0.self_attn.q_proj", "lm_head"],
        "rank_pattern": {r"layers\.1\..*": 2, "q_proj": 3},
    }
    learner = trainer(job(base, lora=lora))
    assert {len(one) for one in policy_tensors(learner.model).values() if len(one) < 8} == {2}


def test_a_pattern_that_cannot_be_read_is_refused(base: Path) -> None:
    for key in ("rank_pattern", "alpha_pattern"):
        with pytest.raises(ValueError, match=r"the pattern 'q_\(proj' cannot be read"):
            job(base, lora={"rank": 4, key: {"q_(proj": 2}})


def test_a_run_goes_on_from_a_checkpoint_of_its_own_kind_only(base: Path, tmp_path: Path) -> None:
    folder = save(trainer(job(base)), tmp_path, base, 1)
    refuse_other_kind(folder, LoraConfig(rank=4))
    refuse_other_kind(base, LoraConfig())
    with pytest.raises(ModelError, match=r"contains an adapter, but lora\.rank is 0") as caught:
        refuse_other_kind(folder, LoraConfig())
    assert "--from" in caught.value.hint


def test_a_merged_adapter_of_a_tied_output_layer_leaves_the_embeddings_as_they_are(
    base: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    wanted = PeftLoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "lm_head"])
    with warnings.catch_warnings(action="ignore"):  # of the tied layer, which is what this is about
        adapted = get_peft_model(model, wanted)
        with torch.no_grad():
            for name, tensor in adapted.named_parameters():
                if "lora_" in name:
                    tensor.normal_(std=0.1)
        adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    parts = IDS[0, :2].numpy(), IDS[0, 2:].numpy()
    whole: Any = adapted
    expected = plain_logprobs(whole, *parts)
    for folder in (tmp_path / "adapter", tmp_path / "again"):
        merged = load_causal_lm(str(folder), dtype=torch.float32)
        np.testing.assert_allclose(plain_logprobs(merged, *parts), expected, atol=1e-5)
        assert all(one.requires_grad for one in merged.parameters())
        hollow = load_causal_lm(str(folder), dtype=torch.float32, hollow=True)
        assert {name for name, _ in hollow.named_parameters()} == {
            name for name, _ in merged.named_parameters()
        }
        merged.save_pretrained(tmp_path / "again")
        AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "again")


def test_a_router_that_is_a_linear_layer_gets_no_adapter(tmp_path: Path) -> None:
    config = PhimoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    PhimoeForCausalLM(config).save_pretrained(tmp_path)
    named = LoraConfig(rank=4, targets=["q_proj", "router"])
    with pytest.raises(ModelError, match=r"matches model\.layers\.0\.mlp\.router"):
        load_policy(str(tmp_path), named, dtype=torch.float32)
    model = load_policy(str(tmp_path), LoraConfig(rank=4), dtype=torch.float32)
    assert layer_names(model) == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_a_layer_whose_weights_kernels_read_gets_no_adapter(tmp_path: Path) -> None:
    make_model("bamba").save_pretrained(tmp_path)
    model = load_policy(str(tmp_path), LoraConfig(rank=4), dtype=torch.float32)
    assert "in_proj" in layer_names(model)
    with pytest.raises(ModelError, match=r"matches model\.layers\.0\.mamba\.out_proj") as refused:
        load_policy(str(tmp_path), LoraConfig(rank=4, targets=["out_proj"]), dtype=torch.float32)
    assert "lora.exclude=[out_proj]" in refused.value.hint
