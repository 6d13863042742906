"""Text is told as soon as it is certain, whatever the tokens' borders are."""

import pytest
from tinkermq.actors.generator.episodes.chat import ChatTokenizer
from tinkermq.actors.generator.episodes.text_stream import TextStream
from tinkermq.actors.models.tiny_model import make_tokenizer

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
