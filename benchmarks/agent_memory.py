"""Memory of a generator that answers the calls of many open episodes of programs.

    python -m benchmarks.agent_memory [--episodes 1000] [--calls 20]

Each episode is a conversation that grows, as an agent's with tools does. The engine answers at
once, so that only what is kept of the calls counts: tokens, log-probs, versions, messages. The
other side is the size of just that, as arrays and texts.
"""

import asyncio
import gc
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tinkermq.actors.generator.agents.answering import CallAnswers
from tinkermq.actors.generator.agents.call_log import CallLog
from tinkermq.actors.generator.agents.template_facts import facts_of
from tinkermq.actors.generator.engine.engine import Drawn, Generation, OnToken, Sampling
from tinkermq.actors.generator.episodes.agent_loop import EpisodeSampling
from tinkermq.actors.generator.episodes.chat import ChatTokenizer
from tinkermq.actors.models.tiny_model import make_tokenizer
from tinkermq.broker.observe.time_use import TimeUse
from tinkermq.schemas.agent import CallMessage, CallPart, CallRequest
from tinkermq.schemas.config.job import JobConfig

from benchmarks.report import Report, parser

_GIVEN_CHARS, _GENERATED = 200, 64


class InstantEngine:
    """Answers with letters, at once."""

    async def generate(
        self, prompt_ids: Any, sampling: Sampling, *, on_token: OnToken, **_: Any
    ) -> Generation:
        """Return an answer of `_GENERATED` tokens."""
        del prompt_ids
        ids = np.full(_GENERATED, 70, np.int32)
        ids[-1] = sampling.stop_token_ids[0]
        for token in ids:
            on_token(Drawn(int(token), -1.0, 3))
        zeros = np.zeros(_GENERATED, np.int32)
        return Generation(ids, zeros.astype(np.float32) - 1, zeros + 3, "stop")

    def release(self, conversation: str) -> None:
        """Keep nothing."""


async def converse(calls: CallAnswers, num_calls: int) -> None:
    """Have one conversation of so many calls."""

    async def unheard(part: CallPart) -> None:
        del part

    messages: list[CallMessage] = []
    for number in range(num_calls):
        said = f"{number} ".ljust(_GIVEN_CHARS, "x")
        messages.append(CallMessage(role="user", content=[said]))
        asked = CallRequest(request=f"r{number}", messages=list(messages))
        last = await calls.answer(asked, unheard)
        messages.append(CallMessage(role="assistant", content=[last.deltas[0].text]))


async def measure(num_episodes: int, num_calls: int) -> tuple[float, float, float]:
    """Return megabytes that the process grew by, megabytes of what it has to keep, and seconds."""
    chat = ChatTokenizer(make_tokenizer())
    limit = num_calls * 2 * (_GIVEN_CHARS + _GENERATED + 64)
    with tempfile.TemporaryDirectory() as folder:
        config = JobConfig.model_validate(
            {
                "model": {"path": str(Path(folder))},
                "env": {"hosts": 0},
                "agent": {"client": True},
                "rollout": {
                    "max_prompt_tokens": limit,
                    "max_turn_tokens": _GENERATED,
                    "max_response_tokens": limit,
                },
                "learner": {"row_tokens": 2 * limit, "microbatch_tokens": 2 * limit},
            }
        )
    facts, engine = facts_of(chat), InstantEngine()
    time_use = TimeUse("generate", "environment", rest="other")
    open_: list[CallAnswers] = []
    loop = asyncio.get_running_loop()
    before, started = _resident_mb(), loop.time()
    for number in range(num_episodes):
        log = CallLog(f"episode {number}")
        log.begin_try()
        sampling = EpisodeSampling(1.0)
        of: Any = engine
        calls = CallAnswers(f"e{number}", of, chat, config, sampling, log, time_use, facts)
        await converse(calls, num_calls)
        open_.append(calls)
    seconds = loop.time() - started
    grown = _resident_mb() - before
    kept = sum(_kept_bytes(calls) for calls in open_) / 2**20
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(calls.close("the benchmark is over") for calls in open_))
    return grown, kept, seconds


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
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
