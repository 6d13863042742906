"""The engine that a configuration asks for."""

import pytest
from pydantic import ValidationError
from tinkermq.actors.rollout.players import load_base, start_engine
from tinkermq.schemas.config.job import GeneratorConfig, JobConfig
from tinkermq.schemas.wire.errors import ConfigError

CONFIG = {
    "model": {"path": "some/model"},
    "env": {"game": "bandit"},
    "generator": {"engine": "vllm"},
}


async def test_vllm_where_it_is_not_installed_is_refused_with_the_remedy() -> None:
    config = JobConfig.model_validate(CONFIG)
    with pytest.raises(ConfigError, match="which cannot be imported here: No module") as caught:
        await start_engine(config)
    assert "pip install 'tinkermq[vllm]'" in caught.value.hint
    with pytest.raises(ConfigError, match="which cannot be imported here"):
        await load_base(config, [])


def test_a_setting_of_vllm_is_refused_for_another_engine() -> None:
    with pytest.raises(ValidationError, match="kv_cache_mb has no effect while engine is 'tran"):
        GeneratorConfig.model_validate({"kv_cache_mb": 64})
