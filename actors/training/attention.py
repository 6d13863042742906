"""Attention over sequences whose columns are divided over processes (Ulysses, arXiv 2309.14509).

Each process has a part of the columns of all heads. Before the attention they exchange: each then
has all columns of a part of the heads, and any kernel and any mask do; behind it they change back.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...schemas.wire.errors import ConfigError

Attention = Callable[..., tuple[Tensor, Any]]
"""transformers' attention interface: (module, query, key, value, mask, **) to [B, T, H, D], …"""


@dataclass(frozen=True)
class SequenceGroup:
    """The processes that divide sequences among them."""

    group: Any
    """Their process group."""
    size: int
    place: int
    """Of this one, in the order of the columns."""


def divide_attention(model: nn.Module, share: SequenceGroup) -> None:
    """Let a model read rows of which each process has a part, beside those that it has whole.

    Raises ConfigError for a model whose heads cannot be divided.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    masks: Any = ALL_MASK_ATTENTION_FUNCTIONS
    kernels: Any = ALL_ATTENTION_FUNCTIONS

    whole: Any = model.config
    config = whole.get_text_config()
    kernel: str = config._attn_implementation
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", None) or 1}
    if any(number % share.size for number in heads) or kernel not in kernels:
        raise ConfigError(
            f"learner.context_parallel={share.size} cannot divide a model of "
            f"{config.num_attention_heads} heads, {min(heads)} of them for keys and values, with "
            f"model.attn_implementation={kernel}",
            hint="choose a divisor of both",
        )
    name = f"divided_{kernel}_over_{share.size}"
    inner = partial(_attend, kernels[kernel], share)
    kernels.register(name, inner)
    if kernel in masks:
        masks.register(name, masks[kernel])
    config._attn_implementation = name


def _attend(
    inner: Attention,
    share: SequenceGroup,
    module: nn.Module,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend to whole sequences, of which the columns here are a part where a mask is wider."""
    if query_BHTD.shape[2] == _length(attention_mask, options, query_BHTD.shape[2]):
        return inner(module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options)
    heads = (_exchanged(states, share) for states in (query_BHTD, key_BHTD, value_BHTD))
    states_BTHD, weights = inner(module, *heads, attention_mask, **options)
    return _exchanged(states_BTHD, share), weights


def _length(mask: Tensor | None, options: dict[str, Any], own: int) -> int:
    if mask is not None:
        return mask.shape[-1]
    return options.get("num_columns") or own


class _Exchange(torch.autograd.Function):
    """Give the part at place p of [P, …] to the process at place p."""

    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, group: Any) -> Tensor:
        ctx.group = group
        given_P = parts_P.contiguous()
        taken_P = torch.empty_like(given_P)
        dist.all_to_all_single(taken_P, given_P, group=group)
        return taken_P

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _Exchange.apply(grad_outputs[0], ctx.group), None


def _exchanged(states: Tensor, share: SequenceGroup) -> Tensor:
    """Cut dimension 1 into parts, and put what comes for them together in dimension 2.

    [B, H, T / P, D] becomes [B, H / P, T, D], and [B, T, H / P, D] becomes [B, T / P, H, D].
    """
    parts_P = torch.stack(list(states.chunk(share.size, dim=1)))
    taken_P = cast(Tensor, _Exchange.apply(parts_P, share.group))
    return torch.cat(list(taken_P.unbind(0)), dim=2)
