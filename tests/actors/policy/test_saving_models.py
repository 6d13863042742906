"""What a model's folder holds and transformers refuses to write is saved or refused in time."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import (
    check_saving,
    load_causal_lm,
    load_model_config,
    load_policy,
    load_stop_token_ids,
    load_tokenizer,
    save_model,
    save_plain_weights,
)
from tinkermq.actors.training.checkpoint import keep_weights, save_form, try_saving
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import ModelError, StorageError
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.support.models import make_tiny_model
from tests.support.saving import make_trainer

READ_BUT_REFUSED = [
    {"temperature": 0.9, "top_p": 0.6},
    {"top_k": 20},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"do_sample": False, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"num_beams": 1, "length_penalty": 2.0},
    {"early_stopping": True},
    {"output_scores": True, "return_dict_in_generate": False},
    {"use_cache": False, "cache_implementation": "static"},
    {"pad_token_id": -1},
    {"temperature": "hot"},
    {"penalty_alpha": 0.6, "top_k": 4},
]
"""transformers opens a model with these settings and refuses to save it."""
HARMLESS = [
    {"foo": "bar"},
    {"max_new_tokens": 10, "max_length": 3},
    {"eos_token_id": [1, 2], "bos_token_id": 0},
    {"do_sample": True, "temperature": 0.0},
    {"stop_strings": ["a"]},
    {"repetition_penalty": 1.05, "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
]
UNREADABLE = [
    {"max_new_tokens": -1},
    {"num_return_sequences": 4},
    {"cache_implementation": "nope"},
    {"watermarking_config": {"a": 1}},
    {"early_stopping": "x"},
    [1, 2],
    "{",
    "",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A copy of a model's folder, to be changed."""
    return shutil.copytree(source, tmp_path / "model")


def settings(folder: Path, given: Any) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    (folder / "generation_config.json").write_text(text)


def load(folder: Path) -> Any:
    return load_causal_lm(str(folder), dtype=torch.float32)


@pytest.mark.parametrize("given", READ_BUT_REFUSED, ids=str)
def test_settings_that_transformers_refuses_to_write_are_saved_as_they_came(
    given: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    settings(folder, given)
    model = load(folder)
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        model.save_pretrained(tmp_path / "theirs")
    save_model(model, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert given.items() <= {**GenerationConfig().to_dict(), **written}.items()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.generation_config.to_dict() == model.generation_config.to_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    check_saving(str(folder))


@pytest.mark.parametrize("given", HARMLESS, ids=str)
def test_settings_that_transformers_writes_are_written_as_it_does(
    given: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    settings(folder, given)
    model = load(folder)
    model.save_pretrained(tmp_path / "theirs")
    save_model(model, tmp_path / "ours")
    name = "generation_config.json"
    ours, theirs = tmp_path / "ours" / name, tmp_path / "theirs" / name
    assert ours.read_text() == theirs.read_text()
    check_saving(str(folder))


def test_a_model_without_settings_is_saved_and_ends_as_its_configuration_says(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "generation_config.json").unlink()
    file = folder / "config.json"
    for ends, found in (([1, 5], (1, 5)), (5, (5,)), (None, ())):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": ends}))
        assert load_stop_token_ids(str(folder)) == found
    save_model(load(folder), tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").is_file()
    check_saving(str(folder))


@pytest.mark.parametrize("given", UNREADABLE, ids=str)
def test_settings_that_cannot_be_read_are_refused_before_training(given: Any, folder: Path) -> None:
    settings(folder, given)
    with pytest.raises(ModelError, match=r"generation_config.json of model .* cannot be read"):
        load_stop_token_ids(str(folder))
    with pytest.raises(ModelError, match="cannot be read"):
        check_saving(str(folder))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rms_norm_eps": "1e-6"}, "cannot be read"),
        ({"hidden_act": None}, "cannot be read"),
        ({"use_cache": "no"}, "cannot be read"),
        ({"layer_types": ["full_attention", "x"]}, "has layers of kind x, which transformers"),
        ({"model_type": "no_such_model"}, "has no model_type 'no_such_model'"),
    ],
    ids=str,
)
def test_a_configuration_that_the_library_refuses_is_a_mistake_with_a_name(
    given: dict[str, Any], told: str, folder: Path
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **given}))
    with pytest.raises(ModelError, match=told):
        load_model_config(str(folder))
    with pytest.raises(ModelError, match=told):
        check_saving(str(folder))


def test_an_adapter_is_saved_with_such_settings_too(folder: Path, tmp_path: Path) -> None:
    settings(folder, {"top_p": 0.6})
    model = load_policy(str(folder), LoraConfig(rank=2), dtype=torch.float32)
    save_model(model, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert written["top_p"] == 0.6
    assert (tmp_path / "ours" / "adapter_model.safetensors").is_file()


class Unsavable:
    """A tokenizer that cannot be written: code that came with a model."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def save_pretrained(self, folder: Path) -> None:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("not a tokenizer"),
        TypeError("Object of type set is not JSON serializable"),
        AttributeError("can't set attribute"),
        NotImplementedError(),
        RuntimeError("shared tensors"),
        SafetensorError("InvalidHeader"),
        RecursionError("maximum recursion depth exceeded"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("whole", [True, False])
def test_what_cannot_be_saved_is_found_before_training(
    error: Exception, whole: bool, folder: Path, tmp_path: Path
) -> None:
    trainer, bad = make_trainer(folder), Unsavable(error)
    write = trainer.save if whole else trainer.save_form
    with pytest.raises(ModelError) as refused:
        try_saving(tmp_path, lambda made: write(made, bad), load_tokenizer(str(folder)), None)
    assert type(error).__name__ in refused.value.message
    assert "nothing was trained yet" in refused.value.hint
    assert not (tmp_path / ".trial").exists()


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_can_be_saved_passes_and_leaves_nothing(
    whole: bool, folder: Path, tmp_path: Path
) -> None:
    settings(folder, {"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 2]})
    trainer, tokenizer = make_trainer(folder), load_tokenizer(str(folder))
    write = trainer.save if whole else trainer.save_form
    run = tmp_path / "run"
    try_saving(
        run, lambda made: write(made, tokenizer), tokenizer, GenerationConfig(eos_token_id=[1, 2])
    )
    assert not list(run.iterdir())


def test_a_disk_that_cannot_be_written_is_told_as_such(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".trial").write_text("no folder")
    trainer, tokenizer = make_trainer(folder), load_tokenizer(str(folder))
    with pytest.raises(StorageError):
        try_saving(tmp_path / ".trial", lambda made: trainer.save(made, tokenizer), tokenizer, None)


def test_a_tokenizer_that_is_another_when_it_is_opened_again_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    trainer, tokenizer = make_trainer(folder), load_tokenizer(str(folder))
    other: Any = load_tokenizer(str(folder))
    other.chat_template = "{{ messages }}"
    with pytest.raises(ModelError, match="its chat template changed"):
        try_saving(tmp_path, lambda made: trainer.save(made, tokenizer), other, None)
    other = load_tokenizer(str(folder))
    other.add_tokens(["<new>"])
    with pytest.raises(ModelError, match="its vocabulary changed"):
        try_saving(tmp_path, lambda made: trainer.save(made, tokenizer), other, None)
    with pytest.raises(ModelError, match=r"generates up to tokens \(7,\)"):
        try_saving(
            tmp_path,
            lambda made: trainer.save(made, tokenizer),
            tokenizer,
            GenerationConfig(eos_token_id=7),
        )


def form_of(folder: Path) -> Any:
    trainer, tokenizer = make_trainer(folder), load_tokenizer(str(folder))
    return trainer, lambda made: save_form(made, trainer.model, tokenizer)


def refuse(folder: Path) -> None:
    raise ValueError("no form")


def test_kept_weights_open_as_a_model_where_its_form_can_be_written(
    folder: Path, tmp_path: Path
) -> None:
    trainer, form = form_of(folder)
    kept = keep_weights([tmp_path], 12, {"": trainer.weights()}, form)
    assert kept == tmp_path / "kept_weights_step_000012"
    again = AutoModelForCausalLM.from_pretrained(kept)
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert load_tokenizer(str(kept)).get_vocab()


def test_kept_weights_need_nothing_but_safetensors(folder: Path, tmp_path: Path) -> None:
    trainer, _ = form_of(folder)
    critic = {"critic.value.weight": torch.ones(2)}
    weights = {"": {**trainer.weights(), **critic}, "guesser": trainer.weights()}
    keep_weights([tmp_path], 1, weights, refuse)
    kept = keep_weights([tmp_path], 2, weights, refuse)
    assert [path.name for path in tmp_path.glob("kept_*")] == ["kept_weights_step_000002"]
    for place in (kept, kept / "policies" / "guesser"):
        found = load_file(place / "model.safetensors")
        assert {name: found[name].tolist() for name in found} == {
            name: value.tolist() for name, value in trainer.weights().items()
        }
    assert load_file(kept / "critic.safetensors").keys() == critic.keys()


def test_kept_adapters_open_as_adapters(folder: Path, tmp_path: Path) -> None:
    model = load_policy(str(folder), LoraConfig(rank=2), dtype=torch.float32)
    kept = keep_weights([tmp_path], 3, {"": policy_tensors(model)}, refuse)
    assert load_file(kept / "adapter_model.safetensors").keys() == policy_tensors(model).keys()


def test_weights_go_elsewhere_where_the_run_folder_takes_none(folder: Path, tmp_path: Path) -> None:
    trainer, form = form_of(folder)
    (tmp_path / "run").write_text("no folder")
    places = [tmp_path / "run", tmp_path / "elsewhere"]
    kept = keep_weights(places, 1, {"": trainer.weights()}, form)
    assert kept.parent == tmp_path / "elsewhere"
    with pytest.raises(StorageError, match="the weights of step 1 could not be written to"):
        keep_weights(places[:1], 1, {"": trainer.weights()}, form)


def test_tensors_that_share_memory_are_written_whole(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    given = {"a": base, "b": base, "c": base[:4], "d": base.view(3, 4).T}
    save_plain_weights(given, tmp_path / "x" / "model.safetensors")
    found = load_file(tmp_path / "x" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in given.items())
