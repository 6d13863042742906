"""The timeline of a training step: who computed, and who waited for whom.

It is drawn from the step's trace, as are `tinkermq profile` and its spans for OpenTelemetry.
"""

import math
import time
from typing import Any

from cachetools import TTLCache

from ....broker.client.connection import Broker
from ....broker.feed import parse_all, read_traces
from ....broker.jetstream.direct_get import BatchInbox, get_last
from ....broker.jetstream.streams import stream_info
from ....schemas.job import FINAL_STATES, JobRecord
from ....schemas.profile import Advice, Span, advise, bound_key, lanes_of, profile_of, spans_of
from ....schemas.wire.errors import MessageError, NotFoundError, TinkermqError
from ....schemas.wire.subjects import JobScope
from ....schemas.wire.trace import StepTrace

MAX_STEPS = 100
"""Steps of one trace file."""
_REPEATED = (32, 4096)
"""Traces around the expected one that are read, too: a resumed run has repeated steps."""
_AT_ONCE = 128
_OUTER = frozenset({"step", "task", "queue", "rollout"})
"""Spans that only hold others, and tasks before they are begun."""
WIDTH, LABEL, LANE = 1200, 150, 18
"""Units of the drawing."""


async def traces_of(
    broker: Broker, scope: JobScope, num: int, last: int | None = None
) -> list[StepTrace]:
    """Return the traces of `num` steps up to `last`, in order; of a repeated step the later one.

    Without `last` they are the newest. Raises NotFoundError if there are none, MessageError for
    more than `MAX_STEPS`.
    """
    if num > MAX_STEPS:
        raise MessageError(
            f"{num} steps were asked for", hint=f"ask for at most {MAX_STEPS} steps at a time"
        )
    newest = stored = None
    if (await stream_info(broker, scope.stream_trace))["state"]["messages"]:
        stored = await get_last(broker, scope.stream_trace, scope.trace)
        newest = next(iter(parse_all([stored], StepTrace)), None) if stored else None
    if stored is None or newest is None:
        raise NotFoundError("this run has no traces of steps", hint="its first step is not over")
    last = newest.step if last is None else last
    first = max(1, last - num + 1)
    for repeated in _REPEATED:
        start = max(1, stored.seq - (newest.step - first) - repeated)
        stop = min(stored.seq, start + last - first + 2 * repeated)
        some = await _between(broker, scope, start, stop)
        traces = {trace.step: trace for trace in some if first <= trace.step <= last}
        if traces:
            return [traces[step] for step in sorted(traces)]
    which = f"step {first} has" if first == last else f"steps {first} to {last} have"
    raise NotFoundError(f"{which} no trace", hint=f"the newest trace is of step {newest.step}")


async def _between(broker: Broker, scope: JobScope, start: int, stop: int) -> list[StepTrace]:
    """Return the traces stored from one sequence to another."""
    inbox = BatchInbox(broker, max_messages=_AT_ONCE)
    traces: list[StepTrace] = []
    try:
        while start <= stop:
            messages, _ = await inbox.get(scope.stream_trace, start, scope.trace)
            traces += parse_all(messages, StepTrace)
            start = messages[-1].seq + 1 if messages else stop + 1
    finally:
        await inbox.close()
    return traces


def show_timeline(trace: StepTrace) -> dict[str, Any]:
    """Return the drawing of a step: lanes of bars, ticks of time, and the parts of its length."""
    spans = [span for span in spans_of(trace) if span.end > span.start]
    own = next(span for span in spans if span.name == "step")
    length = max(own.end - own.start, 1e-3)
    begins = [span.start for span in spans if _is_drawn(span)]
    start = max(min([own.start, *begins]), own.start - 2 * length)
    end = max(own.end, *(span.end for span in spans if span.name == "send"), own.start + length)
    scale = (WIDTH - LABEL) / (end - start)
    lanes: list[tuple[str, list[dict[str, Any]]]] = []
    for actor, some in sorted(
        lanes_of(spans).items(), key=lambda item: (item[0] != "learner", item[0])
    ):
        drawn = ([_bar(span, start, end, scale) for span in lane] for lane in some)
        bars = ([bar for bar in lane if bar is not None] for lane in drawn)
        lanes += [(actor, lane) for lane in bars if lane]
    typical = profile_of([trace]).typical
    return {
        "step": trace.step,
        "lanes": [
            {"actor": actor if not i or lanes[i - 1][0] != actor else "", "bars": bars}
            for i, (actor, bars) in enumerate(lanes)
        ],
        "ticks": [
            {"x": LABEL + (own.start + offset - start) * scale, "text": f"{offset:g} s"}
            for offset in _ticks(start - own.start, end - own.start)
        ],
        "begin": LABEL + (own.start - start) * scale,
        "typical": typical,
        "hosts": trace.hosts,
        "num_groups": trace.num_groups,
        "num_shown": len(trace.groups),
    }


def _bar(span: Span, start: float, end: float, scale: float) -> dict[str, Any] | None:
    """Return the bar of a span within the drawing; None for one that is not drawn."""
    begins, ends = max(span.start, start), min(span.end, end)
    if not _is_drawn(span) or ends <= begins:
        return None
    return {
        "kind": span.name,
        "x": LABEL + (begins - start) * scale,
        "width": max((ends - begins) * scale, 1.0),
        "seconds": span.end - span.start,
        "task": span.attributes.get("tinkermq.task"),
    }


def _is_drawn(span: Span) -> bool:
    return span.name not in _OUTER


def _ticks(first: float, last: float) -> list[float]:
    """Return round times between two."""
    rough = max(last - first, 1e-6) / 8
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    number = int(first // width) + 1
    return [round(place * width, 6) for place in range(number, int(last // width) + 1)]


# -- what limits a run -----------------------------------------------------------------------------

_WINDOW = 20
"""Newest steps that the advice is from, as in the learner's own."""
_limits: TTLCache[tuple[str, bool], Advice | None, float] = TTLCache(1024, 5.0, time.monotonic)


async def limit_of(broker: Broker, record: JobRecord) -> Advice | None:
    """Return what limits a run and what to change; None without traces."""
    ended = record.state in FINAL_STATES
    key = (record.scope.key, ended)
    if key in _limits:
        return _limits[key]
    try:
        traces = await read_traces(broker, record.scope, _WINDOW) if record.trains else []
    except (TinkermqError, TimeoutError):
        return None  # its streams were removed, or are not there yet
    name, bound = "" if ended else record.name, bound_key(record.config)
    _limits[key] = advise(profile_of(traces), name, bound)[0] if traces else None
    return _limits[key]
