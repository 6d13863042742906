"""The evaluator of a job that learns from pairs: how many held-out pairs are told apart rightly.

Nothing is generated. The answers are scored as the learner scores them, by β log π/π_ref or by the
reward model. The share of the pairs whose chosen answer wins is `val/mean_score`, which is what a
game's score is called, so that all that looks at validations finds it.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import asyncio
import time
from collections.abc import Mapping
from contextlib import closing

import torch

from ...broker.weights.store import TensorBytes
from ...envs.data.pair_data import PairData
from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group
from ...schemas.task import Task
from ...schemas.wire.errors import DataError
from ..generator.episodes.chat import open_chat
from ..generator.episodes.demonstrations import demonstrate
from ..generator.episodes.groups import GroupFailed
from ..job_weights import as_sources
from ..learner.algorithms.training_batch import assemble
from ..learner.preferences.pair_losses import pair_numbers
from ..learner.preferences.reward_trainer import RewardTrainer
from ..learner.training.parallel import Parallel
from ..learner.training.policies import load_models
from ..learner.training.step import Trainer
from ..models.job_models import check_weights
from ..models.lora import policy_tensors
from ..models.policies import MAIN
from ..models.weight_tensors import as_tensor
from ..runtime import JobContext
from .requests import Requests


async def run_pair_evaluator(context: JobContext) -> None:
    """Evaluate what is asked for until told to stop."""
    await asyncio.to_thread(check_weights, context.record, context.config)
    pairs, failures = await asyncio.to_thread(held_out_pairs, context.config)
    if failures:
        told = f"{len(failures)} of {len(failures) + len(pairs)} are left out: {failures[0]}"
        await context.event("held_out_pairs_unusable", told)
    judge = await asyncio.to_thread(PairJudge, context.config, pairs)

    async def measure(version: int, tensors: Mapping[str, TensorBytes]) -> dict[str, float]:
        return await asyncio.to_thread(judge.measure, tensors)

    await context.serve_control()
    await Requests(context, measure).serve()


def held_out_pairs(config: JobConfig) -> tuple[list[Group], list[str]]:
    """Tokenise the held-out pairs; also say why some cannot be used.

    Raises DataError where none can.
    """
    chat = open_chat(config.model)
    groups, failures = list[Group](), list[str]()
    with closing(PairData(config.sft.val_data)) as data:
        for number in range(len(data)):
            task = Task(task=number, sample=number, seed=0, group_size=2, min_version=0)
            try:
                groups.append(demonstrate(task, data, chat, config, "evaluator"))
            except GroupFailed as failure:
                failures.append(failure.blame.message)
    if not groups:
        raise DataError(
            f"no pair of sft.val_data can be used: {failures[0]}", hint="see the first of them"
        )
    return groups, failures


class PairJudge:
    """A model that is put at one version after the other, and held-out pairs for it."""

    def __init__(self, config: JobConfig, pairs: list[Group]) -> None:
        """Raises ModelError for a model that cannot be loaded."""
        model = load_models(config, None)[MAIN]
        trainer = RewardTrainer if config.sft.trains_rewards else Trainer
        self._trainer = trainer(model, config, total_steps=1, parallel=Parallel.alone())
        self._batch = assemble(pairs)

    def measure(self, tensors: Mapping[str, TensorBytes]) -> dict[str, float]:
        """Say how a version of these weights tells the pairs apart."""
        started = time.perf_counter()
        self._load(tensors)
        numbers = pair_numbers(self._trainer.pair_rewards(self._batch), "val")
        return {
            "val/mean_score": numbers["val/accuracy"],
            **numbers,
            "timing_s/testing": time.perf_counter() - started,
        }

    @torch.no_grad()
    def _load(self, tensors: Mapping[str, TensorBytes]) -> None:
        mine = policy_tensors(self._trainer.model)
        for name, source in as_sources(tensors).items():
            mine[name].copy_(as_tensor(source))
