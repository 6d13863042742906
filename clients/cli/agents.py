"""`tinkermq agent check` and `agent play`: a program with a scripted model, or a human as one."""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from ...broker.client.connection import Broker
from ...envs.agents import agent_check
from ...envs.agents.episode import EpisodeOver
from ...envs.agents.local_run import LocalCall, LocalRun, open_program
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import load_config
from ...schemas.model_apis.canonical import CanonicalMessage
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import MessageError
from .output import literal, print_json, print_note, print_plain, print_text
from .session import positive, with_private_broker

FAILED = 1
_MARKS = {"ok": "[green]ok[/]   ", "note": "[dim]note[/] ", "fail": "[red]fail[/] "}
_SHOWN_OUTPUT = 2000


def check(
    config: Path,
    /,
    *overrides: str,
    row: int | None = None,
    seed: int = 0,
    timeout: Annotated[float, Parameter(validator=positive)] = agent_check.LIMIT_S,
    json: bool = False,
) -> int:
    """Run an agent program once, here, against a scripted model, and report what it does.

    It runs in the same sandbox as in a pool, and needs neither a pool nor a model. The report
    lists the endpoints that it uses, each call with whether it would be trained and why
    (`agent.train`), where it begins a conversation of its own instead of continuing one, how the
    program ends, and its reward.

    Parameters
    ----------
    config
        YAML file of an agent job.
    overrides
        `section.key=value`, such as `agent.timeout_s=60`.
    row
        Row of the training data; default: the row that `seed` selects.
    seed
        Seed of the episode.
    timeout
        Most seconds for the program, unless the job allows less.
    json
        Print JSON.
    """
    job = agent_job(config, overrides)

    async def work(broker: Broker) -> agent_check.AgentReport:
        return await agent_check.check_program(broker, job, row=row, seed=seed, limit_s=timeout)

    report = with_private_broker(work)
    if json:
        print_json(asdict(report))
    else:
        for line in report_lines(report):
            print_text(line)
    return 0 if report.ok else FAILED


def report_lines(report: agent_check.AgentReport) -> Iterator[str]:
    """Yield the lines of a report, with rich markup."""
    for endpoint, number in report.endpoints.items():
        times = "once" if number == 1 else f"{number} times"
        yield f"asks   {literal(endpoint)}  {times}"
    for call in report.calls:
        yield f"call   {_call_line(call)}"
    if report.calls:
        yield f"rows   {report.rows} for {len(report.calls)} calls"
    if report.without_effect:
        yield f"fields without effect: {literal(', '.join(report.without_effect))}"
    if report.overruled:
        names = literal(", ".join(report.overruled))
        yield f"fields in whose place the job's rollout counts: {names} (see agent.sampling)"
    if report.posted:
        posted = ", ".join(f"{name}={value!r}" for name, value in report.posted.items())
        yield f"posts  {literal(posted)}"
    for finding in report.findings:
        yield f"{_MARKS[finding.level]}  {literal(finding.text)}"
        if finding.remedy:
            yield f"       [dim]{literal(finding.remedy)}[/]"
    if not report.ok and report.output:
        yield f"the end of its output:\n{literal(report.output[-_SHOWN_OUTPUT:].rstrip())}"


def _call_line(call: agent_check.CallReport) -> str:
    where = "root" if call.parent is None else f"continues {call.parent}"
    parts = [
        f"{call.number:<3} {where:<13} {call.messages} messages, {call.new} new",
        f"tools {', '.join(call.tools)}" if call.tools else "",
        "streamed" if call.streamed else "",
        f"{call.choices} choices" if call.choices > 1 else "",
        call.differs,
        f"refused: {call.refusal}" if call.refusal else "",
        "main conversation" if call.main else "",
        f"{'trained' if call.trained else 'not trained'}: {call.why}",
    ]
    return literal(", ".join(part for part in parts if part))


# Lines of a terminal, pipe or file, read while an event loop runs.

_CHUNK = 64 << 10


class TypedLines:
    """The lines of standard input; needs a running event loop."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self.is_terminal = sys.stdin.isatty()
        self._file = sys.stdin.fileno()
        self._unread = b""
        self._ended = False

    async def next(self, prompt: str = "") -> str | None:
        """Return the next line without its end; None at the end of the input."""
        if prompt and self.is_terminal:
            sys.stdout.write(prompt)
            sys.stdout.flush()
        while b"\n" not in self._unread and not self._ended:
            chunk = await self._chunk()
            self._ended = not chunk
            self._unread += chunk
        if not self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode("utf-8", "replace").removesuffix("\r")

    async def _chunk(self) -> bytes:
        """Wait for more input and return it; b"" at the end of the input."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._file, readable.set)
        except PermissionError:
            return os.read(self._file, _CHUNK)  # a file: there is nothing to wait for
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._file)
        return os.read(self._file, _CHUNK)


# `tinkermq agent play`: a human is the model.

NOT_ENDED = 1
_CONTINUES = "\\"
_A_DAY_S = 86_400.0
_HELP = (
    "A line is an answer; one that ends with \\ goes on in the next. `/call NAME JSON` calls a "
    "tool, `/quit` ends."
)


def play(config: Path, /, *overrides: str, row: int | None = None, seed: int = 0) -> int:
    """Answer the calls of an agent program yourself: every typed line is an answer.

    The program runs here, in the same sandbox as in a pool. Of each call, the new messages are
    shown. `/call NAME JSON` calls a tool. Answers can come from a pipe. The exit code is 0 if the
    program has ended and has a reward.

    Parameters
    ----------
    config
        YAML file of an agent job.
    overrides
        `section.key=value`, such as `agent.max_calls=5`.
    row
        Row of the training data; default: the row that `seed` selects.
    seed
        Seed of the episode.
    """
    job = agent_job(config, overrides)
    patient = {"timeout_s": _A_DAY_S, "idle_s": max(job.agent.idle_s, job.agent.timeout_s)}
    job = job.model_copy(update={"agent": job.agent.model_copy(update=patient)})

    async def work(broker: Broker) -> LocalRun:
        person = HumanModel()
        async with open_program(broker, job) as program:
            print_note(_HELP)
            return await program.run(person.say, row=row, seed=seed, stop=person.has_quit)

    return _conclude(with_private_broker(work))


class HumanModel:
    """Answers calls with typed lines."""

    def __init__(self) -> None:
        """Wait for the first call."""
        self.has_quit = asyncio.Event()
        """Set when nothing more is answered."""
        self._lines = TypedLines()
        self._turn = asyncio.Lock()
        self._tools: Sequence[Mapping[str, Any]] = ()

    async def say(self, call: LocalCall) -> str:
        """Print a call and return the typed answer; raises EpisodeOver at the end of the input."""
        async with self._turn:  # calls beside each other wait
            self._show(call)
            while not self.has_quit.is_set():
                typed = await self._typed()
                if typed is None or typed == "/quit":
                    self.has_quit.set()
                elif (answer := self._read(typed, call)) is not None:
                    return answer
        raise EpisodeOver("the player has left")

    def _show(self, call: LocalCall) -> None:
        where = "" if call.parent is None else f", continues {call.parent.call.number}"
        print_plain(f"--- call {call.number}{where}{', streamed' if call.request.stream else ''}")
        if call.request.tools != self._tools:
            self._tools = call.request.tools
            for tool in self._tools:
                print_plain(_tool_line(tool))
        for message in call.new_messages:
            print_plain(_shown(message))

    async def _typed(self) -> str | None:
        lines: list[str] = []
        while True:
            line = await self._lines.next("> ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not self._lines.is_terminal:
                print_plain(f"> {line}")
            lines.append(line.removesuffix(_CONTINUES))
            if not line.endswith(_CONTINUES):
                return "\n".join(lines)

    def _read(self, typed: str, call: LocalCall) -> str | None:
        """Return an answer as a model would write it; None for an invalid one."""
        try:
            return "\n".join(_answer_line(line, call) for line in typed.split("\n"))
        except MessageError as error:
            print_note(f"{error.message}; {error.hint}")
            return None


def _answer_line(line: str, call: LocalCall) -> str:
    """Return a line as a model's answer; MessageError for a malformed tool call."""
    if not line.startswith("/call "):
        return line
    _, _, rest = line.partition(" ")
    name, _, arguments = rest.strip().partition(" ")
    names = [agent_check.tool_name(tool) for tool in call.request.tools]
    if name not in names:
        raise MessageError(
            f"there is no tool {name!r}", hint=f"there are {', '.join(names) or 'none'}"
        )
    try:
        value = read_json(arguments or "{}")
    except ValueError as error:
        raise MessageError(f"{arguments!r} is not JSON", hint='write {"key": "value"}') from error
    if not isinstance(value, dict):
        raise MessageError(f"{arguments!r} is no object", hint='write {"key": "value"}')
    return agent_check.write_call(name, arguments or "{}")


def _tool_line(tool: Mapping[str, Any]) -> str:
    name, function = agent_check.tool_name(tool), agent_check.function_of(tool)
    parameters: Any = function.get("parameters")
    return f"[tool {name}] {function.get('description') or ''} {json.dumps(parameters)}"


def _shown(message: CanonicalMessage) -> str:
    calls = [f"/call {call.name} {call.arguments}" for call in message.calls]
    pictures = ["[image]" for part in message.content if not isinstance(part, str)]
    return "\n".join(
        [f"[{message.role}]", *([message.text] if message.text else []), *pictures, *calls]
    )


def _conclude(run: LocalRun) -> int:
    """Print the outcome; return the exit code."""
    if run.result is None:
        if run.error is not None:
            raise run.error
        print_plain("you left before the program ended")
        return NOT_ENDED
    info = run.result.info
    print_plain(f"outcome {info['outcome']}, exit code {info['exit_code']}")
    if "no_reward" in info:
        print_plain(f"no reward: {info['no_reward']}")
        return NOT_ENDED
    print_plain(f"reward {run.result.reward:g} after {len(run.model.calls)} calls")
    return 0


def agent_job(config: Path, overrides: tuple[str, ...]) -> JobConfig:
    """Read the configuration of an agent job; `model.path` is not required."""
    return load_config(config, ["model.path=none", *overrides])
