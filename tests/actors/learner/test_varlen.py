"""Varlen kernels read packed rows as a mask does, and as each sequence alone.

On a CPU each sequence is computed by SDPA behind the interface of torch's varlen attention.
Everything of transformers and of the learner above the kernel is the real code.
"""

import inspect
import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.layers import needs_masks
from tinkermq.actors.policy.tiny_models import TinyVisionKind
from tinkermq.actors.training import varlen
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.micro_batch import MicroBatch
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Parallel
from tinkermq.actors.training.step import Trainer
from tinkermq.actors.training.varlen import (
    VarlenKernel,
    choose_attention,
    flash_attn_kernel,
    flatten,
    kernel_arguments,
    register_kernel,
    sdpa_by_sequence,
    with_runs,
)
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.wire.errors import ConfigError
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.gpt_oss import GptOssConfig, GptOssForCausalLM
from transformers.models.llama import LlamaConfig

from tests.actors.learner.test_images import _groups as groups_with_images
from tests.actors.learner.test_model import _batch, _mistral, _qwen2, _qwen3_moe, _random
from tests.support.images import make_vision_model

torch.set_num_threads(1)


# -- the kernels -----------------------------------------------------------------------------------


def test_torchs_varlen_attention_takes_what_the_learner_gives() -> None:
    real, ours = (
        inspect.signature(kernel).parameters for kernel in (varlen_attn, sdpa_by_sequence)
    )
    assert ours.keys() - real.keys() == {"softcap"}  # given to kernels that cap scores alone
    for name, parameter in [item for item in ours.items() if item[0] in real]:
        assert real[name].kind == parameter.kind, name
        assert real[name].default == parameter.default, name
    assert [*[name for name in real if name in ours], "softcap"] == [*ours]


def _states(lengths: list[int], heads: int, size: int, **options: Any) -> Tensor:
    return torch.randn(sum(lengths), heads, size, **options)


def _ends(lengths: list[int], **options: Any) -> Tensor:
    return torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, **options)


def test_torchs_varlen_attention_accepts_runs_with_more_keys_than_columns_and_grouped_heads() -> (
    None
):
    options: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    query = _states([3, 4], 4, 8, **options).requires_grad_()
    key, value = (_states([5, 4], 2, 8, **options).requires_grad_() for _ in range(2))
    ends, key_ends = _ends([3, 4]).to("meta"), _ends([5, 4]).to("meta")
    output = varlen_attn(
        query, key, value, ends, key_ends, 4, 5, window_size=(2, 0), enable_gqa=True
    )
    assert isinstance(output, Tensor)
    assert output.shape == query.shape
    output.sum().backward()
    assert key.grad is not None
    assert key.grad.shape == key.shape


@pytest.mark.parametrize("window", [-1, 0, 2])
def test_each_sequence_is_computed_by_the_formula(window: int) -> None:
    torch.manual_seed(0)
    lengths, key_lengths = [3, 1, 4], [5, 1, 4]
    query, key = _states(lengths, 4, 8), _states(key_lengths, 2, 8)
    value = _states(key_lengths, 2, 8)
    output = sdpa_by_sequence(
        query,
        key,
        value,
        _ends(lengths),
        _ends(key_lengths),
        4,
        5,
        scale=0.3,
        window_size=(window, 0),
        enable_gqa=True,
    )
    at = 0
    for (begin, end), (first, last) in zip(
        pairwise(np.cumsum([0, *lengths])), pairwise(np.cumsum([0, *key_lengths])), strict=True
    ):
        for column in range(begin, end):
            newest = last - (end - column)  # the queries are the last of the keys
            oldest = first if window < 0 else max(first, newest - window)
            for head in range(4):
                keys = key[oldest : newest + 1, head // 2]
                weights = (0.3 * keys @ query[column, head]).softmax(0)
                expected = weights @ value[oldest : newest + 1, head // 2]
                torch.testing.assert_close(output[column, head], expected)
            at += 1
    assert at == len(query)


def test_flash_attn_is_asked_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_varlen_func(  # as flash-attn 2.8.3 has it
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
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        assert deterministic
        assert causal
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        sizes = {"scale": softmax_scale, "window_size": (window_size[0], 0), "softcap": softcap}
        return sdpa_by_sequence(q, k, v, *ends, **sizes, enable_gqa=True)  # pyright: ignore[reportArgumentType]

    with pytest.raises(ConfigError, match="flash-attn cannot be imported"):
        flash_attn_kernel()
    module = ModuleType("flash_attn")
    module.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    lengths = [3, 4]
    query, key, value = (_states(lengths, heads, 8) for heads in (4, 2, 2))
    ends = (_ends(lengths), _ends(lengths), 4, 4)
    for kernel in (flash_attn_kernel(), sdpa_by_sequence):
        made = kernel(query, key, value, *ends, window_size=(2, 0), enable_gqa=True)
        expected = sdpa_by_sequence(query, key, value, *ends, window_size=(2, 0), enable_gqa=True)
        torch.testing.assert_close(made, expected)
        capped = cast(Any, kernel)(
            query, key, value, *ends, window_size=(2, 0), enable_gqa=True, softcap=0.5
        )
        assert not torch.allclose(capped, expected)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
PLAIN = LlamaConfig(**HEADS)
ODD = LlamaConfig(hidden_size=72, num_attention_heads=6)
WIDE = LlamaConfig(hidden_size=2048, num_attention_heads=4, head_dim=512)
CAPPED: Any = SimpleNamespace(**HEADS, attn_logit_softcapping=50.0)


@pytest.mark.parametrize(
    ("wanted", "config", "device", "dtype", "capability", "chosen", "with_flash_attn"),
    [
        ("auto", PLAIN, CPU, torch.float32, (0, 0), "sdpa", "sdpa"),
        ("auto", PLAIN, CPU, torch.bfloat16, (0, 0), "sdpa", "sdpa"),
        ("auto", PLAIN, GPU, torch.float32, (9, 0), "sdpa", "sdpa"),
        ("auto", PLAIN, GPU, torch.bfloat16, (7, 5), "sdpa", "sdpa"),
        ("auto", PLAIN, GPU, torch.bfloat16, (8, 0), "varlen", "varlen"),
        ("auto", PLAIN, GPU, torch.bfloat16, (9, 0), "varlen", "varlen"),
        ("auto", PLAIN, GPU, torch.bfloat16, (10, 0), "varlen", "varlen"),
        ("auto", ODD, GPU, torch.bfloat16, (9, 0), "sdpa", "flash_attention_2"),
        ("auto", CAPPED, CPU, torch.float32, (0, 0), "varlen", "varlen"),
        ("auto", WIDE, GPU, torch.bfloat16, (9, 0), "sdpa", "sdpa"),
        ("varlen", PLAIN, CPU, torch.float32, (0, 0), "varlen", "varlen"),
        ("sdpa", PLAIN, GPU, torch.bfloat16, (9, 0), "sdpa", "sdpa"),
        ("flash_attention_2", PLAIN, GPU, torch.bfloat16, (9, 0), *["flash_attention_2"] * 2),
        ("flash_attention_2", CAPPED, GPU, torch.bfloat16, (9, 0), *["flash_attention_2"] * 2),
    ],
)
def test_the_kernel_follows_from_device_dtype_model_and_what_is_installed(
    wanted: Any,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    capability: tuple[int, int],
    chosen: str,
    with_flash_attn: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_attention(wanted, config, device, dtype) == chosen
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert choose_attention(wanted, config, device, dtype) == chosen  # it has no kernel
    module.__dict__["flash_attn_varlen_func"] = sdpa_by_sequence
    assert choose_attention(wanted, config, device, dtype) == with_flash_attn


def test_capped_scores_are_left_to_flash_attention_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.__dict__["flash_attn_varlen_func"] = sdpa_by_sequence
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choose_attention("auto", CAPPED, GPU, torch.bfloat16) == "flash_attention_2"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_attention("auto", CAPPED, GPU, torch.bfloat16) == "sdpa"


def test_a_kernel_that_cannot_compute_a_model_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for wanted, config, device, dtype, said in (
        ("varlen", PLAIN, GPU, torch.float32, "16 bits, and learner.dtype is float32"),
        ("varlen", ODD, GPU, torch.bfloat16, "heads have size 12"),
        ("varlen", CAPPED, GPU, torch.bfloat16, "capped at 50, which only flash_attention_2"),
        ("flash_attention_2", WIDE, GPU, torch.bfloat16, "heads have size 512"),
        ("flash_attention_2", PLAIN, CPU, torch.bfloat16, "no kernel for CPUs"),
    ):
        with pytest.raises(ConfigError, match=said):
            choose_attention(wanted, config, device, dtype)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(ConfigError, match=r"compute capability 7\.5"):
        choose_attention("varlen", PLAIN, GPU, torch.bfloat16)


def test_an_attention_without_masks_is_refused_for_a_model_that_needs_them() -> None:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "head_dim": 8}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_local_experts=2))
    reason = needs_masks(model)
    assert choose_attention("auto", model.config, GPU, torch.bfloat16, reason) == "sdpa"
    with pytest.raises(ConfigError, match="cannot compute this model: its attention has sinks"):
        choose_attention("varlen", model.config, GPU, torch.bfloat16, reason)


def test_capped_scores_are_those_of_transformers() -> None:
    """Gemma 2 in transformers' own attention, which is not packed."""
    torch.manual_seed(3)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        attn_logit_softcapping=0.05,
        sliding_window=4,
        query_pre_attn_scalar=1,
    )
    config._attn_implementation = "eager"
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.arange(3, 15)[None]
    eager = model(input_ids=ids, use_cache=False).logits
    for attention in ("varlen", "sdpa"):
        varlen.set_attention(model, attention, CPU)
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, eager)


def test_newer_flash_attention_is_used_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(varlen, "activate_flash_attention_impl", activated.append)
    assert varlen.activate_newest_flash((9, 0)) == "FA2"  # nothing is installed here
    assert activated == []
    monkeypatch.setattr(varlen, "_is_installed", lambda _: True)
    for capability in ((8, 0), (9, 0), (10, 0)):
        varlen.activate_newest_flash(capability)
    assert activated == ["FA3", "FA4"]
    assert {"FA3", "FA4"} <= set(torch.nn.attention.list_flash_attention_impls())


# -- rows ------------------------------------------------------------------------------------------


def _placed(model: PreTrainedModel, attention: Any, dtype: Any = "float32") -> Scorer:
    inside = Parallel().place(model, LearnerConfig(dtype=dtype), attention)
    return Scorer(model, temperature=1.0, inside=inside)


def _scores(scorer: Scorer, batch: TrainingBatch, *, share: bool) -> tuple[Tensor, Tensor]:
    """Return log-probs and the gradient of a sum of them."""
    model = scorer.inside.model
    model.zero_grad()
    logprobs_N = torch.zeros(batch.num_tokens)
    for packed in pack(
        batch.sequences, max_row_tokens=64, microbatch_tokens=128, share_prompts=share
    ):
        logprobs_N = logprobs_N.index_copy(0, packed.index_N, scorer.score(packed).logprobs_N)
    (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logprobs_N.detach(), gradient


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("window", [5, 4096])
@pytest.mark.parametrize("make", [_mistral, _qwen2, _qwen3_moe])
def test_packed_rows_have_the_scores_and_gradients_of_sdpa(
    make: Any, window: int, share: bool
) -> None:
    model = _random(make(window))
    expected = _scores(_placed(model, "sdpa"), _batch(), share=False)
    scorer = _placed(model, "varlen")
    assert scorer.flat_rows
    for made, wanted in zip(_scores(scorer, _batch(), share=share), expected, strict=True):
        torch.testing.assert_close(made, wanted, atol=1e-4, rtol=1e-4)


def _kernel_of_a_gpu(calls: list[tuple[list[int], list[int]]]) -> VarlenKernel:
    """Return a kernel that refuses what CUDA's would refuse."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Tensor:
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16
        assert cu_seq_k is not None
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (query.ndim, key.shape) == (3, value.shape)
        assert query.shape[1] % key.shape[1] == 0
        assert query.shape[2] == key.shape[2]
        assert all(states.stride(-1) == 1 for states in (query, key, value))
        lengths, key_lengths = cu_seq_q.diff(), cu_seq_k.diff()
        assert (int(cu_seq_q[0]), int(cu_seq_q[-1])) == (0, len(query))
        assert (int(cu_seq_k[0]), int(cu_seq_k[-1])) == (0, len(key))
        assert (int(lengths.max()), int(key_lengths.max())) == (max_q, max_k)
        assert bool((key_lengths >= lengths).all())
        assert int(lengths.min()) > 0
        calls.append((lengths.tolist(), key_lengths.tolist()))
        return sdpa_by_sequence(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    return kernel


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_whole_step_gives_the_kernel_what_a_gpu_takes_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: bool, checkpointing: bool
) -> None:
    _random(_qwen2(4096)).save_pretrained(tmp_path)
    calls: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(varlen, "sdpa_by_sequence", _kernel_of_a_gpu(calls))
    reports: list[dict[str, float]] = []
    for attention in ("sdpa", "varlen"):
        config = JobConfig.model_validate(
            {
                "model": {"path": str(tmp_path), "attn_implementation": attention},
                "env": {"game": "none"},
                "learner": {
                    "dtype": "bfloat16",
                    "gradient_checkpointing": checkpointing,
                    "share_prompts": share,
                },
            }
        )
        trainer = Trainer(load_model(config.model, config.learner), config, total_steps=2)
        calls.clear()
        reports.append(trainer.step(_batch(), 1).numbers)
        assert bool(calls) is (attention == "varlen")
    # all but the last generated token of each, and no padding
    whole = {int(each.mask.nonzero()[0][-1]) for each in _batch().sequences}
    lengths, key_lengths = calls[0]
    assert {*key_lengths} - {*lengths} <= whole
    assert whole <= {*key_lengths}
    assert (sum(lengths) < sum(key_lengths)) is share
    assert len(calls) == 2 * (2 if checkpointing else 1)  # layers, and again for gradients
    for name in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
        assert reports[1][name] == pytest.approx(reports[0][name], rel=0.03, abs=1e-3), name


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_images_are_seen_as_by_sdpa_with_one_call_for_all_windows_of_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: TinyVisionKind
) -> None:
    path = str(make_vision_model(tmp_path, kind))
    norms: list[float] = []
    windows: list[list[int]] = []
    tower_layers: list[nn.Module] = []

    def kernel(*args: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
        if window_size == (-1, -1):  # not causal: of the tower
            windows.append(args[3].diff().tolist())
        return sdpa_by_sequence(*args, window_size=window_size, **options)

    monkeypatch.setattr(varlen, "sdpa_by_sequence", kernel)
    for attention in ("sdpa", "varlen"):
        config = JobConfig.model_validate(
            {
                "model": {"path": path, "attn_implementation": attention},
                "env": {"game": "geo3k"},
                "learner": {"max_row_tokens": 64},
                "rollout": {
                    "max_prompt_tokens": 32,
                    "max_turn_tokens": 16,
                    "max_response_tokens": 32,
                },
            }
        )
        trainer = Trainer(load_model(config.model, config.learner), config, total_steps=2)
        for name, module in trainer.model.named_modules():
            if attention == "varlen" and name.endswith("visual"):
                tower_layers.extend(cast(Any, module).blocks)
                module.register_forward_hook(lambda *_: windows.append([]))
        norms.append(trainer.step(assemble(groups_with_images()), 1).numbers["actor/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    passes = windows.count([])
    assert passes > 0
    assert len(windows) - passes == passes * len(tower_layers)
    assert max(map(len, windows)) > 1


def test_runs_name_the_keys_of_the_path_that_each_continues() -> None:
    column = torch.tensor
    [micro] = pack(_batch().sequences[:1], max_row_tokens=64, microbatch_tokens=64)
    flat = MicroBatch(
        **{
            **vars(micro),
            "input_ids_BT": column([[1, 2, 3, 4, 5, 6, 7, 8]]),
            "position_ids_BT": column([[0, 1, 2, 3, 3, 4, 2, 0]]),
            "segment_ids_BT": column([[1, 1, 1, 1, 2, 3, 4, 5]]),
            "seen_until_BT": column([[7, 7, 6, 4, 6, 6, 7, 8]]),
        }
    )
    runs = with_runs(flat).runs
    assert runs is not None
    assert runs.key_columns is not None
    assert runs.ends_S.tolist() == [0, 4, 5, 6, 7, 8]
    assert runs.key_ends_S.tolist() == [0, 4, 8, 13, 16, 17]
    assert runs.key_columns.tolist() == [
        *(0, 1, 2, 3),
        *(0, 1, 2, 4),
        *(0, 1, 2, 4, 5),
        *(0, 1, 6),
        7,
    ]
    assert (runs.longest, runs.most_keys, runs.num_columns) == (4, 5, 8)


def test_rows_are_told_apart_however_their_segments_are_numbered() -> None:
    alike = [each for each in _batch().sequences if each.mask.any()][:3]
    micros = pack(
        alike, max_row_tokens=max(len(each.mask) for each in alike), microbatch_tokens=4096
    )
    flat = with_runs(flatten(micros[0]))
    assert len(micros[0].input_ids_BT) >= 2
    assert flat.runs is not None
    assert flat.runs.key_columns is None
    assert sorted(flat.runs.ends_S.diff().tolist()) == sorted(
        int(each.mask.nonzero()[0][-1]) for each in alike
    )


def test_a_model_without_lengths_reads_rows_that_are_whole_sequences() -> None:
    model = _random(_qwen2(5))
    ids = torch.arange(12).reshape(2, 6)
    expected = model(input_ids=ids).logits
    register_kernel("packed_test", sdpa_by_sequence)
    model.config._attn_implementation = "packed_test"
    torch.testing.assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)


def test_flash_attention_in_float32_is_refused_at_submission() -> None:
    asked = {
        "model": {"path": "x", "attn_implementation": "flash_attention_2"},
        "env": {"game": "none"},
    }
    with pytest.raises(ValueError, match=r"learner.dtype=bfloat16"):
        JobConfig.model_validate({**asked, "learner": {"dtype": "float32"}})
    JobConfig.model_validate({**asked, "learner": {"dtype": "bfloat16"}})


@pytest.mark.filterwarnings("ignore")  # torch warns of itself where it compiles
def test_layers_with_torchs_kernel_are_one_graph_for_rows_of_all_sizes() -> None:
    """Traced with tensors without values, as they have no kernel on a CPU."""
    with torch.device("meta"):
        model: Any = _qwen2(5)
    model = model.to(torch.bfloat16)
    register_kernel("packed_torch", varlen_attn)
    model.config._attn_implementation = "packed_torch"
    graphs: list[Any] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=count)
    made: list[int] = []
    for max_row_tokens in (64, 96, 128, 192):
        [packed, *_] = pack(
            _batch().sequences,
            max_row_tokens=max_row_tokens,
            microbatch_tokens=4096,
            share_prompts=True,
        )
        flat = with_runs(flatten(packed))
        arguments = kernel_arguments(flat.to("meta"))
        ids_BT, positions_BT = flat.input_ids_BT.to("meta"), flat.position_ids_BT.to("meta")
        model(input_ids=ids_BT, position_ids=positions_BT, use_cache=False, **arguments)
        made.append(len(graphs))
    assert made[0] > 0
    assert made[-1] == made[1]
