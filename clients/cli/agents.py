"""`tinkermq agent check`: run an agent program against a scripted model."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...broker.client.connection import Broker
from ...envs.agents import agent_check
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import load_config
from .checks import exit_code, print_checks
from .output import literal, print_plain, print_text
from .session import positive, with_private_broker

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
        YAML file of an agent run.
    overrides
        `section.key=value`, such as `agent.timeout_s=60`.
    row
        Row of the training data; default: the row that `seed` selects.
    seed
        Seed of the episode.
    timeout
        Time limit of the program in seconds, unless the run has a lower one.
    json
        Print JSON.
    """
    job = agent_job(config, overrides)

    async def work(broker: Broker) -> agent_check.AgentReport:
        return await agent_check.check_program(broker, job, row=row, seed=seed, limit_s=timeout)

    report = with_private_broker(work)
    if json:
        fields = {name: value for name, value in asdict(report).items() if name != "checks"}
        return print_checks(report.checks, as_json=True, **fields)
    for line in report_lines(report):
        print_text(line)
    print_checks(report.checks, as_json=False)
    if not report.ok and report.output:
        print_plain(f"the end of its output:\n{report.output[-_SHOWN_OUTPUT:].rstrip()}")
    return exit_code(report.checks)


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
        yield f"sampling fields that the run's rollout overrides: {names} (see agent.sampling)"
    if report.posted:
        posted = ", ".join(f"{name}={value!r}" for name, value in report.posted.items())
        yield f"posts  {literal(posted)}"


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


def agent_job(config: Path, overrides: tuple[str, ...]) -> JobConfig:
    """Read the configuration of an agent run; `model.path` is not required."""
    return load_config(config, ["model.path=none", *overrides])
