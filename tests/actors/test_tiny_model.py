"""The tiny model that recipes, tests and benchmarks start from."""

from pathlib import Path

import torch
from tinkermq.actors.policy.model_folder import load_causal_lm, load_tokenizer
from tinkermq.actors.policy.tiny_models import save_tiny_model


def test_the_default_model_has_411_thousand_parameters_and_264_tokens(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    model = load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert model.num_parameters() == 411_392
    assert len(load_tokenizer(str(tmp_path))) == model.config.vocab_size == 264
    assert model.generation_config.eos_token_id == 1


def test_a_seed_makes_the_same_model_and_leaves_the_global_generator_alone(
    tmp_path: Path,
) -> None:
    state = torch.get_rng_state()
    weights = [
        (save_tiny_model(tmp_path / name, width=32, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    ]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_every_text_is_one_token_per_byte_and_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(save_tiny_model(tmp_path, width=32)))
    for text in ("3+4=?", "  two  spaces\n", "naïve €"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_words_are_one_token_each_the_longest_first_and_come_back(tmp_path: Path) -> None:
    words = ("<move>", " X1,0", "a line\n\n", "a line")
    folder = save_tiny_model(tmp_path, width=32, words=words)
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer.encode("a line\n\na line X1,0 X1<move>", add_special_tokens=False)
    assert ids[:3] == [266, 267, 265]
    assert ids[-1] == 264
    assert len(ids) == 3 + len(" X1") + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a line\n\na line X1,0 X1<move>"
    assert load_causal_lm(str(folder), dtype=torch.float32).config.vocab_size == 268
