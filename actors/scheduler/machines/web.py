"""Requests to a cluster that is asked over HTTP: its answer, or what kept it from answering."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, NamedTuple

from ....schemas.wire.errors import DeadlineError, PlacementError

_SILENCE_S = 20.0
_DEADLINE_S = 30.0
_MAX_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16


class WebReply(NamedTuple):
    """What a cluster answered."""

    status: int
    text: str

    def last_line(self) -> str:
        """Return the sentence in which a traceback, or a plain text, says what is wrong."""
        lines = [line.strip() for line in self.text.splitlines() if len(line.strip()) > 1]
        return lines[-1] if lines else f"HTTP {self.status} and no word"


async def request(
    method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, hint: str
) -> WebReply:
    """Ask; an answer of any status is one.

    Raises DeadlineError, and PlacementError with the reason where nobody answers; `hint` says what
    a person may do then.
    """
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(  # noqa: S310  the configuration takes http and https alone
        url, data, {"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        return await asyncio.to_thread(_answer, asked)
    except TimeoutError as error:
        raise DeadlineError(f"{url} did not answer in time", hint=hint) from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise DeadlineError(f"{url} did not answer in time", hint=hint) from error
        raise PlacementError(f"{url} cannot be asked: {reason}", hint=hint) from error


def _answer(asked: urllib.request.Request) -> WebReply:
    ends = time.monotonic() + _DEADLINE_S
    try:
        with urllib.request.urlopen(asked, timeout=_SILENCE_S) as answer:  # noqa: S310  see above
            return WebReply(answer.status, _text(answer, ends))
    except urllib.error.HTTPError as error:
        with error:
            return WebReply(error.code, _text(error, ends))


def _text(answer: Any, ends: float) -> str:
    """Read an answer to its end; one that is endless, by its size or by its pace, is none."""
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(_CHUNK_BYTES):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES or time.monotonic() > ends:
            raise TimeoutError
    return b"".join(parts).decode(errors="replace")
