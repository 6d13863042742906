"""Sources of rewards over HTTP and the broker: an endpoint of the user's, or a model that judges.

A source receives a `Case` and returns a `Score`. Requests are retried while the endpoint is busy or
unreachable.
"""

import json
import math
import os
import re
import string
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import httpx
import stamina
import structlog

from ..broker.client.connection import Broker
from ..broker.client.faults import ConnectionLost
from ..broker.client.parts import ask_parts
from ..broker.jobs import JobStore
from ..schemas.chat_messages import json_default
from ..schemas.config.sections import RewardConfig
from ..schemas.generation import Decoding
from ..schemas.infer import CancelInference, ChatRequest, InferPart
from ..schemas.model_apis.canonical import ModelMessage
from ..schemas.wire import errors
from ..schemas.wire.foreign import plain_value, shown
from ..schemas.wire.images import plain_text
from ..schemas.wire.subjects import JobScope
from .game import ChatMessage
from .reasoning import behind_reasoning
from .user_http import http_client, shown_body

_VALUE_KEYS = ("score", "reward")


@dataclass
class Case:
    """The input of a source: the policy's answer, and all other data of the episode."""

    data_source: str
    """The `data_source` of the row."""
    ground_truth: Any
    """The row's gold answer; None for a game that generates its states."""
    extra_info: dict[str, Any]
    """Further data of the row."""
    messages: list[ChatMessage]
    """The conversation so far."""
    solution_str: str = ""
    """The policy's last answer."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The game's `info` of its last step."""
    game_return: float = 0.0
    """Sum of the game's own rewards."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of functions and endpoints."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
            "messages": self.messages,
            "info": self.info,
        }


@dataclass(frozen=True)
class Score:
    """The result of a source."""

    value: float
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further values; numbers become metrics."""


class SourceUnusableError(errors.ConfigError):
    """A source fails for every episode with the same reason: the job must end."""


def read_score(answer: Any, whose: str) -> Score:
    """Read the result of a function or endpoint: a number, or a map with one.

    The map has it as `score` (verl's name) or `reward`. Raises RewardError for anything else,
    naming its source `whose`.
    """
    value, info = answer, cast("dict[str, Any]", {})
    if isinstance(answer, Mapping):
        info = dict(cast("Mapping[Any, Any]", answer))
        value = next((info.pop(key) for key in _VALUE_KEYS if key in info), None)
    number = _number(value)
    if not math.isfinite(number):
        text = shown(cast("object", answer))
        raise errors.RewardError(
            f"{whose} answered {text}, which is not a finite reward",
            hint="answer a number, or a map whose `score` or `reward` is one",
        )
    try:
        return Score(number, plain_value(info, "info") if info else {})
    except errors.MessageError as error:
        raise errors.RewardError(
            f"what {whose} answered beside the reward cannot travel: {error.message}",
            hint=error.hint,
        ) from error


def _number(value: Any) -> float:
    """Return a number of any kind, also NumPy's and torch's, as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


T = TypeVar("T")
_BUSY = frozenset({408, 425, 429})


class RefusedError(errors.RewardError):
    """A request was refused for its content: an equal one would be refused again."""

    def __init__(self, url: str, status: int, text: str, hint: str = "") -> None:
        super().__init__(
            f"{url} refused: status {status}: {shown_body(text)}",
            hint=hint or "see what it expects; env.reward.key_variable names a key",
        )
        self.http_status = status
        self.field = refused_field(text)
        """The field of the request that the endpoint names; empty: none."""


class HttpSource:
    """Posts JSON, and retries while the endpoint is unreachable or busy."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._client: httpx.AsyncClient

    async def start(self) -> None:
        """Open the client; ConfigError without the key."""
        headers: dict[str, str] = {}
        variable = self._config.key_variable
        if variable is not None:
            if not os.environ.get(variable):
                raise errors.ConfigError(
                    f"env.reward.key_variable={variable} is not set",
                    hint="set it in the environment of the environment host",
                )
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        limits = httpx.Limits(max_connections=self._config.max_requests)
        self._client = http_client(headers=headers, timeout=self._config.timeout_s, limits=limits)

    async def stop(self) -> None:
        """Close the client."""
        await self._client.aclose()

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """Return a URL's answer to JSON; RewardError with the reason if it fails."""
        payload = json.dumps(body, default=json_default)
        transient = (httpx.TransportError, _Busy)
        try:
            reply = await again(self._config, transient, lambda: self._try(url, payload))
        except transient as error:
            raise errors.RewardError(
                f"{url} gave no reward in {self._config.tries} tries: "
                f"{type(error).__name__}: {error}",
                hint="see whether it is up and reachable from the environment host",
            ) from error
        if reply.status_code >= 300:
            raise RefusedError(url, reply.status_code, reply.text)
        try:
            return reply.json()
        except ValueError as error:
            raise errors.RewardError(
                f"{url} answered no valid JSON: {shown_body(reply.text)!r}",
                hint='answer {"score": …}',
            ) from error

    async def _try(self, url: str, payload: str) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        reply = await self._client.post(url, content=payload, headers=headers)
        if reply.status_code >= 500 or reply.status_code in _BUSY:
            raise _Busy(f"status {reply.status_code}: {shown_body(reply.text)}")
        return reply


class EndpointSource(HttpSource):
    """Posts a case to a URL, which answers a number or a map with `score` or `reward`."""

    async def score(self, case: Case) -> Score:
        """Post the case."""
        url = self._config.url or ""
        return read_score(await self.post(url, case.arguments()), url)


class _Busy(Exception):
    """The endpoint is busy."""


async def again(
    config: RewardConfig,
    transient: tuple[type[Exception], ...],
    attempt: Callable[[], Awaitable[T]],
) -> T:
    """Retry on some errors, a limited number of times within the reward's own time limit."""
    retrying = stamina.AsyncRetryingCaller(attempts=config.tries, timeout=config.timeout_s)
    return await retrying(transient, attempt)


def refused_field(text: str) -> str:
    """Return the field of a request that a refusal names, or an empty text.

    OpenAI's API says `{"error": {"param": …}}`, others `{"param": …}`, FastAPI's own checks
    `{"detail": [{"loc": ["body", …]}]}`.
    """
    try:
        answer: Any = json.loads(text)
    except ValueError:
        return ""
    outer = cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}
    error, detail = outer.get("error", outer), outer.get("detail")
    param = cast("dict[str, Any]", error).get("param") if isinstance(error, dict) else None
    if param is None and isinstance(detail, list) and detail:
        first = cast("list[Any]", detail)[0]
        loc = cast("dict[str, Any]", first).get("loc") if isinstance(first, dict) else None
        names = [name for name in cast("list[Any]", loc or []) if isinstance(name, str)]
        param = next((name for name in names if name != "body"), None)
    return param.partition("[")[0].partition(".")[0] if isinstance(param, str) else ""


# The judge: an inference job, or a model behind an OpenAI-compatible API.

_JUDGE_PROMPT = """\
You grade answers.

Task:
$question

Reference answer:
$ground_truth

Answer:
$answer

$form"""
_FORM = (
    "End your reply with one line of its own, `Score: N`, and write nothing behind it. N is a "
    "number such as 7 or 7.5, from 0 (wrong) to $scale (right)."
)
_NUMBER = r"(?:[0-9]{1,12}(?:\.[0-9]{1,12})?|\.[0-9]{1,12})"
_SCORE = re.compile(rf"score: *({_NUMBER})", re.IGNORECASE)
_ANY_SCORE = re.compile(r"score:", re.IGNORECASE)
_THINKING = re.compile(
    r"<(think|thinking|thought|reasoning|analysis)>.*?(?:</\1>|\Z)", re.DOTALL | re.IGNORECASE
)
_END_OF_THINKING = re.compile(r"</(?:think|thinking|thought|reasoning|analysis)>", re.IGNORECASE)

_LIMIT, _NEW_LIMIT = "max_tokens", "max_completion_tokens"
_REFUSALS_OF_FIELDS = frozenset({400, 422})
_REFUSALS_OF_ALL = frozenset({401, 403, 404, 405})
"""Statuses of a wrong key, model or URL: all conversations would be refused."""
_MOST_REFUSED = 8
"""Number of refusals without any answer after which the requests count as wrong, not the
conversations."""

_log = structlog.get_logger()


class JudgeSource(HttpSource):
    """A model reads the answer and writes a score."""

    def __init__(
        self, config: RewardConfig, broker: Broker, user: str, job: str | None = None
    ) -> None:
        """`job` is the id of the job `config.judge`; None looks it up."""
        super().__init__(config)
        self._broker = broker
        self._user = user
        self._template = string.Template(config.judge_prompt or _JUDGE_PROMPT)
        self._scope = JobScope(user, job) if job is not None else None
        self._limit_field, self._takes_temperature = _LIMIT, True
        self._is_answered, self._num_refused = False, 0
        self._unusable: SourceUnusableError | None = None

    async def start(self) -> None:
        """Find the judge's job, or open the client of its URL."""
        if self._config.url is not None:
            await super().start()
        elif self._scope is None:
            self._scope = await self._find()

    async def _find(self) -> JobScope:
        record = await JobStore(self._broker).get(self._user, self._config.judge or "")
        if record.kind != "infer":
            raise errors.ConfigError(
                f"env.reward.judge={record.name} is a run of kind {record.kind}, not infer",
                hint=f"`tinkermq serve {record.name}` makes an inference run of it",
            )
        return JobScope(record.user, record.job)

    async def stop(self) -> None:
        """Close the client, if there is one."""
        if self._config.url is not None:
            await super().stop()

    async def score(self, case: Case) -> Score:
        """Send the case to the judge."""
        prompt = self._prompt(case)
        if self._scope is None:
            reply = await self._ask_endpoint(prompt)
        else:
            reply = await self._ask_job(self._scope, prompt)
        return Score(self._worth(reply))

    def _prompt(self, case: Case) -> str:
        scale = f"{self._config.judge_scale:g}"
        turns = [f"{item['role']}: {plain_text(item['content'])}" for item in case.messages]
        first = next((item for item in case.messages if item["role"] == "user"), None)
        return self._template.safe_substitute(
            question="" if first is None else plain_text(first["content"]),
            answer=behind_reasoning(case.solution_str),
            ground_truth=case.ground_truth,
            conversation="\n".join(turns),
            scale=scale,
            form=string.Template(_FORM).substitute(scale=scale),
        )

    def _worth(self, reply: "_Reply") -> float:
        """Return the score of a reply as a share of the best one; RewardError without a score."""
        if reply.is_cut:
            raise self._refused(reply.text, f"was cut at {self._config.judge_tokens} tokens")
        try:
            return read_judgement(reply.text, self._config.judge_scale)
        except ValueError as error:
            raise self._refused(reply.text, str(error)) from error

    def _refused(self, text: str, why: str) -> errors.RewardError:
        return errors.RewardError(
            f"the judge {self._config.judge} gave no score from 0 to "
            f"{self._config.judge_scale:g}: {text[-200:]!r} {why}",
            hint="its reply must end with a line `Score: N`: $form in env.reward.judge_prompt "
            "stands for the sentence that demands it, and env.reward.judge_tokens gives it room",
        )

    async def _ask_endpoint(self, prompt: str) -> "_Reply":
        config = self._config
        url = f"{(config.url or '').rstrip('/')}/chat/completions"
        if self._unusable is not None:
            raise self._unusable
        while True:
            body = self._body(prompt)
            try:
                answer = await self.post(url, body)
                break
            except RefusedError as error:
                if not self._adapt(error, body):
                    raise self._blamed(error, body) from error
        self._is_answered = True
        try:
            choice = answer["choices"][0]
            content: Any = choice["message"]["content"]
            finish: Any = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise errors.RewardError(
                f"{url} answered no chat completion: {str(answer)[:200]}",
                hint="env.reward.url is the base URL of an OpenAI-compatible API, up to /v1",
            ) from error
        if content is not None and not isinstance(content, str):
            raise errors.RewardError(
                f"{url} answered a message whose content is not a text: {str(content)[:200]}",
                hint="name a model that answers texts in env.reward.judge",
            )
        return _Reply(content or "", finish == "length")

    def _body(self, prompt: str) -> dict[str, Any]:
        """Return a request as configured, without the fields that the endpoint refuses."""
        config = self._config
        body: dict[str, Any] = {
            "model": config.judge,
            "messages": [{"role": "user", "content": prompt}],
            self._limit_field: config.judge_tokens,
            "temperature": 0,
        }
        if not self._takes_temperature:
            del body["temperature"]
        merged = body | config.judge_request
        return {name: value for name, value in merged.items() if value is not None}

    def _adapt(self, error: RefusedError, body: Mapping[str, Any]) -> bool:
        """Leave out a field that the endpoint names; return whether the request changes.

        Fields that the user has set stay.
        """
        own = set(self._config.judge_request)
        if error.http_status not in _REFUSALS_OF_FIELDS or error.field in own:
            return False
        if error.field == _LIMIT and _LIMIT in body and _NEW_LIMIT not in own:
            self._limit_field = _NEW_LIMIT
        elif error.field == "temperature" and "temperature" in body:
            self._takes_temperature = False
        else:
            return False
        _log.warning("judge_request_adapted", judge=self._config.judge, without=error.field)
        return True

    def _blamed(self, error: RefusedError, body: Mapping[str, Any]) -> errors.TinkermqError:
        """Return the error of a refusal: of one conversation, or of every request."""
        self._num_refused += 1
        of_all = error.http_status in _REFUSALS_OF_ALL or (
            error.field != "messages" and error.field in body
        )
        if not of_all and (self._is_answered or self._num_refused < _MOST_REFUSED):
            return error
        self._unusable = SourceUnusableError(
            f"the judge {self._config.judge} cannot be asked: {error.message}",
            hint="see env.reward.url, judge and key_variable; env.reward.judge_request sets fields "
            "of the request and takes them out: {max_tokens: null, max_completion_tokens: 2000}",
        )
        return self._unusable

    async def _ask_job(self, scope: JobScope, prompt: str) -> "_Reply":
        transient = (errors.NotFoundError, errors.DeadlineError, ConnectionLost, errors.BusyError)
        try:
            return await again(self._config, transient, lambda: self._chat(scope, prompt))
        except transient as error:
            raise errors.RewardError(
                f"the judge {self._config.judge} gave no answer in {self._config.tries} tries: "
                f"{error.message}",
                hint="see whether it runs: `tinkermq ps`",
            ) from error

    async def _chat(self, scope: JobScope, prompt: str) -> "_Reply":
        request = ChatRequest(
            request=uuid.uuid4().hex,
            messages=[ModelMessage(role="user", content=(prompt,))],
            decoding=Decoding(max_tokens=self._config.judge_tokens, temperature=0.0),
            deadline_s=self._config.timeout_s,
        )
        parts = ask_parts(
            self._broker,
            scope.infer("chat"),
            request,
            InferPart,
            waiting_for=f"the judge {self._config.judge}",
            cancel=(scope.infer("cancel"), CancelInference(request=request.request)),
        )
        async with aclosing(parts):
            received = [part async for part in parts]
        deltas = [delta for part in received for delta in part.deltas]
        opened = next((part.opened for part in received if part.opened), "")
        text = opened + "".join(delta.text for delta in deltas)
        return _Reply(text, any(delta.finish in ("length", "cancelled") for delta in deltas))


class _Reply(NamedTuple):
    """A judge's reply."""

    text: str
    is_cut: bool
    """Whether it was cut by a limit, possibly within the number."""


def read_judgement(reply: str, scale: float) -> float:
    """Return the score of a judge's reply as a share of `scale`, from 0 to 1.

    The reply must end with a line `Score: N`, where N is a plain decimal number from 0 to `scale`.
    Otherwise raises ValueError, which quotes the last line.
    """
    lines = [line.strip() for line in _without_thinking(reply).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError("has no text after its reasoning")
    match = _SCORE.fullmatch(lines[-1])
    if match is None:
        raise ValueError(f"ends with the line {lines[-1][:80]!r}, which is not `Score: N`")
    if any(_ANY_SCORE.match(line) for line in lines[:-1]):
        raise ValueError("holds more than one line `Score: N`")
    number = float(match[1])
    if not number <= scale:
        raise ValueError(f"gives {number:g}, over {scale:g}")
    return number / scale


def _without_thinking(reply: str) -> str:
    """Return a judge's reply without its thinking; empty if the thinking never ended.

    A template may open the thinking in the prompt, so that the reply has only its end.
    """
    *_, answer = _END_OF_THINKING.split(_THINKING.sub("", reply))
    return answer
