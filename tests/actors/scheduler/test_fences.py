"""What a job of a pool with users may not name, also by way of a folder that it names."""

import json
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.fences import refuse_runs_of_others
from tinkermq.schemas.errors import ConfigError
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.load_config import parse_config


def test_an_adapter_may_not_stand_on_the_model_of_another_user(tmp_path: Path) -> None:
    fields = {"name": "r", "user": "ben", "state": "RUNNING", "config": {}, "created": 0.0}
    other = JobRecord.model_validate({**fields, "job": "j", "run_dir": str(tmp_path / "ben" / "r")})
    adapter = tmp_path / "mine"
    adapter.mkdir()
    config = parse_config({"model": {"path": str(adapter)}, "env": {"game": "bandit"}})
    for base, is_others in ((tmp_path / "base", False), (tmp_path / "ben" / "r" / "x", True)):
        settings = {"base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
        if not is_others:
            refuse_runs_of_others(config, [other])
            continue
        with pytest.raises(ConfigError, match=r"the base of the adapter in model\.path=.*another"):
            refuse_runs_of_others(config, [other])
