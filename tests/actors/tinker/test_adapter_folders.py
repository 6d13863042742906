"""Adapters that were written down come back to the bit, and are what PEFT reads."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, LoraSpec
from tinkermq.schemas.wire.errors import (
    ConfigError,
    ModelError,
    NotFoundError,
    StorageError,
)

from tests.support.models import make_tiny_model
from tests.support.tinker import TIED, PlainPeft, group, open_trainer, same_bits, supervised

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings(TIED)

SPEC = LoraSpec(4, seed=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("folders") / "base")


@pytest.fixture
def trainer(base: Path) -> AdapterTrainer:
    made = open_trainer(base)
    made.create("m", SPEC)
    return made


def train(trainer: AdapterTrainer, model: str, *seeds: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for seed in seeds:
        found += trainer.forward_backward(model, group(seed), "ppo").logprobs
        trainer.optim_step(model, AdamParams(1e-2, weight_decay=0.01))
    return found


def test_what_was_evicted_goes_on_to_the_bit(
    trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train(trainer, "m", 1, 2)
    trainer.save("m", tmp_path / "kept", with_optimizer=True)
    trainer.forward_backward("m", group(9), "ppo")  # pending, and not written
    trainer.evict("m")
    trainer.load("m", tmp_path / "kept", with_optimizer=True)
    assert (trainer.spec("m"), trainer.num_steps("m")) == (SPEC, 2)
    back = train(trainer, "m", 3, 4)
    elsewhere = open_trainer(base)
    elsewhere.load("other", tmp_path / "kept", with_optimizer=True)
    through = open_trainer(base)
    through.create("m", SPEC)
    train(through, "m", 1, 2)
    for found in (train(through, "m", 3, 4), train(elsewhere, "other", 3, 4)):
        assert all(np.array_equal(*pair) for pair in zip(back, found, strict=True))
    assert same_bits(trainer.tensors("m"), through.tensors("m"))
    assert same_bits(trainer.tensors("m"), elsewhere.tensors("other"))


def test_an_adapter_that_was_never_stepped_comes_back_too(
    trainer: AdapterTrainer, tmp_path: Path
) -> None:
    fresh = trainer.tensors("m")
    trainer.save("m", tmp_path / "kept", with_optimizer=True)
    train(trainer, "m", 1)
    trainer.load("m", tmp_path / "kept", with_optimizer=True)
    assert same_bits(trainer.tensors("m"), fresh)
    assert trainer.num_steps("m") == 0


def test_without_the_optimiser_it_begins_anew_and_pending_gradients_are_forgotten(
    trainer: AdapterTrainer, tmp_path: Path
) -> None:
    train(trainer, "m", 1, 2)
    trainer.save("m", tmp_path / "with", with_optimizer=True)
    trainer.save("m", tmp_path / "without", with_optimizer=False)
    assert not (tmp_path / "without" / "optimizer.safetensors").exists()
    kept = trainer.tensors("m")
    for name in ("with", "without"):
        trainer.forward_backward("m", group(5), "ppo")
        trainer.window("m").fail("forward_backward 3", "whatever")
        trainer.load("m", tmp_path / name, with_optimizer=False)
        assert same_bits(trainer.tensors("m"), kept)
        assert trainer.num_steps("m") == 0
        told = trainer.optim_step("m", AdamParams(1e-2))
        assert told["grad_norm:mean"] == 0
        assert same_bits(trainer.tensors("m"), kept), "no gradient, no momentum"
    with pytest.raises(ModelError, match="was saved without the optimiser's state"):
        trainer.load("m", tmp_path / "without", with_optimizer=True)


def test_peft_reads_what_was_saved_as_it_is(
    trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train(trainer, "m", 1, 2)
    rng = np.random.default_rng(0)
    data = [supervised(rng, 12)]
    told = trainer.forward_backward("m", data, "cross_entropy", backward=False)
    trainer.save("m", tmp_path / "kept", with_optimizer=True)
    with torch.no_grad():
        plain = load_causal_lm(str(base), dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, str(tmp_path / "kept"))
        logits = model(torch.from_numpy(data[0].tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(data[0].inputs["target_tokens"])[:, None]
    expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
    np.testing.assert_allclose(told.logprobs[0], expected, atol=1e-5)
    stored = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"]) == (4, 32)
    assert stored["base_model_name_or_path"] == str(base)
    assert "lm_head" in stored["target_modules"]


@pytest.mark.parametrize("alpha", [8, 32])
def test_an_adapter_of_peft_is_loaded_whatever_its_alpha(
    base: Path, tmp_path: Path, alpha: int
) -> None:
    plain = load_causal_lm(str(base), dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=alpha, target_modules=targets))
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with pytest.warns(UserWarning, match="save_embedding_layers"):  # and so it has the base's, too
        theirs.save_pretrained(str(tmp_path / "theirs"))
    trainer = open_trainer(base)
    trainer.load("m", tmp_path / "theirs", with_optimizer=False)
    spec = trainer.spec("m")
    assert (spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed) == (
        4,
        True,
        False,
        True,
    )
    rng = np.random.default_rng(0)
    data = [supervised(rng, 12)]
    told = trainer.forward_backward("m", data, "cross_entropy", backward=False).logprobs
    expected = PlainPeft(base, tmp_path / "theirs").forward_backward(data, lambda p, _: p.sum())
    np.testing.assert_allclose(told[0], expected[0], atol=1e-5)


def test_what_does_not_fit_is_refused_and_changes_nothing(
    trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train(trainer, "m", 1)
    trainer.save("m", tmp_path / "kept", with_optimizer=True)
    kept = trainer.tensors("m")
    trainer.create("rank", LoraSpec(8))
    trainer.create("layers", LoraSpec(4, train_unembed=False))
    for model, message in (
        ("rank", "has rank 4, the model 8"),
        (
            "layers",
            r"other layers than the model: .*lm_head.* there and missing here",
        ),
    ):
        before = trainer.tensors(model)
        with pytest.raises(ModelError, match=message):
            trainer.load(model, tmp_path / "kept", with_optimizer=True)
        assert same_bits(before, trainer.tensors(model))
    other = AdapterTrainer.open(str(base), base_model="another", max_rank=2)
    with pytest.raises(ConfigError, match="rank 4 is not offered"):
        other.load("m", tmp_path / "kept", with_optimizer=True)
    other = AdapterTrainer.open(str(base), base_model="another")
    with pytest.raises(ModelError, match="belongs to tiny, this is another"):
        other.load("m", tmp_path / "kept", with_optimizer=True)
    assert not other.models
    with pytest.raises(NotFoundError, match="there is no adapter in"):
        trainer.load("m", tmp_path / "nothing", with_optimizer=True)
    assert same_bits(kept, trainer.tensors("m"))


def test_a_damaged_folder_is_named(trainer: AdapterTrainer, tmp_path: Path) -> None:
    trainer.save("m", tmp_path / "kept", with_optimizer=True)
    file = tmp_path / "kept" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match=r"adapter_model\.safetensors is not as it was written"):
        trainer.load("m", tmp_path / "kept", with_optimizer=True)


def test_a_folder_is_replaced_as_a_whole(trainer: AdapterTrainer, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    trainer.save("m", folder, with_optimizer=True)
    first = trainer.tensors("m")
    train(trainer, "m", 1)
    (tmp_path / ".kept.writing").mkdir()  # left by one that was killed
    trainer.save("m", folder, with_optimizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert not (folder / "optimizer.safetensors").exists()
    second = trainer.tensors("m")
    trainer.load("m", folder, with_optimizer=False)
    assert same_bits(second, trainer.tensors("m"))
    # killed between the two renames: what had the name still counts
    folder.rename(tmp_path / ".kept.replaced")
    trainer.load("m", folder, with_optimizer=False)
    assert same_bits(second, trainer.tensors("m"))
    trainer.save("m", folder, with_optimizer=False)
    assert not same_bits(first, trainer.tensors("m"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="could not be written"):
        trainer.save("m", tmp_path / "file" / "below", with_optimizer=False)
