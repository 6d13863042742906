"""A model behind an OpenAI-compatible URL, asked with what Python has itself."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import stamina

from ...envs.chat_messages import with_text_arguments
from ...schemas.wire.errors import AuthError, ConfigError, EngineError, NotFoundError
from ...schemas.wire.images import with_data_urls

if TYPE_CHECKING:
    from ...envs.game import ChatMessage

KEY_VARIABLE = "OPENAI_API_KEY"
ANSWER_TIMEOUT_S = 300.0
_ATTEMPTS = 6
_SHOWN = 300


@dataclass(frozen=True)
class Endpoint:
    """Where a model answers."""

    url: str
    """Base URL: `http://host:8000/v1`."""
    model: str
    """Name of the model there."""

    @classmethod
    def find(cls, url: str, model: str | None) -> "Endpoint":
        """Name the model, or take the only one that the endpoint serves.

        The key is that of $OPENAI_API_KEY. Raises ConfigError, NotFoundError, AuthError.
        """
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no URL", hint="write http://HOST:PORT/v1")
        if model is not None:
            return cls(url, model)
        served = [str(one["id"]) for one in _send(f"{url}/models", None).get("data", [])]
        if len(served) != 1:
            raise ConfigError(
                f"{url} serves {len(served)} models: {', '.join(served) or 'none'}",
                hint="name one: --model-name NAME",
            )
        return cls(url, served[0])

    def answer(self, messages: "Sequence[ChatMessage]", options: Mapping[str, Any]) -> "ChatAnswer":
        """Return the model's answer to a conversation. Raises as `find` does, EngineError."""
        told = [with_text_arguments(message) for message in with_data_urls(messages)]
        body = {"model": self.model, "messages": told, **options}
        reply = _send(f"{self.url}/chat/completions", body)
        try:
            choice = reply["choices"][0]
            usage: dict[str, Any] = reply.get("usage") or {}
            tokens = int(usage.get("completion_tokens") or 0)
            text = str(choice["message"].get("content") or "")
            cut = choice.get("finish_reason") == "length"
            return ChatAnswer(text, tokens, str(reply.get("model") or self.model), cut)
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"{self.url} gave no answer: {str(reply)[:_SHOWN]}") from error


@dataclass(frozen=True)
class ChatAnswer:
    """One answer of a model."""

    text: str
    num_tokens: int
    model: str
    cut: bool = False
    """It ends at its limit of tokens."""


class _Transient(Exception):
    """The endpoint may answer when it is asked again."""


def _send(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """Ask an endpoint, again while it is busy; return its JSON answer."""
    try:
        for attempt in stamina.retry_context(on=_Transient, attempts=_ATTEMPTS, timeout=None):
            with attempt:
                return _send_once(url, body)
    except _Transient as error:
        raise NotFoundError(
            f"{url} does not answer: {error}", hint="see whether the model is served there"
        ) from error
    raise AssertionError("an attempt returns or raises")


def _send_once(url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY_VARIABLE):
        headers["Authorization"] = f"Bearer {key}"
    try:
        data = None if body is None else json.dumps(body).encode()
    except TypeError as error:
        raise ConfigError(
            f"the conversation holds what is no text: {error}",
            hint="serve the model with `tinkermq serve` and play with `tinkermq infer`",
        ) from error
    request = urllib.request.Request(url, data, headers)  # noqa: S310 - http(s), see `find`
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:  # noqa: S310 - http(s), see `find`
            return cast("dict[str, Any]", json.loads(reply.read()))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read().decode(errors="replace")[:_SHOWN]
        raise _refusal(url, error.code, said) from error
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise _Transient(str(getattr(error, "reason", error))) from error
    except ValueError as error:
        raise EngineError(f"{url} answered something else than JSON: {error}") from error


def _refusal(url: str, code: int, said: str) -> Exception:
    if code == 429 or code >= 500:
        return _Transient(f"{code} {said}")
    if code in (401, 403):
        return AuthError(f"{url} refuses the key: {said}", hint=f"set ${KEY_VARIABLE}")
    return ConfigError(
        f"{url} answered {code}: {said}", hint="see the endpoint's own documentation"
    )
