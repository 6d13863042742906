"""The bytes of tokens, one behind the other, are those of the text that they make."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.policy.token_text import TokenBytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tokenizers import fallback, merging


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has a space in pieces of text, and no bytes."""
    words = ["<unk>", "▁", *"abcdeé日€ \n.", "▁ab", "cd"]
    trained = Tokenizer(models.Unigram([(word, -1.0) for word in dict.fromkeys(words)], unk_id=0))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="<unk>")


def with_words() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with added words, which are written as they are."""
    return make_tokenizer(words=["日本語", "answer", " two words"])


KINDS: dict[str, Any] = {
    "bytes": make_tokenizer(),
    "merging": merging(),
    "fallback": fallback(),
    "metaspace": metaspace(),
    "words": with_words(),
}
CHARS = "abcdeé日本語€👍🏽 \n.ENDone two answer"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=CHARS, min_size=1, max_size=24))
def test_bytes_make_the_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    known = TokenBytes(tokenizer)
    whole = b"".join(known.of(one, first=not place) for place, one in enumerate(ids))
    assert whole.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_of_a_text_has_bytes_and_a_special_one_has_none(kind: str) -> None:
    tokenizer = KINDS[kind]
    known = TokenBytes(tokenizer)
    for token in range(len(tokenizer)):
        assert bool(known.of(token)) == (token not in tokenizer.all_special_ids)
    assert known.of(len(tokenizer) + 7) == b""  # a row of the model's that no token has
