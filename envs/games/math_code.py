r"""Math, several turns, with a code interpreter: programs run in a sandbox, the answer is boxed.

The policy writes programs, either in fenced blocks or as calls of the tool `code_interpreter` in
the form of Hermes and Qwen (`tool_format: hermes`, with the tool in the model's chat template).
Their output is the observation. A `\boxed{}` outside of programs and reasoning ends the episode and
is judged as in the game `math`. `make_data` and `demonstrations` are a tiny task in the same form:
products that a model of some hundred thousand parameters cannot compute. Most demonstrations of its
warm start guess instead of running a program.
"""

import random
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

from ...schemas.tool_calls import OPEN, parse_tool_calls
from ...schemas.wire.codec import read_json
from ...schemas.wire.errors import ConfigError
from ..dataset import answer_text
from ..game import AbstractGame, ChatMessage, StepResult
from ..math import grading
from ..sandbox.interpreters import CodeSession, Outcome, SandboxSettings, TurnTime
from ..sandbox.served import shared_sandbox
from ..write_data import DataMaker, verl_row
from .math import judged_info

HABIT = 0.65
"""Share of the demonstrations that guess."""
TOOL = "code_interpreter"
MAX_PROGRAMS = 4
"""Maximum number of programs of one turn; further ones are refused."""
FENCE = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
"""A fenced block of Python, from its first line to its closing fence."""
_STOPPED = {
    "exited": "the interpreter has ended",
    "time": "stopped: it took too much CPU time",
    "clock": "stopped: it ran for too long",
    "memory": "stopped: it took too much memory",
    "output": "stopped: it printed too much",
    "disk": "stopped: it made too many files",
}
_LOST = "; its variables are gone"


class MathCodeGame(AbstractGame):
    """Answer a math question, with a Python interpreter."""

    def __init__(
        self,
        tool_format: Literal["fenced", "hermes"] = "fenced",
        sandbox: Mapping[str, Any] | None = None,
        rewards: Mapping[str, float] | None = None,
        max_output_chars: int = 2000,
        system_prompt: str | None = None,
    ) -> None:
        """Prepare an episode; the first of a process runs the self-test of the sandbox.

        Raises SandboxError if the test fails, ConfigError for invalid settings.
        """
        if tool_format not in ("fenced", "hermes"):
            raise ConfigError(
                f"env.kwargs.tool_format is {tool_format!r}", hint="it is fenced or hermes"
            )
        self._format = tool_format
        self._settings = SandboxSettings.parse(dict(sandbox or {}))
        self._sandbox = shared_sandbox(self._settings)
        self._rewards = grading.MathRewards(
            rewards or {grading.ANSWER: 1.0}, grading.shared_grader()
        )
        self._max_output_chars = max_output_chars
        self._system_prompt = system_prompt
        self._session: CodeSession | None = None
        self._truth = ""
        self._num_programs = self._num_failed = 0

    @property
    def max_return(self) -> float:
        """Return the highest return of an episode."""
        return self._rewards.most

    def reset(self, *, ground_truth: str, **_: Any) -> str:
        """Start with the answer of a row; the question is the row's prompt."""
        self._truth = answer_text(ground_truth)
        return ""

    def step(self, action: str) -> StepResult:
        """Judge an answer, or run programs; without either, return a message about the format."""
        if grading.answer_of(action) is not None:
            self.close()
            judged = self._rewards.judge(action, self._truth)
            return StepResult(
                "", judged.reward, done=True, info={**self._counts(), **judged_info(judged)}
            )
        programs = self._programs(grading.said_in_the_end(action))
        if not programs:
            return StepResult(self._reminder(), 0.0, done=False, info={"no_action": True})
        role = "tool" if self._format == "hermes" else "user"
        return StepResult(self._run(programs), 0.0, done=False, info=self._counts(), role=role)

    def get_tools(self) -> list[dict[str, Any]]:
        """Return the interpreter as a tool, in the format of the chat template."""
        if self._format != "hermes":
            return []
        code = {"type": "string", "description": "a whole Python program; print what you need"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": TOOL, "description": self._about(), "parameters": parameters}
        return [{"type": "function", "function": function}]

    def get_system_prompt(self) -> str:
        """Return the system prompt; a row's own one has priority."""
        if self._system_prompt is not None:
            return self._system_prompt
        how = "Write programs in ```python blocks; " if self._format == "fenced" else ""
        return f"You solve math problems. {how}{self._about()} {grading.INSTRUCTION}"

    def get_state(self) -> dict[str, Any]:
        """Return the right answer, and the number of programs that ran."""
        return {"ground_truth": self._truth, **self._counts()}

    def get_interaction_name(self) -> str:
        """Return the name under which the game is registered."""
        return "math_code"

    def gold_action(self) -> str:
        """Run a program first, then give the right answer."""
        if self._num_programs:
            return rf"<think>It was printed.</think>\boxed{{{self._truth}}}"
        if self._format == "fenced":
            return "```python\n1 + 1\n```"
        return f'{OPEN}{{"name": "{TOOL}", "arguments": {{"code": "1 + 1"}}}}</tool_call>'

    def close(self) -> None:
        """End the episode's interpreter."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _about(self) -> str:
        packages = ", ".join(self._settings.packages)
        are_kept = "kept" if self._settings.keep_state else "not kept"
        return (
            f"Python programs are run and what they print is shown"
            f"{f'; {packages} can be imported' if packages else ''}; variables are {are_kept} "
            "between turns."
        )

    def _programs(self, text: str) -> list[str | None]:
        """Return the programs of a turn; None for a call that cannot be parsed."""
        if self._format == "fenced":
            return list(FENCE.findall(text))
        _, calls = parse_tool_calls(text)
        read = [_code_of(call["function"]) for call in calls]
        return read + [None] * max(0, text.count(OPEN) - len(read))

    def _run(self, programs: list[str | None]) -> str:
        """Run the programs of one turn, in order, in one interpreter; return their output."""
        session = self._session or self._sandbox.session()
        self._session = session
        left = TurnTime(self._settings)
        shown: list[str] = []
        try:
            for program in programs[:MAX_PROGRAMS]:
                shown.append(self._run_one(session, program, left))
        finally:
            if not self._settings.keep_state:
                self.close()
        if len(programs) > MAX_PROGRAMS:
            shown.append(f"[only {MAX_PROGRAMS} programs are run in one turn]")
        return "\n".join(shown)

    def _run_one(self, session: CodeSession, program: str | None, left: TurnTime) -> str:
        if program is None:
            self._num_failed += 1
            return f'[no call of a tool: write {{"name": "{TOOL}", "arguments": {{"code": "…"}}}}]'
        if left.is_over:
            return "[not run: the time of this turn is over]"
        outcome = left.run(session, program)
        self._num_programs += 1
        self._num_failed += outcome.status != "ok"
        return self._shown(outcome)

    def _shown(self, outcome: Outcome) -> str:
        text = outcome.text.rstrip()
        most = self._max_output_chars
        if len(text) > most:
            left_out = len(text) - most
            end = len(text) - (most - most // 2)
            text = f"{text[: most // 2]}\n[{left_out} characters left out]\n{text[end:]}"
        if (why := _STOPPED.get(outcome.status)) is not None:
            lost = _LOST if self._settings.keep_state else ""
            text = f"{text}\n[{why}{lost}]".lstrip()
        return text or "[nothing was printed]"

    def _reminder(self) -> str:
        tool = "write a ```python block" if self._format == "fenced" else f"call {TOOL}"
        return rf"[neither a program nor an answer: {tool}, or answer within \boxed{{}}]"

    def _counts(self) -> dict[str, Any]:
        return {"programs": self._num_programs, "failed_programs": self._num_failed}


def _code_of(function: Mapping[str, str]) -> str | None:
    """Return the program of a call of our tool, or None for any other call."""
    try:
        arguments: Any = read_json(function["arguments"])
    except ValueError:
        return None
    code = cast("dict[str, Any]", arguments).get("code") if isinstance(arguments, dict) else None
    return code if function["name"] == TOOL and isinstance(code, str) else None


def demonstrations(rng: random.Random) -> list[ChatMessage]:
    """Return one conversation for the warm start; `HABIT` of them guess."""
    question, answer = _draw(rng)
    question_message = {"role": "user", "content": question}
    if rng.random() < HABIT:
        guess = rng.randrange(100, 9802)
        return [question_message, {"role": "assistant", "content": rf"\boxed{{{guess}}}"}]
    return [
        question_message,
        {"role": "assistant", "content": f"```py\n{question}\n```"},
        {"role": "user", "content": answer},
        {"role": "assistant", "content": rf"\boxed{{{answer}}}"},
    ]


def _draw(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randrange(10, 100), rng.randrange(10, 100)
    return f"{a}*{b}", str(a * b)


def _row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    question, answer = _draw(rng)
    return verl_row(question, answer, data_source="products", split=split, index=index)


make_data = DataMaker(_row)
