"""Run a job's program once against a scripted model, and report which calls would be trained."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from ...broker.client.connection import Broker
from ...schemas.checks import CheckResult, Outcome
from ...schemas.config.job import JobConfig
from ...schemas.tool_calls import CLOSE, OPEN, THINK, THOUGHT
from ...schemas.wire.errors import GameError, RewardError
from ..task_folders import TaskFolders, TaskRefused
from ..tools import example_of
from .call_selection import WHY_NOT, WhyNot, main_root, why_untrained
from .local_run import LocalAnswer, LocalCall, LocalRun, num_common, open_program
from .programs.task_environments import EnvironmentPlanner

LIMIT_S = 120.0
"""Time limit of a program, unless its job has a shorter one."""


@dataclass(frozen=True)
class CallReport:
    """One call of the model."""

    number: int
    parent: int | None
    """The call that it continues; None: a root."""
    differs: str
    """Why it continues no earlier call; empty: it does, or it is the first."""
    messages: int
    """Number of messages of its history."""
    new: int
    """Number of messages after the answer that it continues."""
    tools: list[str]
    """Names of the tools that it may call."""
    streamed: bool
    choices: int
    refusal: str
    """Code of the error in the reply; empty: it was answered."""
    trained: int
    """Number of its answers that would be trained, with the episode's reward."""
    why: str
    """Why they would be trained or not."""
    main: bool
    """Whether it belongs to the main conversation."""


@dataclass(frozen=True)
class AgentReport:
    """Report on a run of the program."""

    checks: list[CheckResult]
    """Whether episodes of the program can be trained, and if not, why."""
    calls: list[CallReport]
    endpoints: dict[str, int]
    """Number of requests by method and path: `POST /v1/responses`."""
    without_effect: list[str]
    """Fields of its requests without effect."""
    overruled: list[str]
    """Sampling options of its requests that the job's own options replace."""
    rows: int
    """Number of training rows of the episode: leaves of the tree of calls."""
    outcome: str
    """How it ended; empty: the episode does not count."""
    reward: float | None
    posted: dict[str, object]
    """Data that it posted to the episode's endpoints."""
    output: str
    """The end of its output."""

    @property
    def ok(self) -> bool:
        """Whether episodes of the program can be trained."""
        return all(check.ok for check in self.checks)


async def check_program(
    broker: Broker,
    job: JobConfig,
    *,
    row: int | None = None,
    seed: int = 0,
    limit_s: float = LIMIT_S,
) -> AgentReport:
    """Run a job's program on one task, on this machine, against a scripted model.

    Without a row, it is the first Harbor task from `seed` on that runs here. Raises the errors of
    `open_program` and `LocalProgram.run`.
    """

    async def speak(call: LocalCall) -> str:
        return scripted_answer(call)

    checks, first = await asyncio.to_thread(check_tasks, job, seed)
    row = first if row is None else row
    async with open_program(broker, job, limit_s=limit_s) as program:
        report = report_run(await program.run(speak, row=row, seed=seed), job.agent.train)
    return replace(report, checks=[*checks, *report.checks])


# -- Harbor tasks ----------------------------------------------------------------------------------

_MAX_REFUSED = 20


def check_tasks(job: JobConfig, seed: int = 0) -> tuple[list[CheckResult], int | None]:
    """Check which of a job's Harbor tasks suit this machine by their files; blocks.

    Whether the steps of their Dockerfiles succeed is seen when they are run. Also returns the first
    suitable task from the seed on. Nothing is checked for other
    data. Raises DataError for a folder that cannot be read.
    """
    folders = [TaskFolders(source) for source in job.task_sources if source is not None]
    if not folders:
        return [], None
    planner = EnvironmentPlanner(job.agent)
    refused: list[TaskRefused] = []
    rows: list[int] = []
    num_train = sum(map(len, folders[: len(job.env.train_data)]))
    tasks = [task for folder in folders for task in folder.tasks]
    for number, task in enumerate(tasks):
        try:
            planner.plan(task)
        except TaskRefused as error:
            refused.append(error)
        else:
            rows.append(number)
    trained = [number for number in rows if number < num_train]
    where = f"images of {planner.engine.name}" if planner.engine else "the sandbox"
    suited = f"{len(rows)} of {len(tasks)} Harbor tasks suit {where}, by their files"
    checks = [
        _result(
            "ok" if trained else "failed",
            "tasks",
            suited + (f" ({planner.missing_engine})" if planner.missing_engine else ""),
        ),
        _result("ok", "tasks", "their reward is that of tests/test.sh, in /logs/verifier"),
        *(_result("note", "tasks", error.message, error.hint) for error in refused[:_MAX_REFUSED]),
    ]
    if len(refused) > _MAX_REFUSED:
        text = f"{len(refused) - _MAX_REFUSED} more tasks cannot be run"
        checks.append(_result("note", "tasks", text))
    limit_mb = job.agent.memory_mb
    larger = [task.name for task in tasks if (task.settings.environment.memory_mb or 0) > limit_mb]
    if larger:
        text = f"{len(larger)} tasks ask for more memory than agent.memory_mb={limit_mb}: "
        checks.append(_result("note", "tasks", text + larger[0]))
    start = seed % num_train
    later = [number for number in trained if number >= start]
    return checks, (later or trained or [None])[0]


def _result(outcome: Outcome, name: str, detail: str, hint: str = "") -> CheckResult:
    code = GameError.code if outcome == "failed" else ""
    return CheckResult(name=name, outcome=outcome, detail=detail, hint=hint, code=code)


# -- the script ------------------------------------------------------------------------------------

_ENDS = ("final", "submit", "finish", "complete", "done")
"""Words in the names of tools with which a model submits its final answer."""


def scripted_answer(call: LocalCall) -> str:
    """Return an answer in the form in which models write tool calls.

    The first answer calls a tool, if there is one; the next one ends the episode, by a tool for
    that or by a text. An answer has the required form, if there is one. Answers contain parts that
    programs tend to change: reasoning, white space, unusual spacing of arguments.
    """
    tools = {name: tool for tool in call.request.tools if (name := tool_name(tool))}
    called = {item.name for message in call.history for item in message.calls}
    form = call.request.decoding.format
    if form is not None and form.functions and (form.json_schema is None or not called):
        allowed = sorted(form.functions, key=lambda name: (name in called, _is_end(name)))
        return _call(tools[allowed[0]])
    if form is not None:
        return _spaced(example_of(form.json_schema))
    uncalled = [name for name in tools if not _is_end(name)] if not called else []
    names = uncalled or [name for name in tools if _is_end(name)]
    if names:
        return f"{THINK}\nLet me look.\n{THOUGHT}\n\nI will  look it up.\n{_call(tools[names[0]])}"
    return "  I think  that it is 42.\n\n"


def write_call(name: str, arguments: str) -> str:
    """Return a call as models write it; the spelling of the arguments is kept."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{OPEN}\n{call}\n{CLOSE}"


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool that chat templates take."""
    function: Any = tool.get("function")
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def tool_name(tool: Mapping[str, Any]) -> str:
    """Return the name of a tool; empty for one without a name."""
    return str(function_of(tool).get("name") or "")


def _call(tool: Mapping[str, Any]) -> str:
    parameters = function_of(tool).get("parameters") or {"type": "object"}
    return write_call(tool_name(tool), _spaced(example_of(parameters)))


def _spaced(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",  ", ":  "))


def _is_end(name: str) -> bool:
    return any(word in name.lower() for word in _ENDS)


# -- the report ------------------------------------------------------------------------------------

_APPEND = "append the assistant's message as the API returned it, and change nothing before it"


def report_run(run: LocalRun, train: str) -> AgentReport:
    """Report a run, by the job's `agent.train`."""
    calls, answers = run.model.calls, run.model.answers
    info = run.result.info if run.result is not None else {}
    reports = _report_calls(run, train)
    continued = {call.parent for call in calls}
    num_rows = sum(answer not in continued for answer in answers)
    endpoints: Counter[str] = Counter()
    for (request, _), number in run.requests.items():
        endpoints[request] += number
    return AgentReport(
        checks=[*_check_end(run), *_check_calls(reports, train, num_rows)],
        calls=reports,
        endpoints=dict(endpoints),
        without_effect=sorted({name for call in calls for name in call.request.without_effect}),
        overruled=sorted({name for call in calls for name in call.request.decoding.sampling}),
        rows=num_rows,
        outcome=str(info.get("outcome", "")),
        reward=run.result.reward if run.result is not None else None,
        posted=_posted(run),
        output=str(info.get("output", "")),
    )


def _report_calls(run: LocalRun, train: str) -> list[CallReport]:
    answers = run.model.answers
    left_out = run.episode.untrained if run.episode is not None else ()
    why_not = why_untrained(answers, train, left_out)
    main = main_root(answers)
    return [
        CallReport(
            number=call.number,
            parent=None if call.parent is None else call.parent.call.number,
            differs=_difference(call, answers[: call.num_seen]),
            messages=len(call.history),
            new=len(call.new_messages),
            tools=[tool_name(tool) for tool in call.request.tools],
            streamed=call.request.stream,
            choices=call.request.decoding.num_choices,
            refusal=call.refusal,
            trained=sum(not why_not[answer] for answer in call.answers),
            why=_explain(call.answers, why_not, train),
            main=any(answer.origin is main for answer in call.answers),
        )
        for call in run.model.calls
    ]


def _difference(call: LocalCall, earlier: Sequence[LocalAnswer]) -> str:
    """Return why a call continues none of the earlier answers; empty if it does."""
    if call.parent is not None or not earlier:
        return ""
    near = max(earlier, key=lambda answer: (num_common(call.history, answer.path), answer.number))
    common = num_common(call.history, near.path)
    if common == len(near.path):
        return f"other tools than call {near.call.number}"
    if common == len(call.history):
        return f"the history ends before the answer to call {near.call.number}"
    return f"message {common} ({call.history[common].role}) differs from call {near.call.number}"


def _explain(
    answers: Sequence[LocalAnswer], why_not: Mapping[LocalAnswer, WhyNot], train: str
) -> str:
    """Return why the answers to a call are trained, or why some or all are not."""
    reasons = [why for answer in answers if (why := why_not[answer])]
    if reasons:
        return WHY_NOT[reasons[0]]
    if not answers:
        return "it was not answered"
    words = {"all": "every answer that arrives is", "main": "it is of the main conversation"}
    return words.get(train, f"by the pattern of agent.train={train}")


def _posted(run: LocalRun) -> dict[str, object]:
    if run.episode is None:
        return {}
    posted: dict[str, object] = {"status": run.episode.status, **run.episode.to_info()}
    if run.episode.reward is not None:
        posted["reward"] = run.episode.reward
    return {name: value for name, value in posted.items() if value not in ("", {}, [])}


def _check_end(run: LocalRun) -> Iterator[CheckResult]:
    """Check how the program ended, and whether its reward could be read."""
    if run.result is None:
        if run.error is not None:
            yield _result("failed", "end", run.error.message, _error_remedy(run))
        return
    info = run.result.info
    outcome, exit_code = str(info.get("outcome", "")), info.get("exit_code")
    if outcome == "done":
        yield _result("ok", "end", f"ends by itself, exit code {exit_code}")
    elif outcome == "failed":
        yield _result("note", "end", "reports that it has failed (status=failed)")
    elif outcome == "crash":
        limit = f": it went over agent.{info['limit']}_mb" if "limit" in info else ""
        remedy = "a program that has done what it can exits with 0, whatever the model said"
        yield _result("failed", "end", f"exits with code {exit_code}{limit}", remedy)
    else:
        why = "its time was over" if outcome == "timeout" else "it made no call for too long"
        remedy = "see what it waits for; limit its turns by one of its options"
        yield _result("failed", "end", f"does not end by itself: {why}", remedy)
    if "no_reward" in info:
        yield _result("failed", "reward", f"has no reward: {info['no_reward']}")
    else:
        yield _result("ok", "reward", f"has the reward {run.result.reward:g}")
    if uncounted := info.get("uncounted_rewards"):
        yield _result(
            "note",
            "reward",
            f"posts rewards ({uncounted}), which do not count",
            "agent.reward or the task's tests give it; without them posted rewards count",
        )


def _error_remedy(run: LocalRun) -> str:
    assert run.error is not None
    if isinstance(run.error, RewardError):
        return f"{run.error.hint}\nit must also grade what a program leaves that has done nothing"
    failed = [(request, status) for request, status in run.requests if status >= 400]
    refused = f"; its {failed[0][0]} was answered {failed[0][1]}" if failed else ""
    return run.error.hint + refused


def _check_calls(calls: Sequence[CallReport], train: str, num_rows: int) -> Iterator[CheckResult]:
    """Check how many calls would be trained, and how they continue each other."""
    answered = [call for call in calls if not call.refusal]
    num_trained = sum(bool(call.trained) for call in answered)
    text = f"{num_trained} of {len(answered)} answered calls would be trained (agent.train={train})"
    if answered and not num_trained:
        remedy = "set agent.train to all, main, or another pattern"
        yield _result("failed", "calls", text, remedy)
    elif answered:
        yield _result("ok" if num_trained == len(answered) else "note", "calls", text)
    further = calls[1:]
    num_continuing = sum(call.parent is not None for call in further)
    if further and num_continuing == len(further) and num_rows == 1:
        yield _result("ok", "rows", "each call continues the one before it: one row")
    elif further:
        yield _result(
            "note",
            "rows",
            f"{num_rows} rows: {num_continuing} of {len(further)} further calls continue one "
            f"before them, {len(further) - num_continuing} begin a conversation of their own",
            _APPEND if num_continuing < len(further) else "",
        )
    for code, number in Counter(call.refusal for call in calls if call.refusal).items():
        remedy = "end the program when its calls are used up" if code == "episode_limit" else ""
        yield _result("note", "calls", f"{number} calls were refused with {code}", remedy)
