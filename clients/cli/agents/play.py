"""`tinkermq agent play`: the human is the model."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....broker.client.connection import Broker
from ....envs.agents.agent_check import function_of, tool_name, write_call
from ....envs.agents.episode import EpisodeOver
from ....envs.agents.local_run import LocalCall, LocalRun, open_program
from ....envs.model_apis.canonical import CanonicalMessage
from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError
from ..output import note, say_plain
from ..typed_lines import TypedLines
from .private_broker import agent_job, with_private_broker

NOT_ENDED = 1
_CONTINUES = "\\"
_A_DAY_S = 86_400.0
_HELP = (
    "A line is an answer; one that ends with \\ goes on in the next. `/call NAME JSON` calls a "
    "tool, `/quit` ends."
)


def play(config: Path, /, *overrides: str, row: int | None = None, seed: int = 0) -> int:
    """Be the model of an agent program: each of its calls is shown, every line is an answer.

    The program runs here, in the sandbox that it has in a pool; shown of each call is what is
    new. `/call NAME JSON` calls a tool. From a pipe it plays a script. Ends with 0 when the program
    has ended and has a reward.

    Parameters
    ----------
    config
        YAML file of an agent job.
    overrides
        `section.key=value`, such as `agent.max_calls=5`.
    row
        Row of the training data; default: the one that `seed` falls on.
    seed
        Seed of the episode.
    """
    job = agent_job(config, overrides)
    patient = {"timeout_s": _A_DAY_S, "idle_s": max(job.agent.idle_s, job.agent.timeout_s)}
    job = job.model_copy(update={"agent": job.agent.model_copy(update=patient)})

    async def work(broker: Broker) -> LocalRun:
        person = TypingPerson()
        async with open_program(broker, job) as program:
            note(_HELP)
            return await program.run(person.say, row=row, seed=seed, stop=person.has_quit)

    return _conclude(with_private_broker(work))


class TypingPerson:
    """Says what is typed."""

    def __init__(self) -> None:
        """Wait for the first call."""
        self.has_quit = asyncio.Event()
        """Set when nothing more is answered."""
        self._lines = TypedLines()
        self._turn = asyncio.Lock()
        self._tools: Sequence[Mapping[str, Any]] = ()

    async def say(self, call: LocalCall) -> str:
        """Show a call, and return what is typed; raises EpisodeOver at the end of the input."""
        async with self._turn:  # calls beside each other wait
            self._show(call)
            while not self.has_quit.is_set():
                typed = await self._typed()
                if typed is None or typed == "/quit":
                    self.has_quit.set()
                elif (answer := self._read(typed, call)) is not None:
                    return answer
        raise EpisodeOver("the person who was the model has left")

    def _show(self, call: LocalCall) -> None:
        where = "" if call.parent is None else f", continues {call.parent.call.number}"
        say_plain(f"--- call {call.number}{where}{', streamed' if call.request.stream else ''}")
        if call.request.tools != self._tools:
            self._tools = call.request.tools
            for tool in self._tools:
                say_plain(_tool_line(tool))
        for message in call.new_messages:
            say_plain(_shown(message))

    async def _typed(self) -> str | None:
        lines: list[str] = []
        while True:
            line = await self._lines.next("> ")
            if line is None:
                return "\n".join(lines) if lines else None
            if not self._lines.is_terminal:
                say_plain(f"> {line}")
            lines.append(line.removesuffix(_CONTINUES))
            if not line.endswith(_CONTINUES):
                return "\n".join(lines)

    def _read(self, typed: str, call: LocalCall) -> str | None:
        """Return an answer in the form in which models write it; None for one that is none."""
        try:
            return "\n".join(_answer_line(line, call) for line in typed.split("\n"))
        except MessageError as error:
            note(f"{error.message}; {error.hint}")
            return None


def _answer_line(line: str, call: LocalCall) -> str:
    """Return a line as a model writes it; MessageError for a call that cannot be made."""
    if not line.startswith("/call "):
        return line
    _, _, rest = line.partition(" ")
    name, _, arguments = rest.strip().partition(" ")
    names = [tool_name(tool) for tool in call.request.tools]
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
    return write_call(name, arguments or "{}")


def _tool_line(tool: Mapping[str, Any]) -> str:
    function = function_of(tool)
    parameters: Any = function.get("parameters")
    return f"[tool {tool_name(tool)}] {function.get('description') or ''} {json.dumps(parameters)}"


def _shown(message: CanonicalMessage) -> str:
    calls = [f"/call {call.name} {call.arguments}" for call in message.calls]
    pictures = ["[image]" for part in message.content if not isinstance(part, str)]
    return "\n".join(
        [f"[{message.role}]", *([message.text] if message.text else []), *pictures, *calls]
    )


def _conclude(run: LocalRun) -> int:
    """Say how it ended; return the exit code."""
    if run.result is None:
        if run.error is not None:
            raise run.error
        say_plain("you left before the program ended")
        return NOT_ENDED
    info = run.result.info
    say_plain(f"outcome {info['outcome']}, exit code {info['exit_code']}")
    if "no_reward" in info:
        say_plain(f"no reward: {info['no_reward']}")
        return NOT_ENDED
    say_plain(f"reward {run.result.reward:g} after {len(run.model.calls)} calls")
    return 0
