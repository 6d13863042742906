"""`tinkermq agent check`: what does a program make of a model's answers?"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ....broker.client.connection import Broker
from ....envs.agents.trial.check import LIMIT_S, check_program
from ....envs.agents.trial.report import CallFacts, TrialReport
from ..output import literal, print_json, say
from .private_broker import agent_job, with_private_broker

FAILED = 1
_MARKS = {
    "ok": "[green]ok[/]   ",
    "note": "[dim]note[/] ",
    "costs": "[yellow]costs[/]",
    "fail": "[red]fail[/] ",
}
_SHOWN_OUTPUT = 2000


def check(
    config: Path,
    /,
    *overrides: str,
    row: int | None = None,
    seed: int = 0,
    timeout: float = LIMIT_S,
    once: bool = False,
    json: bool = False,
) -> int:
    """Run an agent program once, here, against a model by a script, and report what it does.

    It runs behind the walls that it has in a pool, and needs neither a pool nor a model. Told are
    the endpoints that it uses, of each call whether it would be trained and why (`agent.train`),
    what it drops or changes of its history and what that costs, whether it ends by itself, its
    reward, and what it does when its history is too long for the model.

    Parameters
    ----------
    config
        YAML file of an agent job.
    overrides
        `section.key=value`, such as `agent.timeout_s=60`.
    row
        Row of the training data; default: the one that `seed` falls on.
    seed
        Seed of the episode.
    timeout
        Seconds that the program may take, unless the job allows less.
    once
        Leave out the second run, in which a call is refused because its history is too long.
    json
        Print JSON.
    """
    job = agent_job(config, overrides)

    async def work(broker: Broker) -> TrialReport:
        return await check_program(
            broker, job, row=row, seed=seed, limit_s=timeout, tries_context=not once
        )

    report = with_private_broker(work)
    if json:
        print_json(asdict(report))
    else:
        for line in report_lines(report):
            say(line)
    return 0 if report.ok else FAILED


def report_lines(report: TrialReport) -> Iterator[str]:
    """Yield a report as lines for people, with rich's markup."""
    for endpoint, number in report.endpoints.items():
        times = "once" if number == 1 else f"{number} times"
        yield f"asks   {literal(endpoint)}  {times}"
    for client in report.clients:
        yield f"client {literal(client)}"
    for call in report.calls:
        yield f"call   {_call_line(call)}"
    if report.calls:
        yield f"rows   {report.rows} for {len(report.calls)} calls; {_parallel(report)}"
    if report.without_effect:
        yield f"fields without effect: {literal(', '.join(report.without_effect))}"
    if report.overruled:
        names = literal(", ".join(report.overruled))
        yield f"fields in whose place the job's rollout counts: {names} (see agent.sampling)"
    if report.posted:
        told = ", ".join(f"{name}={value!r}" for name, value in report.posted.items())
        yield f"posts  {literal(told)}"
    if report.phases is not None:
        yield f"time   {_phases(report)}"
    for finding in report.findings:
        yield f"{_MARKS[finding.level]}  {literal(finding.text)}"
        if finding.remedy:
            yield f"       [dim]{literal(finding.remedy)}[/]"
    if not report.ok and report.output:
        yield f"it printed at last:\n{literal(report.output[-_SHOWN_OUTPUT:].rstrip())}"


def _call_line(call: CallFacts) -> str:
    where = "root" if call.parent is None else f"continues {call.parent}"
    parts = [
        f"{call.number:<3} {where:<13} {call.messages} messages, {call.new} new",
        f"tools {', '.join(call.tools)}" if call.tools else "",
        "streamed" if call.streamed else "",
        f"{call.choices} choices" if call.choices > 1 else "",
        f"changed: {', '.join(call.changes)}" if call.changes else "",
        f"refused: {call.refusal}" if call.refusal else "",
        f"after {call.seconds:.1f} s",
        "main conversation" if call.main else "",
        f"{'trained' if call.trained else 'not trained'}: {call.why}",
    ]
    return literal(", ".join(part for part in parts if part))


def _parallel(report: TrialReport) -> str:
    if report.parallel > 1:
        return f"up to {report.parallel} calls at the same time"
    return "one call at a time"


def _phases(report: TrialReport) -> str:
    phases = report.phases
    assert phases is not None
    first = f"first call after {phases.first_call:.1f} s" if phases.first_call else "no call"
    return (
        f"{phases.start:.1f} s to prepare, {phases.program:.1f} s of the program ({first}), "
        f"{phases.reward:.1f} s for the reward"
    )
