"""Families in vLLM's CPU build: the learner's log-probs, new weights, adapters, refusals."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from tinkermq.actors.policy.lora import policy_tensors
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.plan.model_refusals import VLLM_REFUSALS
from transformers.models.auto import modeling_auto

from tests.support.families import (
    BY_TRANSFORMERS,
    COMPARED_IN_VLLM,
    FAMILIES,
    NOT_ON_CPUS,
)
from tests.support.models import adapted
from tests.support.vllm_families import Served, make, moved, published, served

pytestmark = pytest.mark.vllm
KINDS = (
    "deepseek_v3",
    "exaone_moe",
    "gemma3_text",
    "gpt_oss",
    "granitemoehybrid",
    "mistral",
    "mixtral",
    "qwen3_5_text",
)
"""Each kind of layers, and each form of weights that vLLM's models have otherwise."""
ALL = (*COMPARED_IN_VLLM, *VLLM_REFUSALS, *NOT_ON_CPUS)
ADAPTED = ("gemma3_text", "mistral")
SINGLE = ("sinks", "conv1d.weight", "experts.gate_up_proj", "kv_b_proj.weight")
"""Ends of tensors that are one parameter of vLLM's, or more."""


def test_the_table_of_families_says_which_class_computes_each() -> None:
    registry = import_module("vllm.model_executor.models.registry")
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    modules = {
        family: registry._VLLM_MODELS.get(names[family], ("transformers",)) for family in FAMILIES
    }
    others = [family for family, (module, *_) in modules.items() if module == "transformers"]
    assert others == sorted([*BY_TRANSFORMERS, *VLLM_REFUSALS])
    assert {*KINDS} <= {*COMPARED_IN_VLLM} <= FAMILIES.keys() - {*VLLM_REFUSALS, *NOT_ON_CPUS}


@pytest.mark.parametrize(
    "family",
    [each if each in KINDS else pytest.param(each, marks=pytest.mark.long) for each in ALL],
)
def test_a_family_has_the_log_probs_of_its_own_pass_in_vllm_and_after_new_weights_theirs(
    family: str, tmp_path: Path
) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    if family in VLLM_REFUSALS or family in NOT_ON_CPUS:
        refused = pytest.raises((ValueError, RuntimeError, NotImplementedError, AttributeError))
        with refused, served(tmp_path, model.dtype):
            pass
        return
    with served(tmp_path, model.dtype) as vllm:
        vllm.check(model)
        other = moved(model)
        assert vllm.load(published(other)) == ("done", "")
        vllm.check(other)
        _check_refusals(vllm, published(other))


def _check_refusals(vllm: Served, tensors: dict[str, torch.Tensor]) -> None:
    """Leave out a tensor, and add one: both are named."""
    kind, why = vllm.load({**tensors, "model.layers.1.other.weight": torch.zeros(2)})
    assert (kind, "model.layers.1.other.weight" in why) == ("mismatch", True), why
    for end in SINGLE:
        if name := next((name for name in tensors if name.endswith(end)), ""):
            kind, why = vllm.load({key: value for key, value in tensors.items() if key != name})
            assert (kind, "nothing was loaded into" in why) == ("mismatch", True), name


@pytest.mark.parametrize("family", ADAPTED)
def test_an_adapter_has_the_log_probs_of_the_learner_in_vllm(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    config = LoraConfig(rank=4)
    model = adapted(tmp_path, config, 3)
    with served(tmp_path, model.dtype, config.rank) as vllm:
        tensors = {name: tensor.detach() for name, tensor in policy_tensors(model).items()}
        vllm.add_adapter(tensors, config)
        vllm.check(model)
