"""What ranks hold and exchange at real sizes, by tensors without values and a group without peers.

torch's fake process group answers each collective at once, and FakeTensorMode computes shapes only:
one process stands for a rank of sixteen, and a model of 30 B weights needs no memory. The device is
the CPU, on which attention reads a mask.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tinkermq.actors.training.model import Scorer, _prepare
from tinkermq.actors.training.optimizer import make_optimizer
from tinkermq.actors.training.parallel import Parallel, _mesh_of, _sequence_of
from tinkermq.actors.training.rank_batches import RankPacker
from tinkermq.schemas.config.job import JobConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from tests.support.allocations import equal_sequences, estimated_for_step, job_of_length

TOLERANCE = 0.1
STORED = ("Sharded Param", "Sharded Grad", "OptState")
"""Kinds that `learner.cpu_offload` moves into the machine's memory."""


def qwen3(width: int, layers: int, heads: int, mlp: int, vocab: int = 151936) -> Qwen3Config:
    return Qwen3Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=mlp,
        vocab_size=vocab,
    )


SMALL = qwen3(512, 4, 8, 1536, 8192)
QWEN3_8B = qwen3(4096, 36, 32, 12288)
_30B_A3B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = Qwen3MoeConfig(**_30B_A3B)


class Answers(TorchFunctionMode):
    """Answers what is asked of values: a learner asks whether its model is as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0.0
        self.listed: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.new_tensor:
            self.listed = args[1]
        if func is torch.searchsorted:  # each column predicts one token …
            return np.array(self.listed)
        if func is torch.Tensor.unique:  # … here, too
            return args[0], torch.arange(len(args[0]))
        if func is torch.allclose or func is torch.Tensor.__bool__:
            return True
        if func in (torch.Tensor.__float__, torch.Tensor.item):
            return self.number
        if func is torch.Tensor.pin_memory:  # which FakeTensorMode does not know
            return args[0]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Pass:
    """A pass of a rank, behind another one and an update."""

    held: dict[str, int]
    """Bytes at its peak, by kind."""
    exchanged: dict[str, int]
    """Number of collectives, by name."""


def measured(config: JobConfig, shape: PreTrainedConfig, length: int, rows: int) -> Pass:
    """Compute two passes of `rows` rows and an update as rank 0; return the second pass."""
    learner, answers = config.learner, Answers()
    dist.init_process_group("fake", rank=0, world_size=learner.ranks, store=FakeStore())
    try:
        device = torch.device("cpu")
        mesh, sequence = _mesh_of(device, learner), _sequence_of(0, learner.context_parallel)
        parallel = Parallel(0, learner.ranks, device, mesh, sequence)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, answers:
            model = AutoModelForCausalLM.from_config(shape).eval()
            model = _prepare(model, learner, "")
            inside = parallel.place(model, learner, "sdpa")
            scorer = Scorer(model, temperature=1.0, inside=inside)
            optimizer = make_optimizer(model, learner, learner.lr)
        num = rows * learner.ranks // learner.context_parallel
        batch = equal_sequences(shape.vocab_size, length + 1, num)
        packer = RankPacker(model, scorer, learner, parallel, None)
        [micro] = packer.pack(batch, torch.ones_like(batch.group_S, dtype=torch.bool))
        answers.number = 1.0
        with fake, answers:

            def compute() -> None:
                scorer.score(micro).logprobs_N.sum().backward()

            compute()
            optimizer.step()
            tracker, exchanged = FSDPMemTracker(inside, optimizer), CommDebugMode()
            with tracker:
                compute()
            with exchanged:
                compute()
        held = tracker.get_tracker_snapshot("peak")[device]
        return Pass(
            {getattr(kind, "value", kind): size for kind, size in held.items()},
            {str(kind): number for kind, number in exchanged.get_comm_counts().items()},
        )
    finally:
        dist.destroy_process_group()


def config_of(folder: Path, ranks: int, length: int, rows: int, options: Any) -> JobConfig:
    learner = {
        "dtype": "bfloat16",
        "gradient_checkpointing": False,
        "ranks": ranks,
        "slots": ranks,
        "max_row_tokens": length,
        "microbatch_tokens": rows * length,
        **options,
    }
    return job_of_length(folder, length, learner)


KEPT: dict[str, Any] = {}
AGAIN: dict[str, Any] = {"gradient_checkpointing": True}
FOUR: dict[str, Any] = {"context_parallel": 4}
OFFLOADED, DIVIDED = AGAIN | {"cpu_offload": True}, AGAIN | FOUR
AT_SIZE = {
    "Qwen3-8B, 4 ranks": (QWEN3_8B, 4, KEPT),
    "Qwen3-8B, 8 ranks, recomputed": (QWEN3_8B, 8, AGAIN),
    "Qwen3-8B, 8 ranks, offloaded": (QWEN3_8B, 8, OFFLOADED),
    "Qwen3-8B, 16 ranks, four a sequence": (QWEN3_8B, 16, DIVIDED),
    "Qwen3-30B-A3B, 4 ranks, offloaded": (QWEN3_30B_A3B, 4, OFFLOADED),
    "Qwen3-30B-A3B, 8 ranks, recomputed": (QWEN3_30B_A3B, 8, AGAIN),
    "Qwen3-30B-A3B, 16 ranks": (QWEN3_30B_A3B, 16, KEPT),
    "Qwen3-30B-A3B, 16 ranks, four a sequence": (QWEN3_30B_A3B, 16, DIVIDED),
}
CASES = [
    pytest.param(SMALL, 4, 1024, DIVIDED, marks=pytest.mark.full, id="small"),
    pytest.param(SMALL, 4, 1024, KEPT | FOUR, marks=pytest.mark.long, id="small, kept"),
    *(
        pytest.param(shape, ranks, 4096, options, marks=pytest.mark.long, id=name)
        for name, (shape, ranks, options) in AT_SIZE.items()
    ),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("shape", "ranks", "length", "options"), CASES)
def test_a_rank_holds_what_is_planned_and_gathers_each_layer_twice(
    shape: PreTrainedConfig,
    ranks: int,
    length: int,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    shape.save_pretrained(tmp_path)
    config = config_of(tmp_path, ranks, length, 2, options)
    one = measured(config, shape, length, 2)
    elsewhere = STORED if config.learner.cpu_offload else ()
    held = one.held["Total"] - sum(one.held[kind] for kind in elsewhere)
    assert estimated_for_step(config) == pytest.approx(held, rel=TOLERANCE), one
    layers = shape.num_hidden_layers
    num = 12 if config.learner.gradient_checkpointing else 8
    exchanges = {"c10d.alltoall_base_": num * layers} if "context_parallel" in options else {}
    assert one.exchanged == {
        "c10d._allgather_base_": 2 * layers + 1,
        "c10d._reduce_scatter_base_": layers + 1,
        **exchanges,  # of queries, keys, values and outputs: forwards, again, and backwards
    }
