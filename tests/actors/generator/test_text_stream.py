"""Text is told as soon as it is certain, whatever the tokens' borders are."""

import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.policy.token_text import TextStream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.tokenizers import fallback, merging

CHAT = ChatTokenizer(make_tokenizer())  # one token for each byte


def told(text: str, *stops: str) -> tuple[list[str], TextStream]:
    stream = TextStream(CHAT.decode, stops)
    return [stream.push(token) for token in CHAT.encode(text)], stream


@pytest.mark.parametrize("text", ["plain", "2 € für 日本", "👍🏽 ok", " spaces \n kept "])
def test_the_pieces_make_the_whole(text: str) -> None:
    pieces, stream = told(text)
    assert "".join(pieces) + stream.finish() == text
    assert all("�" not in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last() -> None:
    pieces, _ = told("a€")
    assert pieces == ["a", "", "", "€"]


def test_bytes_that_make_no_character_are_told_at_the_end() -> None:
    stream = TextStream(CHAT.decode)
    assert stream.push(CHAT.encode("€")[0]) == ""
    assert stream.finish() == "�"


def test_a_stop_text_ends_the_text_before_it_and_nothing_of_it_is_told() -> None:
    pieces, stream = told("one END two", "END")
    assert "".join(pieces) == "one "
    assert stream.stopped
    assert stream.finish() == ""


def test_what_only_begins_like_a_stop_text_is_told_after_all() -> None:
    pieces, stream = told("EN END", "ENDE")
    assert "".join(pieces) == "EN "
    assert stream.finish() == "END"
    assert not stream.stopped


def test_the_first_of_several_stop_texts_counts() -> None:
    pieces, _ = told("abcd", "cd", "b")
    assert "".join(pieces) == "a"


def test_special_tokens_are_no_text() -> None:
    pieces, stream = told("hi<|end|>")
    assert "".join(pieces) + stream.finish() == "hi"


MERGING, FALLBACK = ChatTokenizer(merging()), ChatTokenizer(fallback())
STOPS = [
    ["END"],
    ["\n\nHuman:", "Observation:"],
    ["ND", "END", "D"],  # overlapping
    ["€"],
    ["D€"],
    ["本"],
    ["E", "."],
    [":", "n:", "Human"],
    [" "],
    ["not there"],
]
TEXTS = [
    "one END two END",
    "Observation: x\n\nHuman: y",
    "a D€ D日本 END€",
    "END",
    "über€€ ED: EEND.",
    "\n\n\nHuman:",
]


@pytest.mark.parametrize("chat", [CHAT, MERGING, FALLBACK], ids=["bytes", "merging", "fallback"])
@pytest.mark.parametrize("stops", STOPS, ids=repr)
def test_the_last_token_is_the_one_that_completes_the_first_stop_text(
    chat: ChatTokenizer, stops: list[str]
) -> None:
    """The judge decodes every beginning as a whole."""
    for text in TEXTS:
        ids = chat.encode(text)
        wholes = [chat.decode(ids[:num]).rstrip("�") for num in range(1, len(ids) + 1)]
        completed = (
            num for num, whole in enumerate(wholes, 1) if any(stop in whole for stop in stops)
        )
        expected = next(completed, None)
        stream = TextStream(chat.decode, stops)
        said = "".join(stream.push(token) for token in ids) + stream.finish()
        assert stream.stopped == (expected is not None)
        assert stream.num_tokens == (expected or len(ids))
        if expected is None:
            assert said == wholes[-1]
        else:
            whole = wholes[expected - 1]
            assert said == whole[: min(whole.find(stop) for stop in stops if stop in whole)]


def test_a_stop_text_before_an_unfinished_character_ends_at_once() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, "Dâ"])}
    trained = Tokenizer(models.BPE(vocab=vocabulary, merges=[("D", "â")]))  # â: the first byte of €
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.decoder = decoders.ByteLevel()
    ids = trained.encode("xEND€ y").ids
    assert trained.decode(ids[:4]) == "xEND�"
    for stops, num, said in ((["END"], 4, "x"), (["D€"], 6, "xEN"), (["ND"], 4, "xE")):
        stream = TextStream(trained.decode, stops)
        assert "".join(stream.push(one) for one in ids) == said
        assert stream.num_tokens == num
