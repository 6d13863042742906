"""Who waited for whom: a pure summary of a run's traces.

The learner waits for the last group that its batch needs. What that group was at meanwhile (in the
queue, waiting for weights, generating, in its game) is what the learner waited for.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...schemas.wire.trace import GroupTrace, StepTrace, trace_of

Shares = dict[str, float]
PHASES: tuple[str, ...] = ("queue", "weights", "generate", "environment", "other")
"""What a group may be at while the learner waits for it, in this order."""
_OWN = {
    "train": "train",
    "publish": "publish",
    "checkpoint": "checkpoint",
    "paused": "paused",
    "other": "rest",
}
"""What the learner does by itself in a step, in this order, and what it is called there."""


@dataclass(frozen=True)
class TypicalStep:
    """The step of median length, and what it was made of, one after the other."""

    step: int
    seconds: float
    path: list[tuple[str, float]]
    """What was waited for or done, and its seconds; they add up to the step's."""
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
    """Of the learner's wall time: what the groups were at that it waited for."""
    generators: dict[str, Shares]
    hosts: dict[str, Shares]
    answer_p50_s: float
    """What half of the groups waited for an answer of the game, or less."""
    answer_p95_s: float
    typical: TypicalStep | None

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
    )


def waited_for(trace: StepTrace) -> list[tuple[str, float]]:
    """Divide a step's wait among what its last group was at; the seconds add up to the wait.

    `other`: the group was at the learner already, had not been issued, or came from outside.
    """
    wait_s = trace.learner.get("wait", 0.0)
    if wait_s <= 0:
        return []
    begin = trace.formed - wait_s
    found = dict.fromkeys(PHASES, 0.0)
    for group in trace.groups[-1:]:
        for start, end, shares in _way(group):
            seconds = max(min(end, trace.formed) - max(start, begin), 0.0)
            _add(found, {phase: share * seconds for phase, share in shares.items()})
    found["other"] += max(wait_s - sum(found.values()), 0.0)
    return [(phase, seconds) for phase, seconds in found.items() if seconds > 0]


def _way(group: GroupTrace) -> list[tuple[float, float, Shares]]:
    """Return from when to when a group was at what, until it arrived.

    Counted back from its arrival, since only lengths are known of another machine's clock. The
    turns of the slowest episode alternate between engine and game: every part of their time is
    divided as the whole is.
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


def _by_actor(told: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Shares]:
    names = sorted({name for step in told for name in step})
    sums = {name: _sum(step.get(name, {}) for step in told) for name in names}
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
    """Return the smallest value that at least this share of all values does not exceed."""
    return ordered[max(math.ceil(share * len(ordered)), 1) - 1] if ordered else 0.0
