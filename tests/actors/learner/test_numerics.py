"""In 16 bits a learner computes as a model of 16-bit weights does, on one rank as on several."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tinkermq.actors.learner.replay import ReplayResult, why_inexact
from tinkermq.actors.training.model import Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import Inside, Parallel
from tinkermq.actors.training.state import SUMS, LearnerState, Numerics
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LearnerConfig, resolve_dtype
from tinkermq.schemas.wire.errors import ModelError
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.actors.learner.test_model import SMALL, _batch, _mistral, _qwen2, _qwen3_moe, _random
from tests.actors.learner.test_ranks import HARD, config_of, trained

pytestmark = pytest.mark.full

torch.set_num_threads(1)

HALF = LearnerConfig(dtype="bfloat16")
DEEP: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _half(model: PreTrainedModel, attention: Any = "sdpa") -> Scorer:
    inside = Parallel().place(model, HALF, attention)
    return Scorer(model, temperature=1.0, inside=inside)


# -- which models can be packed --------------------------------------------------------------------


@torch.no_grad()
def _deep(kind: str, seed: int, top_logit: float) -> PreTrainedModel:
    """Return a deep model with random weights whose largest logit is about so large."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "dense":
        model = Qwen2ForCausalLM(Qwen2Config(**DEEP, tie_word_embeddings=False))
    else:
        experts: dict[str, Any] = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**DEEP, **experts, tie_word_embeddings=False))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1 / parameter.shape[-1] ** 0.5)
    whole: Any = model.eval()
    logits = whole(input_ids=torch.arange(20)[None]).logits
    whole.get_output_embeddings().weight.mul_(top_logit / logits.abs().max())
    return model


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("top_logit", [10.0, 20.0, 30.0])
def test_no_sound_model_is_refused_in_bfloat16(kind: str, top_logit: float, attention: str) -> None:
    for seed in range(3 if kind == "dense" else 2):
        _half(_deep(kind, seed, top_logit), attention)


def _attend_to_all(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> Any:
    """Attend to all earlier columns of a row, whosever they are."""
    return sdpa_attention_forward(module, query, key, value, None, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_logit", [10.0, 30.0])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_model_whose_attention_reaches_other_sequences_is_refused(
    kind: str, top_logit: float, dtype: Any
) -> None:
    model = _deep(kind, 0, top_logit)
    inside = Parallel().place(model, LearnerConfig(dtype=dtype), "sdpa")
    ALL_ATTENTION_FUNCTIONS.register("reaches_others", _attend_to_all)
    model.config._attn_implementation = "reaches_others"
    with pytest.raises(ModelError, match="change each other's log-probs"):
        Scorer(model, temperature=1.0, inside=inside)


# -- weights in 16 bits ----------------------------------------------------------------------------


def _of_16_bits(model: PreTrainedModel) -> Scorer:
    """Score by a model whose weights have 16 bits."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return Scorer(model, temperature=1.0, inside=Inside(model, dtype=torch.bfloat16))


def _logprobs(scorer: Scorer) -> Tensor:
    batch = _batch()
    logprobs_N = torch.zeros(batch.num_tokens)
    for packed in pack(
        batch.sequences, max_row_tokens=64, microbatch_tokens=128, share_prompts=True
    ):
        logprobs_N = logprobs_N.index_copy(0, packed.index_N, scorer.score(packed).logprobs_N)
    return logprobs_N


@pytest.mark.parametrize("make", [_mistral, _qwen2, _qwen3_moe])
def test_one_rank_computes_to_the_bit_what_a_model_of_16_bits_does(make: Any) -> None:
    plain = _random(make(4096))
    scorer = _half(copy.deepcopy(plain))
    mine, expected = _logprobs(scorer), _logprobs(_of_16_bits(plain))
    assert torch.equal(mine, expected)
    mine.sum().backward()
    expected.sum().backward()
    for (name, weight), other in zip(
        scorer.inside.model.named_parameters(), plain.parameters(), strict=True
    ):
        assert weight.dtype == torch.float32
        assert weight.grad is not None, name
        assert other.grad is not None
        assert weight.grad.dtype == torch.float32
        scale = float(other.grad.float().abs().max())
        torch.testing.assert_close(
            weight.grad, other.grad.float(), atol=0.02 * scale, rtol=0.02, msg=name
        )


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_model_holds_in_float32_computes_in_it(frozen: bool) -> None:
    config = Ernie4_5_MoeConfig(**SMALL, moe_intermediate_size=16, moe_num_experts=4, moe_k=2)
    model = _random(Ernie4_5_MoeForCausalLM(config)).requires_grad_(not frozen)
    router: Any = model.get_submodule("model.layers.1.mlp.gate")
    seen: set[torch.dtype] = set()
    held = router.moe_statics.e_score_correction_bias
    router.register_forward_hook(
        lambda *_: seen.update(one.dtype for one in (router.weight, *router.parameters()))
    )
    _logprobs(_half(model))
    assert seen == {torch.float32} == {held.dtype}


def test_master_weights_are_back_after_an_error(folder: Path) -> None:
    model = _random(_qwen2(4096))
    _half(model)
    masters = {name: id(weight) for name, weight in model.named_parameters()}
    with pytest.raises(RuntimeError):
        model(inputs_embeds=torch.zeros(1, 4, 7))
    assert {name: id(weight) for name, weight in model.named_parameters()} == masters


def test_frozen_weights_lie_in_16_bits_and_adapters_in_32(folder: Path) -> None:
    learner = {"dtype": "bfloat16"}
    sections = {"lora": {"rank": 4}, "algorithm": {"kl_coef": 0.05}}
    config = config_of(folder, 1, learner=learner, **sections)
    model = load_model(config.model, config.learner, lora=config.lora)
    expected = _logprobs(_of_16_bits(model))
    model = load_model(config.model, config.learner, lora=config.lora)
    scorer = _half(model)
    dtypes = {weight.requires_grad: weight.dtype for weight in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert torch.equal(_logprobs(scorer), expected)


@pytest.mark.parametrize(
    "sections",
    [pytest.param({}, marks=pytest.mark.long), {"lora": {"rank": 4}}],
    ids=["all weights", "adapter"],
)
def test_one_rank_and_two_train_alike_in_bfloat16(folder: Path, sections: dict[str, Any]) -> None:
    learner = {"dtype": "bfloat16", "lr": 0.01}
    (reports, weights), (expected, alone) = (
        trained(config_of(folder, ranks, learner=learner, **sections), range(1, 4))
        for ranks in (2, 1)
    )
    for one, other in zip(reports, expected, strict=True):
        for name in {"actor/grad_norm", "actor/entropy", "actor/pg_loss"} & other.numbers.keys():
            assert one.numbers[name] == pytest.approx(other.numbers[name], rel=0.01, abs=1e-3)
    for name, value in alone.items():
        assert weights[name].dtype == value.dtype == torch.float32
        torch.testing.assert_close(weights[name], value, atol=1e-3, rtol=1e-3, msg=name)


# -- what follows from a device --------------------------------------------------------------------


def test_auto_means_16_bits_on_a_gpu_alone() -> None:
    assert resolve_dtype("auto", on_gpu=True) == "bfloat16"
    assert resolve_dtype("auto", on_gpu=False) == "float32"
    for on_gpu in (False, True):
        assert resolve_dtype("float32", on_gpu=on_gpu) == "float32"
        assert resolve_dtype("bfloat16", on_gpu=on_gpu) == "bfloat16"


SETTLED = """
import os, torch
from tinkermq.actors.training.numerics import settle_numerics
from tinkermq.schemas.config.sections import LearnerConfig

for deterministic, on_gpu in ((False, False), (False, True), (True, True)):
    if os.fork():  # each is settled in a process of its own, and torch is imported once
        os.wait()
        continue
    settle_numerics(LearnerConfig(deterministic=deterministic), on_gpu=on_gpu)
    print(
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        torch.cuda.is_initialized(),
        flush=True,
    )
    os._exit(0)
"""


def test_kernels_are_settled_for_the_process_before_cuda_starts() -> None:
    env = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-c", SETTLED], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "highest False None False",
        "high False None False",
        "high True :4096:8 False",
    ]


def test_a_step_runs_with_deterministic_kernels_alone(folder: Path) -> None:
    sections = {**HARD, "algorithm": {**HARD["algorithm"], "advantage": "gae"}}
    torch.use_deterministic_algorithms(True)
    try:
        reports, _ = trained(config_of(folder, 1, critic={"lr": 0.1}, **sections), range(1, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert reports[0].numbers["actor/grad_norm"] > 0


def test_weights_are_published_in_the_dtype_that_engines_compute_in() -> None:
    least = {"model": {"path": "m"}, "env": {"game": "g"}}
    for engine, own, on_gpu, published in (
        ("auto", "auto", False, "float32"),
        ("auto", "auto", True, "bfloat16"),
        ("float32", "auto", True, "float32"),
        ("bfloat16", "auto", False, "bfloat16"),
        ("bfloat16", "float32", True, "float32"),
    ):
        sections = {"generator": {"dtype": engine}, "learner": {"publish_dtype": own}}
        config = JobConfig.model_validate({**least, **sections})
        assert config.published_dtype(on_gpu=on_gpu) == published


# -- what a replay may say -------------------------------------------------------------------------

CPU = Numerics(device="cpu", dtype="float32", attention="sdpa", deterministic=False, torch="2.13.0")
GPU = Numerics(
    device="NVIDIA H100",
    dtype="bfloat16",
    attention="packed_varlen FA3",
    deterministic=False,
    torch="2.13.0",
)
EXACT = GPU.model_copy(update={"deterministic": True})
OTHER = EXACT.model_copy(update={"device": "NVIDIA A100"})


@pytest.mark.parametrize(
    ("recorded", "now", "said"),
    [
        ([CPU], CPU, ""),
        ([], CPU, ""),
        ([EXACT], EXACT, ""),
        ([GPU], GPU, "trained with NVIDIA H100, bfloat16, attention packed_varlen FA3, kernels"),
        ([CPU, GPU], GPU, "and is replayed with NVIDIA H100"),
        ([EXACT], OTHER, "and is replayed with NVIDIA A100"),
        ([], GPU, "it is replayed with NVIDIA H100"),
    ],
)
def test_bits_may_differ_where_kernels_do(
    recorded: list[Numerics], now: Numerics, said: str
) -> None:
    reason = why_inexact(recorded, now)
    assert said in reason
    assert bool(reason) is bool(said)


def test_a_replay_that_cannot_repeat_bits_is_sound_within_a_bound() -> None:
    def result(differing: list[str], distance: float, inexact: str) -> ReplayResult:
        return ReplayResult(3, differing, Path("x"), [], distance, inexact)

    assert result([], 0.0, "").is_sound
    assert not result(["w"], 0.01, "").is_sound
    assert result(["w"], 0.01, "other kernels").is_sound
    assert not result(["w"], 0.5, "other kernels").is_sound


def test_a_state_notes_each_change_of_kernels() -> None:
    state = LearnerState()
    for numerics in (CPU, CPU, GPU, GPU, CPU):
        state.note_numerics(numerics)
    assert state.numerics == [CPU, GPU, CPU]
    assert LearnerState.model_validate_json(state.model_dump_json()) == state
    assert LearnerState.model_validate({"step": 3}).numerics == []  # of an earlier release


def test_steps_of_an_earlier_release_count_as_added_up_in_another_order() -> None:
    now = CPU.model_copy(update={"sums": SUMS})
    state = LearnerState(step=3)
    state.note_numerics(now)
    assert [item.sums for item in state.numerics] == [0, SUMS]
    assert "sums in order 0, and is replayed with" in why_inexact(state.numerics, now)
    begun = LearnerState()
    begun.note_numerics(now)
    assert begun.numerics == [now]
