"""What a job of a pool with users may not name, also by way of a folder that it names."""

import json
from pathlib import Path

import pytest
from tinkermq.actors.scheduler.fences import refuse_runs_of_others
from tinkermq.schemas.errors import ConfigError
from tinkermq.schemas.load_config import parse_config


def test_an_adapter_may_not_stand_on_the_model_of_another_user(tmp_path: Path) -> None:
    hers = tmp_path / "ben" / "r"
    (hers / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(hers / "x")
    mine, between = tmp_path / "mine", tmp_path / "between"
    config = parse_config({"model": {"path": str(mine)}, "env": {"game": "bandit"}})

    def stand(adapter: Path, base: Path) -> None:
        adapter.mkdir(exist_ok=True)
        settings = {"base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))

    judged = {"algorithm": {"advantage": "gae"}, "critic": {"path": str(mine)}}
    critic = parse_config({"model": {"path": "m"}, "env": {"game": "bandit"}, **judged})
    stand(mine, tmp_path / "base")
    refuse_runs_of_others(config, [(str(hers), "ben")])
    stand(mine, between)
    for base in (hers / "x", tmp_path / "link", hers.parent / "other"):
        stand(between, base)
        with pytest.raises(ConfigError, match=r"the base of the adapter in model\.path=.*another"):
            refuse_runs_of_others(config, [(str(hers), "ben")])
        with pytest.raises(ConfigError, match=r"the base of the adapter in critic\.path=.*another"):
            refuse_runs_of_others(critic, [(str(hers), "ben")])
