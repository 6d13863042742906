"""Packed rows give the log-probs of a plain forward pass, for models of several kinds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import ScoreOptions, Scorer, load_model
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.parallel import SequenceGroup, _divide_attention
from tinkermq.schemas.config.job import ModelConfig
from tinkermq.schemas.config.sections import LearnerConfig
from tinkermq.schemas.wire.errors import ConfigError, ModelError
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.models.gemma2 import Gemma2Config, Gemma2ForCausalLM
from transformers.models.granite import GraniteConfig, GraniteForCausalLM
from transformers.models.llama import LlamaConfig, LlamaForCausalLM
from transformers.models.mistral import MistralConfig, MistralForCausalLM
from transformers.models.phimoe import PhimoeConfig, PhimoeForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.actors.learner.plain_step import plain_logprobs
from tests.support.families import make_model
from tests.support.groups import random_group
from tests.support.models import make_tiny_model

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model large random weights, so that every part of it shows."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def _gemma(window: int) -> PreTrainedModel:
    config = Gemma2Config(
        **SMALL,
        sliding_window=window,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=16,
    )
    config._attn_implementation = "sdpa"
    return Gemma2ForCausalLM(config)


def _mistral(window: int) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=window))


def _qwen2(window: int) -> PreTrainedModel:
    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    config = Qwen2Config(
        **small, use_sliding_window=True, sliding_window=window, max_window_layers=1
    )
    return Qwen2ForCausalLM(config)


def _granite(_window: int) -> PreTrainedModel:
    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    return GraniteForCausalLM(GraniteConfig(**small, logits_scaling=4.0))


def _qwen3_moe(_window: int) -> PreTrainedModel:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **experts, norm_topk_prob=True))


def _llama(window: int) -> PreTrainedModel:
    """Return a model whose configuration has a window that its class knows nothing of."""
    config = LlamaConfig(**SMALL)
    config.sliding_window = window
    return LlamaForCausalLM(config)


def _batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    return assemble([random_group(rng, number, turns=3) for number in range(3)])


def _scored(scorer: Scorer, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Score a batch in packed rows; return what a plain forward pass gives beside it."""
    batch = _batch()
    ours = torch.empty(batch.num_tokens)
    for packed in pack(
        batch.sequences,
        max_row_tokens=64,
        microbatch_tokens=128,
        one_per_row=scorer.one_per_row,
        **options,
    ):
        ours[packed.index_N] = scorer.score(packed).logprobs_N.detach()
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, turns=3) for number in range(3)]
    with torch.no_grad():
        plain, _ = plain_logprobs(
            scorer._model, [item for group in groups for item in group.sampled], 1.0
        )
    return ours, torch.cat(plain)


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("window", [5, 4096])
@pytest.mark.parametrize("make", [_gemma, _mistral, _qwen2, _llama, _granite, _qwen3_moe])
def test_every_kind_of_model_is_scored_as_it_stands(
    make: Any, window: int, share_prompts: bool
) -> None:
    scorer = Scorer(_random(make(window)), temperature=1.0)
    ours, plain = _scored(scorer, share_prompts=share_prompts)
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "full"), [(_gemma, True), (_granite, True), (_mistral, False), (_qwen2, False)]
)
def test_logits_that_are_more_than_the_output_layer_are_found_out(make: Any, full: bool) -> None:
    fresh = make(4096).eval()  # its logits are so small that a soft cap does not show
    assert Scorer(fresh, temperature=1.0).full_logits is full


def test_each_sequence_of_a_recurrent_model_has_a_row() -> None:
    config = Qwen3NextConfig(
        **SMALL,
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    scorer = Scorer(_random(Qwen3NextForCausalLM(config)), temperature=1.0)
    assert scorer.one_per_row
    ours, plain = _scored(scorer, share_prompts=True)
    torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)


def test_a_recurrent_model_is_not_divided_over_ranks_by_columns() -> None:
    with pytest.raises(ConfigError, match="cannot divide this model: it has recurrent layers"):
        _divide_attention(make_model("lfm2"), SequenceGroup(None, size=2, place=0))


class _Leaky(MistralForCausalLM):
    """A model whose tokens see their neighbours, whatever the mask says."""

    def forward(self, *args: Any, **arguments: Any) -> Any:
        """Mix the logits of adjacent columns."""
        output: Any = super().forward(*args, **arguments)
        output.logits = output.logits + output.logits.roll(1, dims=1)
        return output


def test_sequences_that_see_each_other_are_refused() -> None:
    model = _random(_Leaky(MistralConfig(**SMALL)))
    with pytest.raises(ModelError, match="change each other's log-probs"):
        Scorer(model, temperature=1.0)


def test_a_check_computes_without_tf32() -> None:
    seen: set[str] = set()
    model = _random(_mistral(4096))
    model.base_model.register_forward_hook(
        lambda *_: seen.add(torch.get_float32_matmul_precision())
    )
    torch.set_float32_matmul_precision("high")
    try:
        Scorer(model, temperature=1.0)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"highest"}


def test_logits_in_chunks_change_neither_scores_nor_gradients() -> None:
    model = _random(_mistral(4096))
    batch = _batch()
    [packed] = pack(batch.sequences, max_row_tokens=64, microbatch_tokens=4096)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk_bytes in (1 << 28, 4 * 264 * 7):
        model.zero_grad()
        scorer = Scorer(model, temperature=0.8, chunk_bytes=chunk_bytes)
        scores = scorer.score(packed, ScoreOptions(entropy_gradient=True))
        (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((scores.logprobs_N.detach(), gradient))
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-5)


def test_the_entropy_is_the_same_with_and_without_a_gradient() -> None:
    scorer = Scorer(_random(_mistral(4096)), temperature=0.8)
    [packed] = pack(_batch().sequences, max_row_tokens=64, microbatch_tokens=4096)
    with_gradient = scorer.score(packed, ScoreOptions(entropy_gradient=True)).entropy_N
    without = scorer.score(packed).entropy_N
    assert with_gradient.requires_grad
    assert not without.requires_grad
    torch.testing.assert_close(without, with_gradient.detach(), rtol=1e-5, atol=1e-5)


def test_dropout_is_refused_where_gradient_checkpointing_would_turn_it_on(tmp_path: Path) -> None:
    MistralForCausalLM(MistralConfig(**SMALL, attention_dropout=0.1)).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert not load_model(config, LearnerConfig()).training
    with pytest.raises(ModelError, match=r"attention_dropout=0\.1, which gradient checkpointing"):
        load_model(config, LearnerConfig(gradient_checkpointing=True))


def test_layers_that_are_recomputed_compute_without_the_noise_of_training(tmp_path: Path) -> None:
    small = {key: value for key, value in SMALL.items() if key != "head_dim"}
    noisy = PhimoeConfig(**small, num_local_experts=4, sliding_window=4096, input_jitter_noise=0.3)
    _random(PhimoeForCausalLM(noisy)).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    found: list[torch.Tensor] = []
    for recomputes in (False, True):
        model = load_model(config, LearnerConfig(gradient_checkpointing=recomputes))
        found.append(_scored(Scorer(model, temperature=1.0))[0])
    torch.testing.assert_close(found[1], found[0])


def test_master_weights_are_float32_whatever_the_folder_holds(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    load_model(ModelConfig(path=str(tmp_path)), LearnerConfig()).bfloat16().save_pretrained(
        tmp_path
    )
    model = load_model(ModelConfig(path=str(tmp_path)), LearnerConfig(dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
