"""The bytes that tokens stand for, also where several of them make one character.

A tokenizer writes bytes in one of two ways: each as a character of an alphabet of 256 (GPT-2's,
byte-level BPE), or as a piece of its own, `<0xE2>`, beside pieces of text (SentencePiece's byte
fallback, where `▁` is a space). Which it is, its decoder says.
"""

import json
import re
from collections.abc import Iterator, Mapping
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
        found = self._bytes_of(token_id)
        if first and found.startswith(b" ") and not self._decoded([token_id]).startswith(" "):
            return found[1:]
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level:
            alphabet = _alphabet()
            if all(one in alphabet for one in piece):
                return bytes(alphabet[one] for one in piece)
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
