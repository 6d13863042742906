"""What $WANDB_… says where a job is submitted goes with it, or it is told what to set where."""

import pytest
from tinkermq.clients.pool import with_tracker_settings
from tinkermq.schemas.config.load_config import parse_config
from tinkermq.schemas.wire.errors import ConfigError

LEAST = {"model": {"path": "m"}, "env": {"game": "bandit"}}
WANDB = {**LEAST, "logger_backends": ["jsonl", "wandb"]}


@pytest.fixture(autouse=True)
def _nothing_of_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENTITY", "PROJECT", "RUN_GROUP", "TAGS", "NOTES", "MODE", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)


def test_the_environment_of_wandb_fills_what_the_configuration_leaves_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "WANDB_ENTITY": "our-lab",
        "WANDB_PROJECT": "games",
        "WANDB_RUN_GROUP": "sweep-3",
        "WANDB_TAGS": "baseline, seed=3",
        "WANDB_NOTES": "the first of them",
    }.items():
        monkeypatch.setenv(name, value)
    config = parse_config(with_tracker_settings({**WANDB, "project": "mine"}))
    assert (config.tracking.entity, config.project) == ("our-lab", "mine")
    assert (config.group, config.tags) == ("sweep-3", ["baseline", "seed=3"])
    assert config.notes == "the first of them"
    assert with_tracker_settings(LEAST) == LEAST


@pytest.mark.parametrize(
    ("mode", "backends"),
    [
        ("offline", ["jsonl", "wandb-offline"]),
        ("online", ["jsonl", "wandb"]),
        ("disabled", ["jsonl"]),
    ],
)
def test_its_mode_chooses_the_tracker(
    mode: str, backends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert with_tracker_settings(WANDB)["logger_backends"] == backends


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WANDB_BASE_URL", "https://wandb.lab", "set it in the environment of the nodes"),
        ("WANDB_MODE", "shared", "set online, offline or disabled"),
    ],
)
def test_what_cannot_travel_is_refused_with_what_to_do(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        with_tracker_settings(WANDB)
    assert name in refused.value.message
    assert said in refused.value.hint
