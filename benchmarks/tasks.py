"""The tasks that the benchmarks train: models, data and configurations, made once and cached.

Models and data lie below outputs/benchmarks/. The warm starts and the hyperparameters are those of
the examples.
"""

import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypedDict, Unpack

from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.policy.tiny_models import TinyKind, make_model, make_tokenizer
from tinkermq.actors.warm_start import warm_start
from tinkermq.envs.data import HostData
from tinkermq.envs.dataset import Record, answer_text
from tinkermq.envs.write_data import verl_row, write_rows
from tinkermq.schemas.config.job import JobConfig
from transformers.utils import logging

from benchmarks.stack import REPOSITORY

CACHE = REPOSITORY / "outputs" / "benchmarks"
NUM_ROWS = 2048
Row = dict[str, Any]


def warm_model(game: str, *, quick: bool = False, kind: TinyKind = "qwen3") -> Path:
    """Return the folder of a game's warm-started model; `quick`: of one that was hardly trained."""
    folder = CACHE / f"{game}-quick" if quick else REPOSITORY / "outputs" / "models" / game
    if kind != "qwen3":  # the examples' models
        folder = folder.with_name(f"{folder.name}-{kind}")
    warm_start(game, folder, steps=20 if quick else None, kind=kind)
    return folder


class Shape(TypedDict, total=False):
    """What of a tiny model's shape the benchmarks choose (`make_model`)."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    mlp_width: int
    vocab_size: int
    max_tokens: int


def random_model(name: str, **shape: Unpack[Shape]) -> Path:
    """Return the folder of a random model of this shape (`make_model`)."""
    folder = CACHE / name
    if not (folder / "config.json").is_file():
        logging.disable_progress_bar()
        make_model(**shape).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return folder


def questions(game: str) -> Path:
    """Return the JSONL file of a game's questions."""
    file = CACHE / f"{game}.jsonl"
    if not file.is_file():
        write_rows(file, _rows(game))
    return file


def in_training_order(game: str, num_rows: int, *, seed: int = 0) -> list[Row]:
    """Return the questions that the learner trains, in its order: for the peer."""
    rows = list(_rows(game))
    order = DataOrder(seed, len(rows))
    picked = [rows[order.sample(index) or 0] for index in range(num_rows)]
    return [
        {
            "question": row["prompt"][0]["content"],
            "ground_truth": row["reward_model"]["ground_truth"],
        }
        for row in picked
    ]


def rows_of_job(config: JobConfig, num_rows: int) -> list[Row]:
    """Return the rows of a job's data that the learner trains, in its order: for the peer."""
    data = HostData(config.env, config.seed)
    order = DataOrder(config.seed, data.num_train)
    try:
        return [_row(data.record("train", order.sample(index))) for index in range(num_rows)]
    finally:
        data.close()


def _row(record: Record | None) -> Row:
    assert record is not None, "a game whose tasks are rows"
    truth = answer_text(record.ground_truth)
    return {"question": record.messages()[0]["content"], "ground_truth": truth}


def _rows(game: str) -> Iterator[Row]:
    draw = import_module(f"tinkermq.envs.games.{game}").demonstrations
    rng = random.Random(1)
    for index in range(NUM_ROWS):
        question = draw(rng)[0]["content"]
        left, sign, right = _parts(question)
        truth = str(left + right if sign == "+" else left * right)
        row = verl_row(question, truth, data_source=game, split="train", index=index)
        row["extra_info"]["question"] = question
        yield row


def _parts(question: str) -> tuple[int, str, int]:
    sign = "+" if "+" in question else "*"
    left, _, right = question.rstrip("=").partition(sign)
    return int(left), sign, int(right)


def addition_job(model: Path, num_steps: int) -> dict[str, Any]:
    """Return the job that trains the addition: 16 tasks × 16 samples a step."""
    return {
        "model": {"path": str(model)},
        "env": {"game": "addition", "train_data": [str(questions("addition"))], "num_val": 0},
        "rollout": {
            "group_size": 16,
            "max_prompt_tokens": 12,
            "max_turn_tokens": 4,
            "max_response_tokens": 4,
        },
        "generator": {"max_episodes": 512, "max_requests": 256},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
        "learner": {
            "lr": 2.5e-4,
            "betas": [0.9, 0.99],
            "max_row_tokens": 512,
            "microbatch_tokens": 8192,
        },
        "training": {"num_steps": num_steps, "batch_size": 16, "max_staleness": 2},
    }


def slow_calculator_job(model: Path, num_steps: int, scale: float) -> dict[str, Any]:
    """Return the job that trains the calculator in an environment that takes its time."""
    return {
        "model": {"path": str(model)},
        "env": {
            "game": "benchmarks.slow_game:SlowCalculatorGame",
            "kwargs": {"scale": scale},
            "train_data": [str(questions("calculator"))],
            "num_val": 0,
            "workers": 256,
        },
        "rollout": {
            "group_size": 16,
            "max_turns": 2,
            "max_prompt_tokens": 16,
            "max_turn_tokens": 12,
            "max_response_tokens": 32,
        },
        "generator": {"max_episodes": 768, "max_requests": 256},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
        "learner": {
            "lr": 5e-4,
            "betas": [0.9, 0.99],
            "max_row_tokens": 1024,
            "microbatch_tokens": 8192,
        },
        "training": {"num_steps": num_steps, "batch_size": 16, "max_staleness": 2},
    }


def coin_job(
    model: Path, num_steps: int, *, tasks: int, group: int, tokens: int, staleness: int = 2
) -> dict[str, Any]:
    """Return a job in which nothing is learnt: every episode has `tokens` new tokens."""
    return {
        "model": {"path": str(model)},
        "env": {"game": "benchmarks.coin_game:CoinGame", "num_val": 0},
        "rollout": {
            "group_size": group,
            "max_prompt_tokens": 16,
            "max_turn_tokens": tokens,
            "max_response_tokens": tokens,
        },
        "generator": {"max_episodes": 4 * tasks * group, "max_requests": tasks * group},
        "learner": {"lr": 1e-5, "max_row_tokens": 512, "microbatch_tokens": 4096},
        "training": {
            "num_steps": num_steps,
            "batch_size": tasks,
            "max_staleness": staleness,
        },
    }
