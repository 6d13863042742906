"""Ranks: a model divided over processes (FSDP2) trains as one process does."""

import torch

from ....schemas.config.job import JobConfig
from ...learner.ranks.child_ranks import ChildRanks
from ...learner.training.policies import Policies, load_models
from ...models.policies import MAIN
from ..figures import Figure, Found, Setting
from ..material import RandomPolicy
from ..measuring.learner_step import StepSequences

_LONGEST = (96, 80, 88)
"""Tokens of the longest sequence of each step."""
_NUM_SEQUENCES = 9
_ROLLOUT = {"max_prompt_tokens": 16, "max_turn_tokens": 96, "max_response_tokens": 96}


def fsdp(setting: Setting) -> Found:
    """Train some steps with all GPUs, or two processes, and with one process."""
    policy = RandomPolicy.make(setting)
    learner: dict[str, object] = {"lr": 0.1, "eps": 1.0, "grad_clip": 0.5}
    learner |= {"row_tokens": 256, "microbatch_tokens": 256}
    num_gpus = torch.cuda.device_count()
    num_ranks = num_gpus if setting.on_gpu else 2
    # one GPU divides nothing; its weights pass through FSDP2 from the machine's memory
    divided = {"ranks": num_ranks, "slots": num_ranks, "cpu_offload": num_gpus == 1}
    one, several = (
        policy.config(rollout=_ROLLOUT, learner=more) for more in (learner, learner | divided)
    )
    norms, weights = _train(one, policy.vocab_size)
    others, made = _train(several, policy.vocab_size)
    apart = max(float((made[name] - weights[name]).abs().max()) for name in weights)
    off = max(abs(ours / alone - 1) for ours, alone in zip(others, norms, strict=True))
    tolerance = 1e-4 if setting.on_gpu else 1e-5
    return Found(
        [
            Figure("processes", num_ranks),
            Figure("smallest gradient norm", min(norms), at_least=1e-4),
            Figure("weights differ by", apart, at_most=tolerance),
            Figure("gradient norms differ by", off, at_most=10 * tolerance),
        ]
    )


def _train(config: JobConfig, vocab_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the gradient norm of each step, and the weights after the last, on the CPU."""
    ranks = ChildRanks.start(config)
    try:
        models = load_models(config, None)
        policies = Policies.open(config, models, ranks, total_steps=len(_LONGEST), folder=None)
        norms = [
            policies.step(StepSequences(vocab_size, longest, _NUM_SEQUENCES).groups(), step).numbers
            for step, longest in enumerate(_LONGEST, 1)
        ]
        return [one["actor/grad_norm"] for one in norms], policies.gather()[MAIN]
    finally:
        ranks.close()
