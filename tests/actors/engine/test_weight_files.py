"""New weights as files, and what an engine asks of them without having them in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tinkermq.actors.engine.vllm.weight_files import WeightFiles, reference_names
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.actors.policy.model_folder import load_policy
from tinkermq.actors.policy.tiny_models import save_tiny_vision_model
from tinkermq.actors.weights.tensors import TensorBytes, TensorSource
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.wire.errors import EngineError, ModelError

LORAS = [LoraConfig(), LoraConfig(rank=4), LoraConfig(rank=2, targets=["q_proj", "v_proj"])]


@pytest.mark.parametrize("lora", LORAS, ids=["model", "all-linear", "two layers"])
def test_the_tensors_of_a_model_are_known_without_loading_it(
    folder: Path, lora: LoraConfig
) -> None:
    names = reference_names(str(folder), lora, trust_remote_code=False)
    assert all(tensor.is_meta for tensor in names.tensors)
    tensors = policy_tensors(load_policy(str(folder), lora, dtype=torch.float32))
    assert {name for some in names.names for name in some} == set(tensors)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    names.check(shapes)
    with pytest.raises(EngineError, match="wrong shape"):
        names.check({**shapes, next(iter(tensors)): [3]})


def test_an_adapter_of_the_eyes_is_refused_and_one_of_the_words_is_not(tmp_path: Path) -> None:
    folder = str(save_tiny_vision_model(tmp_path, kind="qwen2_5_vl"))
    with pytest.raises(ModelError, match="how the model sees images"):
        reference_names(folder, LoraConfig(rank=2), trust_remote_code=False)
    words = LoraConfig(rank=2, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    names = reference_names(folder, words, trust_remote_code=False)
    assert len(names.names) == 2 * 4 * 2  # layers, targets, A and B


def test_weights_are_written_once_and_freed() -> None:
    files = WeightFiles()
    ones = torch.ones(3, 2, dtype=torch.bfloat16)
    zeros = TensorBytes("float32", [2], memoryview(bytes(8)))
    tensors: dict[str, TensorSource] = {"a": ones, "b": zeros}
    (first, _), (second, entries) = files.write_model(1, tensors), files.write_model(1, tensors)
    assert [(entry.name, entry.offset) for entry in entries] == [("a", 0), ("b", 12)]
    assert second.read_bytes() == ones.view(torch.uint8).numpy().tobytes() + bytes(8)
    files.keep_only(second.parent)
    assert (first.exists(), second.exists()) == (False, True)
    files.close()
    assert not second.exists()


def test_what_a_killed_process_left_behind_is_freed_by_the_next() -> None:
    code = (
        "import os; from tinkermq.actors.engine.vllm.weight_files import WeightFiles;"
        "print(WeightFiles().write_model(1, {})[0], flush=True); os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_file()
    WeightFiles().close()
    assert not left.exists()
