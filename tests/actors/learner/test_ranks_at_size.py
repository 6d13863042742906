"""What ranks hold and exchange at real sizes, by tensors without values and a group without peers.

torch's fake process group answers each collective at once, and FakeTensorMode computes shapes only:
one process stands for a rank of sixteen, and a model of 30 B weights needs no memory. The device is
the CPU, on which attention reads a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tinkermq.actors.training import model as model_module
from tinkermq.actors.training import output_layer
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

from tests.support.allocations import equal_sequences, estimated_for_step

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

    number = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unique:  # each column predicts one token
            return args[0], torch.arange(len(args[0]))
        if func is torch.allclose or func is torch.Tensor.__bool__:
            return True
        if func in (torch.Tensor.__float__, torch.Tensor.item):
            return self.number
        if func is torch.Tensor.pin_memory:  # which FakeTensorMode does not know
            return args[0]
        return func(*args, **(kwargs or {}))


def equal_chunks(
    row_M: torch.Tensor, num_rows: int, chunk_rows: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the chunks of rows of which each has one token."""
    starts = [*range(0, num_rows, chunk_rows), num_rows]
    yield from zip(starts, starts[1:], starts, starts[1:], strict=False)


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


def config_of(folder: Path, ranks: int, length: int, rows: int, **learner: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "rollout": {
                "max_prompt_tokens": length // 8,
                "max_turn_tokens": length - length // 8,
                "max_response_tokens": length - length // 8,
            },
            "algorithm": {"correction": "none"},
            "learner": {
                "lr": 1e-6,
                "dtype": "bfloat16",
                "gradient_checkpointing": False,
                "ranks": ranks,
                "slots": ranks,
                "max_row_tokens": length,
                "microbatch_tokens": rows * length,
                **learner,
            },
        }
    )


KEPT: dict[str, Any] = {}
AGAIN: dict[str, Any] = {"gradient_checkpointing": True}
OFFLOADED, DIVIDED = AGAIN | {"cpu_offload": True}, AGAIN | {"context_parallel": 4}
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (output_layer, model_module):
        monkeypatch.setattr(module, "row_chunks", equal_chunks)
    shape.save_pretrained(tmp_path)
    config = config_of(tmp_path, ranks, length, 2, **options)
    one = measured(config, shape, length, 2)
    elsewhere = STORED if config.learner.cpu_offload else ()
    held = one.held["Total"] - sum(one.held[kind] for kind in elsewhere)
    assert estimated_for_step(config) == pytest.approx(held, rel=TOLERANCE), one
    layers = shape.num_hidden_layers
    exchanges = {"c10d.alltoall_base_": 12 * layers} if "context_parallel" in options else {}
    assert one.exchanged == {
        "c10d._allgather_base_": 2 * layers + 1,
        "c10d._reduce_scatter_base_": layers + 1,
        **exchanges,  # of queries, keys, values and outputs: forwards, again, and backwards
    }
