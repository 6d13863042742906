"""The jobs of a soak: tiny models and quick games, limits as a user has them who sets none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkermq.envs.games.addition import make_data

from benchmarks.soak.client import NUM_VAL

Config = dict[str, Any]

_SMALL: Config = {
    "rollout": {
        "group_size": 4,
        "max_prompt_tokens": 64,
        "max_turn_tokens": 6,
        "max_response_tokens": 64,
    },
    "generator": {"count": 2},
    "evaluation": {"samples": 2},
    "learner": {"lr": 1e-3, "max_row_tokens": 512, "microbatch_tokens": 2048},
    "training": {"batch_size": 4, "save_freq": 4, "keep_rollouts": True},
}


@dataclass(frozen=True)
class Recipe:
    """One kind of job."""

    name: str
    make: Callable[[Path, Path, int], Config]
    """`make(model, folder, steps)` returns the configuration."""
    hosted: bool = False
    """Its game is hosted by a program of the user's."""
    has_rows: bool = False


def _job(model: Path, steps: int, **sections: Mapping[str, Any]) -> Config:
    config: Config = {"model": {"path": str(model)}, **_SMALL}
    config["training"] = {**config["training"], "num_steps": steps, "test_freq": -(-steps // 3)}
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def _rows(model: Path, folder: Path, steps: int) -> Config:
    """Two epochs over a few rows of a dataset, played by two hosts, validated by an evaluator."""
    batch_size = _SMALL["training"]["batch_size"]
    num_rows = steps * batch_size // 2
    train, val = make_data(folder / f"addition-{steps}", num_rows, 8)
    data = {"train_data": [str(train)], "val_data": [str(val)], "num_val": 8}
    env = {"game": "addition", "hosts": 2, **data}
    config = _job(model, steps, env=env, evaluation={"slots": 1})
    del config["training"]["num_steps"]
    config["training"].update(num_epochs=2, save_freq=20)  # much is trained again after a crash
    return config


def _lora(model: Path, folder: Path, steps: int) -> Config:
    """Low-rank adapters, on-policy."""
    bandit = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 4}
    return _job(model, steps, env=bandit, lora={"rank": 4}, training={"max_staleness": 0})


def _turns(model: Path, folder: Path, steps: int) -> Config:
    """Episodes of several turns that are written down as they go; stragglers are waited for."""
    return _job(
        model,
        steps,
        env={"game": "tests.support.games:SlowEcho", "kwargs": {"delay_s": 0.1}, "num_val": 2},
        rollout={"max_turns": 4, "max_turn_tokens": 20, "max_response_tokens": 160},
        generator={"segment_tokens": 8},
        training={"staleness_policy": "wait", "batch_size": 2, "save_freq": 30},
    )


def _client(model: Path, folder: Path, steps: int) -> Config:
    """A game in a program of the user's, with groups that teach nothing dropped."""
    return _job(
        model,
        steps,
        env={"game": "tests.support.games:SlowGuess", "hosts": 0, "num_val": NUM_VAL},
        rollout={"max_turns": 3},
        algorithm={"filter_equal_rewards": True},
        training={"save_freq": 10},
    )


RECIPES = (
    Recipe("rows", _rows, has_rows=True),
    Recipe("lora", _lora),
    Recipe("turns", _turns),
    Recipe("client", _client, hosted=True),
)


def num_rows(config: Config) -> int:
    """Return how many rows a job of `_rows` has."""
    import pyarrow.parquet as parquet

    return int(parquet.read_metadata(config["env"]["train_data"][0]).num_rows)
