"""The trace of each step: where the learner's time went, and that of all whom it may wait for.

Groups may be those of external agents, so what they tell is never taken at its word.
"""

import math
import time
from collections.abc import Mapping, Sequence

from ...broker.metering import TimeUse
from ...schemas.metric import Presence
from ...schemas.rollout import Group
from ...schemas.wire.trace import (
    GENERATOR_KINDS,
    HOST_KINDS,
    GroupTrace,
    StepTrace,
    is_traceparent,
    new_trace,
)
from .intake import CheckedEntry

MAX_GROUPS = 64


def learner_time_use() -> TimeUse:
    """Return the partition of the learner's time; what it does on purpose counts before waiting."""
    return TimeUse("paused", "checkpoint", "train", "publish", "wait", rest="other")


class StepTracer:
    """Collects what generators and environment hosts tell, and makes the trace of each step."""

    def __init__(self) -> None:
        self._generators: dict[str, dict[str, float]] = {}
        self._hosts: dict[str, dict[str, float]] = {}
        self._last_seconds: dict[str, tuple[int, dict[str, float]]] = {}

    def take_group(self, group: Group) -> None:
        """Take the time of its generator that a group tells of, trained or not."""
        kinds = (kind for kind in GENERATOR_KINDS if kind in group.time_use)
        spans = {kind: _length(group.time_use[kind]) for kind in kinds}
        if spans:
            _add(self._generators.setdefault(group.source, {}), spans)

    def take_host(self, host: Presence) -> None:
        """Take an environment host's heartbeat: counters since its start."""
        seconds = {kind: host.numbers.get(f"{kind}_s", 0.0) for kind in HOST_KINDS}
        pid, before = self._last_seconds.get(host.actor, (0, {}))
        self._last_seconds[host.actor] = host.pid, seconds
        if before and pid == host.pid:
            spent = {kind: max(seconds[kind] - before[kind], 0.0) for kind in HOST_KINDS}
            _add(self._hosts.setdefault(host.actor, {}), spent)

    def forget(self) -> None:
        """Leave out what came so far: it was told before a restart."""
        self._generators, self._hosts = {}, {}

    def trace(
        self,
        step: int,
        entries: Sequence[CheckedEntry],
        formed: float,
        learner: Mapping[str, float],
        send_s: float,
    ) -> StepTrace:
        """Return the trace of a step that is over, and begin with the next."""
        last = sorted(entries, key=lambda entry: entry.arrived)[-MAX_GROUPS:]
        generators, hosts = self._generators, self._hosts
        self.forget()
        return StepTrace(
            step=step,
            traceparent=new_trace(),
            formed=formed,
            ended=time.time(),
            learner=dict(learner),
            send_s=send_s,
            generators=generators,
            hosts=hosts,
            num_groups=len(entries),
            groups=[_group(entry, entry.group) for entry in last if entry.group is not None],
        )


def _group(entry: CheckedEntry, group: Group) -> GroupTrace:
    episodes = group.trajectories
    slowest = max(episodes, key=lambda item: item.generate_s + item.environment_s)
    answers = sum(1 + len(item.turn_ends) for item in episodes)
    return GroupTrace(
        task=group.task.task,
        traceparent=entry.traceparent if is_traceparent(entry.traceparent) else "",
        source=group.source,
        issued=_length(group.task.issued),
        arrived=entry.arrived,
        weights_s=_length(group.weights_s),
        rollout_s=_length(group.finished - group.started),
        generate_s=_length(slowest.generate_s),
        environment_s=_length(slowest.environment_s),
        answer_s=_length(sum(item.environment_s for item in episodes) / answers),
    )


def _length(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _add(sums: dict[str, float], spent: Mapping[str, float]) -> None:
    for kind, seconds in spent.items():
        sums[kind] = sums.get(kind, 0.0) + seconds
