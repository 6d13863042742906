"""Flash attention reads the packed rows as sdpa does, run on a CPU as far as the CUDA kernel.

The kernel is the only thing that stands in: everything of transformers and of the learner above it
is the real code.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from tinkermq.actors.training.attention import flatten
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from tests.actors.learner.test_images import _groups as groups_with_images
from tests.actors.learner.test_model import _batch, _mistral, _qwen2, _random
from tests.support.images import make_vision_model

torch.set_num_threads(1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, left: int):
    """Attention of one sequence: [T, heads, D]."""
    place_T = torch.arange(len(q))
    seen_TT = torch.ones(len(q), len(q), dtype=torch.bool)
    if causal:
        distance_TT = place_T[:, None] - place_T
        seen_TT = (distance_TT >= 0) & ((distance_TT <= left) if left >= 0 else True)
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, seen_TT, scale=scale, enable_gqa=True)
    return out.transpose(0, 1)


class Kernel:
    """What flash-attn 2 computes, with its signature and what it asks for."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.texts: list[list[int]] = []
        """Where the sequences of each causal call begin and end."""

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        """Sequences of any lengths in one row: [T, heads, D]."""
        assert {q.dtype, k.dtype, v.dtype} == {self.dtype}
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_q.equal(cu_seqlens_k)
        assert int(cu_seqlens_q.diff().max()) == max_seqlen_q == max_seqlen_k
        assert dropout_p == 0
        ends = cu_seqlens_q.tolist()
        assert ends[0] == 0
        assert ends[-1] == len(q)
        if causal:
            assert deterministic
            self.texts.append(ends)
        return torch.cat(
            [
                _attend(q[a:b], k[a:b], v[a:b], softmax_scale, causal, window_size[0])
                for a, b in pairwise(ends)
            ]
        )

    def same_lengths(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> Tensor:
        """Rows of one length: [B, T, heads, D]."""
        assert {q.dtype, k.dtype, v.dtype} == {self.dtype}
        parts = zip(q, k, v, strict=True)
        return torch.stack([_attend(*row, softmax_scale, causal, window_size[0]) for row in parts])


def _reads_flash(model: PreTrainedModel) -> PreTrainedModel:
    """Let a model use flash attention although this machine has no GPU."""
    model.config._attn_implementation = "flash_attention_2"
    return model


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """What stands in, of a dtype."""
    made = Kernel(getattr(request, "param", torch.float32))
    process = flash._lazy_define_process_function(made.varlen)
    functions = (made.same_lengths, made.varlen, None, None, None), (process, process)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_: functions)
    return made


@pytest.mark.parametrize("make", [_mistral, _qwen2])
@pytest.mark.parametrize("window", [5, 4096])
def test_packed_rows_have_the_scores_and_gradients_of_sdpa(
    make: Any, window: int, kernel: Kernel
) -> None:
    model = _random(make(window))
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(2):
        model.zero_grad()
        scorer = Scorer(model, temperature=1.0, dtype="float32")
        batch = _batch()
        logprobs_N = torch.zeros(batch.num_tokens)
        for packed in pack(batch.sequences, max_row_tokens=64, microbatch_tokens=128):
            logprobs_N = logprobs_N.index_copy(0, packed.index_N, scorer.score(packed).logprobs_N)
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((logprobs_N.detach(), gradient))
        assert bool(kernel.texts) is scorer.flat_rows
        _reads_flash(model)
    for sdpa, flashed in zip(*found, strict=True):
        torch.testing.assert_close(flashed, sdpa, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", [torch.bfloat16], indirect=True)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_step_hands_each_sequence_to_the_kernel_in_bfloat16(
    tmp_path: Path, kernel: Kernel, checkpointing: bool
) -> None:
    _random(_qwen2(4096)).save_pretrained(tmp_path)
    reports: list[dict[str, float]] = []
    for of in (load_model, lambda *arguments: _reads_flash(load_model(*arguments))):
        config = JobConfig.model_validate(
            {
                "model": {"path": str(tmp_path)},
                "env": {"game": "none"},
                "learner": {
                    "dtype": "bfloat16",
                    "gradient_checkpointing": checkpointing,
                    "share_prompts": False,
                },
            }
        )
        trainer = Trainer(of(config.model, config.learner), config, total_steps=2)
        kernel.texts.clear()
        reports.append(trainer.step(_batch(), 1).numbers)
    # all but the last generated token of each, and no padding
    lengths = {int(each.mask.nonzero()[0][-1]) for each in _batch().sequences}
    assert {end - begin for begin, end in pairwise(kernel.texts[0])} == lengths
    assert len(kernel.texts) == 2 * (2 if checkpointing else 1)  # layers, and again for gradients
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=0.03, abs=1e-3), name


def test_images_are_seen_as_by_sdpa(tmp_path: Path, kernel: Kernel) -> None:
    config = JobConfig.model_validate(
        {
            "model": {"path": str(make_vision_model(tmp_path, "qwen2_5_vl"))},
            "env": {"game": "geo3k"},
            "learner": {"max_row_tokens": 64, "share_prompts": False},
            "rollout": {
                "max_prompt_tokens": 32,
                "max_turn_tokens": 16,
                "max_response_tokens": 32,
            },
        }
    )
    norms: list[float] = []
    for of in (load_model, lambda *arguments: _reads_flash(load_model(*arguments))):
        trainer = Trainer(of(config.model, config.learner), config, total_steps=2)
        norms.append(trainer.step(assemble(groups_with_images()), 1).numbers["actor/grad_norm"])
    assert kernel.texts
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_rows_with_shared_prompts_are_refused() -> None:
    [packed] = pack(
        _batch().sequences, max_row_tokens=4096, microbatch_tokens=4096, share_prompts=True
    )
    with pytest.raises(ValueError, match="share a prompt"):
        flatten(packed)


def test_flash_attention_in_float32_is_refused_at_submission() -> None:
    asked = {
        "model": {"path": "x", "attn_implementation": "flash_attention_2"},
        "env": {"game": "none"},
    }
    with pytest.raises(ValueError, match=r"learner.dtype=bfloat16"):
        JobConfig.model_validate(asked)
    JobConfig.model_validate({**asked, "learner": {"dtype": "bfloat16"}})
