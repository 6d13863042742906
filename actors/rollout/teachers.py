"""Teachers outside the learner: they score a group before it is appended to the log.

The log holds their scores, so a run remains a function of its log. If a teacher is unavailable, the
generator of the task reports it and waits, while its other tasks continue.

A teacher is an inference job, or a model behind an OpenAI-compatible API. Both score the policy's
own token ids with one prefill, at temperature 1. Temporary failures (unreachable, busy, slow) are
raised as TeacherAway and retried; others end the run with the reason. A teacher's first prompt may
have a text of the game that the policy does not see.
"""

import asyncio
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias, cast

import httpx
import numpy as np

from ...broker.client.connection import Broker
from ...broker.client.faults import ConnectionLost
from ...broker.client.parts import ask_parts
from ...envs.user_http import http_client, shown_body
from ...schemas import infer
from ...schemas.config.algorithm import AlgorithmConfig, endpoint, served_job
from ...schemas.generation import Decoding
from ...schemas.job import TEACHER_KEY
from ...schemas.rollout import Group, Teaching, Trajectory
from ...schemas.wire.array import IntVector
from ...schemas.wire.errors import (
    BrokerError,
    BusyError,
    ConfigError,
    DataError,
    DeadlineError,
    NobodyAnswersError,
    TinkermqError,
)
from ...schemas.wire.subjects import JobScope
from ..engine.engine import PromptScores
from ..policy.chat import ChatMessage, ChatTokenizer
from ..runtime import JobContext
from .template_facts import first_prompt

# -- the teachers ----------------------------------------------------------------------------------

ANSWER_S = 600.0
"""Time limit of one answer."""
_CONNECT_S = 10.0
_MOST_BYTES = 512 << 20
"""Maximum size of an API's answer; 8,192 tokens with 256 alternatives each are smaller."""
_PASSING = frozenset({404, 408, 409, 425, 429})
"""Statuses of an API that may be temporary, for example while it loads a model."""
_COMPARED = 64
"""Number of tokens whose texts are compared with those of an API."""


class TeacherAway(TinkermqError):
    """A teacher is unavailable; the request is retried."""

    code = "teacher_away"


class JobTeacher:
    """A job that serves a model, reached through the broker."""

    def __init__(self, name: str, broker: Broker, scope: JobScope, chat: ChatTokenizer) -> None:
        """`name` is the teacher in the configuration; `chat` has the policy's tokens."""
        self._name = name
        self._broker = broker
        self._scope = scope
        self._chat = chat

    async def score(self, ids: IntVector, top_k: int) -> PromptScores:
        """Request scores from any server of the job."""
        try:
            return await self._request_scores(ids, top_k)
        except (BusyError, DeadlineError, NobodyAnswersError, ConnectionLost, BrokerError) as error:
            raise TeacherAway(error.message, hint="see whether it runs: `tinkermq ps`") from error

    async def _request_scores(self, ids: IntVector, top_k: int) -> PromptScores:
        request = infer.CompletionRequest(
            request=uuid.uuid4().hex,
            prompts=[ids.tolist()],
            prompt_logprobs=top_k,
            decoding=Decoding(max_tokens=0),
            deadline_s=ANSWER_S,
        )
        scores: list[infer.PromptScore] = []
        parts = ask_parts(
            self._broker,
            self._scope.infer("complete"),
            request,
            infer.InferPart,
            waiting_for=f"the teacher {self._name}",
            cancel=(self._scope.infer("cancel"), infer.CancelInference(request=request.request)),
        )
        async with aclosing(parts):
            async for part in parts:
                if part.vocabulary and part.vocabulary != self._chat.vocabulary():
                    raise other_tokenizer(self._name)
                scores += part.scores
        return _whole(scores, len(ids), self._name)

    async def close(self) -> None:
        """Nothing is open."""


class EndpointTeacher:
    """A model behind an API that returns `prompt_logprobs`, as vLLM's and ours do."""

    def __init__(self, base: str, model: str, chat: ChatTokenizer) -> None:
        """`base` is the URL up to `/v1`."""
        self._url = f"{base}/completions"
        self._model = model
        self._chat = chat
        key = os.environ.get(TEACHER_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(ANSWER_S, connect=_CONNECT_S)
        self._client = http_client(headers=headers, timeout=timeout)

    async def score(self, ids: IntVector, top_k: int) -> PromptScores:
        """Request scores from the API."""
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
            failure = f"{self._url}: {type(error).__name__}: {error}"
            raise TeacherAway(
                failure, hint="see whether it is up and reachable from here"
            ) from error
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
        body = shown_body(answer.decode(errors="replace"))
        failure = f"{self._url} answered {status}: {body}"
        if status >= 500 or status in _PASSING:
            raise TeacherAway(failure)
        raise ConfigError(
            f"the teacher refuses requests: {failure}",
            hint=f"check model and key; the run has the submitter's ${TEACHER_KEY}, encrypted",
        )

    def _read(self, answer: bytes, ids: IntVector, top_k: int) -> PromptScores:
        try:
            reply: Any = json.loads(answer)
            rows: list[Any] = reply["choices"][0]["prompt_logprobs"]
            ours = cast("dict[str, Any]", reply.get("tinkermq") or {})
            vocabulary = ours.get("vocabulary")
            if vocabulary and vocabulary != self._chat.vocabulary():
                raise other_tokenizer(self._url)
            return _read_rows(rows, ids, top_k, self._chat, self._url)
        except TinkermqError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{self._url} returned no prompt_logprobs: "
                f"{shown_body(answer.decode(errors='replace'))}",
                hint="a teacher's API must support them, like vLLM's server",
            ) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def other_tokenizer(name: str) -> ConfigError:
    """Return the error of a teacher whose tokenizer differs from the policy's."""
    return ConfigError(
        f"the teacher {name} has another tokenizer than the policy",
        hint="a teacher scores the policy's token ids: use a model of the same family",
    )


def _whole(pieces: list[infer.PromptScore], num: int, name: str) -> PromptScores:
    rows = sorted(pieces, key=lambda piece: piece.start)
    if sum(len(piece.logprobs) for piece in rows) != num:
        raise TeacherAway(f"the teacher {name} scored only some of the {num} tokens")
    columns = ("logprobs", "top_ids", "top_logprobs")
    return PromptScores(*(np.concatenate([getattr(row, key) for row in rows]) for key in columns))


def _read_rows(
    rows: list[Any], ids: IntVector, top_k: int, chat: ChatTokenizer, name: str
) -> PromptScores:
    """Read the row of each token: `{id: {logprob, rank, decoded_token}}`."""
    num = len(ids)
    if len(rows) != num:
        raise other_tokenizer(name)
    scores = PromptScores.unknown(num, top_k)
    for place in range(1, num):
        row = cast("dict[str, Any]", rows[place])
        own = row.get(str(ids[place]))
        if own is None:
            raise other_tokenizer(name)
        if place <= _COMPARED and not _is_same(own.get("decoded_token"), int(ids[place]), chat):
            raise other_tokenizer(name)
        scores.logprobs[place] = own["logprob"]
        if top_k:
            pairs = [(float(entry["logprob"]), int(token)) for token, entry in row.items()]
            best = sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:top_k]
            if len(best) < top_k:
                raise ValueError(f"{len(best)} tokens were returned for one position")
            scores.top_logprobs[place] = [logprob for logprob, _ in best]
            scores.top_ids[place] = [token for _, token in best]
    return scores


def _is_same(text: Any, token: int, chat: ChatTokenizer) -> bool:
    """Whether a token's text equals that of the policy's tokenizer.

    Only plain words are compared, since servers write blanks and partial characters differently.
    """
    if not isinstance(text, str):
        return True
    own, theirs = (side.strip(" \u0120\u2581") for side in (chat.token_text(token), text))
    return not (own.isascii() and theirs.isascii() and own.isalnum() and theirs.isalnum()) or (
        own == theirs
    )


_AT_ONCE = 32
"""Maximum number of episodes that one generator has scored concurrently."""
_FIRST_S, _LONGEST_S = 0.5, 20.0
"""First and longest pause between two tries."""


Teacher: TypeAlias = JobTeacher | EndpointTeacher


class AskedTeachers:
    """The teachers outside the learner whose scores generators request; usually none."""

    def __init__(self, context: JobContext, chat: ChatTokenizer) -> None:
        """Raises ConfigError if a package that a teacher needs is not installed."""
        algorithm = context.config.algorithm
        self._context = context
        self._top_k = algorithm.teacher_top_k if algorithm.teacher_loss == "forward_kl" else 0
        self._loaded = frozenset(algorithm.teachers) - frozenset(algorithm.asked_teachers)
        names = dict.fromkeys(algorithm.asked_teachers.values())
        by_name = {name: _open(name, context, chat) for name in names}
        self._of_source = {s: (name, by_name[name]) for s, name in algorithm.asked_teachers.items()}
        self._all = list(by_name.values())
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._away: dict[str, float] = {}

    async def teach(self, group: Group) -> Group:
        """Return a group with its teachers' scores; waits for unavailable teachers.

        Raises ConfigError for a teacher that does not fit this policy.
        """
        if not self._of_source:
            return group
        taught = await asyncio.gather(*(self._taught(item) for item in group.trajectories))
        return group.model_copy(update={"trajectories": list(taught)})

    async def _taught(self, item: Trajectory) -> Trajectory:
        named = self._teacher_of(item.data_source)
        if named is None or item.greedy:
            return item
        teaching = item.teaching or Teaching()
        ids, places = _read_by_teacher(item, teaching.prompt)
        async with self._places:
            scores = await self._request_scores(*named, ids)
        score_fields = {
            "logprobs": scores.logprobs[places],
            **(
                {"top_ids": scores.top_ids[places], "top_logprobs": scores.top_logprobs[places]}
                if self._top_k
                else {}
            ),
        }
        return item.model_copy(update={"teaching": teaching.model_copy(update=score_fields)})

    def _teacher_of(self, source: str) -> tuple[str, Teacher] | None:
        if source in self._loaded:
            return None
        return self._of_source.get(source, self._of_source.get(""))

    async def _request_scores(self, name: str, teacher: Teacher, ids: IntVector) -> PromptScores:
        pause_s, since = _FIRST_S, 0.0
        while True:
            try:
                scores = await teacher.score(ids, self._top_k)
            except TeacherAway as away:
                since = since or time.time()
                await self._report_away(name, away)
                with self._context.missing(f"the teacher {name}: {away.message[:200]}", since):
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
            else:
                await self._report_back(name)
                return scores

    async def _report_away(self, name: str, away: TeacherAway) -> None:
        """Report an unavailable teacher once, however many episodes wait for it."""
        if name not in self._away:
            self._away[name] = time.time()
            await self._context.event("teacher_away", f"the teacher {name}: {away}")

    async def _report_back(self, name: str) -> None:
        if (since := self._away.pop(name, None)) is not None:
            away_s = time.time() - since
            await self._context.event("teacher_back", f"the teacher {name}, after {away_s:.0f} s")

    async def close(self) -> None:
        """Close all connections."""
        for teacher in self._all:
            await teacher.close()


def _open(name: str, context: JobContext, chat: ChatTokenizer) -> Teacher:
    job = served_job(name)
    if job is None:
        return EndpointTeacher(*endpoint(name), chat)
    scope = JobScope(context.scope.user, context.record.teachers.get(name, job))
    return JobTeacher(name, context.broker, scope, chat)


def _read_by_teacher(item: Trajectory, prompt: IntVector | None) -> tuple[IntVector, Sequence[int]]:
    """Return the input tokens of a teacher, and the positions of the generated ones."""
    generated = np.flatnonzero(item.mask)
    end = int(generated[-1]) + 1
    if prompt is None:
        return item.token_ids[:end], generated.tolist()
    first = int(generated[0])
    ids = np.concatenate([prompt, item.token_ids[first:end]]).astype(np.int32)
    return ids, (generated - first + len(prompt)).tolist()


# -- prompts of teachers ---------------------------------------------------------------------------


class TeacherContext:
    """Renders the first prompts of teachers."""

    def __init__(self, key: str, max_tokens: int, chat: ChatTokenizer) -> None:
        """`key` names the text in a game's `info`, of at most `max_tokens`."""
        self._key = key
        self._max_tokens = max_tokens
        self._chat = chat

    @classmethod
    def of(cls, config: AlgorithmConfig, chat: ChatTokenizer) -> "TeacherContext | None":
        """Return the configured context; None: teachers read the policy's prompt."""
        if config.teacher_context is None:
            return None
        return cls(config.teacher_context, config.teacher_context_tokens, chat)

    def prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        num_prompt: int,
        info: Mapping[str, Any],
        seconds: float | None = None,
    ) -> IntVector:
        """Return int32[P]: the first prompt with the text in the game's last `info`.

        `num_prompt` is the length of the policy's prompt, `seconds` its time. Raises DataError if
        the game has no such text, or one that is too long.
        """
        text = info.get(self._key)
        if not isinstance(text, str) or not text:
            raise DataError(
                f"algorithm.teacher_context={self._key}: the game's `info` has "
                f"{text!r:.40} under this name at the episode's end",
                hint=f"it must be a text; there are {', '.join(sorted(map(str, info)))[:200]}",
            )
        chat = self._chat if seconds is None else self._chat.at(seconds)
        prompt = first_prompt(chat, with_text(messages, text), tools)
        more = len(prompt) - num_prompt
        if more > self._max_tokens:
            raise DataError(
                f"the teacher's prompt is {more} tokens longer than the policy's, "
                f"algorithm.teacher_context_tokens is {self._max_tokens}",
                hint=f"raise it to {more}, with learner.max_row_tokens, or shorten the game's text",
            )
        return prompt


def with_text(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    """Return messages with a text added to the user's last message, or as a new one."""
    last = messages[-1]
    if last.get("role") != "user":
        return [*messages, {"role": "user", "content": text}]
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:-1], {**last, "content": f"{content}\n\n{text}"}]
    parts = [*(content or ()), {"type": "text", "text": f"\n\n{text}"}]
    return [*messages[:-1], {**last, "content": parts}]
