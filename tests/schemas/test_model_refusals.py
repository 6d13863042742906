"""What config.json says of a model's layers refuses keys that do not fit them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.settings import refuse_models
from tinkermq.schemas.wire.errors import ConfigError

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
