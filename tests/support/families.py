"""Tiny models of the families of transformers that generate text, and the table of docs/models.md.

`python -m tests.support.families` writes the table.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.engine.transformers.adapters import EngineAdapter
from tinkermq.actors.engine.transformers.decoder import FedTokens, SlotDecoder, load_decoder
from tinkermq.actors.model_kind import kind_checks
from tinkermq.actors.policy.layers import needs_masks
from tinkermq.actors.policy.lora import layer_names, merge, policy_tensors
from tinkermq.actors.policy.model_folder import load_causal_lm, load_policy, save_model
from tinkermq.actors.policy.small_copy import SIZES, VOCABULARY, draw_zeros
from tinkermq.actors.training.micro_batch import TokenSequence
from tinkermq.actors.training.model import Scorer
from tinkermq.actors.training.packing import pack
from tinkermq.actors.training.varlen import choose_attention, set_attention
from tinkermq.schemas.checks import run_checks
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.sections import LoraConfig
from tinkermq.schemas.plan import model_refusals
from tinkermq.schemas.plan.cache_shape import cache_widths
from tinkermq.schemas.wire.errors import TinkermqError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

PAGE = Path("docs/models.md")
SHORT = {
    "down, gate, k, o, q, up, v": "*all*",
    "k, o, q, v": "*attention*",
    "kv_a_proj_with_mqa, kv_b, o, q_a, q_b": "*latent*",
}
"""How the page calls the layers that many families adapt."""
WINDOW, PROMPT = 8, 12
VOCAB = VOCABULARY
_SIZES: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "attention_window_size": WINDOW,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "first_k_dense_replace": 1,
    "num_kv_shared_layers": 1,
}
_ALWAYS = ("hidden_size", "num_hidden_layers", "vocab_size")

Row = tuple[str, str, str]
"""What the learner does, what the transformers engine does, and which layers LoRA adapts."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Arcee Trinity", {}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee AFM", {}),
    "bamba": ("Bamba", {"attn_layer_indices": [1, 3]}),
    "bitnet": ("BitNet b1.58", {}),
    "bloom": ("BLOOM", {}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B, Command A", {}),
    "cwm": ("Code World Model", {}),
    "deepseek_v3": ("DeepSeek V3, R1", {}),
    "deepseek_v32": ("DeepSeek V3.2", {"index_topk": 4}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 with experts", {}),
    "exaone4": ("EXAONE 4", {}),
    "exaone_moe": ("K-EXAONE", {}),
    "falcon": ("Falcon", {"head_dim": None, "num_key_value_heads": None}),
    "falcon_h1": ("Falcon H1", {"mamba_d_head": 16}),
    "falcon_mamba": ("Falcon Mamba", {"layer_types": None}),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "gemma3n_text": ("Gemma 3n", {}),
    "gemma4_text": ("Gemma 4", {}),
    "glm": ("GLM 4 (9B, 2024)", {}),
    "glm4": ("GLM 4 (2025)", {}),
    "glm4_moe": ("GLM 4.5 to 4.7", {}),
    "glm4_moe_lite": ("GLM 4.7 Flash", {}),
    "glm_moe_dsa": ("GLM 5", {"index_topk": 4}),
    "gpt2": ("GPT-2", {}),
    "gpt_neox": ("Pythia", {}),
    "gpt_oss": ("gpt-oss", {}),
    "granite": ("Granite 3", {}),
    "granitemoe": ("Granite 3 with experts", {}),
    "granitemoehybrid": ("Granite 4", {"layer_types": ["mamba", "attention"] * 2}),
    "granitemoeshared": ("Granite with shared experts", {}),
    "helium": ("Helium", {}),
    "jais2": ("Jais 2", {}),
    "jamba": ("Jamba", {"layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": (
        "Kimi Linear",
        {"topk_group": 1},
    ),
    "lfm2": ("LFM2", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm2_moe": ("LFM2 with experts", {"layer_types": ["conv", "full_attention"] * 2}),
    "llama": ("Llama 2 and 3, SmolLM2", {}),
    "llama4_text": ("Llama 4", {}),
    "longcat_flash": ("LongCat Flash", {"num_layers": 2}),
    "mamba": ("Mamba", {"layer_types": None}),
    "minicpm3": ("MiniCPM 3", {}),
    "mimo_v2_flash": ("MiMo V2 Flash", {}),
    "minimax": ("MiniMax 01, M1", {}),
    "minimax_m2": ("MiniMax M2", {}),
    "ministral3": ("Ministral 3", {}),
    "mistral": ("Mistral 7B", {}),
    "mixtral": ("Mixtral", {}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("Nemotron 3 and 4, Minitron", {"head_dim": 8, "num_key_value_heads": 2}),
    "nemotron_h": ("Nemotron H, Nano 2 and 3", {"hybrid_override_pattern": "M*M*"}),
    "olmo": ("OLMo", {}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {}),
    "olmo_hybrid": ("OLMo Hybrid", {}),
    "olmoe": ("OLMoE", {}),
    "opt": ("OPT", {}),
    "phi": ("Phi 1 and 2", {}),
    "phi3": ("Phi 3 and 4", {}),
    "phimoe": ("Phi 3.5 MoE", {}),
    "qwen2": ("Qwen2, Qwen2.5, DeepSeek R1 distilled", {}),
    "qwen2_moe": ("Qwen1.5 MoE, Qwen2 57B", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_5_moe_text": ("Qwen3.5 with experts", {}),
    "qwen3_5_text": ("Qwen3.5", {}),
    "qwen3_moe": ("Qwen3 with experts", {}),
    "qwen3_next": ("Qwen3-Next", {}),
    "recurrent_gemma": ("RecurrentGemma", {}),
    "seed_oss": ("Seed OSS", {}),
    "smollm3": ("SmolLM3", {}),
    "solar_open": ("Solar Open", {}),
    "stablelm": ("StableLM", {}),
    "starcoder2": ("StarCoder2", {}),
    "youtu": ("Youtu-LLM", {}),
}
"""The families by their `model_type`: well-known models of it, and settings of the tiny model."""
QUICK = (
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm2",
    "llama4_text",
    "mistral",
    "qwen3",
    "qwen3_5_text",
    "recurrent_gemma",
)
"""Families that have all kinds of layers among them."""
COMPARED_IN_VLLM = (
    *("apertus", "arcee", "bitnet", "cohere", "cwm", "deepseek_v3", "ernie4_5", "exaone4"),
    *("exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma", "gemma2", "gemma3_text"),
    *("gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_oss", "granite"),
    *("granitemoe", "granitemoehybrid", "mistral", "mixtral", "olmo2", "qwen3_5_text", "smollm3"),
)
"""Families whose log-probs in vLLM's CPU build a test compares with the learner's."""
NOT_ON_CPUS = ("deepseek_v32", "glm_moe_dsa", "olmo_hybrid")
"""Families whose sparse or linear attention vLLM's CPU build lacks."""
BY_TRANSFORMERS = (
    *("arcee", "bitnet", "cwm", "flex_olmo", "glm", "gpt_neox", "helium", "jais2", "nanochat"),
    *("olmo", "olmo2", "olmo3", "phi", "phimoe", "seed_oss", "smollm3", "solar_open"),
    *("starcoder2", "youtu"),
)
"""Families without a class of vLLM's, which it computes by transformers' class."""


def vllm_of(family: str) -> str:
    """Return the table's cell about vLLM."""
    if family in model_refusals.VLLM_REFUSALS:
        return "no"
    computed = "transformers' class" if family in BY_TRANSFORMERS else "own class"
    notes = {
        "compared": family in COMPARED_IN_VLLM,
        "with LoRA alone": family in model_refusals.STALE_IN_VLLM,
        "not on CPUs": family in NOT_ON_CPUS,
    }
    return ", ".join([computed, *(note for note, is_so in notes.items() if is_so)])


def make_config(
    family: str, sizes: Mapping[str, Any] | None = None, **settled: Any
) -> PreTrainedConfig:
    """Return a small configuration of a family, four layers with every kind that it has.

    `sizes` are other widths than the usual ones, `settled` further settings.
    """
    plain: Any = AutoConfig.for_model(family)
    defaults: dict[str, Any] = plain.to_dict()
    settings = {
        name: value
        for name, value in {**_SIZES, **(sizes or {})}.items()
        if defaults.get(name) is not None or name in _ALWAYS
    }
    if "kv_lora_rank" in settings:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if kinds := defaults.get("layer_types"):
        settings["layer_types"] = (list(dict.fromkeys(kinds)) * 4)[:4]
    settings |= FAMILIES[family][1] | settled
    return type(plain)(**{name: value for name, value in settings.items() if value is not None})


def make_model(
    family: str, sizes: Mapping[str, Any] | None = None, **settled: Any
) -> PreTrainedModel:
    """Return a random model of `make_config`."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        make_config(family, sizes, **settled)
    ).eval()
    draw_zeros(model)
    return model


def plain_logprobs(
    model: PreTrainedModel, ids: Sequence[int] | np.ndarray[Any, Any], start: int
) -> torch.Tensor:
    """Return the log-probs of a sequence's tokens from `start` on, by the model's own pass."""
    tokens = torch.as_tensor(np.asarray(ids, np.int64))
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), tokens[start:]]


def row_of(family: str) -> Row:
    """Run a family's tiny model in the learner and the engine; return the row of the table.

    Raises AssertionError for log-probs, adapters or an estimate of memory that are not right.
    """
    model = make_model(family)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoder = None
        try:
            decoder = _decoder(folder)
            engine = "yes"
            _check_memory(decoder, model)
        except TinkermqError as error:
            engine = f"no: {error.message.replace(f'model {folder}', 'it')}"
        learner = _learner(model)
        _check_kind(folder, learner, engine)
        lora = "no" if learner.startswith("no") else adapt(Path(folder), decoder)
    return learner, engine, lora


def _decoder(folder: str) -> SlotDecoder:
    return load_decoder(folder, dtype=torch.float32, device="cpu", max_slots=4, max_tokens=128)


def _check_memory(decoder: SlotDecoder, model: PreTrainedModel) -> None:
    """Compare what `tinkermq plan` computes from the configuration with what the cache has."""
    spans = [FedTokens(slot, 0, np.arange(3, 20, dtype=np.int32)) for slot in range(3)]
    list(decoder.prefill(spans))
    widths = cache_widths(model.config.get_text_config().to_dict())
    cache = decoder.cache
    tokens = cache.num_slots * cache.num_tokens
    told = widths.token_bytes(4) * tokens + widths.state_bytes(4) * cache.num_slots
    assert told == pytest.approx(cache.num_bytes, rel=0.1)


def _check_kind(folder: str, learner: str, engine: str) -> None:
    """Compare what `tinkermq model check` says, by the configuration, with what was computed."""
    job = JobConfig.model_validate({"model": {"path": folder}, "env": {"game": "none"}})
    results = {result.name: result for result in run_checks(kind_checks(job, alone=True))}
    said = results["learner"]
    ways = {"packed": "packed rows", "a row each": "a row for each sequence"}
    assert said.ok == (learner in ways), said
    assert said.detail.startswith(ways.get(learner, "")), said
    assert results["transformers engine"].ok == (engine == "yes"), results["transformers engine"]
    skipped = [results[name] for name in _TRIED if results[name].outcome == "skipped"]
    assert skipped == [], skipped


_TRIED = ("family", "layers", "learner", "transformers engine", "LoRA", "memory")


def adapt(folder: Path, decoder: SlotDecoder | None) -> str:
    """Train an adapter for a step, and compute it merged and in the engine; return its layers."""
    config = LoraConfig(rank=2)
    model = load_policy(str(folder), config, dtype=torch.float32)
    noise = torch.Generator().manual_seed(2)
    tensors = policy_tensors(model)
    for name, tensor in tensors.items():
        if ".lora_B" in name:
            tensor.data.normal_(std=0.1, generator=noise)
    scorer = _scorer(model)
    loss = -_scores(scorer).mean()
    loss.backward()
    assert torch.isfinite(loss)
    unused = [name for name, each in tensors.items() if each.grad is None or not each.grad.any()]
    assert unused == [], unused
    with torch.no_grad():
        for tensor in tensors.values():
            assert tensor.grad is not None
            tensor -= 0.01 * tensor.grad
        ours = _scores(scorer)
    save_model(model, folder / "adapter")
    merged = merge(load_causal_lm(str(folder), dtype=torch.float32), folder / "adapter").eval()
    torch.testing.assert_close(ours, _plain(merged), atol=1e-4, rtol=1e-4)
    if decoder is not None:
        adapter = EngineAdapter("a", 1, decoder.adapters.prepare(tensors, config))
        decoder.adapters.open()
        owners = [adapter, None, adapter]
        spans = [
            FedTokens(slot, 0, ids.astype(np.int32), adapter=owner)
            for slot, (ids, owner) in enumerate(zip(_sequences(), owners, strict=True))
        ]
        base = load_causal_lm(str(folder), dtype=torch.float32)
        for rows, logits in decoder.prefill(spans):
            for row, own in zip(rows, logits, strict=True):
                plain = base if owners[row] is None else merged
                ids = torch.as_tensor(_sequences()[row])[None]
                with torch.no_grad():
                    expected = plain(input_ids=ids, use_cache=False).logits[0, -1]
                torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    names = ", ".join(name.removesuffix("_proj") for name in layer_names(model))
    return SHORT.get(names, names)


def _sequences() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB, PROMPT)
    return [np.concatenate([prompt, rng.integers(3, VOCAB, more)]) for more in (9, 14, 20)]


def _learner(model: PreTrainedModel) -> str:
    """Say how the learner reads a model's sequences; raises AssertionError if it is not right."""
    plain = _plain(model)
    try:
        scorer = _scorer(model)
    except TinkermqError as error:
        return f"no: {error.message}"
    with torch.no_grad():
        torch.testing.assert_close(_scores(scorer), plain, atol=1e-4, rtol=1e-4)
    return "a row each" if scorer.one_per_row else "packed"


def _scorer(model: PreTrainedModel) -> Scorer:
    cpu, reason, config = torch.device("cpu"), needs_masks(model), model.config.get_text_config()
    # a submission is judged by config.json alone, which may name the family and no kinds of layers
    assert reason == model_refusals.needs_masks({"model_type": config.model_type})
    set_attention(model, choose_attention("auto", config, cpu, torch.float32, reason), cpu)
    return Scorer(model, temperature=1.0)


def _plain(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([plain_logprobs(model, each, PROMPT) for each in _sequences()])


def _scores(scorer: Scorer) -> torch.Tensor:
    """Return the learner's log-probs of what `_plain` returns, in the same order."""
    sequences = [
        TokenSequence(each, (np.arange(len(each)) >= PROMPT).astype(np.uint8))
        for each in _sequences()
    ]
    micros = pack(
        sequences,
        max_row_tokens=128,
        microbatch_tokens=256,
        share_prompts=True,
        one_per_row=scorer.one_per_row,
    )
    parts = [(torch.as_tensor(micro.index_N), scorer.score(micro).logprobs_N) for micro in micros]
    index_N, logprobs_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs_N[index_N.argsort()]


def line_of(family: str, row: Row) -> str:
    """Return a family's line of the table."""
    learner, engine, lora = row
    cells = (f"`{family}`", FAMILIES[family][0], learner, engine, vllm_of(family), lora)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the lines of all families into the page."""
    before, _, rest = PAGE.read_text().partition("<!-- families -->\n")
    _, _, after = rest.partition("<!-- end -->")
    columns = ("family", "models", "learner", "transformers engine", "vLLM", "LoRA")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for family in FAMILIES:
        lines.append(line_of(family, row_of(family)))
        sys.stdout.write(f"{lines[-1]}\n")
    table = "\n".join(lines)
    PAGE.write_text(f"{before}<!-- families -->\n{table}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
