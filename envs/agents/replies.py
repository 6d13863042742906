"""A model's answer as a message: what it reasoned, said and called, read as it is generated.

What a program is told and what is kept of a call are both made of the pieces that are read here,
so that an echo of an answer is recognised. Calls are read as Hermes and Qwen models write them;
what is not well formed is text. White space beside reasoning and calls belongs to neither.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..tool_calls import CallSplitter, overlap
from .messages import CanonicalCall, CanonicalMessage, joined

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what the model reasons."""

    text: str


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what it says."""

    text: str


Piece: TypeAlias = ReasoningPiece | TextPiece | CanonicalCall
"""What an answer has gained; a call comes whole, once it is closed."""


class ReplyReader:
    """Reads one answer, bit by bit."""

    def __init__(
        self, name: str, *, calls: bool, thinking: bool = False, keeps_reasoning: bool = False
    ) -> None:
        """Read an answer whose calls have ids that begin with `name`.

        Without `calls`, what looks like a call is text; with `keeps_reasoning`, reasoning is, too.
        With `thinking`, the prompt has opened the reasoning already.
        """
        self._name = name
        self._reads_calls = calls
        self._state: Literal["begin", "reasoning", "text"] = "reasoning" if thinking else "begin"
        if keeps_reasoning:
            self._state = "text"
        self._unread = ""
        self._space = ""
        self._hides_space = not keeps_reasoning
        self._reasoning: list[str] | None = [] if thinking else None
        self._texts: list[str] = []
        self._calls: list[CanonicalCall] = []
        self._splitter = CallSplitter()

    @property
    def reply(self) -> CanonicalMessage:
        """What has been told so far, as a message."""
        return CanonicalMessage(
            role="assistant",
            content=joined(self._texts),
            calls=tuple(self._calls),
            reasoning=None if self._reasoning is None else "".join(self._reasoning),
        )

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what it certainly is."""
        self._unread += text
        return self._read(last=False)

    def finish(self) -> list[Piece]:
        """Return what was held back, now that nothing follows."""
        pieces = self._read(last=True)
        if self._state == "text" and not self._calls and self._space:
            pieces.append(TextPiece(self._space))
            self._texts.append(self._space)
        return pieces

    def _read(self, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "begin":
            self._begin(last=last)
        if self._state == "reasoning":
            told, closed = self._until(THOUGHT, last=last)
            if told and (text := self._spaced(told)):
                pieces.append(ReasoningPiece(text))
                self._reasoning = [*(self._reasoning or []), text]
            if closed:
                self._state, self._space, self._hides_space = "text", "", True
        if self._state == "text":
            text, self._unread = self._unread, ""
            self._read_text(text, pieces, last=last)
        return pieces

    def _begin(self, *, last: bool) -> None:
        """Tell reasoning from text by the first letters."""
        first = self._unread.lstrip()
        if first.startswith(THINK):
            self._state, self._unread = "reasoning", first.removeprefix(THINK)
            self._reasoning = []
        elif last or (first and not THINK.startswith(first)):
            self._state, self._hides_space = "text", False

    def _read_text(self, text: str, pieces: list[Piece], *, last: bool) -> None:
        """Read what is said and called."""
        if not self._reads_calls:
            pieces += self._say(text) if text else []
            return
        for piece in self._splitter.push(text, last=last):
            if isinstance(piece, str):
                pieces += self._say(piece)
                continue
            for read in piece:
                call = CanonicalCall(*read, f"{self._name}{len(self._calls):03}")
                self._calls.append(call)
                pieces.append(call)
            self._space, self._hides_space = "", True

    def _until(self, mark: str, *, last: bool) -> tuple[str, bool]:
        """Take what stands before a mark, and the mark; hold back what may begin one."""
        before, found, after = self._unread.partition(mark)
        if found:
            self._unread = after
            return before, True
        held = 0 if last else overlap(before, mark)
        self._unread = before[len(before) - held :]
        return before[: len(before) - held], False

    def _say(self, text: str) -> list[Piece]:
        said = self._spaced(text)
        if not said:
            return []
        self._texts.append(said)
        return [TextPiece(said)]

    def _spaced(self, text: str) -> str:
        """Return what can be told of a text: white space at its end waits for what follows."""
        whole = self._space + text
        if self._hides_space:
            whole = whole.lstrip()
        told = whole.rstrip()
        self._space = whole[len(told) :]
        self._hides_space = self._hides_space and not told
        return told


def call_name(request: str, choice: int = 0) -> str:
    """Return what the ids of the calls in a served answer begin with, wherever they are read."""
    return f"call_{request[:20]}" if not choice else f"call_{request[:17]}{choice:03}"


def parse_reply(text: str, name: str, *, calls: bool, thinking: bool = False) -> CanonicalMessage:
    """Read a whole answer; see `ReplyReader`."""
    reader = ReplyReader(name, calls=calls, thinking=thinking)
    reader.push(text)
    reader.finish()
    return reader.reply
