"""Attention of packed rows with varlen kernels, which use no mask.

A varlen kernel computes many sequences of any lengths in one call. Their queries and keys are
concatenated, separated by cumulative lengths; if a sequence has fewer queries than keys, the
queries are at its end. Rows are concatenated without padding. The columns that a row adds to one
path form a run: the run's queries are its own columns, its keys those of the whole path that it
continues. A shared prompt is therefore computed once, and only its keys and values, which are small
in models with grouped queries, are copied for each response. Rows without shared parts would hold
at least as many.

The kernels are torch's (`torch.nn.attention.varlen`, FlashAttention 2, or 3 and 4 where their
packages are installed), the package flash-attn (also for capped scores), and one on CPUs that
computes each sequence by SDPA: the reference implementation of the others.

Shape letters: T columns of all rows, H query heads, G key heads, D head size, K keys.
"""

# torch and transformers leave some of their methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from ...schemas.plan.model_refusals import refuse_without_masks
from ...schemas.wire.errors import ConfigError
from ..policy.layers import WITH_SINKS, attend, has_sinks
from ..policy.vision import PackedImages
from .micro_batch import MicroBatch, Runs

AttentionKey = Literal["auto", "sdpa", "varlen", "flash_attention_2"]
"""Values of `model.attn_implementation`."""
_NAME = "packed_"
"""Prefix of the names of these kernels in transformers."""
_log = structlog.get_logger()
_MAX_HEAD_SIZE = 256
_MIN_CAPABILITY = (8, 0)


VarlenKernel = Callable[..., Any]
"""A kernel with the arguments of `sdpa_by_sequence`: those of torch's `varlen_attn` that are used
here. Only kernels that cap scores (see `choose_attention`) take a `softcap`."""


def sdpa_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Compute each sequence by SDPA with a mask, as the CUDA kernels define it.

    Returns the output [T, H, D] of queries [T, H, D] over keys and values [K, G, D]. Capped scores
    are `softcap` x tanh(score / `softcap`).
    """
    left, right = window_size
    ends_q = cast("list[int]", cu_seq_q.tolist())
    ends_k = ends_q if cu_seq_k is None else cast("list[int]", cu_seq_k.tolist())
    outputs: list[Tensor] = []
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        place_q = torch.arange(k1 - k0 - (q1 - q0), k1 - k0, device=query.device)[:, None]
        behind = place_q - torch.arange(k1 - k0, device=query.device)
        seen = torch.ones_like(behind, dtype=torch.bool)
        if left >= 0:
            seen &= behind <= left
        if right >= 0:
            seen &= behind >= -right
        queries, keys, values = (
            part.transpose(0, 1) for part in (query[q0:q1], key[k0:k1], value[k0:k1])
        )
        if softcap:
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            parts = queries[None], keys[None], values[None], seen[None, None]
            output = attend(*parts, factor, softcap)[0]
        else:
            output = nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
            )
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def flash_attn_kernel() -> VarlenKernel:
    """Return the kernel of the package flash-attn; ConfigError if it cannot be imported."""
    try:
        from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"model.attn_implementation=flash_attention_2, and flash-attn cannot be imported: "
            f"{error}",
            hint="where learners run: pip install --no-build-isolation 'tinkermq[flash-attn]', or "
            "set model.attn_implementation=auto",
        ) from error

    def kernel(
        *inputs: Any,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        softcap: float = 0.0,
    ) -> Tensor:
        return cast(Any, flash_attn_varlen_func)(
            *inputs,
            softmax_scale=scale,
            causal=window_size[1] == 0,
            window_size=window_size,
            softcap=softcap,
            deterministic=True,
        )

    return kernel


# -- which kernel ----------------------------------------------------------------------------------


def choose_attention(
    configured: AttentionKey,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    needs_masks: str | None = None,
) -> Literal["sdpa", "varlen", "flash_attention_2"]:
    """Return the attention for a model with the text configuration `config` on a device.

    `auto` on a GPU in 16 bits: varlen if it supports the model, else flash-attn if it is installed
    and supports the model, else sdpa, as on CPUs; there varlen if scores are capped. Torch's
    kernels come first since they are the same or newer: torch has FlashAttention 2, like the
    package, and 3 or 4 if installed (on an H100, 3 is 1.5 to 2 times as fast as 2; arXiv
    2407.08608). Only the package caps scores and supports heads of any size up to 256.

    `needs_masks` is why only an attention with masks computes the model: sdpa. Raises ConfigError
    for a configured attention that cannot compute the model.
    """
    refuse_without_masks(configured, needs_masks)
    if configured == "sdpa" or needs_masks is not None:
        return "sdpa"
    if configured == "auto":
        if device.type != "cuda":
            return "varlen" if _is_capped(config) else "sdpa"
        if _why_not("varlen", config, device, dtype) is None:
            return "varlen"
        alone = _why_not("flash_attention_2", config, device, dtype) is None
        return "flash_attention_2" if alone and has_flash_attn() else "sdpa"
    why_not = _why_not(configured, config, device, dtype)
    if why_not is not None:
        raise ConfigError(
            f"model.attn_implementation={configured} cannot compute this model here: {why_not}",
            hint="set model.attn_implementation=sdpa, or auto",
        )
    return configured


def _is_capped(config: Any) -> bool:
    return bool(getattr(config, "attn_logit_softcapping", None))


def has_flash_attn() -> bool:
    """Return whether flash-attn can be imported; log a damaged installation."""
    if not _is_installed("flash_attn"):
        return False
    try:
        flash_attn_kernel()
    except ConfigError as error:
        _log.warning("flash_attn_unusable", error=error.message)
        return False
    return True


def _why_not(
    kernel: Literal["varlen", "flash_attention_2"],
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
) -> str | None:
    if device.type != "cuda":
        return None if kernel == "varlen" else "flash-attn has no kernel for CPUs"
    is_torchs = kernel == "varlen"
    if is_torchs and _is_capped(config):
        return (
            f"its attention scores are capped at {config.attn_logit_softcapping:g}, which only "
            "flash_attention_2 computes"
        )
    if dtype == torch.float32:
        return "the kernels compute in 16 bits, and learner.dtype is float32"
    if not getattr(config, "num_attention_heads", None):
        return "it has no attention"
    size = _head_size(config)
    if size > _MAX_HEAD_SIZE or (is_torchs and size % 8):
        return (
            f"its heads have size {size}; the kernels need a multiple of 8 up to 256, "
            "flash_attention_2 any size up to 256"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}; it must be ≥ 8.0"
    return None


def _head_size(config: Any) -> int:
    """Return the size of one query head; DeepSeek's models have two parts."""
    parts = [getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope")]
    if all(parts):
        return sum(cast("list[int]", parts))
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def activate_newest_flash(capability: tuple[int, int]) -> str:
    """Activate the newest kernels of this GPU for torch's varlen attention; return their name.

    FlashAttention 3 on Hopper and 4 on Blackwell, if their packages are installed, else torch's own
    FlashAttention 2.
    """
    newer = {9: ("FA3", "flash_attn_interface"), 10: ("FA4", "flash_attn.cute")}
    name, module = newer.get(capability[0], ("", ""))
    if name and current_flash_attention_impl() != name and _is_installed(module):
        activate_flash_attention_impl(name)
    return current_flash_attention_impl() or "FA2"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def set_attention(model: nn.Module, chosen: str, device: torch.device) -> None:
    """Set the attention kernel of a model's text layers and vision tower.

    With sdpa the tower's stays: transformers calls it for each window of an image. Raises
    ConfigError if the kernel is not installed.
    """
    whole: Any = cast(Any, model).config
    config = whole.get_text_config()
    if chosen == "sdpa":
        with_more = has_sinks(model) or _is_capped(config)
        config._attn_implementation = WITH_SINKS if with_more else "sdpa"
        return
    kernel: VarlenKernel = sdpa_by_sequence
    if chosen == "flash_attention_2":
        kernel = flash_attn_kernel()
    elif device.type == "cuda":
        kernel = varlen_attn
        activate_newest_flash(torch.cuda.get_device_capability(device))
    register_kernel(f"{_NAME}{chosen}", kernel)
    config._attn_implementation = f"{_NAME}{chosen}"
    if (tower := getattr(whole, "vision_config", None)) is not None:
        # For names with "flash", transformers calls it once with the lengths of all windows.
        register_kernel(f"{_NAME}flash_{chosen}", kernel)
        tower._attn_implementation = f"{_NAME}flash_{chosen}"


def register_kernel(name: str, kernel: VarlenKernel) -> None:
    """Register a kernel under a name for transformers' models."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    cast(Any, ALL_ATTENTION_FUNCTIONS).register(name, partial(_attend, kernel))


def describe_attention(attention: str, device: torch.device) -> str:
    """Return the name of an attention, with the version of its kernel if it may vary."""
    if device.type == "cuda" and attention.endswith("varlen"):
        return f"{attention} {current_flash_attention_impl() or 'FA2'}"
    return attention


def reads_flat_rows(attention: str | None) -> bool:
    """Return whether an attention of transformers reads all rows as one, without a mask."""
    return attention is not None and _NAME in attention


def _attend(
    kernel: VarlenKernel,
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    key_columns: Tensor | None = None,
    is_causal: bool | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers; without lengths, each row is one sequence.

    It is causal, except that of vision towers.
    """
    rows, _, length, _ = query_BHTD.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = cu_seq_lens_k = torch.arange(
            0, rows * length + 1, length, dtype=torch.int32, device=query_BHTD.device
        )
        max_length_q = max_length_k = length
    query, key, value = (
        states.transpose(1, 2).flatten(0, 1) for states in (query_BHTD, key_BGTD, value_BGTD)
    )
    if key_columns is not None:
        key, value = key.index_select(0, key_columns), value.index_select(0, key_columns)
    size = value.shape[-1]
    output = cast(Any, kernel)(
        query.to(value.dtype),
        key.to(value.dtype),
        nn.functional.pad(value, (0, query.shape[-1] - size)),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        scale=scaling,
        # A window of w columns includes the query's own.
        window_size=(
            -1 if sliding_window is None else sliding_window - 1,
            -1 if is_causal is False else 0,
        ),
        enable_gqa=query.shape[1] != key.shape[1],
        **({"softcap": softcap} if softcap else {}),
    )
    return output[..., :size].unflatten(0, (rows, length)), None


# -- rows ------------------------------------------------------------------------------------------


def flatten(packed: MicroBatch) -> MicroBatch:
    """Concatenate the tokens of all rows into one row without padding."""
    real_C = packed.segment_ids_BT.flatten() > 0  # C: columns of all rows, concatenated
    place_C = real_C.cumsum(0) - 1
    row_B1 = torch.arange(len(packed.input_ids_BT), device=place_C.device)[:, None]
    num_columns = packed.input_ids_BT.shape[1]

    def row(values_BT: Tensor) -> Tensor:
        return values_BT.flatten()[real_C][None]

    images = packed.images
    if images is not None:
        rope_31T = images.rope_3BT.flatten(1)[:, None, real_C]
        images = PackedImages(images.images, place_C[images.column_Q], rope_31T)
    experts = packed.experts_BTLK
    last_BT = row_B1 * num_columns + packed.seen_until_BT - 1
    column_N = packed.row_N * num_columns + packed.source_col_N
    return replace(
        packed,
        input_ids_BT=row(packed.input_ids_BT),
        position_ids_BT=row(packed.position_ids_BT),
        segment_ids_BT=row(packed.segment_ids_BT + row_B1 * (num_columns + 1)),
        seen_until_BT=row(place_C[last_BT] + 1),
        row_N=torch.zeros_like(packed.row_N),
        source_col_N=place_C[column_N],
        images=images,
        experts_BTLK=None if experts is None else experts.flatten(0, 1)[real_C][None],
    )


def with_runs(flat: MicroBatch) -> MicroBatch:
    """Add to one row without padding the columns of each run, and the keys it reads."""
    segments_T = flat.segment_ids_BT[0].cpu().numpy()
    seen_until_T = flat.seen_until_BT[0].cpu().numpy()
    starts_S = np.concatenate([[0], np.flatnonzero(np.diff(segments_T)) + 1])
    lengths_S = np.diff(np.append(starts_S, len(segments_T)))
    goes_on_S = flat.position_ids_BT[0].cpu().numpy()[starts_S] > 0
    paths = [
        np.flatnonzero(seen_until_T[:start] > start) if goes_on else starts_S[:0]
        for start, goes_on in zip(starts_S.tolist(), goes_on_S.tolist(), strict=True)
    ]
    key_lengths_S = lengths_S + [len(path) for path in paths]
    key_columns: Tensor | None = None
    if goes_on_S.any():
        own = np.split(np.arange(len(segments_T)), starts_S[1:])
        keys = [part for pair in zip(paths, own, strict=True) for part in pair]
        key_columns = torch.from_numpy(np.concatenate(keys)).to(flat.input_ids_BT.device)

    def ends(lengths: Any) -> Tensor:
        cumulative = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return torch.from_numpy(cumulative).to(flat.input_ids_BT.device)

    runs = Runs(
        ends_S=ends(lengths_S),
        key_ends_S=ends(key_lengths_S),
        longest=int(lengths_S.max()),
        most_keys=int(key_lengths_S.max()),
        num_columns=len(segments_T),
        key_columns=key_columns,
    )
    return replace(flat, runs=runs)


def kernel_arguments(flat: MicroBatch) -> dict[str, Any]:
    """Return the arguments that transformers passes to the attention of one flat row."""
    runs = flat.runs
    assert runs is not None
    return {
        "cu_seq_lens_q": runs.ends_S,
        "cu_seq_lens_k": runs.key_ends_S,
        "max_length_q": runs.longest,
        "max_length_k": runs.most_keys,
        "num_columns": runs.num_columns,
        "key_columns": runs.key_columns,
    }
