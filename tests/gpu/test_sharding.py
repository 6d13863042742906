"""A model divided over the GPUs (FSDP2) trains as one process does."""

import pytest
import torch
from tinkermq.actors.learner.ranks.processes import ChildRanks
from tinkermq.actors.policy.policies import MAIN
from tinkermq.actors.training.policies import Policies, load_models
from tinkermq.schemas.config.job import JobConfig

from benchmarks.learner_step import StepSequences
from tests.gpu.material import RandomPolicy
from tests.gpu.report import Recorder

pytestmark = [pytest.mark.gpu_machine, pytest.mark.timeout(300)]
LONGEST = (96, 80, 88)
"""Tokens of the longest sequence of each step."""
ROLLOUT = {"max_prompt_tokens": 16, "max_turn_tokens": 96, "max_response_tokens": 96}


def train(config: JobConfig, vocab_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the gradient norm of each step, and the weights after the last, on the CPU."""
    ranks = ChildRanks.start(config)
    try:
        models = load_models(config, None)
        policies = Policies.open(config, models, ranks, total_steps=len(LONGEST), folder=None)
        numbers = [
            policies.step(StepSequences(vocab_size, longest, 9).groups(), step).numbers
            for step, longest in enumerate(LONGEST, 1)
        ]
        return [one["actor/grad_norm"] for one in numbers], policies.gather()[MAIN]
    finally:
        ranks.close()


def test_ranks_train_as_one_process_does(
    policy: RandomPolicy, on_gpu: bool, record: Recorder
) -> None:
    num_gpus = torch.cuda.device_count()
    num_ranks = num_gpus if on_gpu else 2
    learner = {
        "lr": 0.1,
        "eps": 1.0,
        "grad_clip": 0.5,
        "max_row_tokens": 256,
        "microbatch_tokens": 256,
    }
    # one GPU divides nothing; its weights pass through FSDP2 from the machine's memory
    divided = {"ranks": num_ranks, "slots": num_ranks, "cpu_offload": num_gpus == 1}
    alone, ranks = (
        policy.config(rollout=ROLLOUT, learner=each) for each in (learner, learner | divided)
    )
    norms, weights = train(alone, policy.vocab_size)
    rank_norms, rank_weights = train(ranks, policy.vocab_size)
    difference = max(float((rank_weights[name] - weights[name]).abs().max()) for name in weights)
    record("ranks", num_ranks)
    record("weights differ by", difference)
    tolerance = 1e-4 if on_gpu else 1e-5
    assert min(norms) >= 1e-4
    assert difference <= tolerance
    assert rank_norms == pytest.approx(norms, rel=10 * tolerance)
