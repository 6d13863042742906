"""Text of tokens that arrive one by one, up to a stop text. Pure, apart from the tokenizer.

A character may be spread over several tokens, and a stop text over several as well: text is told
as soon as neither can change it any more.
"""

from collections.abc import Callable, Sequence

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
        if found := self._places(text):
            place, number = min(found)
            self.stopped, self._held, self.stop = True, "", self._stops[number]
            return text[:place]
        kept = 0 if final else self._longest_start(text)
        self._held = text[len(text) - kept :] if kept else ""
        return text[: len(text) - kept]

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
