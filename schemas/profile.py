"""The profile of a run: a pure summary of its traces.

The learner waits for the last group that its batch needs. The phases of that group meanwhile (in
the queue, waiting for weights, generating, in its game) divide the learner's wait.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from .wire.trace import GroupTrace, StepTrace, span_of, trace_of

Shares = dict[str, float]
PHASES: tuple[str, ...] = ("queue", "weights", "generate", "environment", "other")
"""Phases of a group while the learner waits for it, in order."""
_OWN = {
    "train": "train",
    "publish": "publish",
    "checkpoint": "checkpoint",
    "paused": "paused",
    "other": "rest",
}
"""The learner's own work in a step, in order: kinds of a trace, and their names in a path."""


@dataclass(frozen=True)
class TypicalStep:
    """The step of median length and its parts, in order."""

    step: int
    seconds: float
    path: list[tuple[str, float]]
    """Each wait or work with its seconds, which add up to the step's."""
    task: int | None
    """Task of the group that came last, where the learner waited for it."""
    source: str
    """Generator or external agent of that group."""
    trace: str
    """Trace id of that task; empty where there is none."""


@dataclass(frozen=True)
class Profile:
    """Where the time of a run went; shares are of an actor's wall time, 0 to 1."""

    num_steps: int
    wall_s: float
    """The learner's, over these steps."""
    learner: Shares
    waited_for: Shares
    """Shares of the learner's wall time by the phase of the group that it waited for."""
    generators: dict[str, Shares]
    hosts: dict[str, Shares]
    answer_p50_s: float
    """Median wait of a group for the game's answer."""
    answer_p95_s: float
    typical: TypicalStep | None
    cores_busy: float = 0.0
    """Busy share of the cores of the one machine that computes the run; 0: unknown."""

    @property
    def held_back(self) -> float:
        """Share of the generators' time without a task that they might begin."""
        many = self.generators.values()
        return mean_share(many, "weights") + mean_share(many, "tasks")

    def fields(self) -> dict[str, Any]:
        """Return it as plain values, for JSON."""
        return asdict(self)


def mean_share(many: Iterable[Shares], kind: str) -> float:
    """Average one share over several actors; 0 for none."""
    shares = [shares.get(kind, 0.0) for shares in many]
    return sum(shares) / len(shares) if shares else 0.0


def profile_of(traces: Sequence[StepTrace]) -> Profile:
    """Sum up the traces of some steps."""
    waits: Shares = {}
    for trace in traces:
        _add(waits, dict(waited_for(trace)))
    learner = _sum(trace.learner for trace in traces)
    wall_s = sum(learner.values())
    answers = sorted(group.answer_s for trace in traces for group in trace.groups)
    return Profile(
        num_steps=len(traces),
        wall_s=wall_s,
        learner=_shares(learner, wall_s),
        waited_for=_shares(waits, wall_s),
        generators=_by_actor([trace.generators for trace in traces]),
        hosts=_by_actor([trace.hosts for trace in traces]),
        answer_p50_s=_quantile(answers, 0.5),
        answer_p95_s=_quantile(answers, 0.95),
        typical=_typical(traces),
        cores_busy=_cores_busy(traces),
    )


def _cores_busy(traces: Sequence[StepTrace]) -> float:
    """Average the busy share of the cores over the steps, by their time."""
    known = [(trace.cores_busy, sum(trace.learner.values())) for trace in traces]
    whole = sum(seconds for share, seconds in known if share)
    return sum(share * seconds for share, seconds in known) / whole if whole else 0.0


def waited_for(trace: StepTrace) -> list[tuple[str, float]]:
    """Divide a step's wait among the phases of its last group; the seconds add up to the wait.

    `other`: the group had arrived already, was not issued yet, or came from an external agent.
    """
    wait_s = trace.learner.get("wait", 0.0)
    if wait_s <= 0:
        return []
    begin = trace.formed - wait_s
    waits = dict.fromkeys(PHASES, 0.0)
    for group in trace.groups[-1:]:
        for start, end, shares in _way(group):
            seconds = max(min(end, trace.formed) - max(start, begin), 0.0)
            _add(waits, {phase: share * seconds for phase, share in shares.items()})
    waits["other"] += max(wait_s - sum(waits.values()), 0.0)
    return [(phase, seconds) for phase, seconds in waits.items() if seconds > 0]


def _way(group: GroupTrace) -> list[tuple[float, float, Shares]]:
    """Return the start, end and shares of each phase of a group until it arrived.

    Times are counted back from its arrival, since clocks of machines differ. The turns of the
    slowest episode alternate between engine and game; each part of their time has the shares of the
    whole.
    """
    begun = group.arrived - group.rollout_s
    held = begun - group.weights_s
    issued = group.issued or held
    played = max(group.rollout_s, group.generate_s + group.environment_s, 1e-9)
    generate, environment = group.generate_s / played, group.environment_s / played
    rollout = {"generate": generate, "environment": environment}
    rollout["other"] = max(1.0 - generate - environment, 0.0)
    return [
        (issued, held, {"queue": 1.0}),
        (held, begun, {"weights": 1.0}),
        (begun, group.arrived, rollout),
    ]


def _typical(traces: Sequence[StepTrace]) -> TypicalStep | None:
    if not traces:
        return None
    by_length = sorted(traces, key=lambda trace: sum(trace.learner.values()))
    trace = by_length[(len(by_length) - 1) // 2]
    waits = waited_for(trace)
    last = trace.groups[-1] if trace.groups and waits else None
    own = [(name, trace.learner[kind]) for kind, name in _OWN.items() if trace.learner.get(kind)]
    return TypicalStep(
        step=trace.step,
        seconds=sum(trace.learner.values()),
        path=waits + own,
        task=None if last is None else last.task,
        source="" if last is None else last.source,
        trace="" if last is None else trace_of(last.traceparent),
    )


def _by_actor(steps: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Shares]:
    names = sorted({name for step in steps for name in step})
    sums = {name: _sum(step.get(name, {}) for step in steps) for name in names}
    return {name: _shares(spent, sum(spent.values())) for name, spent in sums.items()}


def _shares(spent: Mapping[str, float], whole: float) -> Shares:
    return {kind: seconds / whole for kind, seconds in spent.items()} if whole > 0 else {}


def _sum(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for spent in many:
        _add(sums, spent)
    return sums


def _add(sums: dict[str, float], spent: Mapping[str, float]) -> None:
    for kind, seconds in spent.items():
        sums[kind] = sums.get(kind, 0.0) + seconds


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0


# Advice from a profile: what slows the run down, and what to change.

_WAITS = 0.25
"""A learner that waits for a smaller share of its time is the bottleneck."""
_HELD_BACK = 0.3
_NOTABLE = 0.1
_FULL_HOST = 0.5
_ALL_BUSY = 0.9


@dataclass(frozen=True)
class Advice:
    """One finding, and the configuration keys and commands that change it."""

    text: str
    change: tuple[str, ...]


def advise(profile: Profile, run: str, bound: str = "training.max_staleness") -> list[Advice]:
    """Return at least one advice on what slows a run down, the most important first.

    `run` is its name, for commands; empty for an ended run, whose advice names configuration keys.
    `bound` is the key that bounds the staleness.
    """
    waited = profile.learner.get("wait", 0.0)
    if waited < _WAITS:
        advice = [_learner_busy(profile)]
    elif profile.cores_busy >= _ALL_BUSY and _mostly(profile) != "weights":
        advice = [_machine_busy(waited, profile.cores_busy, run)]
    else:
        advice = [_learner_waits(profile, run, bound)]
    held_back = profile.held_back
    if held_back >= _HELD_BACK and waited < _WAITS:
        advice.append(
            Advice(
                f"generators were held back {held_back:.0%} of the time by the staleness bound, "
                "since the learner is behind: fewer generators would do",
                (_scaled(run, "generators"),),
            )
        )
    for kind, (what, keys) in _OVERHEADS.items():
        share = profile.learner.get(kind, 0.0)
        if share >= _NOTABLE:
            advice.append(Advice(f"{what} took {share:.0%} of the learner's time", keys))
    swapping = mean_share(profile.generators.values(), "swap")
    if swapping >= _NOTABLE:
        text = f"generators stood still {swapping:.0%} of the time to swap weights in"
        advice.append(Advice(text, ("generator.kv_on_swap=keep", "lora.rank")))
    validating = mean_share(profile.generators.values(), "validation")
    if validating >= _NOTABLE:
        text = f"generators did nothing but validate versions {validating:.0%} of the time"
        keys = ("training.test_freq", "env.num_val", "evaluation.slots=1")
        advice.append(Advice(text, keys))
    return advice


_OVERHEADS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "checkpoint": ("writing checkpoints", ("training.save_freq",)),
    "publish": (
        "publishing weights (the version before was still being sent, or the copy took long)",
        ("weights.transport=file", "learner.publish_dtype=bfloat16", "lora.rank"),
    ),
}


def bound_key(config: Mapping[str, Any]) -> str:
    """Return the key that bounds the staleness in a run's configuration."""
    training: Mapping[str, Any] = config.get("training") or {}
    is_auto = training.get("max_staleness") == "auto"
    return "training.staleness_limit" if is_auto else "training.max_staleness"


_COUNTS = {"generators": "generator.count", "environments": "env.hosts"}


def _scaled(run: str, actors: str) -> str:
    """Return what changes the number of actors: a command, or a key for the next run."""
    return f"tinkermq scale {run} {actors}=N" if run else _COUNTS[actors]


def _learner_busy(profile: Profile) -> Advice:
    busy = 1 - profile.learner.get("wait", 0.0) - profile.learner.get("paused", 0.0)
    text = f"the learner is busy {busy:.0%} of the time: it is the bottleneck"
    text += " (more generators would not help)"
    return Advice(text, ("learner.ranks", "learner.threads", "learner.dtype=bfloat16"))


def _machine_busy(waited: float, cores_busy: float, run: str) -> Advice:
    """Return the advice that more actors on this machine would only share its cores."""
    return Advice(
        f"the learner waited {waited:.0%} of the time for rollouts, and the cores of this machine "
        f"are {cores_busy:.0%} busy: more generators here would not help; add a machine and then "
        "generators, or make the work smaller",
        (_scaled(run, "generators"), "learner.threads"),
    )


def _mostly(profile: Profile) -> str:
    """Return the phase for which the learner waited longest."""
    return max(profile.waited_for, key=lambda phase: profile.waited_for[phase], default="other")


def _learner_waits(profile: Profile, run: str, bound: str) -> Advice:
    """Return advice on the learner's longest wait, caused by the bound, engine, queue or game."""
    waited = profile.learner["wait"]
    mostly = _mostly(profile)
    says = f"the learner waited {waited:.0%} of the time for rollouts"
    held_back = profile.held_back
    if not profile.generators:
        return Advice(f"{says}; their external agent records no times", (bound,))
    if mostly == "weights" or (held_back >= _HELD_BACK and mostly != "environment"):
        return Advice(
            f"{says}, while generators were held back {held_back:.0%} of the time by the staleness "
            f"bound: raise {bound} or training.batch_size",
            (bound, "training.batch_size"),
        )
    if mostly == "environment":
        return _games_are_slow(profile, run, says, bound)
    if mostly == "queue":
        return Advice(
            f"{says}, mostly for tasks that no generator had room for: add generators, or raise "
            "generator.max_episodes",
            (_scaled(run, "generators"), "generator.max_episodes"),
        )
    says += ", mostly for generation" if mostly == "generate" else ""
    if held_back >= _NOTABLE:
        return Advice(
            f"{says}, and generators were held back {held_back:.0%} of the time by the staleness "
            f"bound: add generators, or raise {bound}",
            (_scaled(run, "generators"), bound),
        )
    return Advice(f"{says}: add generators", (_scaled(run, "generators"),))


def _games_are_slow(profile: Profile, run: str, says: str, bound: str) -> Advice:
    """Return advice on games that wait for a worker, or that are slow themselves."""
    says += f", mostly for games, which answered after {seconds_text(profile.answer_p95_s)} (p95)"
    full = mean_share(profile.hosts.values(), "full")
    if profile.hosts and full < _FULL_HOST:
        return Advice(
            f"{says}, though their hosts had workers free {1 - full:.0%} of the time: more "
            f"episodes at a time hide it: raise {bound}",
            (bound, "generator.max_episodes"),
        )
    return Advice(
        f"{says}: add environment hosts or workers",
        (_scaled(run, "environments"), "env.workers"),
    )


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: `1.2 s`, `35 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# The traces of a run as spans, for OpenTelemetry, Perfetto and the dashboard: a pure derivation.
#
# Only the ids of tasks and steps are random and sent in messages. The ids of spans below them are
# derived from these, so the same traces always give the same spans.


@dataclass(frozen=True)
class Span:
    """One span; times are seconds since the epoch."""

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
    """Trace and span ids of the spans that it follows."""


def spans_of(step: StepTrace) -> Iterator[Span]:
    """Yield the spans of a step, and of the groups that its trace names.

    Durations are exact, start times are not: generation and game alternate within an episode, but
    are one span each here; `send` (the weights of the version before) and each generator's `swap`
    (the sum of its pauses) begin with the step.
    """
    for group in step.groups:
        yield from _of_group(group)
    yield from _of_step(step)


def _of_step(step: StepTrace) -> Iterator[Span]:
    trace, root = trace_of(step.traceparent), span_of(step.traceparent)
    attributes = {"tinkermq.step": step.step, "tinkermq.num_groups": step.num_groups}
    start = _begin(step)
    yield Span("step", "learner", trace, root, "", start, step.ended, attributes)
    links = tuple((trace_of(g.traceparent), span_of(g.traceparent)) for g in step.groups)
    known = tuple(link for link in links if all(link))
    for kind in (*_BEFORE, *_BEHIND):
        length = step.learner.get(kind, 0.0)
        if length <= 0:
            continue
        after = known if kind == "train" else ()
        child = _child(root, kind)
        yield Span(kind, "learner", trace, child, root, start, start + length, attributes, after)
        start += length
    yield from _of_weights(step, attributes)


def _of_weights(step: StepTrace, attributes: Mapping[str, int]) -> Iterator[Span]:
    """Yield the spans of sending new weights and swapping them in, beside the learner's work."""
    trace, root = trace_of(step.traceparent), span_of(step.traceparent)
    lengths = [("send", "learner", step.send_s)]
    lengths += [("swap", name, spent.get("swap", 0.0)) for name, spent in step.generators.items()]
    start = _begin(step)
    for kind, actor, length in lengths:
        if length > 0:
            child = _child(root, f"{kind}.{actor}")
            yield Span(kind, actor, trace, child, root, start, start + length, attributes)


def _begin(step: StepTrace) -> float:
    return step.formed - sum(step.learner.get(kind, 0.0) for kind in _BEFORE)


_BEFORE = ("checkpoint", "paused", "wait")
_BEHIND = ("train", "publish")


def _of_group(group: GroupTrace) -> Iterator[Span]:
    trace, root = trace_of(group.traceparent), span_of(group.traceparent)
    if not trace:
        return
    attributes = {"tinkermq.task": group.task}
    begun = group.arrived - group.rollout_s
    held = begun - group.weights_s
    if group.issued:
        issued = min(group.issued, held)
        yield Span("task", "learner", trace, root, "", issued, group.arrived, attributes)
        yield Span("queue", "learner", trace, _child(root, "queue"), root, issued, held, attributes)
    source, rollout = group.source, _child(root, "rollout")
    if group.weights_s:
        yield Span("weights", source, trace, _child(root, "weights"), root, held, begun, attributes)
    yield Span("rollout", source, trace, rollout, root, begun, group.arrived, attributes)
    at = begun
    for name, length in (("generate", group.generate_s), ("environment", group.environment_s)):
        if length > 0:
            yield Span(
                name, source, trace, _child(rollout, name), rollout, at, at + length, attributes
            )
            at += length


def lanes_of(spans: Iterable[Span]) -> dict[str, list[list[Span]]]:
    """Return each actor's spans in lanes, in which only children lie within their parents."""
    sets: dict[tuple[str, str, str], list[Span]] = {}
    for span in spans:
        alone = span.name if span.name in ("send", "swap") else ""
        sets.setdefault((span.actor, span.trace, alone), []).append(span)
    lanes: dict[str, list[list[Span]]] = {}
    for (actor, _, _), some in sorted(sets.items(), key=lambda item: _extent(item[1])[0]):
        start, _ = _extent(some)
        own = lanes.setdefault(actor, [])
        free = next((lane for lane in own if _extent(lane)[1] <= start), None)
        if free is None:
            own.append(list(some))
        else:
            free += some
    return lanes


def _extent(spans: Sequence[Span]) -> tuple[float, float]:
    return min(span.start for span in spans), max(span.end for span in spans)


def trace_file(spans: Iterable[Span]) -> dict[str, Any]:
    """Return spans in Chrome's trace format, which Perfetto opens: a process for each actor."""
    events: list[dict[str, Any]] = []
    for process, (actor, lanes) in enumerate(sorted(lanes_of(spans).items()), 1):
        name = {"name": "process_name", "ph": "M", "pid": process, "args": {"name": actor}}
        events.append(name)
        events += [
            {
                **{"name": span.name, "ph": "X", "pid": process, "tid": lane},
                **{"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6},
                "args": {**span.attributes, "trace_id": span.trace, "span_id": span.span},
            }
            for lane, some in enumerate(lanes)
            for span in some
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _child(parent: str, name: str) -> str:
    return hashlib.sha256(f"{parent}.{name}".encode()).hexdigest()[:16]


# -- an actor's wall time by kind of work; cheap enough for every turn -----------------------------


class TimeUse:
    """Divides wall time among kinds of work; of concurrent kinds the first named counts.

    The seconds of all kinds add up to the wall time. Use one object per thread or event loop.
    """

    def __init__(
        self, *kinds: str, rest: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`rest` is the kind of the time in which none of `kinds` runs."""
        self._running = dict.fromkeys(kinds, 0)
        self._rest = rest
        self._clock = clock
        self._doing = rest
        self._since = clock()
        self._totals = dict.fromkeys((*kinds, rest), 0.0)
        self._last_totals = dict(self._totals)

    @contextmanager
    def doing(self, kind: str) -> Iterator[None]:
        """Count work of this kind while the block runs."""
        self.begin(kind)
        try:
            yield
        finally:
            self.end(kind)

    def begin(self, kind: str) -> None:
        """Count work of this kind until `end`."""
        self._running[kind] += 1
        if self._running[kind] == 1:
            self._turn()

    def end(self, kind: str) -> None:
        """End work that `begin` counted."""
        self._running[kind] -= 1
        if self._running[kind] == 0:
            self._turn()

    def reassign(self, source: str, target: str, seconds: float) -> None:
        """Move seconds of `source` to `target`, at most those since the last `take`."""
        self._settle()
        moved = min(seconds, self._totals[source] - self._last_totals[source])
        self._totals[source] -= moved
        self._totals[target] += moved

    def totals(self) -> dict[str, float]:
        """Return the seconds by kind since the start."""
        self._settle()
        return dict(self._totals)

    def take(self) -> dict[str, float]:
        """Return the seconds by kind since the last call; kinds without any are left out."""
        totals = self.totals()
        spent = {kind: total - self._last_totals[kind] for kind, total in totals.items()}
        self._last_totals = totals
        return {kind: seconds for kind, seconds in spent.items() if seconds > 0}

    def _turn(self) -> None:
        doing = next((kind for kind, count in self._running.items() if count), self._rest)
        if doing != self._doing:
            self._settle()
            self._doing = doing

    def _settle(self) -> None:
        now = self._clock()
        self._totals[self._doing] += now - self._since
        self._since = now
