"""What config.json says of a model's layers refuses keys that do not fit them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.model_refusals import BY_DRAFT, refuse_part
from tinkermq.schemas.plan.settings import refuse_models
from tinkermq.schemas.wire.errors import ConfigError, ModelError

ATTENTION = {"model": {"attn_implementation": "varlen"}}
DIVIDED = {"learner": {"context_parallel": 2, "ranks": 2, "slots": 2}}


@pytest.mark.parametrize(
    ("config", "refused", "reason"),
    [
        ({"model_type": "gpt_oss"}, ATTENTION, "its attention has sinks"),
        ({"text_config": {"model_type": "llama4_text"}}, ATTENTION, "its attention is chunked"),
        ({"model_type": "x", "layer_types": ["chunked_attention"]}, ATTENTION, "is chunked"),
        ({"model_type": "deepseek_v32"}, ATTENTION, "chooses keys by an index"),
        ({"model_type": "deepseek_v32"}, DIVIDED, "an index over all columns"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, DIVIDED, "it has recurrent layers"),
        ({"model_type": "qwen3", "num_key_value_heads": 3}, DIVIDED, "num_key_value_heads=3"),
    ],
)
def test_keys_that_do_not_fit_a_model_s_layers_are_refused_by_its_configuration_alone(
    tmp_path: Path, config: dict[str, Any], refused: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    def job_of(**sections: Any) -> JobConfig:
        model = {"path": str(tmp_path), **sections.pop("model", {})}
        return JobConfig.model_validate({"model": model, "env": {"game": "none"}, **sections})

    job = job_of(**refused)
    with pytest.raises(ConfigError, match=reason) as raised:
        refuse_models(job)
    assert "set " in raised.value.hint or "choose " in raised.value.hint
    refuse_models(job, trains=False)
    refuse_models(job_of())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    refuse_models(job)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]},
        {"model_type": "eagle"},
        {"model_type": "qwen3_next_mtp", "architectures": ["Qwen3NextMTP"]},
        {"model_type": "medusa"},
        {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
    ],
)
def test_a_draft_that_is_a_part_of_a_model_is_refused(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    speculation = {"num_tokens": 3, "draft": str(tmp_path)}
    generator = {"engine": "vllm", "speculation": speculation}
    tree = {"model": {"path": "nobody/knows-it"}, "env": {"game": "none"}, "generator": generator}
    with pytest.raises(ModelError, match="is a part of a model") as refused:
        refuse_models(JobConfig.model_validate(tree))
    assert "name a language model with the policy's tokenizer" in refused.value.hint


def test_what_vllm_makes_of_a_draft_decides_whether_it_is_whole() -> None:
    refuse_part("models/small", BY_DRAFT)
    for method in ("eagle3", "mtp", "medusa"):  # vLLM completes a draft of DeepSeek's so
        with pytest.raises(ModelError, match=f"vLLM runs it as {method}"):
            refuse_part("models/small", method)
