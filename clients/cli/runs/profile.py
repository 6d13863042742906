"""`tinkermq profile`: where the time of a run goes, who waits for whom, and what to change."""

from collections.abc import Mapping
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from ....broker.calls import trace_steps
from ....broker.feed import read_traces
from ....broker.profile import (
    Advice,
    Profile,
    TypicalStep,
    advise,
    bound_key,
    profile_of,
    seconds_text,
    spans_of,
)
from ....schemas.job import JobRecord
from ....schemas.wire.errors import ConfigError, StateError
from ....schemas.wire.trace import StepTrace
from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json, print_table, say_plain
from ..session import with_pool

_STEPS = 100
_BUSY = {
    "learner": ("train", "publish", "checkpoint", "other"),
    "generator": ("generate",),
    "host": ("full", "play"),
}
"""What counts as work; all else is waiting."""
_WORDS = {
    "generate": "generation",
    "environment": "games",
    "queue": "tasks in the queue",
    "weights": "newer weights",
    "tasks": "tasks",
    "swap": "swaps of weights",
    "idle": "actions",
    "full": "all workers",
    "play": "some workers",
    "paused": "somebody to resume it",
    "other": "other",
}


def profile(
    run: str,
    /,
    *,
    steps: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    torch_profiler: bool = False,
    otlp: str | None = None,
    common: Common = COMMON,
) -> int:
    """Show where the time of a run goes: who waits for whom, and what to change.

    Parameters
    ----------
    run
        Name or job id.
    steps
        How many of the newest steps to look at (default: 100); of the next ones to trace (1).
    torch_profiler
        Have the learner trace its next steps with torch's profiler, and print the files on the
        pool, which chrome://tracing and Perfetto open.
    otlp
        Send the spans of these steps to a collector of OpenTelemetry's at this URL, such as
        http://127.0.0.1:4318.
    """

    if torch_profiler and otlp is not None:
        raise ConfigError(
            "--otlp has no effect beside --torch-profiler", hint="give one of them at a time"
        )

    async def trace(pool: Pool) -> list[str]:
        return await trace_steps(pool.broker, await pool.find(run), steps or 1)

    async def read(pool: Pool) -> tuple[JobRecord, list[StepTrace]]:
        record = await pool.find(run)
        if not record.trains:
            raise StateError(
                f"job {record.name} trains nothing, so it has no steps",
                hint="give the name of a training job: `tinkermq ps --all`",
            )
        return record, await read_traces(pool.broker, record.scope, steps or _STEPS)

    if torch_profiler:
        _print_files(with_pool(common.nats_url, trace), as_json=common.json)
        return 0
    record, traces = with_pool(common.nats_url, read)
    if otlp is not None:
        _send(record, traces, otlp)
    found = profile_of(traces)
    advice = advise(found, record.name, bound_key(record.config)) if traces else []
    if common.json:
        print_json(_document(record, found, advice))
    elif not traces:
        note(f"{record.name} has no traces: none of its steps is over")
    else:
        _print(found, advice)
    return 0


def _print_files(files: list[str], *, as_json: bool) -> None:
    if as_json:
        print_json({"files": files})
        return
    for file in files:
        say_plain(file)


def _send(record: JobRecord, traces: list[StepTrace], url: str) -> None:
    from ...otlp import send_spans

    spans = [span for trace in traces for span in spans_of(trace)]
    send_spans(spans, url, {"tinkermq.run": record.name, "tinkermq.job": record.job})
    note(f"sent {len(spans)} spans to {url}")


def _document(record: JobRecord, found: Profile, advice: list[Advice]) -> dict[str, Any]:
    told = [{"text": one.text, "change": list(one.change)} for one in advice]
    return {"run": record.name, "job": record.job, **found.fields(), "advice": told}


def _print(found: Profile, advice: list[Advice]) -> None:
    say_plain(f"{found.num_steps} steps in {seconds_text(found.wall_s)}")
    say_plain("")
    print_table(("actor", "busy", "of it", "waits for"), _rows(found))
    if found.answer_p95_s:
        p50, p95 = seconds_text(found.answer_p50_s), seconds_text(found.answer_p95_s)
        say_plain("")
        say_plain(f"games answered after p50 {p50}, p95 {p95}")
    if found.typical is not None:
        say_plain("")
        _print_path(found.typical)
    say_plain("")
    for one in advice:
        say_plain(f"- {one.text}")
        say_plain(f"  change: {', '.join(one.change)}")


def _rows(found: Profile) -> list[tuple[str, str, str, str]]:
    paused = {kind: share for kind, share in found.learner.items() if kind == "paused"}
    rows = [_row("learner", found.learner, "learner", found.waited_for | paused)]
    rows += [_row(name, shares, "generator") for name, shares in found.generators.items()]
    rows += [_row(name, shares, "host") for name, shares in found.hosts.items()]
    return rows


def _row(
    name: str, shares: Mapping[str, float], role: str, waits: Mapping[str, float] | None = None
) -> tuple[str, str, str, str]:
    work = {kind: shares[kind] for kind in _BUSY[role] if kind in shares}
    rest = waits or {kind: share for kind, share in shares.items() if kind not in work}
    parts = "" if len(_BUSY[role]) == 1 else _parts(work)
    return name, f"{sum(work.values()):.0%}", parts, _parts(rest)


def _parts(shares: Mapping[str, float]) -> str:
    """Return shares from the largest on; what rounds to nothing is left out."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{_WORDS.get(kind, kind)} {share:.0%}" for kind, share in ordered if share >= 0.005
    )


def _print_path(typical: TypicalStep) -> None:
    """Print what a step was made of, one line for each part."""
    say_plain(f"step {typical.step}, of median length, took {seconds_text(typical.seconds)}:")
    if typical.task is not None:
        say_plain(f"  it waited for task {typical.task} of {typical.source}")
    for kind, seconds in typical.path:
        say_plain(f"  {kind:<12}{seconds_text(seconds):>9}  {seconds / typical.seconds:5.0%}")
    if typical.trace:
        say_plain(f"  trace {typical.trace}")
