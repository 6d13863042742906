"""Flash attention against torch's own (SDPA): the kernel, and what the learner makes of it."""

# flash-attn is an extra; torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...models.devices import own_device
from ..figures import CheckSkipped, Figure, Found, Setting
from ..material import RandomPolicy, token_sequences

_LENGTHS = (700, 1, 256, 1091)
_HEADS, _KV_HEADS, _WIDTH = 8, 2, 64


def flash_attention(setting: Setting) -> Found:
    """Compare outputs, gradients and the learner's log-probs of packed sequences."""
    if not setting.on_gpu:
        raise CheckSkipped(
            "flash-attention's kernels run on GPUs alone",
            hint="run `tinkermq doctor --gpu` on a machine with GPUs",
        )
    if find_spec("flash_attn") is None:
        raise CheckSkipped("flash-attn is not installed", hint="pip install 'tinkermq[flash-attn]'")
    apart = _kernels_apart()
    logprobs = _learners_apart(setting)
    return Found(
        [
            Figure("outputs differ by", apart[0], at_most=0.02),
            Figure("gradients differ by", apart[1], at_most=0.05),
            Figure("the learner's log-probs differ by", logprobs, "on average", at_most=0.02),
        ]
    )


def _kernels_apart() -> tuple[float, float]:
    """Return the largest differences of outputs and gradients of q, relative to the largest."""
    torch.manual_seed(0)
    total = sum(_LENGTHS)
    q, k, v = (
        torch.randn(total, heads, _WIDTH, device=own_device(), dtype=torch.bfloat16)
        for heads in (_HEADS, _KV_HEADS, _KV_HEADS)
    )
    made = [_with_gradient(attend, q, k, v) for attend in (_flash, _sdpa)]
    return _relative(made[0][0], made[1][0]), _relative(made[0][1], made[1][1])


def _with_gradient(attend: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    asked = q.clone().requires_grad_()
    out: Tensor = attend(asked, k, v)
    torch.autograd.backward(out.float().square().sum())
    assert asked.grad is not None
    return out.detach(), asked.grad


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernel: Any = import_module("flash_attn").flash_attn_varlen_func
    ends = torch.tensor([0, *_LENGTHS], device=q.device).cumsum(0).to(torch.int32)
    return kernel(q, k, v, ends, ends, max(_LENGTHS), max(_LENGTHS), causal=True)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(*(cast("Any", each).split(_LENGTHS) for each in (q, k, v)), strict=True)
    made = [
        scaled_dot_product_attention(
            *(each.transpose(0, 1)[None] for each in part), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for part in parts
    ]
    return torch.cat(made)


def _relative(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


def _learners_apart(setting: Setting) -> float:
    """Return the mean difference of log-probs in bfloat16."""
    policy = RandomPolicy.make(setting)
    sequences = token_sequences(policy.vocab_size, [300, 40, 211])
    flash, sdpa = (
        policy.learner("bfloat16", attention).logprobs(sequences)
        for attention in ("flash_attention_2", "sdpa")
    )
    return float((flash - sdpa).abs().mean())
