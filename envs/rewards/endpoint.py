"""Rewards from an HTTP endpoint, tried again while nobody is there or somebody is busy."""

import base64
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import stamina

from ...schemas.config.sections import RewardConfig
from ...schemas.wire.errors import ConfigError, MessageError, RewardError
from ...schemas.wire.foreign import plain_value, shown
from ..game import ChatMessage

if TYPE_CHECKING:
    import httpx


# What a source of rewards is: it is shown a case and says a score.

_VALUE_KEYS = ("score", "reward")


@dataclass
class Case:
    """What a source judges: the policy's answer, and all that is known of the episode."""

    data_source: str
    """What the row of the data says of its origin."""
    ground_truth: Any
    """The row's gold answer; None for a game that generates its states."""
    extra_info: dict[str, Any]
    """Whatever else the row says."""
    messages: list[ChatMessage]
    """The conversation so far."""
    solution_str: str = ""
    """The policy's last answer."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the game said in `info` at its last step."""
    game_return: float = 0.0
    """Sum of the game's own rewards."""

    def arguments(self) -> dict[str, Any]:
        """Return what functions and endpoints are given."""
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
    """What a source says."""

    value: float
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else it tells; numbers become metrics."""


class SourceUnusableError(ConfigError):
    """A source that would fail every episode for the same reason: the job is to end with it."""


class Source(Protocol):
    """Says what a case is worth."""

    async def start(self) -> None:
        """Get ready; raises what makes the source unusable."""
        ...

    async def score(self, case: Case) -> Score:
        """Judge a case; RewardError when that is not possible, SourceUnusableError for any."""
        ...

    async def stop(self) -> None:
        """Give back what it holds."""
        ...


def read_score(answer: Any, whose: str) -> Score:
    """Read what a function returned or an endpoint answered: a number, or a map with one.

    The map holds it as `score` (verl's name) or `reward`. Raises RewardError for anything else,
    naming `whose` answer it is.
    """
    value, info = answer, cast("dict[str, Any]", {})
    if isinstance(answer, Mapping):
        info = dict(cast("Mapping[Any, Any]", answer))
        value = next((info.pop(key) for key in _VALUE_KEYS if key in info), None)
    number = _number(value)
    if not math.isfinite(number):
        told = shown(cast("object", answer))
        raise RewardError(
            f"{whose} answered {told}, which is no finite reward",
            hint="answer a number, or a map whose `score` or `reward` is one",
        )
    try:
        return Score(number, plain_value(info, "info") if info else {})
    except MessageError as error:
        raise RewardError(
            f"what {whose} answered beside the reward cannot travel: {error.message}",
            hint=error.hint,
        ) from error


def _number(value: Any) -> float:
    """Return a number of any kind, NumPy's and torch's too, as a float; NaN for what is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


T = TypeVar("T")
_BUSY = frozenset({408, 425, 429})


class RefusedError(RewardError):
    """A request that was understood and refused: the same one would be refused again."""

    def __init__(self, url: str, status: int, text: str, hint: str = "") -> None:
        super().__init__(
            f"{url} refused: status {status}: {text[:300]}",
            hint=hint or "see what it expects; env.reward.key_variable names a key",
        )
        self.http_status = status
        self.field = refused_field(text)
        """The field of the request that the endpoint says is to blame; empty: it names none."""


class HttpSource:
    """What posts JSON, and tries again while nobody is there or somebody is busy."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._client: httpx.AsyncClient

    async def start(self) -> None:
        """Open the client; ConfigError when the package or the key is missing."""
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(
                f"env.reward.source={self._config.source} needs httpx, which is not installed",
                hint="pip install 'tinkermq[rewards]' where the environment host runs",
            ) from error
        headers: dict[str, str] = {}
        variable = self._config.key_variable
        if variable is not None:
            if not os.environ.get(variable):
                raise ConfigError(
                    f"env.reward.key_variable={variable} is not set",
                    hint="set it in the environment of the environment host",
                )
            headers["Authorization"] = f"Bearer {os.environ[variable]}"
        limits = httpx.Limits(max_connections=self._config.max_requests)
        self._client = httpx.AsyncClient(
            headers=headers, timeout=self._config.timeout_s, limits=limits
        )

    async def stop(self) -> None:
        """Close the client."""
        await self._client.aclose()

    async def post(self, url: str, body: dict[str, Any]) -> Any:
        """Return what a URL answers to JSON; RewardError with its reason when it does not."""
        import httpx

        payload = json.dumps(body, default=_plain)
        transient = (httpx.TransportError, _Busy)
        try:
            reply = await again(self._config, transient, lambda: self._try(url, payload))
        except transient as error:
            raise RewardError(
                f"{url} gave no reward in {self._config.tries} tries: "
                f"{type(error).__name__}: {error}",
                hint="see whether it is up and reachable from the environment host",
            ) from error
        if reply.status_code >= 300:
            raise RefusedError(url, reply.status_code, reply.text)
        try:
            return reply.json()
        except ValueError as error:
            raise RewardError(
                f"{url} answered what is no JSON: {reply.text[:200]!r}",
                hint='answer {"score": …}',
            ) from error

    async def _try(self, url: str, payload: str) -> "httpx.Response":
        headers = {"Content-Type": "application/json"}
        reply = await self._client.post(url, content=payload, headers=headers)
        if reply.status_code >= 500 or reply.status_code in _BUSY:
            raise _Busy(f"status {reply.status_code}: {reply.text[:200]}")
        return reply


class EndpointSource(HttpSource):
    """Posts a case to a URL, which answers a number or a map with `score` or `reward`."""

    async def score(self, case: Case) -> Score:
        """Ask the endpoint."""
        url = self._config.url or ""
        return read_score(await self.post(url, case.arguments()), url)


class _Busy(Exception):
    """Somebody answered that he cannot now."""


async def again(
    config: RewardConfig,
    transient: tuple[type[Exception], ...],
    attempt: Callable[[], Awaitable[T]],
) -> T:
    """Try again on some errors, a bounded number of times within the reward's own limit."""
    retrying = stamina.AsyncRetryingCaller(attempts=config.tries, timeout=config.timeout_s)
    return await retrying(transient, attempt)


def refused_field(text: str) -> str:
    """Return the field of a request that a refusal names; empty: none.

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
        names = [one for one in cast("list[Any]", loc or []) if isinstance(one, str)]
        param = next((name for name in names if name != "body"), None)
    return param.partition("[")[0].partition(".")[0] if isinstance(param, str) else ""


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into what it does."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, np.ndarray | np.generic):
        return cast("Any", value).tolist()
    return str(value)
