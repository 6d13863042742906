"""Teachers that are asked: a job that serves, and a model behind an OpenAI-compatible API.

Both score the policy's own token ids by one prefill, at temperature 1. What is passing (nobody is
there, busy, slow) is told as TeacherAway and asked again; what is not ends the run with its reason.
"""

import asyncio
import json
import os
import uuid
from contextlib import aclosing
from typing import Any, Protocol, cast

import numpy as np

from ....broker.client.connection import Broker, ConnectionLost
from ....broker.client.parts import ask_parts
from ....schemas.infer import (
    CancelInference,
    CompletionRequest,
    Decoding,
    InferPart,
    PromptScore,
)
from ....schemas.secret import TEACHER_KEY
from ....schemas.wire.errors import (
    BrokerError,
    BusyError,
    ConfigError,
    DeadlineError,
    NobodyAnswersError,
    TinkermqError,
)
from ....schemas.wire.subjects import JobScope
from ..engine.engine import IntVector, PromptScores
from ..episodes.chat import ChatTokenizer

ANSWER_S = 600.0
"""The longest time that one answer may take."""
_CONNECT_S = 10.0
_MOST_BYTES = 512 << 20
"""Of one answer of an API: more than 8,192 tokens with 256 others in the place of each."""
_PASSING = frozenset({404, 408, 409, 425, 429})
"""Statuses of an API that may be another one later: its model is being loaded, it is busy."""
_COMPARED = 64
"""Tokens whose texts are compared with those that an API tells."""


class TeacherAway(TinkermqError):
    """A teacher does not answer now; it is asked again."""

    code = "teacher_away"


class Teacher(Protocol):
    """Something that scores tokens."""

    async def score(self, ids: IntVector, top_k: int) -> PromptScores:
        """Return the log-probs of tokens, each behind those before it.

        Raises TeacherAway for what may pass, ConfigError for what does not.
        """
        ...

    async def close(self) -> None:
        """Let go of what is open."""
        ...


class JobTeacher:
    """A job that serves a model, asked through the broker."""

    def __init__(self, name: str, broker: Broker, scope: JobScope, chat: ChatTokenizer) -> None:
        """`name` is the teacher in the configuration; `chat` has the policy's tokens."""
        self._name = name
        self._broker = broker
        self._scope = scope
        self._chat = chat

    async def score(self, ids: IntVector, top_k: int) -> PromptScores:
        """Ask any server of the job."""
        try:
            return await self._ask(ids, top_k)
        except (BusyError, DeadlineError, NobodyAnswersError, ConnectionLost, BrokerError) as error:
            raise TeacherAway(error.message, hint="see whether it runs: `tinkermq ps`") from error

    async def _ask(self, ids: IntVector, top_k: int) -> PromptScores:
        request = CompletionRequest(
            request=uuid.uuid4().hex,
            prompts=[ids.tolist()],
            prompt_logprobs=top_k,
            decoding=Decoding(max_tokens=0),
            deadline_s=ANSWER_S,
        )
        told: list[PromptScore] = []
        parts = ask_parts(
            self._broker,
            self._scope.infer("complete"),
            request,
            InferPart,
            waiting_for=f"the teacher {self._name}",
            cancel=(self._scope.infer("cancel"), CancelInference(request=request.request)),
        )
        async with aclosing(parts):
            async for part in parts:
                if part.vocabulary and part.vocabulary != self._chat.vocabulary():
                    raise other_tokenizer(self._name)
                told += part.scores
        return _whole(told, len(ids), self._name)

    async def close(self) -> None:
        """Nothing is open."""


class EndpointTeacher:
    """A model behind an API that tells `prompt_logprobs`, as vLLM's and ours do."""

    def __init__(self, base: str, model: str, chat: ChatTokenizer) -> None:
        """`base` is the URL up to `/v1`. Raises ConfigError where httpx is not installed."""
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(
                f"algorithm.teacher={base} needs httpx, which is not installed",
                hint="pip install 'tinkermq[rewards]' where generators run",
            ) from error
        self._url = f"{base}/completions"
        self._model = model
        self._chat = chat
        key = os.environ.get(TEACHER_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=_CONNECT_S)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout)

    async def score(self, ids: IntVector, top_k: int) -> PromptScores:
        """Ask the API."""
        import httpx

        body = {
            "model": self._model,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
        }
        try:
            status, answer = await self._post(body)
        except httpx.TransportError as error:
            told = f"{self._url}: {type(error).__name__}: {error}"
            raise TeacherAway(told, hint="see whether it is up and reachable from here") from error
        if status >= 300:
            self._refuse(status, answer)
        return await asyncio.to_thread(self._read, answer, ids, top_k)

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        answer = bytearray()
        async with self._client.stream("POST", self._url, json=body) as reply:
            async for piece in reply.aiter_bytes():
                answer += piece
                if len(answer) > _MOST_BYTES:
                    raise ConfigError(
                        f"{self._url} answered more than {_MOST_BYTES >> 20} MiB",
                        hint="lower algorithm.teacher_top_k",
                    )
            return reply.status_code, bytes(answer)

    def _refuse(self, status: int, answer: bytes) -> None:
        told = f"{self._url} answered {status}: {answer[:300].decode(errors='replace')}"
        if status >= 500 or status in _PASSING:
            raise TeacherAway(told)
        raise ConfigError(
            f"the teacher cannot be asked: {told}",
            hint=f"see model and key: ${TEACHER_KEY} of who submits travels with the job, sealed",
        )

    def _read(self, answer: bytes, ids: IntVector, top_k: int) -> PromptScores:
        try:
            found: Any = json.loads(answer)
            rows: list[Any] = found["choices"][0]["prompt_logprobs"]
            ours = cast("dict[str, Any]", found.get("tinkermq") or {})
            vocabulary = ours.get("vocabulary")
            if vocabulary and vocabulary != self._chat.vocabulary():
                raise other_tokenizer(self._url)
            return _read_rows(rows, ids, top_k, self._chat, self._url)
        except TinkermqError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._url} told no prompt_logprobs: {answer[:200].decode(errors='replace')}",
                hint="a teacher's API must have them, as vLLM's server does",
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def other_tokenizer(name: str) -> ConfigError:
    """Return what is raised of a teacher that has other tokens than the policy."""
    return ConfigError(
        f"the teacher {name} has another tokenizer than the policy",
        hint="a teacher scores the policy's own token ids: take a model of the same family",
    )


def _whole(told: list[PromptScore], num: int, name: str) -> PromptScores:
    rows = sorted(told, key=lambda piece: piece.start)
    if sum(len(piece.logprobs) for piece in rows) != num:
        raise TeacherAway(f"the teacher {name} told not all of the {num} tokens")
    columns = ("logprobs", "top_ids", "top_logprobs")
    return PromptScores(*(np.concatenate([getattr(one, key) for one in rows]) for key in columns))


def _read_rows(
    rows: list[Any], ids: IntVector, top_k: int, chat: ChatTokenizer, name: str
) -> PromptScores:
    """Read what stands for each token: `{id: {logprob, rank, decoded_token}}`."""
    num = len(ids)
    if len(rows) != num:
        raise other_tokenizer(name)
    scores = PromptScores(
        np.full(num, np.nan, np.float32),
        np.zeros((num, top_k), np.int32),
        np.full((num, top_k), np.nan, np.float32),
    )
    for place in range(1, num):
        row = cast("dict[str, Any]", rows[place])
        own = row.get(str(ids[place]))
        if own is None:
            raise other_tokenizer(name)
        if place <= _COMPARED and not _is_same(own.get("decoded_token"), int(ids[place]), chat):
            raise other_tokenizer(name)
        scores.logprobs[place] = own["logprob"]
        if top_k:
            pairs = [(float(one["logprob"]), int(token)) for token, one in row.items()]
            best = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_k]
            if len(best) < top_k:
                raise ValueError(f"{len(best)} tokens are told in the place of one")
            scores.top_logprobs[place] = [logprob for logprob, _ in best]
            scores.top_ids[place] = [token for _, token in best]
    return scores


def _is_same(text: Any, token: int, chat: ChatTokenizer) -> bool:
    """Whether a token has the text that the policy's tokenizer has for it, as far as texts tell.

    Only plain words are compared: servers write blanks and halves of characters in several ways.
    """
    if not isinstance(text, str):
        return True
    own, theirs = (one.strip(" \u0120\u2581") for one in (chat.token_text(token), text))
    return not (own.isascii() and theirs.isascii() and own.isalnum() and theirs.isalnum()) or (
        own == theirs
    )
