"""The bytes of tokens, the text of streamed tokens, and text that looks like special tokens.

A tokenizer writes bytes in one of two ways: each as a character of an alphabet of 256 (GPT-2's,
byte-level BPE), or as a token such as `<0xE2>` beside tokens of text (SentencePiece's byte
fallback, where `▁` is a space). Its decoder tells which.

A character or a stop text may span several tokens: streamed text is released as soon as later
tokens cannot change it.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ...schemas.wire.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of one tokenizer's tokens."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", unsaid: Collection[int] = ()) -> None:
        """Read the tokenizer's decoder; `unsaid` tokens have no text."""
        self._tokenizer: Any = tokenizer
        self._unsaid = frozenset(unsaid)
        self._known: dict[int, bytes] = {}
        steps = list(_steps(_decoder(tokenizer)))
        self._is_byte_level = any(step.get("type") == "ByteLevel" for step in steps)
        self._has_fallback = any(step.get("type") == "ByteFallback" for step in steps)
        self._replaced = [pair for step in steps if (pair := _replacement(step)) is not None]
        self._special = frozenset(tokenizer.all_special_ids)

    def of(self, token_id: int, *, first: bool = False) -> bytes:
        """Return a token's bytes; empty for one without text.

        `first`: at the start of a text, where a tokenizer may omit a space.
        """
        token_bytes = self._known.get(token_id)
        if token_bytes is None:
            token_bytes = self._known[token_id] = self._bytes_of(token_id)
        if first and token_bytes.startswith(b" ") and not self._decoded([token_id]).startswith(" "):
            return token_bytes[1:]
        return token_bytes

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._unsaid:
            return b""
        if token_id in self._special:
            return self._decoded([token_id]).encode()
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
    """Return the replacement of a decoder's step and its pattern, if it replaces."""
    if step.get("type") == "Metaspace":
        return step["replacement"], " "
    if step.get("type") == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Return the bytes of GPT-2's characters; printable ones are their own."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + number): byte for number, byte in enumerate(others)},
    }


# -- streamed text ---------------------------------------------------------------------------------

_UNFINISHED = "�"


class TextStream:
    """The text of one streamed choice."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Decode tokens with `decode`; end before the first of `stops` behind `min_tokens`."""
        self._decode = decode
        self._stops = [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._known = self._read = 0
        self._held: str = ""
        self._min_tokens = min_tokens
        self.stopped = False
        """A stop text was found: no more text follows."""
        self.stop = ""
        """The found stop text; of several in one place, the first in the list."""

    def push(self, token_id: int) -> str:
        """Add the next token, unless a stop text was found; return the text that is final now."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        return self._until_stop(self._fresh(final=False), final=False)

    def finish(self) -> str:
        """Return the rest at the end of the generation."""
        return self._until_stop(self._fresh(final=True), final=True)

    def _fresh(self, *, final: bool) -> str:
        """Return the text of the newest tokens, unless a character is incomplete."""
        before = self._decode(self._ids[self._known : self._read])
        now = self._decode(self._ids[self._known :])
        if now.endswith(_UNFINISHED) and not final:
            # A stop text may be complete before the incomplete character.
            whole = now.rstrip(_UNFINISHED)[len(before) :]
            may_stop = len(self._ids) > self._min_tokens
            return whole if may_stop and self._places(self._held + whole) else ""
        if len(now) <= len(before):
            return ""
        self._known, self._read = self._read, len(self._ids)
        return now[len(before) :]

    def _until_stop(self, fresh: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + fresh
        if len(self._ids) <= self._min_tokens:
            return text
        if places := self._places(text):
            place, number = min(places)
            self.stopped, self._held, self.stop = True, "", self._stops[number]
            return text[:place]
        num_held = 0 if final else self._longest_start(text)
        self._held = text[len(text) - num_held :] if num_held else ""
        return text[: len(text) - num_held]

    def _places(self, text: str) -> list[tuple[int, int]]:
        """Return the first place of each stop text in a text, and its number."""
        return [
            (place, number)
            for number, stop in enumerate(self._stops)
            if (place := text.find(stop)) >= 0
        ]

    def _longest_start(self, text: str) -> int:
        """Return how many characters at the end may be the start of a stop text."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:length])
            ),
            default=0,
        )


# -- text of messages that looks like special tokens -----------------------------------------------
# A rendered conversation is one text, in which `<|im_end|>` of a user looks like the template's
# own. Therefore texts of messages are escaped before rendering, with random codes, and unescaped as
# text. A rendering with codes is tokenised by a copy of the tokenizer whose markers have other
# names, which replace the template's own. One pass makes all tokens, so that they equal those of
# the ordinary rendering except for the escaped text. Without such text nothing is done.

_FIRST_PRIVATE = 0xF0000
"""Characters for private use, of which the codes are made."""
_NEAR_CHARS = 4096
"""Last characters of a text that are searched for its last marker first."""
_Rename: TypeAlias = Callable[["re.Match[str]"], str]


class SpecialText:
    """Escapes texts of messages that look like a tokenizer's special tokens."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        frame: Collection[str] = (),
        controls: Collection[str] = (),
    ) -> None:
        """Escape the special tokens of `tokenizer`, and those of the template's `frame`.

        In an assistant's text only `controls` are escaped: it generates the other markers itself.
        """
        self._tokenizer = tokenizer
        names = special_tokens(tokenizer)
        names |= {name: _id_of(tokenizer, name) for name in frame if name not in names}
        self._ids = names
        nonce = "".join(chr(_FIRST_PRIVATE + secrets.randbelow(0xFF00)) for _ in range(4))
        self._begin = nonce + chr(_FIRST_PRIVATE + 0xFF01)
        places = {name: chr(_FIRST_PRIVATE + place) for place, name in enumerate(names)}
        self._nothing = self._begin + chr(_FIRST_PRIVATE + 0xFF02)
        self._codes = {name: self._begin + place for name, place in places.items()}
        self._names = {code: name for name, code in self._codes.items()}
        self._new_names = {name: nonce + place for name, place in places.items()}
        self._coded = re.compile(f"{self._begin}(.)", re.DOTALL)
        self._all = _Guarded(names)
        self._controls = _Guarded([name for name in names if name in controls])
        self._renamed: tuple[Any, dict[int, int]] | None = None
        self._renaming = Lock()

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which no text looks like a marker of the template.

        Raises DataError for a message nested too deeply.
        """
        with _at_depth("a message"):
            return [self._message(message) for message in messages]

    def hide_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return descriptions of tools in which no text looks like a marker; raises DataError."""
        with _at_depth("the description of a tool"):
            return [self._hidden(dict(tool), self._all) for tool in tools]

    def plain(self, text: str) -> str:
        """Return an unescaped text."""
        if self._begin not in text:
            return text
        return self._coded.sub(lambda match: self._names.get(match[0], ""), text)

    def find(self, text: str) -> list[str]:
        """Return the markers in a rendered text, in order, without escaped text."""
        return self._all.find(text)

    def last(self, text: str) -> int:
        """Return where the last marker of a rendered text begins, or 0."""
        return self._all.last(text)

    def starts(self, text: str) -> bool:
        """Whether a rendered text begins with a marker."""
        return self._all.starts(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text, in which escaped text is text.

        Raises ModelError for a tokenizer that makes special tokens of it nevertheless.
        """
        plain = self.plain(text)
        if plain is text or self.find(plain) == self.find(text):
            return self._tokenizer.encode(plain, add_special_tokens=False)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
        ids = self._as_text(text)
        unknown = cast("int | None", self._tokenizer.unk_token_id)  # any text may contain these
        known = {token for token in self._ids.values() if token != unknown}
        markers = [token for token in map(self._ids.__getitem__, self.find(text)) if token in known]
        if [token for token in ids if token in known] != markers:
            coded = {match[0] for match in self._coded.finditer(text)}
            shown = sorted(self._names[code] for code in coded if code in self._names)[:3]
            raise ModelError(
                f"the tokenizer makes special tokens of {', '.join(shown)} in a message",
                hint="leave them out of the messages, or use a tokenizer with a tokenizer.json",
            )
        return ids

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if message.get("role") != "assistant":
            return self._hidden(dict(message), self._all)
        return {
            key: self._hidden(value, self._all if key == "tool_calls" else self._controls)
            for key, value in message.items()
        }

    def _hidden(self, value: Any, guarded: "_Guarded") -> Any:
        if isinstance(value, str):
            return guarded.hide(value, lambda match: self._codes[match[0]], self._nothing)
        if isinstance(value, Mapping):
            return {
                self._hidden(key, guarded): self._hidden(item, guarded)
                for key, item in cast("Mapping[Any, Any]", value).items()
            }
        if isinstance(value, list | tuple):
            return [self._hidden(item, guarded) for item in cast("Sequence[Any]", value)]
        return value

    def _as_text(self, text: str) -> list[int]:
        if not self._tokenizer.is_fast:
            return self._piece_by_piece(text)
        with self._renaming:
            tokenizer, ids = self._renamed = self._renamed or self._rename()
        renamed = self._all.sub(lambda match: self._new_names[match[0]], text)
        made = cast(
            "list[int]", tokenizer.encode(self.plain(renamed), add_special_tokens=False).ids
        )
        return [ids.get(token, token) for token in made]

    def _rename(self) -> tuple[Any, dict[int, int]]:
        """Return a copy of the tokenizer whose markers have other names, and their ids."""
        from tokenizers import Tokenizer

        backend = cast("Any", self._tokenizer).backend_tokenizer
        state: dict[str, Any] = json.loads(backend.to_str())
        for key in ("post_processor", "truncation", "padding"):
            state[key] = None
        added: list[dict[str, Any]] = state["added_tokens"]
        old = [str(token["content"]) for token in added]
        for token in added:
            token["content"] = self._new_names.get(token["content"], token["content"])
        _rename_in(state["model"], self._new_names)
        copy: Any = Tokenizer.from_str(json.dumps(state))
        pairs = ((copy.token_to_id(self._new_names.get(name, name)), name) for name in old)
        return copy, {new: int(backend.token_to_id(name)) for new, name in pairs}

    def _piece_by_piece(self, text: str) -> list[int]:
        """Encode the text between markers separately, for tokenizers written in Python."""
        ids: list[int] = []
        for piece in self._all.split(text):
            if piece in self._ids:
                ids.append(self._ids[piece])
            elif piece := self.plain(piece):
                encode = cast("Callable[..., list[int]]", self._tokenizer.encode)  # pyright: ignore[reportUnknownMemberType]  # untyped in transformers
                ids += encode(piece, add_special_tokens=False, split_special_tokens=True)
        return ids


class _Guarded:
    """Texts to find in others, the longest match first."""

    def __init__(self, names: Collection[str]) -> None:
        longest_first = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._heads = {name[:cut] for name in names for cut in range(1, len(name))}
        self._tails = {name[cut:] for name in names for cut in range(1, len(name))}
        self._most = max(map(len, names), default=0)

    def hide(self, text: str, code: _Rename, nothing: str) -> str:
        """Return a text with codes; `nothing` separates text from a possible marker beside it."""
        if not text:
            return text
        cuts = range(1, min(self._most, len(text) + 1))
        begins = any(text[:cut] in self._tails for cut in cuts)
        ends = any(text[-cut:] in self._heads for cut in cuts)
        hidden = self._pattern.sub(code, text)
        return f"{nothing * begins}{hidden}{nothing * ends}" if begins or ends else hidden

    def find(self, text: str) -> list[str]:
        return self._pattern.findall(text)

    def last(self, text: str) -> int:
        near = max(0, len(text) - _NEAR_CHARS)
        for start in (near, 0) if near else (0,):
            starts = [match.start() for match in self._pattern.finditer(text, start)]
            if starts and (
                not start or starts[-1] - start > self._most
            ):  # not a part of a longer one
                return starts[-1]
        return 0

    def starts(self, text: str) -> bool:
        return self._pattern.match(text) is not None

    def sub(self, rename: _Rename, text: str) -> str:
        return self._pattern.sub(rename, text)

    def split(self, text: str) -> list[str]:
        return re.split(f"({self._pattern.pattern})", text)


@contextmanager
def _at_depth(what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError as error:
        raise DataError(
            f"{what} nests lists or maps too deeply",
            hint="send texts, and the arguments of calls",
        ) from error


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Return a tokenizer's special tokens and their ids."""
    added = cast("dict[int, Any]", cast("Any", tokenizer).added_tokens_decoder)
    special = {str(token.content): int(number) for number, token in added.items() if token.special}
    named = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=False)
    return {**{str(name): int(number) for name, number in named}, **special}


def _id_of(tokenizer: "PreTrainedTokenizerBase", name: str) -> int:
    return int(cast("int", tokenizer.convert_tokens_to_ids(name)))


def _rename_in(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename entries of a vocabulary, to names that texts do not contain."""
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        entries = cast("dict[str, int]", vocabulary).items()
        model["vocab"] = {names.get(name, name): number for name, number in entries}
    elif isinstance(vocabulary, list):  # of Unigram, with scores
        pieces = cast("list[tuple[str, float]]", vocabulary)
        model["vocab"] = [[names.get(name, name), score] for name, score in pieces]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    if merges := cast("list[Any]", model.get("merges") or []):
        pairs = [
            tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in merges
        ]
        model["merges"] = [
            pair
            for pair, (left, right) in zip(merges, pairs, strict=True)
            if not {left, right, left + right} & names.keys()
        ]


_MARK = re.compile(r"[<\[{|].+[>\]}|]", re.DOTALL)
"""Form of a marker that a template writes around roles, unlike the words of a vocabulary."""


def marks_of(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Return the special tokens, and added ones that look like markers of a template."""
    added = cast("dict[int, Any]", cast("Any", tokenizer).added_tokens_decoder).items()
    marks = {int(number): str(token.content) for number, token in added}
    marks = {number: name for number, name in marks.items() if _MARK.fullmatch(name)}
    return marks | {number: name for name, number in special_tokens(tokenizer).items()}
