"""The staleness gate: how far generation may run ahead of training.

A credit is the right to issue one task. Each version brings `batch_size` credits, and each group
that will never be trained (dropped, filtered, given up) gives its own back: otherwise a batch
would lack groups that nobody may generate. The *slot* of a task is the number of tasks issued
before it minus the credits returned before it. It takes the place of the task's number in every
rule, because numbers grow with each return and slots do not: under the gate
`slot // batch_size <= version + max_staleness`, so `min_version` never asks for a version that
the learner has yet to make, and nothing waits for itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...schemas.config.job import TrainingConfig
from ...schemas.profile import mean_share, profile_of
from ...schemas.wire.trace import StepTrace


def num_admissible(
    version: int,
    max_staleness: int,
    batch_size: int,
    returned_credits: int,
    total_steps: int | None = None,
) -> int:
    """Count the tasks that may have been issued by now, since the start of the job.

    With `total_steps` no task is issued that no step would train.
    """
    steps = version + max_staleness + 1
    if total_steps is not None:
        steps = min(steps, total_steps)
    return steps * batch_size + returned_credits


def min_version(slot: int, batch_size: int, max_staleness: int) -> int:
    """Give the oldest version that may begin the task in `slot`."""
    return max(0, slot // batch_size - max_staleness)


# -- the bound: fixed, or chosen from measured times -----------------------------------------------
# A batch takes the time L to be generated and T to be trained, so at one batch every C seconds (L +
# T) / C batches are under way (Little's law), and the gate lets η + 1 of them. A smaller η makes
# learner and generators wait for each other; a larger one only makes tokens older. `auto` looks for
# the smallest that does neither. C is what the slower side needs by itself: the learner T, the
# generators the part of each step in which they compute.
#
# Whether the games could keep pace with more episodes is not known beforehand. So a wider gate is a
# trial: if steps do not become shorter, the bound before comes back and stays for a while.
#
# The bound in force is that of the gate. What is trained is bounded by the largest one, so nothing
# becomes stale because the gate was narrowed.

_MIN_WINDOW = 8
_SLACK = 0.1
_GAIN = 0.05
_HOLD = 64
_COMPUTING = ("generate", "swap", "other")


@dataclass(frozen=True)
class Pace:
    """What some steps tell."""

    step_s: float
    """Seconds from step to step."""
    batches: float
    """Batches that are generated or trained at a time when nobody waits for the gate."""


class Staleness:
    """The bound of one learner."""

    def __init__(self, training: TrainingConfig, bound: int = 0) -> None:
        """Begin at 1 where the bound is chosen, close to on-policy, or with the last `bound`."""
        self.largest = training.largest_staleness
        """No group with a larger lag is trained (unless the policy is `train`)."""
        self._is_auto = training.max_staleness == "auto"
        self.now = min(max(bound, 1), self.largest) if self._is_auto else self.largest
        """How far generation may run ahead now."""
        self._traces: list[StepTrace] = []
        self._trial: tuple[int, float] | None = None
        self._ceiling = self.largest
        self._hold = 0

    def adapt(self, trace: StepTrace) -> None:
        """Take the times of a step, and choose anew where that is asked for."""
        if not self._is_auto:
            return
        self._hold = max(self._hold - 1, 0)
        self._traces.append(trace)
        settle = self.now + 1  # what is under way when a bound comes into force
        window = max(_MIN_WINDOW, 2 * (self.now + 1))
        if len(self._traces) < settle + window:
            return
        self.now = self._choose(pace_of(self._traces[settle:]))
        self._traces.clear()

    def _choose(self, pace: Pace) -> int:
        """Return the next bound: that before a trial without gain, or the one that is needed."""
        trial, self._trial = self._trial, None
        if trial is not None and pace.step_s > trial[1] * (1 - _GAIN):
            self._ceiling, self._hold = trial[0], _HOLD
            return trial[0]
        ceiling = self._ceiling if self._hold else self.largest
        chosen = min(choose(self.now, pace.batches), max(ceiling, self.now), self.largest)
        if chosen > self.now:
            self._trial = (self.now, pace.step_s)
        return chosen


def choose(bound: int, batches: float) -> int:
    """Return the bound to take after `bound`, at least 1, for so many batches under way.

    Upwards at most twofold, since what was measured may change with it; downwards by one, and only
    if that leaves some room.
    """
    if batches > (bound + 1) * (1 + _SLACK):
        return min(math.ceil(batches) - 1, 2 * bound)
    if bound > 1 and batches < bound * (1 - _SLACK):
        return bound - 1
    return bound


def pace_of(traces: Sequence[StepTrace]) -> Pace:
    """Measure some steps; without generators' times nothing says that more batches would help."""
    profile = profile_of(traces)
    step_s = profile.wall_s * (1 - profile.learner.get("paused", 0.0)) / len(traces)
    own_s = step_s - profile.wall_s * profile.learner.get("wait", 0.0) / len(traces)
    rollouts = [group.rollout_s for trace in traces for group in trace.groups]
    if not rollouts or not profile.generators:
        return Pace(step_s, 0.0)
    computing = sum(mean_share(profile.generators.values(), kind) for kind in _COMPUTING)
    pace_s = max(own_s, step_s * computing, 1e-9)
    return Pace(step_s, (sum(rollouts) / len(rollouts) + own_s) / pace_s)
