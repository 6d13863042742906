"""Calls of programs through the proxy and the broker, against their engine and FastAPI alone.

    python -m benchmarks.agent_proxy [--programs 64] [--seconds 4] [--rounds 3]
                                     [--part language|instant]

With a language model of 135 million weights: programs have conversations of two calls, with the
proxy, the broker and the log of calls between them and the engine. What the engine was asked for,
it is then asked for once more, without anything else: the same prompts, as many tokens, the calls
of each program one after the other. Both take turns, on all cores of one machine, which the client,
the proxy and nats-server use, too.

With an engine that answers at once, calls per second against FastAPI: the same engine stands behind
NATS and the proxy that programs of an episode call, and in the process of a FastAPI server built as
the field's OpenAI-style servers are, with typed requests and answers. Each program asks, waits for
the whole answer and asks again. All servers are processes of their own, on uvloop, and both HTTP
servers are uvicorn with the same parser; they take turns in the same run. As a generator's words
that are drawn within 20 ms travel together, those of a stream come in two parts here, and one by
one from FastAPI. The delay of a stream's first words is that of one program alone.
"""

# FastAPI and aiohttp are of the `bench` extra, which development does without.
# pyright: reportMissingImports=false

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import uvloop
from tinkermq.actors.engine.engine import Engine, Generation, OnToken, Sampling
from tinkermq.actors.engine.transformers.transformers_engine import TransformersEngine
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.model_folder import load_tokenizer
from tinkermq.actors.rollout.agent_loop import EpisodeSampling
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_log import CallLog
from tinkermq.actors.rollout.program_loop import ProgramLoop
from tinkermq.actors.runtime import settle_memory
from tinkermq.broker.client.connection import connect
from tinkermq.broker.client.parts import PartsService, Tell
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.partial_rollouts import SegmentWriter
from tinkermq.envs.agents.episode import ProgramEpisode
from tinkermq.envs.agents.proxy.proxy import ModelProxy
from tinkermq.schemas.agent import CallPart, CallRequest
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.generation import Delta
from tinkermq.schemas.profile import TimeUse
from tinkermq.schemas.wire.array import IntVector
from tinkermq.schemas.wire.subjects import JobScope

from benchmarks.engine import SMALL, save
from benchmarks.report import Report, parser
from benchmarks.sizes import ALL_CORES, language_model

SCOPE = JobScope("local", "bench")
WORDS = [f"word{number} " for number in range(24)]
"""An answer, token by token."""
TURN = "The tests fail in module seven; see the output below and mend it. " * 6
BODY: dict[str, Any] = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": "You mend programs. " * 20},
        *(
            {"role": role, "content": TURN}
            for role in ("user", "assistant", "user", "assistant", "user")
        ),
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "bash",
                "description": "Runs a command.",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        }
    ],
}


def _episode(number: int) -> ProgramEpisode:
    return ProgramEpisode(episode=f"e{number}", task_input={}, key=f"tmqe_key-of-{number:06}")


async def serve_generator(url: str, num_programs: int) -> None:
    """Answer the calls of all episodes until killed."""
    ids = list(range(len(WORDS)))
    whole = Delta(
        choice=0,
        text="".join(WORDS),
        token_ids=ids,
        logprobs=[-0.5] * len(ids),
        versions=[1] * len(ids),
        finish="stop",
    )
    calls = 0

    async def answer(request: CallRequest, tell: Tell[CallPart]) -> CallPart:
        nonlocal calls
        calls += 1
        head = CallPart(delivery=1, names=[f"c{calls:05}"], prompt_tokens=900)
        if not request.stream:
            return head.model_copy(update={"deltas": [whole], "calls": [calls]})
        first, rest = [
            Delta(
                choice=0,
                text="".join(words),
                token_ids=ids[: len(words)],
                logprobs=[-0.5] * len(words),
                versions=[1] * len(words),
            )
            for words in (WORDS[:1], WORDS[1:])
        ]
        await tell(head.model_copy(update={"deltas": [first]}))
        end = rest.model_copy(update={"finish": "stop"})
        return CallPart(delivery=1, deltas=[end], calls=[calls])

    async with (
        await connect(url, name="generator") as broker,
        await Service.start(broker, name="generator", description="answers at once") as service,
    ):
        parts = PartsService(broker, service)
        for number in range(num_programs):
            subject = SCOPE.episode(f"e{number}", "call")
            await parts.listen(subject, CallRequest, CallPart, answer, blank=CallPart(delivery=1))
        settle_memory()
        await asyncio.Event().wait()


async def serve_proxy(url: str, port: int, num_programs: int) -> None:
    """Serve the programs' HTTP until killed."""
    async with (
        await connect(url, name="proxy") as broker,
        ModelProxy(broker, SCOPE, port=port) as proxy,
    ):
        for number in range(num_programs):
            proxy.open(_episode(number))
        settle_memory()
        await asyncio.Event().wait()


def serve_http(port: int) -> None:
    """Serve the engine by FastAPI until killed."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from pydantic import BaseModel

    class Message(BaseModel):
        role: str
        content: str | list[dict[str, Any]] | None = None
        tool_calls: list[dict[str, Any]] | None = None
        tool_call_id: str | None = None

    class ChatBody(BaseModel):
        model: str
        messages: list[Message]
        tools: list[dict[str, Any]] | None = None
        temperature: float | None = None
        max_tokens: int | None = None
        stream: bool = False

    app = FastAPI()

    def top(kind: str) -> dict[str, Any]:
        return {
            "id": "chatcmpl-1",
            "object": kind,
            "created": int(time.time()),
            "model": "policy",
        }

    async def chunks() -> AsyncIterator[str]:
        for text in [*WORDS, None]:
            choice = {
                "index": 0,
                "delta": {} if text is None else {"content": text},
                "finish_reason": "stop" if text is None else None,
            }
            chunk = ChatCompletionChunk.model_validate(
                {**top("chat.completion.chunk"), "choices": [choice]}
            )
            yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
            await asyncio.sleep(0)  # as a token that an engine has drawn
        yield "data: [DONE]\n\n"

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: ChatBody) -> Any:
        if body.stream:
            return StreamingResponse(chunks(), media_type="text/event-stream")
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        counts = {"prompt_tokens": 900, "completion_tokens": 24, "total_tokens": 924}
        return ChatCompletion.model_validate(
            {**top("chat.completion"), "choices": [choice], "usage": counts}
        )

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


async def calls_per_second(port: int, num_programs: int, seconds: float, *, stream: bool) -> float:
    """Let programs ask one after the other; return how many answers came in a second."""
    import aiohttp

    end = time.perf_counter() + seconds
    raw = json.dumps({**BODY, "stream": stream}).encode()
    connector = aiohttp.TCPConnector(limit=num_programs)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def program(number: int) -> int:
            headers = _headers(number)
            calls = 0
            while time.perf_counter() < end:
                async with session.post(_url(port), data=raw, headers=headers) as answer:
                    told = await answer.read()
                    assert answer.status == 200, told
                    assert b"word23" in told
                calls += 1
            return calls

        started = time.perf_counter()
        calls = sum(await asyncio.gather(*(program(n) for n in range(num_programs))))
    return calls / (time.perf_counter() - started)


async def first_words_ms(port: int, seconds: float) -> float:
    """Return the median time to a stream's first words, of one program alone."""
    import aiohttp

    end = time.perf_counter() + seconds
    raw = json.dumps({**BODY, "stream": True}).encode()
    times: list[float] = []
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < end:
            began = time.perf_counter()
            async with session.post(_url(port), data=raw, headers=_headers(0)) as answer:
                told = b""
                while b"word0" not in told:
                    told += await answer.content.readany()
                times.append(time.perf_counter() - began)
                await answer.read()
    return 1000 * statistics.median(times)


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/chat/completions"


def _headers(number: int) -> dict[str, str]:
    return {
        "authorization": f"Bearer {_episode(number).key}",
        "content-type": "application/json",
    }


def compare(num_programs: int, seconds: float, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure both in turns; return the figures by way and kind."""
    found: dict[str, dict[str, list[float]]] = {
        way: {"whole": [], "stream": [], "first": []} for way in ("http", "proxy")
    }
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        programs = ("--programs", str(num_programs))
        for _ in range(rounds):
            port = _free_port()
            with _Serving("--serve-http", str(port)):
                _measure(found["http"], port, num_programs, seconds)
            port = _free_port()
            with (
                _Serving("--serve-generator", server.url, *programs),
                _Serving("--serve-proxy", server.url, "--port", str(port), *programs),
            ):
                _measure(found["proxy"], port, num_programs, seconds)
    return found


def _measure(found: dict[str, list[float]], port: int, num_programs: int, seconds: float) -> None:
    _wait_for(port)
    for stream in (False, True):
        uvloop.run(calls_per_second(port, num_programs, seconds / 8, stream=stream))  # to warm up
        rate = uvloop.run(calls_per_second(port, num_programs, seconds, stream=stream))
        found["stream" if stream else "whole"].append(rate)
    found["first"].append(uvloop.run(first_words_ms(port, seconds / 2)))


def tell(found: dict[str, dict[str, list[float]]], num_programs: int, report: Report) -> None:
    """Print the tables and the ratios."""
    names = {"http": "FastAPI + uvicorn, engine inside", "proxy": "proxy, NATS, generator"}
    medians = {
        way: {kind: statistics.median(values) for kind, values in kinds.items()}
        for way, kinds in found.items()
    }
    rows = [
        [
            names[way],
            f"{medians[way]['whole']:,.0f}",
            f"{medians[way]['stream']:,.0f}",
            f"{medians[way]['first']:.2f}",
            " ".join(f"{value:,.0f}" for value in found[way]["whole"]),
        ]
        for way in found
    ]
    columns = ["way", "calls/s", "streams/s", "first words ms", "runs"]
    report.table(f"Calls of the model, {num_programs} programs at once", columns, rows)
    http, proxy = medians["http"], medians["proxy"]
    report.at_least("calls of the proxy, against FastAPI", proxy["whole"] / http["whole"], 0.8)
    report.at_least("streams of the proxy, against FastAPI", proxy["stream"] / http["stream"], 0.8)
    report.at_most("added before a stream's first words", proxy["first"] - http["first"], 5, "ms")


# -- an engine with a language model ---------------------------------------------------------------

NUM_LANGUAGE_PROGRAMS = 16
MAX_CONTEXT = 1024
TURN_TOKENS = 16
QUESTIONS = (
    "Name {number} cities and say one sentence about each of them.",
    "Which of them would you visit first, and why?",
)
Asked = tuple[IntVector, Sampling, int]
"""A prompt, how it was continued, and by how many tokens."""


class RecordingEngine:
    """An engine, and what the programs' calls have asked it for."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.asked = defaultdict[str, list[Asked]](list)
        """By episode."""

    async def generate(
        self,
        prompt_ids: IntVector,
        sampling: Sampling,
        *,
        request_id: str,
        conversation: str | None = None,
        on_token: OnToken | None = None,
        images: Sequence[bytes] = (),
    ) -> Generation:
        """Generate, and note it."""
        generation = await self._engine.generate(
            prompt_ids,
            sampling,
            request_id=request_id,
            conversation=conversation,
            on_token=on_token,
            images=images,
        )
        asked = (np.array(prompt_ids), sampling, len(generation.token_ids))
        self.asked[request_id.partition(".")[0]].append(asked)
        return generation

    def cancel(self, request_id: str) -> None:
        """End a request."""
        self._engine.cancel(request_id)

    def release(self, conversation: str) -> None:
        """Forget a conversation's cache."""
        self._engine.release(conversation)

    async def ask_again(self) -> tuple[float, int]:
        """Generate as many tokens from the same prompts, and forget them.

        Returns the seconds, and the number of calls.
        """
        every, self.asked = self.asked, defaultdict(list)

        async def ask_all(episode: str, calls: list[Asked]) -> None:
            for number, (prompt, sampling, num_tokens) in enumerate(calls):
                await self._engine.generate(
                    prompt,
                    replace(sampling, max_new_tokens=num_tokens, stop_token_ids=()),
                    request_id=f"again-{episode}-{number}",
                    conversation=f"again-{episode}",
                )

        started = time.perf_counter()
        await asyncio.gather(*(ask_all(episode, calls) for episode, calls in every.items()))
        took = time.perf_counter() - started
        for episode in every:
            self._engine.release(f"again-{episode}")
        return took, sum(map(len, every.values()))


def language_config(folder: str) -> JobConfig:
    """Return the configuration of a job whose programs run elsewhere."""
    limits = {
        "group_size": 1,
        "max_prompt_tokens": 512,
        "max_turn_tokens": TURN_TOKENS,
        "max_response_tokens": 512,
    }
    return JobConfig.model_validate(
        {
            "model": {"path": folder},
            "env": {"hosts": 0},
            "agent": {"client": True, "max_calls": 1000},
            "rollout": limits,
        }
    )


async def compare_language(
    folder: str, num_programs: int, rounds: int
) -> list[tuple[int, float, float]]:
    """Return of each round the calls, their seconds by the proxy, and by the engine alone."""
    torch.set_num_threads(ALL_CORES)
    started = await TransformersEngine.start(
        folder, max_slots=num_programs, max_context=MAX_CONTEXT
    )
    engine = RecordingEngine(started)
    found: list[tuple[int, float, float]] = []
    with tempfile.TemporaryDirectory() as root, NatsServer(Path(root)) as server:
        async with await connect(server.url, name="generator") as broker:
            await create_job_streams(broker, SCOPE, LimitsConfig(), segments=True)
            loop = await answer_programs(broker, engine, folder, num_programs)
            port, programs = _free_port(), ("--programs", str(num_programs))
            with _Serving("--serve-proxy", server.url, "--port", str(port), *programs):
                await asyncio.to_thread(_wait_for, port)
                for number in range(rounds + 1):
                    took = await run_programs(port, num_programs)
                    again, num_calls = await engine.ask_again()
                    if number:  # the first warms all up
                        found.append((num_calls, took, again))
            await loop.close()
    await started.close()
    return found


async def answer_programs(
    broker: Any, engine: RecordingEngine, folder: str, num_programs: int
) -> ProgramLoop:
    """Answer the calls of all episodes as a generator does, each one logged."""
    config, sampling = language_config(folder), EpisodeSampling(1.0)
    chat = ChatTokenizer(load_tokenizer(folder))
    asked = cast("Engine", engine)
    loop = ProgramLoop(broker, SCOPE, asked, chat, cast("Any", None), config, sampling)
    await loop.start()
    for number in range(num_programs):
        episode = f"e{number}"
        writer = SegmentWriter(broker, SCOPE, number + 1, 0, delivery=1, writer="benchmark")
        log = CallLog(episode, writer)
        log.begin_try()
        log.hold(episode, "here", anew=True)
        time_use = TimeUse("generate", "environment", rest="other")
        calls = CallAnswers(episode, asked, chat, config, sampling, log, time_use)
        await loop.listen(episode, calls, 1, AsyncExitStack())
    return loop


async def run_programs(port: int, num_programs: int) -> float:
    """Run all programs once in a process of their own; return their seconds."""
    programs = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.agent_proxy", "--converse", str(port)),
        *("--programs", str(num_programs)),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await programs.communicate()
    assert programs.returncode == 0, "the programs failed"
    return float(said)


async def converse(port: int, num_programs: int) -> float:
    """Have one conversation of each program; return the seconds of all."""
    import aiohttp

    connector = aiohttp.TCPConnector(limit=num_programs)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def program(number: int) -> None:
            messages: list[dict[str, str]] = []
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question.format(number=number + 2)})
                body = {"model": "policy", "messages": messages}
                async with session.post(_url(port), json=body, headers=_headers(number)) as answer:
                    told = await answer.json()
                    assert answer.status == 200, told
                reply = told["choices"][0]["message"]
                messages.append({"role": "assistant", "content": reply["content"] or ""})

        started = time.perf_counter()
        await asyncio.gather(*(program(number) for number in range(num_programs)))
        return time.perf_counter() - started


def measure_language(report: Report, *, quick: bool) -> None:
    """Compare with a language model, with --quick with a tiny one; print and write."""
    num_programs = 4 if quick else NUM_LANGUAGE_PROGRAMS
    with tempfile.TemporaryDirectory() as root:
        folder = save(Path(root) / "small", **SMALL) if quick else language_model()
        found = uvloop.run(compare_language(folder, num_programs, 1 if quick else 3))
    rows = [
        [
            str(num_calls),
            f"{num_calls / took:.2f}",
            f"{num_calls / again:.2f}",
            f"{again / took:.3f}",
        ]
        for num_calls, took, again in found
    ]
    columns = ["calls", "by the proxy, calls/s", "engine alone, calls/s", "ratio"]
    title = f"A language model, {num_programs} programs at once, {ALL_CORES} cores"
    report.table(title, columns, rows)
    share = statistics.median(again / took for _, took, again in found)
    report.at_least("calls by the proxy, against the engine alone", share, 0.95)


class _Serving:
    """A server process of this script, ended with the block."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.agent_proxy", *arguments]
        )

    def __enter__(self) -> "_Serving":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    """Parse the arguments; serve, or compare and print."""
    options = parser(__doc__)
    options.add_argument("--programs", type=int, default=64)
    options.add_argument("--seconds", type=float, default=4.0)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--part", choices=["language", "instant"], help="only this one")
    options.add_argument("--converse", type=int, help=argparse.SUPPRESS)
    options.add_argument("--serve-generator", help=argparse.SUPPRESS)
    options.add_argument("--serve-proxy", help=argparse.SUPPRESS)
    options.add_argument("--serve-http", type=int, help=argparse.SUPPRESS)
    options.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve_generator:
        uvloop.run(serve_generator(arguments.serve_generator, arguments.programs))
    elif arguments.serve_proxy:
        uvloop.run(serve_proxy(arguments.serve_proxy, arguments.port, arguments.programs))
    elif arguments.serve_http:
        serve_http(arguments.serve_http)
    elif arguments.converse:
        print(uvloop.run(converse(arguments.converse, arguments.programs)))
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Compare, print and write."""
    if arguments.quick:
        arguments.seconds, arguments.rounds = 0.5, 1
    title = "Programs' calls against the engine alone and FastAPI"
    report = Report("agent_proxy", title, quick=arguments.quick)
    if arguments.part != "instant":
        measure_language(report, quick=arguments.quick)
    if arguments.part != "language":
        found = compare(arguments.programs, arguments.seconds, arguments.rounds)
        tell(found, arguments.programs, report)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
