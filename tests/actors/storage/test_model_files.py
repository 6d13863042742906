"""Names in tables, indexes and settings that lead out of a folder, and settings that name code."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.policy.lora import merge
from tinkermq.actors.policy.model_folder import (
    check_model_alike,
    check_model_is_here,
    load_causal_lm,
    load_model_config,
    load_tokenizer,
    stored_shapes,
)
from tinkermq.actors.storage.access import refuse_links_to_others
from tinkermq.actors.storage.adapters import adapter_settings
from tinkermq.actors.storage.files import check_digests, read_table, write_digests
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ModelError, StorageError

from tests.support.models import make_tiny_model
from tests.support.owners import record_of_ada

OUT = ["/etc/passwd", "../secret", "a/../../secret", "/", ".."]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def change(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; a missing file is made."""
    told = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**told, **fields}))


def write_table(folder: Path, name: str, digest: str = "0" * 64) -> None:
    body = f"{digest}  {name}\n"
    head = f"# sha256 of the lines below: {hashlib.sha256(body.encode()).hexdigest()}\n"
    (folder / "SHA256SUMS").write_text(head + body)


@pytest.mark.parametrize("name", OUT)
def test_a_table_of_digests_that_names_a_file_elsewhere_tells_nothing_of_it(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_table(folder, name)
    with pytest.raises(StorageError, match=r"SHA256SUMS names .*outside of the folder") as absent:
        check_digests(folder)
    (tmp_path / "secret").write_text("it is there")
    with pytest.raises(StorageError) as present:
        check_digests(folder)
    assert str(present.value) == str(absent.value)
    with pytest.raises(StorageError, match="outside of the folder"):
        read_table(folder)


def test_a_table_of_digests_does_not_follow_links(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("it is there")
    (folder / "model.safetensors").symlink_to(secret)
    write_table(folder, "model.safetensors", hashlib.sha256(secret.read_bytes()).hexdigest())
    with pytest.raises(StorageError, match=r"model\.safetensors is a link, which") as told:
        check_digests(folder)
    assert "cp -rL model.safetensors" in told.value.hint
    (folder / "inner").symlink_to(tmp_path)
    write_table(folder, "inner/secret")
    with pytest.raises(StorageError, match="inner is a link, which is not followed"):
        check_digests(folder)
    (folder / "SHA256SUMS").rename(tmp_path / "table")
    (folder / "SHA256SUMS").symlink_to(tmp_path / "table")
    with pytest.raises(StorageError, match="SHA256SUMS is a link"):
        check_digests(folder)


def in_cache(model: Path, cache: Path) -> Path:
    """Move a model into a folder as Hugging Face's cache keeps it; return its snapshot."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0a1b"
    for folder in (blobs, snapshot / "inner"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        file.rename(blobs / str(number))
        link = snapshot / file.relative_to(model)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


@pytest.mark.parametrize("with_table", [False, True])
def test_a_model_in_hugging_faces_cache_is_read_through_its_links(
    model: Path, tmp_path: Path, with_table: bool
) -> None:
    (model / "inner").mkdir()
    (model / "inner" / "notes").write_text("x")
    if with_table:
        write_digests(model)
    snapshot = in_cache(model, tmp_path / "models--org--tiny")
    config = parse_config({"model": {"path": str(snapshot)}, "env": {"game": "bandit"}})
    root = tmp_path / "runs"
    record = record_of_ada(root)
    refuse_links_to_others(record, config)
    check_model_is_here(str(snapshot))
    check_model_alike(str(snapshot))
    assert load_tokenizer(str(snapshot)).vocab_size
    assert load_causal_lm(str(snapshot), dtype=_float32())
    secret = tmp_path / "secret"
    secret.write_text("x")
    for target in (secret, snapshot / "config.json", tmp_path / "models--org--tiny" / "blobs"):
        link = snapshot / "inner" / "notes"
        link.unlink()
        link.symlink_to(target)
        if with_table:
            os.utime(snapshot / "SHA256SUMS", follow_symlinks=False)  # it is compared anew
            with pytest.raises(StorageError, match=r"inner/notes (is a link|differs)"):
                check_digests(snapshot)


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize("index", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_names_a_shard_elsewhere_is_refused_at_submission_and_load(
    model: Path, name: str, index: str
) -> None:
    change(model / index, weight_map={"a": "model.safetensors", "b": name})
    with pytest.raises(ModelError, match="outside of its folder"):
        check_model_is_here(str(model))
    with pytest.raises(ModelError, match="there is no model at"):
        check_model_alike(str(model))
    with pytest.raises(ModelError, match="outside of its folder"):
        load_causal_lm(str(model), dtype=_float32())


CODE: list[dict[str, Any]] = [
    {"attn_implementation": "mallory/kernel"},
    {"_attn_implementation": "mallory/kernel@main:forward"},
    {"attn_implementation": {"text_config": "mallory/kernel"}},
    {"text_config": {"_attn_implementation_internal": "paged|mallory/kernel"}},
    {"experts_implementation": "mallory/kernel"},
    {"quantization_config": {"quant_method": "mallory/kernel"}},
    {"quantization_config": {"config": [{"_type": "mallory/kernel:Class"}]}},
    {"trust_remote_code": True},
    {"use_kernels": True},
    {"vision_config": {"kernel_config": {"Linear": "mallory/kernel:Linear"}}},
]


@pytest.mark.parametrize("setting", CODE, ids=str)
def test_a_configuration_that_names_code_of_the_hub_is_refused_at_submission_and_load(
    model: Path, setting: dict[str, Any]
) -> None:
    change(model / "config.json", **setting)
    with pytest.raises(ModelError, match="asks for code"):
        check_model_is_here(str(model))
    with pytest.raises(ModelError, match="there is no model at"):
        check_model_alike(str(model))
    for load in (load_model_config, lambda path: load_causal_lm(path, dtype=_float32())):
        with pytest.raises(ModelError, match="asks for code"):
            load(str(model))


def test_a_configuration_with_settings_of_transformers_itself_is_accepted(model: Path) -> None:
    change(
        model / "config.json",
        attn_implementation="flash_attention_2",
        _experts_implementation="grouped_mm",
        _name_or_path="/home/ada/model",
        trust_remote_code=False,
    )
    check_model_is_here(str(model))
    load_model_config(str(model))


def test_code_beside_a_model_is_not_run(model: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    change(model / "config.json", auto_map=dict.fromkeys(classes, "own.Own"))
    tokenizers = {"AutoTokenizer": ["own.Own", "own.Own"]}
    change(model / "tokenizer_config.json", auto_map=tokenizers)
    check_model_is_here(str(model))
    load_causal_lm(str(model), dtype=_float32())
    load_tokenizer(str(model))
    assert not ran.exists()


@pytest.mark.parametrize(
    "setting",
    [
        {"peft_type": "XLORA", "adapters": {"0": "/runs/ada/run/checkpoints/step_1"}},
        {"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "mallory/tokenizer"},
        {"tokenizer_kwargs": {"trust_remote_code": True}},
        {"arrow_config": {"task_paths": ["../../other"]}},
    ],
    ids=str,
)
def test_an_adapter_that_names_other_files_than_its_base_is_refused(
    model: Path, tmp_path: Path, setting: dict[str, Any]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": str(model)}
    change(adapter / "adapter_config.json", **base)
    adapter_settings(adapter)
    change(adapter / "adapter_config.json", **setting)
    for read in (
        lambda: adapter_settings(adapter),
        lambda: check_model_is_here(str(adapter)),
        lambda: merge(None, adapter),  # pyright: ignore[reportArgumentType]  refused before
    ):
        with pytest.raises(ModelError, match=r"names .* in|asks for code"):
            read()


def test_the_error_of_a_file_that_is_no_weights_tells_nothing_of_its_bytes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"password" * 4)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(secret)
    with pytest.raises(ModelError, match="is damaged or cut") as told:
        stored_shapes(folder)
    assert f"{int.from_bytes(b'password', 'little'):,}" not in str(told.value)


def _float32() -> Any:
    import torch

    return torch.float32
