"""The traces of a run as spans, for tools that speak OpenTelemetry: a pure derivation.

Only the ids of tasks and steps are made at random and travel; those of the spans below them follow
from theirs, so the same traces always give the same spans.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...schemas.wire.trace import GroupTrace, StepTrace, span_of, trace_of


@dataclass(frozen=True)
class Span:
    """One span; moments are seconds since the epoch."""

    name: str
    actor: str
    trace: str
    """Trace id, 32 hexadecimal digits."""
    span: str
    """Span id, 16 hexadecimal digits."""
    parent: str
    """Span id of its parent; empty for a root."""
    start: float
    end: float
    attributes: Mapping[str, int | float | str] = field(
        default_factory=dict[str, int | float | str]
    )
    links: tuple[tuple[str, str], ...] = ()
    """Trace and span ids of what it follows from."""


def spans_of(step: StepTrace) -> Iterator[Span]:
    """Yield the spans of a step and of those of its groups that it names.

    Lengths are right everywhere, places not: generation and game alternate within an episode, and
    stand one after the other here; `send` (of the weights of the version before) and each
    generator's `swap` (the sum of its pauses) stand at the step's beginning.
    """
    for group in step.groups:
        yield from _of_group(group)
    yield from _of_step(step)


def _of_step(step: StepTrace) -> Iterator[Span]:
    trace, root = trace_of(step.traceparent), span_of(step.traceparent)
    told = {"tinkermq.step": step.step, "tinkermq.num_groups": step.num_groups}
    start = _begin(step)
    yield Span("step", "learner", trace, root, "", start, step.ended, told)
    links = tuple((trace_of(g.traceparent), span_of(g.traceparent)) for g in step.groups)
    known = tuple(link for link in links if all(link))
    for kind in (*_BEFORE, *_BEHIND):
        length = step.learner.get(kind, 0.0)
        if length <= 0:
            continue
        after = known if kind == "train" else ()
        child = _child(root, kind)
        yield Span(kind, "learner", trace, child, root, start, start + length, told, after)
        start += length
    yield from _of_weights(step, told)


def _of_weights(step: StepTrace, told: Mapping[str, int]) -> Iterator[Span]:
    """Yield what sending and swapping in new weights took, beside the learner's work."""
    trace, root = trace_of(step.traceparent), span_of(step.traceparent)
    lengths = [("send", "learner", step.send_s)]
    lengths += [("swap", name, spent.get("swap", 0.0)) for name, spent in step.generators.items()]
    start = _begin(step)
    for kind, actor, length in lengths:
        if length > 0:
            child = _child(root, f"{kind}.{actor}")
            yield Span(kind, actor, trace, child, root, start, start + length, told)


def _begin(step: StepTrace) -> float:
    return step.formed - sum(step.learner.get(kind, 0.0) for kind in _BEFORE)


_BEFORE = ("checkpoint", "paused", "wait")
_BEHIND = ("train", "publish")


def _of_group(group: GroupTrace) -> Iterator[Span]:
    trace, root = trace_of(group.traceparent), span_of(group.traceparent)
    if not trace:
        return
    told = {"tinkermq.task": group.task}
    begun = group.arrived - group.rollout_s
    held = begun - group.weights_s
    if group.issued:
        issued = min(group.issued, held)
        yield Span("task", "learner", trace, root, "", issued, group.arrived, told)
        yield Span("queue", "learner", trace, _child(root, "queue"), root, issued, held, told)
    source, rollout = group.source, _child(root, "rollout")
    if group.weights_s:
        yield Span("weights", source, trace, _child(root, "weights"), root, held, begun, told)
    yield Span("rollout", source, trace, rollout, root, begun, group.arrived, told)
    at = begun
    for name, length in (("generate", group.generate_s), ("environment", group.environment_s)):
        if length > 0:
            yield Span(name, source, trace, _child(rollout, name), rollout, at, at + length, told)
            at += length


def _child(parent: str, name: str) -> str:
    return hashlib.sha256(f"{parent}.{name}".encode()).hexdigest()[:16]
