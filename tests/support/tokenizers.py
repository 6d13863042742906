"""Small tokenizers of the two kinds whose tokens may be parts of characters."""

from tinkermq.actors.policy.tiny_models import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def merging() -> PreTrainedTokenizerFast:
    """Return a tokenizer with tokens of several characters, and of parts of characters."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    texts = ["Observation: x\n\nHuman: END. €€ über 日本 ", "a\n\nb D€ D€ D日 END€ ND. ED:"] * 9
    trained.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=None)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def fallback() -> PreTrainedTokenizerFast:
    """Return a SentencePiece-like tokenizer whose unknown characters are bytes."""
    words = ["▁END", "▁", "E", "N", "D", "▁one", "▁two", ".", "a", "\n"]
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [(word, -float(len(words) - at)) for at, word in enumerate(words)]
    trained = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=None)
    fast.add_special_tokens({"eos_token": "<|end|>"})
    fast.chat_template = CHAT_TEMPLATE
    return fast
