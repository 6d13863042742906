"""The answers of the three APIs, as one proxy gives them: by parts, or whole."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..dialects.answer import Answered, AnswerHead, TokenLogprob, Usage, event
from ..dialects.chat import ChatCompletionAnswer, read_chat
from ..dialects.messages_api import MessagesAnswer, read_messages
from ..dialects.request import ModelRequest
from ..dialects.responses import ResponseAnswer, read_response
from ..replies import Piece
from .errors import Api

_WAITING = ": waiting\n\n"


class Wording(Protocol):
    """An answer in the words of one API."""

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first events."""
        ...

    def push(self, piece: Piece, choice: int) -> Iterator[str]:
        """Take more of a choice; yield it as events."""
        ...

    def take(self, piece: Piece, choice: int) -> None:
        """Take more of a choice, of an answer that is told as one object."""
        ...

    def end(
        self, ends: Sequence[Answered], usage: Usage, extra: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the last events, the one that says that nothing follows included."""
        ...

    def fail(self, told: dict[str, Any]) -> str:
        """Return the event that ends an answer which cannot go on."""
        ...

    def whole(self, ends: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object, once it is at its end."""
        ...


class ChatWording:
    """Chat Completions."""

    def __init__(self, head: AnswerHead, asked: ModelRequest) -> None:
        """Word the answer to a request."""
        self._answer = ChatCompletionAnswer(
            head, asked.num_choices, include_usage=asked.include_usage
        )

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first events."""
        del usage
        return self._answer.start()

    def push(self, piece: Piece, choice: int) -> Iterator[str]:
        """Take more of a choice; yield it as events."""
        return self._answer.push(piece, choice)

    def note_logprobs(self, told: Sequence[TokenLogprob], choice: int) -> Iterator[str]:
        """Take the log-probs of new tokens; yield them as events."""
        return self._answer.note_logprobs(told, choice)

    def take(self, piece: Piece, choice: int) -> None:
        """Take more of a choice, of an answer that is told as one object."""
        self._answer.take(piece, choice)

    def end(
        self, ends: Sequence[Answered], usage: Usage, extra: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the last events, [DONE] included."""
        for choice, answered in enumerate(ends):
            yield from self._answer.finish(answered, choice)
        yield from self._answer.end(usage, extra)

    def fail(self, told: dict[str, Any]) -> str:
        """Return the event that ends an answer which cannot go on."""
        return event(told)

    def whole(self, ends: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        for choice, answered in enumerate(ends):
            self._answer.close(answered, choice)
        return self._answer.whole(usage)


class SingleWording:
    """Responses and Messages, which know one choice."""

    def __init__(self, answer: ResponseAnswer | MessagesAnswer) -> None:
        """Word an answer."""
        self._answer = answer

    def start(self, usage: Usage) -> Iterator[str]:
        """Yield the first events."""
        return self._answer.start(usage)

    def push(self, piece: Piece, choice: int) -> Iterator[str]:
        """Take more of it; yield it as events."""
        del choice
        return self._answer.push(piece)

    def take(self, piece: Piece, choice: int) -> None:
        """Take more of it, of an answer that is told as one object."""
        for _ in self.push(piece, choice):
            pass

    def end(
        self, ends: Sequence[Answered], usage: Usage, extra: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield the last events."""
        return self._answer.finish(ends[0], usage, extra)

    def fail(self, told: dict[str, Any]) -> str:
        """Return the event that ends an answer which cannot go on."""
        return self._answer.fail(told)

    def whole(self, ends: Sequence[Answered], usage: Usage) -> dict[str, Any]:
        """Return the answer as one object."""
        for _ in self._answer.finish(ends[0], usage):
            pass
        return self._answer.whole(ends[0], usage)


@dataclass(frozen=True)
class ModelApi:
    """An API: how its requests are read, and its answers worded."""

    api: Api
    prefix: str
    """Of an answer's id."""
    read: Callable[[Any], ModelRequest]
    word: Callable[[AnswerHead, ModelRequest], Wording]
    waiting: str = _WAITING
    """What is sent on a stream that has nothing to say."""

    def id_of(self, name: str) -> str:
        """Return the id of an answer whose tool calls' ids begin with `name`."""
        return f"{self.prefix}_{name.strip('_-')}"


def _response(head: AnswerHead, asked: ModelRequest) -> Wording:
    # What is sampled with the job says, not the program.
    echo = {**asked.echo, "temperature": None, "top_p": None}
    return SingleWording(ResponseAnswer(head, custom_tools=asked.custom_tools, echo=echo))


def _messages(head: AnswerHead, asked: ModelRequest) -> Wording:
    del asked
    return SingleWording(MessagesAnswer(head))


CHAT = ModelApi("chat", "chatcmpl", read_chat, ChatWording)
RESPONSES = ModelApi("responses", "resp", read_response, _response)
MESSAGES = ModelApi("messages", "msg", read_messages, _messages, event({"type": "ping"}, "ping"))
