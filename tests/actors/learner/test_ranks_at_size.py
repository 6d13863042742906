"""What ranks hold and exchange at real sizes, by tensors without values and a group without peers.

torch's fake process group answers each collective at once, and FakeTensorMode computes shapes only:
one process stands for a rank of sixteen, and a model of 30 B weights needs no memory. The device is
the CPU, on which attention reads a mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tinkermq.actors.policy.vision import ImageReader
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import Scorer, _prepare
from tinkermq.actors.training.optimizer import make_optimizer
from tinkermq.actors.training.parallel import Parallel, _mesh_of, _sequence_of
from tinkermq.actors.training.rank_batches import RankPacker
from tinkermq.schemas.config.job import JobConfig
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from tests.support.allocations import equal_sequences, estimated_for_step, job_of_length
from tests.support.groups import make_group, make_trajectory
from tests.support.images import png

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
IMAGE_ID = 8000


def qwen2_5_vl(text: dict[str, Any], tower: dict[str, Any]) -> Qwen2_5_VLConfig:
    rotary = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {"rope_parameters": rotary, **text}
    tower = {"out_hidden_size": text["hidden_size"], "patch_size": 14, "window_size": 112, **tower}
    return Qwen2_5_VLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE_ID)


QWEN2_5_VL_7B = qwen2_5_vl(
    {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
    },
    {
        "depth": 32,
        "hidden_size": 1280,
        "num_heads": 16,
        "intermediate_size": 3420,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
)
SMALL_VL = qwen2_5_vl(
    {
        "vocab_size": 8192,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 1536,
    },
    {
        "depth": 4,
        "hidden_size": 320,
        "num_heads": 4,
        "intermediate_size": 864,
        "fullatt_block_indexes": [3],
    },
)


def sequences(shape: PreTrainedConfig, length: int, num: int) -> TrainingBatch:
    """Return a batch of sequences of one length; where there is a tower, with images alone."""
    if not isinstance(shape, Qwen2_5_VLConfig):
        return equal_sequences(shape.vocab_size, length, num)
    rows = (length // 8 - 8) // 16
    prompt = [3, *rows * 16 * [IMAGE_ID], 70, 71]
    groups = []
    for number in range(num):
        image = {"type": "image", "image": {"bytes": png(16 * 28, rows * 28, number), "path": None}}
        answer = (length - len(prompt)) * [9]
        messages = [{"role": "user", "content": [image]}]
        episode = make_trajectory(prompt, [(answer, [])], [1.0], messages=messages)
        groups.append(make_group([episode], number).with_shared_images())
    return assemble(groups)


class Answers(TorchFunctionMode):
    """Answers what is asked of values: a learner asks whether its model is as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0.0
        self.listed: list[int] = []
        self._real: list[torch.Tensor] = []

    def keep(self, tensors: Any) -> Any:
        """Compute what follows from these alone: the sizes of images and of their windows."""
        self._real += [one for one in _pytree.tree_leaves(tensors) if torch.is_tensor(one)]
        return tensors

    def really(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of kept tensors; keep its results."""
        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            return self.keep(work(*args, **kwargs))

    def ends(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do the same; return the ends of windows as no tensors, which layers would save."""

        def listed(one: Any) -> Any:
            is_ends = torch.is_tensor(one) and one.dtype == torch.int32
            return one.numpy() if is_ends else one

        with torch._C.DisableTorchFunction(), unset_fake_temporarily():
            return self.keep(_pytree.tree_map(listed, work(*args, **kwargs)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in _pytree.tree_leaves((args, kwargs)) if torch.is_tensor(one)]
        if given and all(any(one is real for real in self._real) for one in given):
            return self.really(func, *args, **(kwargs or {}))
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


def lay_out(answers: Answers, tower: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give a tower the layout of its windows, which it else computes from the images' sizes."""
    grid, sizes = kwargs["grid_thw"], (tower.spatial_merge_size, tower.window_size)
    ends, longest = answers.ends(get_vision_attention_seqlens, grid, tower.config)
    order, windows = answers.ends(get_vision_window_index, grid, *sizes, tower.patch_size)
    laid_out = {
        "position_ids": answers.ends(get_vision_position_ids, grid, tower.spatial_merge_size),
        "cu_seqlens": ends,
        "max_seqlen": longest,
        "window_index": order,
        "cu_window_seqlens": windows,
    }
    return args, kwargs | laid_out


def measured(config: JobConfig, shape: PreTrainedConfig, length: int, rows: int) -> Pass:
    """Compute two passes of `rows` rows and an update as rank 0; return the second pass."""
    learner, answers = config.learner, Answers()
    sees = isinstance(shape, Qwen2_5_VLConfig)
    reader = ImageReader(Qwen2VLImageProcessorPil(), IMAGE_ID) if sees else None
    dist.init_process_group("fake", rank=0, world_size=learner.ranks, store=FakeStore())
    try:
        device = torch.device("cpu")
        mesh, sequence = _mesh_of(device, learner), _sequence_of(0, learner.context_parallel)
        parallel = Parallel(0, learner.ranks, device, mesh, sequence)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, answers:
            kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            model = kind.from_config(shape).eval()
            if sees:
                tower = model.model.visual
                tower.register_forward_pre_hook(partial(lay_out, answers), with_kwargs=True)
            model = _prepare(model, learner, "")
            inside = parallel.place(model, learner, "sdpa")
            scorer = Scorer(model, temperature=1.0, inside=inside)
            optimizer = make_optimizer(model, learner, learner.lr)
        num = rows * learner.ranks // learner.context_parallel
        batch = sequences(shape, length + 1, num)
        packer = RankPacker(model, scorer, learner, parallel, reader)
        [micro] = packer.pack(batch, torch.ones_like(batch.group_S, dtype=torch.bool))
        if micro.images is not None:
            answers.keep([image.grid_I3 for image in micro.images.images])
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
        "share_prompts": False,
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
    "Qwen2.5-VL-7B, 4 ranks": (QWEN2_5_VL_7B, 4, KEPT),
    "Qwen2.5-VL-7B, 4 ranks, offloaded": (QWEN2_5_VL_7B, 4, OFFLOADED),
    "Qwen2.5-VL-7B, 8 ranks, recomputed": (QWEN2_5_VL_7B, 8, AGAIN),
    "Qwen2.5-VL-7B, 16 ranks, four a sequence": (QWEN2_5_VL_7B, 16, DIVIDED),
}
CASES = [
    pytest.param(SMALL, 4, 1024, DIVIDED, marks=pytest.mark.full, id="small"),
    pytest.param(SMALL, 4, 1024, KEPT | FOUR, marks=pytest.mark.long, id="small, kept"),
    pytest.param(SMALL_VL, 4, 1024, DIVIDED, marks=pytest.mark.full, id="small, with images"),
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
    layers = shape.get_text_config().num_hidden_layers
    tower: Any = shape.vision_config if isinstance(shape, Qwen2_5_VLConfig) else None
    units = layers + (tower.depth if tower is not None else 0)
    num = 12 if config.learner.gradient_checkpointing else 8
    exchanges = {"c10d.alltoall_base_": num * layers} if "context_parallel" in options else {}
    assert one.exchanged == {
        "c10d._allgather_base_": 2 * units + 1,
        "c10d._reduce_scatter_base_": units + 1,
        **exchanges,  # of queries, keys, values and outputs: forwards, again, and backwards
    }
