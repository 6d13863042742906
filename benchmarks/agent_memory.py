"""Memory and time of a generator that answers the calls of many open episodes of programs.

    python -m benchmarks.agent_memory [--episodes 1000] [--calls 20]

Each episode is a conversation that grows, as an agent's with tools does. The engine answers at
once, so that only what is kept of the calls counts: tokens, log-probs, versions, messages. The
other side is the size of just that, as arrays and texts.

A call renders and tokenises what is new, whatever stands before it. The other side of its time is
what a server does that knows no episode: the whole history through the chat template and the
tokenizer, at the same call.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import psutil
from tinkermq.actors.engine.engine import Drawn, Generation, OnToken, Sampling
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.agent_loop import EpisodeSampling
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_log import CallLog
from tinkermq.schemas.agent import CallPart, CallRequest
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.model_apis.canonical import ModelMessage
from tinkermq.schemas.profile import TimeUse

from benchmarks.report import Report, parser

_GIVEN_CHARS, _GENERATED = 200, 64
_LATE = 10
"""Calls at the beginning and at the end of a long episode."""


class Late(NamedTuple):
    """Seconds of a call."""

    first: float
    """Of the first ones of an episode."""
    last: float
    """Of the last ones."""
    whole: float
    """Of rendering and tokenising the history of the last ones from its beginning."""


class InstantEngine:
    """Answers with letters, at once."""

    async def generate(
        self, prompt_ids: Any, sampling: Sampling, *, on_token: OnToken | None, **_: Any
    ) -> Generation:
        """Return an answer of `_GENERATED` tokens."""
        del prompt_ids
        ids = np.full(_GENERATED, 70, np.int32)
        ids[-1] = sampling.stop_token_ids[0]
        if on_token is not None:
            for token in ids:
                on_token(Drawn(int(token), -1.0, 3))
        zeros = np.zeros(_GENERATED, np.int32)
        return Generation(ids, zeros.astype(np.float32) - 1, zeros + 3, "stop")

    def cancel(self, request_id: str) -> None:
        """End nothing: every answer is complete."""

    def release(self, conversation: str) -> None:
        """Keep nothing."""


async def converse(
    calls: CallAnswers, num_calls: int, beside: Callable[[CallRequest], None] | None = None
) -> list[float]:
    """Have one conversation of so many calls; return the seconds that each has computed.

    `beside` is given each request behind its answer.
    """
    seconds: list[float] = []
    messages: list[ModelMessage] = []
    for number in range(num_calls):
        said = f"{number} ".ljust(_GIVEN_CHARS, "x")
        messages.append(ModelMessage(role="user", content=(said,)))
        asked = CallRequest(request=f"r{number}", messages=list(messages))
        started = time.process_time()
        last = await calls.answer(asked, _unheard)
        seconds.append(time.process_time() - started)
        if beside is not None:
            beside(asked)
        messages.append(ModelMessage(role="assistant", content=(last.deltas[0].text,)))
    return seconds


async def _unheard(part: CallPart) -> None:
    del part


async def late_calls(num_calls: int) -> Late:
    """Have one long conversation; return what its last calls took, and took rendered whole."""
    chat = ChatTokenizer(make_tokenizer())
    whole: list[float] = []

    def render(asked: CallRequest) -> None:
        started = time.process_time()
        chat.prompt([one.for_template() for one in asked.messages])
        whole.append(time.process_time() - started)

    calls = _opened(0, chat, _config(num_calls))
    mine = await converse(calls, num_calls, render)
    await calls.close("the benchmark is over")
    return Late(median(mine[:_LATE]), median(mine[-_LATE:]), median(whole[-_LATE:]))


async def measure(num_episodes: int, num_calls: int) -> tuple[float, float, float]:
    """Return megabytes that the process grew by, megabytes of what it has to keep, and seconds."""
    chat, config = ChatTokenizer(make_tokenizer()), _config(num_calls)
    open_: list[CallAnswers] = []
    before, seconds = _resident_mb(), 0.0
    for number in range(num_episodes):
        calls = _opened(number, chat, config)
        seconds += sum(await converse(calls, num_calls))
        open_.append(calls)
    grown = _resident_mb() - before
    kept = sum(_kept_bytes(calls) for calls in open_) / 2**20
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(calls.close("the benchmark is over") for calls in open_))
    return grown, kept, seconds


def _config(num_calls: int) -> JobConfig:
    limit = num_calls * 2 * (_GIVEN_CHARS + _GENERATED + 64)
    return JobConfig.model_validate(
        {
            "model": {"path": "a model"},
            "env": {"hosts": 0},
            "agent": {"client": True, "max_calls": num_calls},
            "rollout": {
                "max_prompt_tokens": limit,
                "max_turn_tokens": _GENERATED,
                "max_response_tokens": limit,
            },
            "learner": {"max_row_tokens": 2 * limit, "microbatch_tokens": 2 * limit},
        }
    )


def _opened(number: int, chat: ChatTokenizer, config: JobConfig) -> CallAnswers:
    log = CallLog(f"episode {number}")
    log.begin_try()
    time_use = TimeUse("generate", "environment", rest="other")
    of: Any = InstantEngine()
    sampling = EpisodeSampling(1.0)
    return CallAnswers(f"e{number}", of, chat, config, sampling, log, time_use)


def _kept_bytes(calls: CallAnswers) -> int:
    arrays = texts = 0
    for call in calls.tree.calls:
        made = call.generated
        arrays += call.given_ids.nbytes + made.token_ids.nbytes
        arrays += made.logprobs.nbytes + made.versions.nbytes
        texts += sum(len(message.text) for message in (*call.given, call.reply))
    return arrays + texts


def _resident_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--episodes", type=int, default=1000)
    options.add_argument("--calls", type=int, default=20)
    arguments = options.parse_args()
    num_episodes = 50 if arguments.quick else arguments.episodes
    report = Report("agent_memory", "Memory of open episodes of programs", quick=arguments.quick)
    grown, kept, seconds = asyncio.run(measure(num_episodes, arguments.calls))
    num_calls = num_episodes * arguments.calls
    report.table(
        f"{num_episodes:,} open episodes of {arguments.calls} calls",
        ("grown", "arrays and texts", "an episode", "a call"),
        [
            (
                f"{grown:.0f} MB",
                f"{kept:.0f} MB",
                f"{1024 * grown / num_episodes:.0f} kB",
                f"{1e3 * seconds / num_calls:.2f} ms",
            )
        ],
    )
    report.at_most("memory over what has to be kept", grown / kept, None)
    num_late = 40 if arguments.quick else 200
    late = asyncio.run(late_calls(num_late))
    report.table(
        f"a call in an episode of {num_late} calls, seconds of the processor",
        (f"first {_LATE}", f"last {_LATE}", f"the histories of the last {_LATE} rendered whole"),
        [tuple(f"{1e3 * seconds:.2f} ms" for seconds in late)],
    )
    report.at_least("the whole history rendered over a late call", late.whole / late.last, None)
    report.at_most("a late call over an early one", late.last / late.first, None)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
