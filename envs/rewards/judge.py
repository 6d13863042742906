"""Rewards from a model that judges: an inference job, or one behind an OpenAI-compatible API."""

import re
import string
import uuid
from contextlib import aclosing

from ...broker.client.connection import Broker, ConnectionLost
from ...broker.client.parts import ask_parts
from ...broker.jobs import JobStore
from ...schemas.config.reward import RewardConfig
from ...schemas.infer import CancelInference, ChatRequest, Decoding, InferPart
from ...schemas.wire.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    NotFoundError,
    RewardError,
)
from ...schemas.wire.images import plain_text
from ...schemas.wire.subjects import JobScope
from ..reasoning import behind_reasoning
from .endpoint import HttpSource, again
from .source import Case, Score

_JUDGE_PROMPT = """\
You grade answers.

Task:
$question

Reference answer:
$ground_truth

Answer:
$answer

Reply with one line, `Score: N`, where N is a number from 0 (wrong) to $scale (right)."""
_SCORE = re.compile(r"score\W*(-?\d+(?:\.\d+)?)", re.IGNORECASE)


class JudgeSource(HttpSource):
    """Lets a model read the answer and write a score."""

    def __init__(
        self, config: RewardConfig, broker: Broker, user: str, job: str | None = None
    ) -> None:
        """`job` is the id of the job that `config.judge` names; it is looked up without."""
        super().__init__(config)
        self._broker = broker
        self._user = user
        self._template = string.Template(config.judge_prompt or _JUDGE_PROMPT)
        self._scope = JobScope(user, job) if job is not None else None

    async def start(self) -> None:
        """Find the judge's job, or open the client of its URL."""
        if self._config.url is not None:
            await super().start()
        elif self._scope is None:
            self._scope = await self._find()

    async def _find(self) -> JobScope:
        record = await JobStore(self._broker).get(self._user, self._config.judge or "")
        if record.kind != "infer":
            raise ConfigError(
                f"env.reward.judge={record.name} is a job of kind {record.kind}, it answers nobody",
                hint=f"`tinkermq serve {record.name}` makes an inference job of it",
            )
        return JobScope(record.user, record.job)

    async def stop(self) -> None:
        """Close the client, where there is one."""
        if self._config.url is not None:
            await super().stop()

    async def score(self, case: Case) -> Score:
        """Ask the judge."""
        prompt = self._prompt(case)
        if self._scope is None:
            reply = await self._ask_endpoint(prompt)
        else:
            reply = await self._ask_job(self._scope, prompt)
        return Score(self._read(reply))

    def _prompt(self, case: Case) -> str:
        said = [f"{item['role']}: {plain_text(item['content'])}" for item in case.messages]
        first = next((item for item in case.messages if item["role"] == "user"), None)
        return self._template.safe_substitute(
            question="" if first is None else plain_text(first["content"]),
            answer=behind_reasoning(case.solution_str),
            ground_truth=case.ground_truth,
            conversation="\n".join(said),
            scale=f"{self._config.judge_scale:g}",
        )

    def _read(self, reply: str) -> float:
        found = _SCORE.findall(reply)
        number = float(found[-1]) if found else _whole_number(reply)
        scale = self._config.judge_scale
        if number is None or not 0 <= number <= scale:
            raise RewardError(
                f"the judge {self._config.judge} gave no score from 0 to {scale:g}: "
                f"{reply[-200:]!r}",
                hint="say in env.reward.judge_prompt how it shall answer, and give it room with "
                "env.reward.judge_tokens",
            )
        return number / scale

    async def _ask_endpoint(self, prompt: str) -> str:
        config = self._config
        url = f"{(config.url or '').rstrip('/')}/chat/completions"
        body = {
            "model": config.judge,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": config.judge_tokens,
            "temperature": 0,
        }
        answer = await self.post(url, body)
        try:
            return str(answer["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(
                f"{url} answered no chat completion: {str(answer)[:200]}",
                hint="env.reward.url is the base URL of an OpenAI-compatible API, up to /v1",
            ) from error

    async def _ask_job(self, scope: JobScope, prompt: str) -> str:
        transient = (NotFoundError, DeadlineError, ConnectionLost, BusyError)
        try:
            return await again(self._config, transient, lambda: self._chat(scope, prompt))
        except transient as error:
            raise RewardError(
                f"the judge {self._config.judge} gave no answer in {self._config.tries} tries: "
                f"{error.message}",
                hint="see whether it runs: `tinkermq ps`",
            ) from error

    async def _chat(self, scope: JobScope, prompt: str) -> str:
        request = ChatRequest(
            request=uuid.uuid4().hex,
            messages=[{"role": "user", "content": prompt}],
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
            return "".join([delta.text async for part in parts for delta in part.deltas])


def _whole_number(reply: str) -> float | None:
    try:
        return float(reply.strip())
    except ValueError:
        return None
