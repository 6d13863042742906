"""Commands that inspect a run: `tinkermq logs`, `rollouts`, `failed` and `profile`."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from ...broker.calls import decide_failed, read_memory, trace_steps
from ...broker.feed import read_failed, read_traces
from ...broker.kept_rollouts import RunRollouts
from ...envs.agents.call_selection import CallLine, call_lines
from ...schemas.job import FINAL_STATES, JobRecord
from ...schemas.metric import Event, LogLines, readable
from ...schemas.profile import (
    Advice,
    Profile,
    Span,
    TypicalStep,
    advise,
    bound_key,
    profile_of,
    seconds_text,
    spans_of,
    trace_file,
)
from ...schemas.rollout import Trajectory
from ...schemas.task import DeadLetter, Decision
from ...schemas.wire.errors import BrokerError, ConfigError, NotFoundError, StateError, StorageError
from ...schemas.wire.images import plain_text
from ...schemas.wire.trace import StepTrace
from ..pool import Pool
from ..run_records import (
    EpisodeFilter,
    LoggedEpisode,
    check_actor,
    read_episodes,
    read_log_lines,
    read_steps,
)
from .output import (
    literal,
    print_json,
    print_json_line,
    print_note,
    print_plain,
    print_result,
    print_table,
    print_text,
)
from .session import COMMON, Common, with_pool

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

    from ...schemas.control import ControlReply


def logs(
    run: str,
    /,
    *,
    follow: Annotated[bool, Parameter(alias="-f")] = False,
    actor: str | None = None,
    attempt: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    common: Common = COMMON,
) -> int:
    """Print the logs of a run's actors, oldest first.

    Parameters
    ----------
    run
        Name or job id.
    follow
        Keep printing new lines until Ctrl-C.
    actor
        Only this actor's lines: learner, generator-0, evaluator-0 …
    attempt
        Only lines of this attempt of the run: 1, 2 …
    """

    async def work(pool: Pool) -> int:
        record = await pool.find(run)
        await check_actor(pool, record, actor)
        if attempt is not None and attempt > record.attempt:
            raise NotFoundError(
                f"run {record.name} has no attempt {attempt}",
                hint=f"its attempts are 1 to {record.attempt}",
            )
        num_batches = 0
        async with aclosing(read_log_lines(pool, record, follow_on=follow)) as batches:
            async for batch in batches:
                num_batches += 1
                if isinstance(batch, Event):
                    print_note(batch.message)
                elif actor in (None, batch.actor) and attempt in (None, batch.attempt):
                    _print_logs(batch, as_json=common.json)
        if not num_batches and record.state not in FINAL_STATES:
            print_note(f"{record.name} has written nothing yet: {record.reason}")
        return 0

    return with_pool(common.nats_url, work)


def _print_logs(batch: LogLines, *, as_json: bool) -> None:
    if as_json:
        print_json_line(batch.model_dump())
        return
    for line in batch.lines:
        print_plain(f"{batch.actor} | {readable(line)}")


# `tinkermq rollouts`: read the episodes of a run from its rollout log.

_PRINTED = 10
_ROLE_STYLES = {"system": "dim", "user": "blue", "assistant": "green", "tool": "magenta"}


def rollouts(
    run: str,
    /,
    *,
    step: int | None = None,
    sort: Literal["log", "reward"] = "log",
    errors: bool = False,
    limit: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    to: Path | None = None,
    common: Common = COMMON,
) -> int:
    """Read a run's episodes: messages, rewards by turn, policy versions.

    The log holds the groups that the run still needs, and after its end the newest ones (16 MiB);
    with `training.keep_rollouts=true`, all. Older ones are read from the run folder if it is on
    this machine: a sample of the whole run, or the rollouts of an archived run.

    Parameters
    ----------
    run
        Name or job id; or a run folder, which is read without a broker.
    step
        Only the groups that this training step trained.
    sort
        `log`: newest first; `reward`: best first.
    errors
        Only failures: failed tasks, and episodes with failed attempts.
    limit
        Most episodes to print (default: 10) or to write (default: all).
    to
        Write them to this Parquet file instead, oldest first, with tokens and log-probs.
    """

    async def read(there: RunRollouts, steps: dict[int, int]) -> list[LoggedEpisode] | int:
        if to is not None:
            from ..export import write_parquet  # pyarrow takes a third of a second to import

            return await write_parquet(there, steps, replace(selected, most=limit), to)
        return await read_episodes(there, steps, selected)

    async def work(pool: Pool) -> list[LoggedEpisode] | int:
        record = await pool.find(run)
        if record.kind != "train":
            raise StateError(
                f"run {record.name} is of kind {record.kind}, which logs no rollouts",
                hint="give the name of a training job: `tinkermq ps --all`",
            )
        there = await RunRollouts.open(pool.broker, record.scope, record.run_dir)
        return await read(there, await read_steps(pool.broker, record.scope, there))

    most = limit or _PRINTED
    selected = EpisodeFilter(step, errors=errors, most=most if sort == "log" else None)
    if "/" in run:
        there = _of_folder(run)
        episodes = asyncio.run(read(there, there.steps))
    else:
        episodes = with_pool(common.nats_url, work)
    if isinstance(episodes, int):
        written = {"file": str(to), "episodes": episodes}
        return print_result(written, f"{episodes} episodes in {to}", as_json=common.json)
    if sort == "reward":
        episodes = sorted(episodes, key=lambda episode: episode.reward, reverse=True)
    if not episodes and not common.json:
        print_note("no such rollouts in the log (it is trimmed unless training.keep_rollouts=true)")
    for episode in episodes[:most]:
        if common.json:
            print_json_line(episode.fields())
        else:
            _print_rollouts(episode)
    return 0


def _of_folder(folder: str) -> RunRollouts:
    if not (rollouts := RunRollouts.of_folder(folder)):
        raise NotFoundError(
            f"{folder} holds no rollouts",
            hint="name the folder of a run (`tinkermq ps --json` shows it), or the run itself",
        )
    return rollouts


def _cut_turns(trajectory: Trajectory) -> str:
    """List the turns that their token limit cut, counted from 1."""
    cut = [str(turn) for turn, why in enumerate(trajectory.finish_reasons, 1) if why == "length"]
    return f" (cut: turn {', '.join(cut)})" if cut else ""


def _name(episode: LoggedEpisode) -> str:
    trajectory = episode.trajectory
    if trajectory is None or trajectory.episode < 0:
        return f"episode {episode.number}"
    rows = [item for item in episode.group.trajectories if item.episode == trajectory.episode]
    row = next(place for place, item in enumerate(rows) if item is trajectory)
    return (
        f"episode {trajectory.episode}, row {row + 1} of {len(rows)} ({trajectory.kind or 'main'})"
    )


def _print_call(line: CallLine) -> None:
    """Print one call of a program's tree."""
    where = f"row {line.row + 1}" if line.row is not None else f"not trained: {line.why_not}"
    reward = f"  reward {line.reward:g}" if line.reward is not None else ""
    if line.branch_reward is not None:
        reward += f"  reward of its branch {line.branch_reward:g}"
    branch = (
        f" ({', '.join(named)})" if (named := [*filter(None, (line.name, line.branch))]) else ""
    )
    text = " ".join([*line.text.split(), *(f"→ {tool}" for tool in line.tools)])
    print_plain(
        f"  {'  ' * line.depth}call {line.call}{branch}: {line.tokens} tokens, {where}{reward}  "
        f"{text[:80]}"
    )


def _print_rollouts(episode: LoggedEpisode) -> None:
    task = episode.group.task
    trained = f"step {episode.step}" if episode.step is not None else "not trained"
    trajectory = episode.trajectory
    head = f"[bold]task {task.task}[/] {literal(_name(episode))}  {trained}"
    if trajectory is None:
        error = episode.group.error
        print_text(f"{head}  [red]given up[/]")
        print_plain(f"  {error.boundary}: {error.message}" if error else "  (no reason)")
        return
    by_turn = " ".join(f"{reward:g}" for reward in trajectory.rewards.tolist())
    versions = (
        f"{trajectory.min_version}"
        if trajectory.min_version == trajectory.max_version
        else f"{trajectory.min_version}-{trajectory.max_version}"
    )
    print_text(
        f"{head}  reward [bold]{trajectory.reward:g}[/] (by turn: {by_turn})  version {versions}  "
        f"{trajectory.num_generated} tokens  ended by {trajectory.ended_by}"
        f"{_cut_turns(trajectory)}  from {literal(episode.group.source)}"
    )
    for message in trajectory.messages:
        role = str(message.get("role", "?"))
        print_text(f"  [{_ROLE_STYLES.get(role, 'white')}]{literal(role)}[/]")
        for line in plain_text(message.get("content", "")).splitlines() or [""]:
            print_plain(f"    {line}")
        for call in message.get("tool_calls", ()):
            function = call.get("function", {})
            print_plain(f"    → {function.get('name')}({function.get('arguments')})")
    for line in call_lines(trajectory.info):
        _print_call(line)
    for failure in trajectory.failures:
        print_plain(f"  failed try: {failure.boundary}: {failure.message}")
    print_text("")


def failed(
    run: str,
    /,
    *,
    repeat: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    drop: Annotated[list[int] | None, Parameter(consume_multiple=True)] = None,
    every: Annotated[Decision | None, Parameter(name="--all")] = None,
    common: Common = COMMON,
) -> int:
    """List the tasks of a run that failed for good, with their reasons; repeat or drop them.

    A task is listed once its tries are used up, or if it can never be played.

    Parameters
    ----------
    run
        Name or job id.
    repeat
        Numbers of listed tasks to issue again, each once, as new tasks of the same row and seed;
        a run that has ended issues them when it is resumed for more steps.
    drop
        Numbers of listed tasks to take off the list; the run is not changed.
    every
        `repeat` or `drop` all that are listed.
    """
    chosen: dict[Decision, list[int]] = {}
    if repeat:
        chosen["repeat"] = repeat
    if drop:
        chosen["drop"] = drop
    if every and chosen:
        raise ConfigError("--all is given with numbers", hint="give one of both")
    if every:
        chosen[every] = []

    async def work(pool: Pool) -> tuple[list[DeadLetter], dict[Decision, list[int]]]:
        record = await pool.find(run)
        decided: dict[Decision, list[int]] = {
            what: await decide_failed(pool.broker, record, numbers, what)
            for what, numbers in chosen.items()
        }
        return await read_failed(pool.broker, record.scope), decided

    letters, decided = with_pool(common.nats_url, work)
    if common.json:
        print_json({"failed": [item.model_dump() for item in letters], "decided": decided})
        return 0
    for what, numbers in decided.items():
        note = "issued again when the staleness bound allows" if what == "repeat" else "dropped"
        print_note(f"{len(numbers)} {'task is' if len(numbers) == 1 else 'tasks are'} {note}")
    for letter in letters:
        task, blame = letter.task, letter.blame
        row = f"seed {task.seed}" if task.sample is None else f"row {task.sample}"
        print_text(
            f"[bold]task {task.task}[/]  {row}  tries {task.tries + 1}  {literal(letter.source)}"
        )
        print_plain(f"  {blame.boundary}: {blame.message}")
        if blame.hint:
            print_plain(f"  {blame.hint}")
    if not letters:
        print_note("no task has failed for good, or all are decided")
    return 0


# `tinkermq profile`: how a run spends its time, which actors wait, and what to change.

_STEPS = 100
_BUSY = {
    "learner": ("train", "publish", "checkpoint", "other"),
    "generator": ("generate", "validation"),
    "host": ("full", "play"),
}
"""Kinds of spans that count as work; all others are waiting."""
_WORDS = {
    "generate": "generation",
    "environment": "games",
    "validation": "validation",
    "queue": "tasks in the queue",
    "weights": "newer weights",
    "tasks": "tasks",
    "swap": "swaps of weights",
    "idle": "actions",
    "full": "all workers",
    "play": "some workers",
    "paused": "a resume",
    "other": "other",
}


def profile(
    run: str,
    /,
    *,
    steps: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    torch_profiler: bool = False,
    memory: bool = False,
    otlp: str | None = None,
    to: Path | None = None,
    common: Common = COMMON,
) -> int:
    """Show where the time of a run goes: who waits for whom, and what to change.

    Parameters
    ----------
    run
        Name or job id.
    steps
        Number of newest steps to analyse (default: 100), or of next steps to trace (default: 1).
    torch_profiler
        Trace the learner's next steps with torch's profiler, and print the trace files on the
        pool, for chrome://tracing or Perfetto.
    memory
        Show what the memory of each of the run's processes holds, instead of times.
    otlp
        Send the spans of these steps to an OpenTelemetry collector at this URL, such as
        http://127.0.0.1:4318.
    to
        Write the timeline of these steps to this JSON file, which https://ui.perfetto.dev opens.
    """

    alone = [
        name
        for name, is_given in (
            ("--torch-profiler", torch_profiler),
            ("--memory", memory),
            ("--otlp", otlp is not None),
            ("--to", to is not None),
        )
        if is_given
    ]
    if len(alone) > 1:
        raise ConfigError(
            f"{' and '.join(alone)} are given together", hint="give one of them at a time"
        )

    async def trace(pool: Pool) -> list[str]:
        return await trace_steps(pool.broker, await pool.find(run), steps or 1)

    async def read(pool: Pool) -> tuple[JobRecord, list[StepTrace]]:
        record = await pool.find(run)
        if not record.trains:
            raise StateError(
                f"run {record.name} trains nothing, so it has no steps",
                hint="give the name of a training job: `tinkermq ps --all`",
            )
        return record, await read_traces(pool.broker, record.scope, steps or _STEPS)

    async def ask_for_memory(pool: Pool) -> "dict[str, ControlReply]":
        return await read_memory(pool.broker, await pool.find(run))

    if memory:
        _print_memory(with_pool(common.nats_url, ask_for_memory), as_json=common.json)
        return 0
    if torch_profiler:
        files = with_pool(common.nats_url, trace)
        return print_result({"files": files}, "\n".join(files), as_json=common.json)
    record, traces = with_pool(common.nats_url, read)
    spans = [span for trace in traces for span in spans_of(trace)] if otlp or to else []
    if to is not None:
        _write_timeline(to, record, spans)
    if otlp is not None:
        send_spans(spans, otlp, {"tinkermq.run": record.name, "tinkermq.job": record.job})
        print_note(f"sent {len(spans)} spans to {otlp}")
    measured = profile_of(traces)
    name = "" if record.state in FINAL_STATES else record.name
    advice = advise(measured, name, bound_key(record.config)) if traces else []
    if common.json:
        print_json(_document(record, measured, advice))
    elif not traces:
        print_note(f"{record.name} has no traces: none of its steps is over")
    else:
        _print_profile(measured, advice)
    return 0


def _write_timeline(to: Path, record: JobRecord, spans: list[Span]) -> None:
    if not spans:
        raise NotFoundError(f"{record.name} has no traces", hint="none of its steps is over")
    try:
        to.write_text(json.dumps(trace_file(spans)), encoding="utf-8")
    except OSError as error:
        problem = f"{to} cannot be written: {error.strerror or error}"
        raise StorageError(problem, hint="name another file") from error
    print_note(f"wrote {len(spans)} spans to {to}; https://ui.perfetto.dev opens it")


_PROCESS = (("resident", "in memory"), ("peak", "peak"), ("shared_memory", "of it shared"))
_LIBRARIES = "libraries, activations, allocator"


def _print_memory(replies: Mapping[str, "ControlReply"], *, as_json: bool) -> None:
    """Print a line for each part of each process; the rest is not attributed to an actor."""
    if as_json:
        print_json({name: reply.detail for name, reply in replies.items()})
        return
    rows: list[tuple[str, ...]] = []
    for name, reply in replies.items():
        sizes: dict[str, int] = reply.detail["memory"]
        parts = {part: size for part, size in reply.detail["parts"].items() if size}
        rest = sizes.get("resident", 0) - sum(parts.values())
        rows.append((name, *(_megabytes(sizes.get(key, 0)) for key, _ in _PROCESS), ""))
        listed = sorted(parts.items(), key=lambda part: -part[1])
        listed += [(_LIBRARIES, rest)] if parts and rest > 0 else []
        rows += [("", "", "", "", f"{_megabytes(size):>7}  {part}") for part, size in listed]
    print_table(("MB", *(title for _, title in _PROCESS), "of it"), rows)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}"


def _document(record: JobRecord, profile: Profile, advice: list[Advice]) -> dict[str, Any]:
    suggestions = [
        {"text": suggestion.text, "change": list(suggestion.change)} for suggestion in advice
    ]
    return {"run": record.name, "job": record.job, **profile.fields(), "advice": suggestions}


def _print_profile(profile: Profile, advice: list[Advice]) -> None:
    print_plain(f"{profile.num_steps} steps in {seconds_text(profile.wall_s)}")
    print_plain("")
    print_table(("actor", "busy", "of it", "waits for"), _rows(profile))
    if profile.answer_p95_s:
        p50, p95 = seconds_text(profile.answer_p50_s), seconds_text(profile.answer_p95_s)
        print_plain("")
        print_plain(f"games answered after p50 {p50}, p95 {p95}")
    if profile.typical is not None:
        print_plain("")
        _print_path(profile.typical)
    print_plain("")
    for suggestion in advice:
        print_plain(f"- {suggestion.text}")
        print_plain(f"  change: {', '.join(suggestion.change)}")


def _rows(profile: Profile) -> list[tuple[str, str, str, str]]:
    paused = {kind: share for kind, share in profile.learner.items() if kind == "paused"}
    rows = [_row("learner", profile.learner, "learner", profile.waited_for | paused)]
    rows += [_row(name, shares, "generator") for name, shares in profile.generators.items()]
    rows += [_row(name, shares, "host") for name, shares in profile.hosts.items()]
    return rows


def _row(
    name: str, shares: Mapping[str, float], role: str, waits: Mapping[str, float] | None = None
) -> tuple[str, str, str, str]:
    work = {kind: shares[kind] for kind in _BUSY[role] if kind in shares}
    rest = waits or {kind: share for kind, share in shares.items() if kind not in work}
    parts = "" if len(_BUSY[role]) == 1 else _parts(work)
    return name, f"{sum(work.values()):.0%}", parts, _parts(rest)


def _parts(shares: Mapping[str, float]) -> str:
    """Return the shares, largest first, without those that round to zero."""
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{_WORDS.get(kind, kind)} {share:.0%}" for kind, share in ordered if share >= 0.005
    )


def _print_path(typical: TypicalStep) -> None:
    """Print the parts of a step, one per line."""
    print_plain(f"step {typical.step}, of median length, took {seconds_text(typical.seconds)}:")
    if typical.task is not None:
        print_plain(f"  it waited for task {typical.task} of {typical.source}")
    for kind, seconds in typical.path:
        print_plain(f"  {kind:<12}{seconds_text(seconds):>9}  {seconds / typical.seconds:5.0%}")
    if typical.trace:
        print_plain(f"  trace {typical.trace}")


# Send the spans of a run to an OpenTelemetry collector over HTTP.
#
# The packages are those of the extra `otel` and are imported on use.

_BATCH = 512
_TIMEOUT_S = 10.0


def send_spans(spans: Sequence[Span], url: str, attributes: Mapping[str, str]) -> None:
    """Send spans to a collector, such as http://127.0.0.1:4318; `attributes` name the run.

    Raises ConfigError when the packages are not installed, BrokerError when no collector accepts.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise ConfigError(
            f"--otlp needs a package that cannot be imported: {error}",
            hint="pip install 'tinkermq[otel]'",
        ) from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url!r} is not the URL of a collector", hint="write it as http://127.0.0.1:4318"
        )
    endpoint = f"{url.rstrip('/')}/v1/traces"
    sender = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
    readable = [_readable(span, attributes) for span in spans]
    try:
        for start in range(0, len(readable), _BATCH):
            result = sender.export(readable[start : start + _BATCH])
            if result is not SpanExportResult.SUCCESS:
                raise BrokerError(
                    f"no collector accepted the spans at {endpoint}",
                    hint="does the collector run, and does it listen for OTLP over HTTP?",
                )
    finally:
        sender.shutdown()


def _readable(span: Span, attributes: Mapping[str, str]) -> "ReadableSpan":
    """Return a span of the SDK, with the actor as service instance."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    def context(trace_id: str, span_id: str) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), True, sampled)

    return ReadableSpan(
        span.name,
        context=context(span.trace, span.span),
        parent=context(span.trace, span.parent) if span.parent else None,
        resource=Resource(
            {"service.name": "tinkermq", "service.instance.id": span.actor, **attributes}
        ),
        attributes=dict(span.attributes),
        links=[Link(context(*link)) for link in span.links],
        start_time=int(span.start * 1e9),
        end_time=int(span.end * 1e9),
    )
