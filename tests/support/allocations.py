"""What torch allocates, to the byte: the most that was held at once; and what a plan estimates."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.plan.memory import learner_load, learner_terms
from tinkermq.schemas.plan.model_shape import find_shape
from torch.profiler import ProfilerActivity, profile

from benchmarks.learner_step import StepSequences


def largest_allocation(work: Callable[[], object]) -> int:
    """Run some work; return the most bytes that it held on a CPU beyond those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results: Any = cast(Any, profiler).profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    assert events, "the profiler saw no allocation"
    return largest


def job_of_length(folder: Path, length: int, learner: dict[str, Any], **sections: Any) -> JobConfig:
    """Return a job for the model in a folder whose sequences have `length` tokens."""
    answer = length - length // 8
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": length // 8,
                "max_turn_tokens": answer,
                "max_response_tokens": answer,
            },
            "algorithm": {"correction": "none"},
            "learner": {"lr": 1e-6, **learner},
            **sections,
        }
    )


def equal_sequences(vocab: int, length: int, num: int) -> TrainingBatch:
    """Return a batch of `num` sequences of random tokens, all of one length."""
    work, rng = StepSequences(vocab, length, num), np.random.default_rng(0)
    work.ids = [rng.integers(8, vocab, length) for _ in range(num)]
    return assemble(work.groups())


def allocated_in_step(
    config: JobConfig, length: int, num_episodes: int, batch: TrainingBatch | None = None
) -> int:
    """Return the most bytes of a learner's step: weights, states, and what it allocates.

    On a GPU that is what torch's allocator held there. Without a `batch` it has `num_episodes` of
    random tokens, all of one length.
    """
    model = load_model(config.model, config.learner, lora=config.lora)
    trainer = Trainer(model, config, total_steps=4)
    if batch is None:
        batch = equal_sequences(int(model.config.vocab_size), length, num_episodes)
    trainer.step(batch, 1)  # the optimiser has its states after it
    trainer.optimizer.zero_grad()
    if next(model.parameters()).is_cuda:
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        trainer.step(batch, 2)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    there = [*model.parameters(), *filter(torch.is_tensor, states)]
    before = sum(tensor.numel() * tensor.element_size() for tensor in there)
    return before + largest_allocation(lambda: trainer.step(batch, 2))


def estimated_for_step(config: JobConfig, *, on_gpu: bool = False, images: bool = True) -> int:
    """Return the bytes that a plan estimates for it, but for those outside of torch's allocator.

    `images`: with those that the vision tower takes for images.
    """
    shape = find_shape(config.model.path)
    assert shape is not None
    learner = config.learner
    load = learner_load(
        config,
        shape,
        microbatch_tokens=learner.pass_tokens,
        checkpointing=learner.recomputes,
        offload_activations=learner.offloads,
        on_gpu=on_gpu,
    )
    terms = learner_terms(load)
    others = ["CUDA and transfer buffers", *([] if images else ["images"])]
    return sum(term.num_bytes for term in terms if term.name not in others)
