"""Configurations of jobs that tests submit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import load_config

REPOSITORY = Path(__file__).parents[2]
UNHURRIED = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 1.0}, "num_val": 0}
"""A game for runs that a test only looks at: it leaves the machine to whoever looks."""


def small_job(model: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job that runs in seconds: the bandit with a random model; sections are laid over."""
    config: dict[str, Any] = {
        "model": {"path": str(model)},
        "env": {"game": "bandit", "num_val": 0},
        "rollout": {
            "group_size": 4,
            "max_prompt_tokens": 32,
            "max_turn_tokens": 6,
            "max_response_tokens": 24,
        },
        "generator": {"max_episodes": 64, "max_requests": 64, "ack_wait_s": 3},
        "learner": {"lr": 1e-3, "max_row_tokens": 512, "microbatch_tokens": 2048},
        "training": {
            "num_steps": 12,
            "batch_size": 4,
            "max_staleness": 2,
            "save_freq": 3,
            "keep_rollouts": True,
        },
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return config


def example(name: str, *overrides: str) -> dict[str, Any]:
    """Return the configuration of an example as a user's client sends it."""
    config = load_config(REPOSITORY / "examples" / f"{name}.yaml", list(overrides))
    return config.model_dump(mode="json", exclude_unset=True)


def learner_job(folder: Path | str = "none", **sections: Mapping[str, Any]) -> JobConfig:
    """Return a job whose updates are nearly proportional to gradients; sections are laid over."""
    config: dict[str, Any] = {
        "model": {"path": str(folder)},
        "env": {"game": "none"},
        "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
        "learner": {"lr": 0.1, "eps": 1.0, "grad_clip": 1e9},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return JobConfig.model_validate(config)
