"""TRL's GRPOTrainer on what a run with a forced lag trains, validated as that is.

The model, the rows in their order, sizes, optimiser and loss are the job's; every draw is TRL's
own. Weights are copied every few steps and validated afterwards by our engine, on the same rows
and with the same seeds of tokens, so that both sides are measured by one instrument.
"""

# TRL and datasets are of the `bench` extra, which development does without, and the stubs of
# transformers hold what the rooms use.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.schemas.config.job import JobConfig
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from benchmarks.evidence.lagged import Curve, LaggedRun, Weights, copied_weights
from benchmarks.tasks import rows_of_job
from benchmarks.trl_peer import Clock, Settings, grpo_config, ways

WAYS = {"addition": "none", "calculator": "rollout"}
"""Game to the way in which TRL meets it (`benchmarks.trl_peer`)."""


class Snapshots(TrainerCallback):
    """Copies the weights every so many steps, and counts the time of the steps alone."""

    def __init__(self, test_every: int) -> None:
        self._test_every = test_every
        self.weights = dict[int, Weights]()
        self.wall_s = self.cpu_s = 0.0
        self._begun = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the time: from the second step on the batch was drawn since the last one's end."""
        if not self._begun[0]:
            self._begun = time.perf_counter(), time.process_time()

    def on_step_end(self, _: Any, state: Any, __: Any, *, model: Any, **___: Any) -> None:
        """Count the step; copy what it made, off the clock."""
        self.wall_s += time.perf_counter() - self._begun[0]
        self.cpu_s += time.process_time() - self._begun[1]
        if state.global_step % self._test_every == 0:
            self.weights[state.global_step] = copied_weights(model)
        self._begun = time.perf_counter(), time.process_time()


async def train_with_trl(job: dict[str, Any], *, test_every: int) -> Curve:
    """Train a job's model with TRL, synchronously on one thread; return what was measured."""
    started, run = time.perf_counter(), LaggedRun(job, lag=0, test_every=test_every)
    model = load_causal_lm(job["model"]["path"], dtype=torch.float32)
    snapshots, clock = Snapshots(test_every), Clock()
    snapshots.weights[0] = copied_weights(model)
    with tempfile.TemporaryDirectory() as folder:
        _train(model, settings_of(run.config, Path(folder)), [snapshots, clock])
    curve = Curve(validation=await run.examine(snapshots.weights), rewards=clock.rewards)
    steps = run.config.training.num_steps or 0
    curve.samples = steps * run.config.training.batch_size * run.config.rollout.group_size
    curve.train_s, curve.told["train_cpu_s"] = snapshots.wall_s, snapshots.cpu_s
    curve.seconds = time.perf_counter() - started
    return curve


def settings_of(config: JobConfig, folder: Path) -> Settings:
    """Return what TRL is told: the job's sizes and rates, and its rows in the learner's order."""
    assert config.learner.eps == 1e-8, "TRL's default"
    assert config.algorithm.loss_agg == "token-mean", "what loss_type dapo is"
    return {
        "way": WAYS[config.env.game],
        "rows": rows_of_job(config, (config.training.num_steps or 0) * config.training.batch_size),
        "model": config.model.path,
        "output_dir": str(folder),
        "batch_size": config.training.batch_size,
        "group_size": config.rollout.group_size,
        "max_response_tokens": config.rollout.max_response_tokens,
        "num_steps": config.training.num_steps,
        "lr": config.learner.lr,
        "schedule": config.learner.schedule,
        "seed": config.seed,
        "delay_scale": 0.0,
        "env_workers": 1,
    }


def _train(model: Any, settings: Settings, callbacks: list[TrainerCallback]) -> None:
    rows = settings["rows"]
    data = {
        "prompt": [[{"role": "user", "content": row["question"]}] for row in rows],
        "ground_truth": [row["ground_truth"] for row in rows],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL's, of experimental features and of CPUs
        trainer = GRPOTrainer(
            model=model,
            args=grpo_config(settings),
            train_dataset=Dataset.from_dict(data),
            callbacks=callbacks,
            **ways(settings, load_tokenizer(settings["model"]))[settings["way"]](),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
