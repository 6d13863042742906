"""A batch as ours and as verl's functions take it, for comparisons of the two."""

import pytest
import torch
from tinkermq.actors.training.off_policy import CorrectionInputs

NUM_GROUPS, GROUP_SIZE, LENGTH = 5, 4, 12
NUM_SEQS = NUM_GROUPS * GROUP_SIZE


class Batch:
    """Random episodes: flat for us, as padded rows [S, L] with a mask for verl."""

    def __init__(self, seed, spread=0.3):
        generator = torch.Generator().manual_seed(seed)

        def normal(scale):
            return scale * torch.randn(NUM_SEQS, LENGTH, generator=generator)

        self.mask = (torch.rand(NUM_SEQS, LENGTH, generator=generator) < 0.7).float()
        self.mask[:, 0] = 1
        self.place = self.mask.nonzero(as_tuple=True)
        self.seq_N = self.place[0]
        self.group_S = torch.arange(NUM_SEQS) // GROUP_SIZE
        self.index = self.group_S.numpy().astype(object)
        self.old = -normal(1.0).abs() - 0.1
        self.behaviour = self.old - normal(spread)
        self.current = self.old + normal(spread)
        self.advantages = normal(1.0)
        self.rewards_S = torch.randint(0, 3, (NUM_SEQS,), generator=generator).float()
        last_S = (self.mask * torch.arange(LENGTH)).argmax(dim=1)
        self.token_rewards = torch.zeros(NUM_SEQS, LENGTH)
        self.token_rewards[torch.arange(NUM_SEQS), last_S] = self.rewards_S

    def flat(self, rows):
        return rows[self.place]

    def correction_inputs(self):
        old_N, behaviour_N = self.flat(self.old), self.flat(self.behaviour)
        return CorrectionInputs(old_N, behaviour_N, self.seq_N, NUM_SEQS)


@pytest.fixture(params=range(4))
def batch(request):
    return Batch(request.param)


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
