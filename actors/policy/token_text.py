"""The bytes that tokens stand for, and the text of tokens that arrive one by one.

A tokenizer writes bytes in one of two ways: each as a character of an alphabet of 256 (GPT-2's,
byte-level BPE), or as a piece of its own, `<0xE2>`, beside pieces of text (SentencePiece's byte
fallback, where `▁` is a space). Which it is, its decoder says.

A character may be spread over several tokens, and a stop text over several as well: streamed text
is released as soon as neither can change it any more.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Read how the tokenizer decodes."""
        self._tokenizer: Any = tokenizer
        steps = list(_steps(_decoder(tokenizer)))
        self._is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        self._has_fallback = any(step.get("type") == "ByteFallback" for step in steps)
        self._replaced = [pair for step in steps if (pair := _replacement(step)) is not None]
        self._special = frozenset(tokenizer.all_special_ids)

    def of(self, token_id: int, *, first: bool = False) -> bytes:
        """Return a token's bytes; none for a special one, which is no text.

        `first`: of a text, before which a tokenizer may leave out a space.
        """
        if token_id in self._special:
            return b""
        token_bytes = self._bytes_of(token_id)
        if first and token_bytes.startswith(b" ") and not self._decoded([token_id]).startswith(" "):
            return token_bytes[1:]
        return token_bytes

    def _bytes_of(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level:
            alphabet = _alphabet()
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()
        if self._has_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        if self._replaced:
            for old, new in self._replaced:
                piece = piece.replace(old, new)
            return piece.encode()
        return self._decoded([token_id]).encode()

    def _decoded(self, ids: list[int]) -> str:
        return cast("str", self._tokenizer.decode(ids))


def _decoder(tokenizer: "PreTrainedTokenizerBase") -> Any:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else json.loads(backend.to_str()).get("decoder")


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder, in order."""
    if not isinstance(decoder, dict):
        return
    fields = cast("dict[str, Any]", decoder)
    if fields.get("type") == "Sequence":
        for step in fields["decoders"]:
            yield from _steps(step)
    else:
        yield fields


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a step of a decoder puts in the place of what, if it does so."""
    if step.get("type") == "Metaspace":
        return step["replacement"], " "
    if step.get("type") == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Return the bytes that GPT-2's characters stand for: printable ones stand for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + number): byte for number, byte in enumerate(others)},
    }


# -- streamed text ---------------------------------------------------------------------------------

_UNFINISHED = "�"


class TextStream:
    """The text of one choice as it grows."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        """Decode tokens with `decode`; end before the first of `stops`."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._known = self._read = 0
        self._held: str = ""
        self.stopped = False
        """A stop text was met: nothing follows."""
        self.stop = ""
        """The stop text that was met: of several in one place, the one that was given first."""

    @property
    def num_tokens(self) -> int:
        """Tokens taken, the one that completed a stop text being the last of them."""
        return len(self._ids)

    def push(self, token_id: int) -> str:
        """Take the next token, unless it comes behind a stop text; return what is certain now."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._until_stop(self._fresh(final=False), final=False)

    def finish(self) -> str:
        """Return what is left at the end of the generation."""
        return self._until_stop(self._fresh(final=True), final=True)

    def _fresh(self, *, final: bool) -> str:
        """Return the text that the newest tokens add, unless a character is unfinished."""
        before = self._decode(self._ids[self._known : self._read])
        now = self._decode(self._ids[self._known :])
        if now.endswith(_UNFINISHED) and not final:
            # A stop text may be complete before the unfinished character.
            whole = now.rstrip(_UNFINISHED)[len(before) :]
            return whole if self._places(self._held + whole) else ""
        if len(now) <= len(before):
            return ""
        self._known, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _until_stop(self, fresh: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + fresh
        if places := self._places(text):
            place, number = min(places)
            self.stopped, self._held, self.stop = True, "", self._stops[number]
            return text[:place]
        num_held = 0 if final else self._longest_start(text)
        self._held = text[len(text) - num_held :] if num_held else ""
        return text[: len(text) - num_held]

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return the first place of each stop text that is there, and its number."""
        return [
            (place, number)
            for number, stop in enumerate(self._stops)
            if (place := text.find(stop)) >= 0
        ]

    def _longest_start(self, text: str) -> int:
        """Return how many characters at the end may be the beginning of a stop text."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )
