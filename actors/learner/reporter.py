"""Reports each step to the feed and to the trackers, and its bottleneck as an event."""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ...broker.feed import publish_metric, publish_trace, read_metrics
from ...broker.jetstream.kv import Entry
from ...broker.presence import list_presences
from ...schemas.local.disk import in_thread, read_objects, with_room
from ...schemas.local.tracking import (
    GuardedTracker,
    Outcome,
    TrackedRun,
    Tracker,
    make_trackers,
)
from ...schemas.metric import WHY_EQUAL, Metric, Presence
from ...schemas.plan.plan import ModelUse
from ...schemas.plan.settings import find_models
from ...schemas.profile import TimeUse, advise, bound_key, profile_of
from ...schemas.rollout import Group
from ...schemas.wire.errors import StorageError, TinkermqError
from ...schemas.wire.images import plain_text
from ...schemas.wire.trace import (
    GENERATOR_KINDS,
    HOST_KINDS,
    GroupTrace,
    StepTrace,
    is_traceparent,
    new_trace,
)
from ..policy.devices import own_card
from ..runtime import JobContext
from ..training.state import LearnerState, Waste
from ..training.step import StepReport
from .group_metrics import demonstration_numbers, group_numbers, prompt_and_others
from .intake import CheckedEntry, Drops, Intake

# -- time use of a step ----------------------------------------------------------------------------
# The learner's time, and the time of the generators and environment hosts for which it may wait.
# Groups may come from external agents, so their numbers are not trusted.

MAX_GROUPS = 64


def learner_time_use() -> TimeUse:
    """Return the partition of the learner's time; work takes precedence over waiting."""
    return TimeUse("paused", "checkpoint", "train", "publish", "wait", rest="other")


class StepTracer:
    """Collects the times of generators and environment hosts for the trace of each step."""

    def __init__(self) -> None:
        self._generators: dict[str, dict[str, float]] = {}
        self._hosts: dict[str, dict[str, float]] = {}
        self._last_seconds: dict[str, tuple[int, dict[str, float]]] = {}

    def take_group(self, group: Group) -> None:
        """Add the generator's time reported by a group, trained or not."""
        kinds = (kind for kind in GENERATOR_KINDS if kind in group.time_use)
        spans = {kind: _length(group.time_use[kind]) for kind in kinds}
        if spans:
            _add(self._generators.setdefault(group.source, {}), spans)

    def take_host(self, host: Presence) -> None:
        """Add an environment host's heartbeat, with counters since its start."""
        seconds = {kind: host.numbers.get(f"{kind}_s", 0.0) for kind in HOST_KINDS}
        pid, before = self._last_seconds.get(host.actor, (0, {}))
        self._last_seconds[host.actor] = host.pid, seconds
        if before and pid == host.pid:
            spent = {kind: max(seconds[kind] - before[kind], 0.0) for kind in HOST_KINDS}
            _add(self._hosts.setdefault(host.actor, {}), spent)

    def forget(self) -> None:
        """Discard the times so far, which are from before a restart."""
        self._generators, self._hosts = {}, {}

    def trace(
        self,
        step: int,
        entries: Sequence[CheckedEntry],
        formed: float,
        learner: Mapping[str, float],
        send_s: float,
    ) -> StepTrace:
        """Return the trace of the step that has ended, and begin the next."""
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


# -- use of the machine's cores --------------------------------------------------------------------

_IDLE = (3, 4)
"""Columns of time in which a core was idle or waited for a disk."""
_COUNTED = 8


class CoreUse:
    """Measures the share of busy core time between calls."""

    def __init__(self, source: Path = Path("/proc/stat")) -> None:
        self._source = source
        self._last = self._read()

    def busy_share(self) -> float:
        """Return the busy share since the last call, 0 to 1; 0 if it is unknown."""
        now, last = self._read(), self._last
        self._last = now
        spent = [new - old for new, old in zip(now, last, strict=False)]
        total = sum(spent)
        return 1 - sum(spent[column] for column in _IDLE) / total if total > 0 else 0.0

    def _read(self) -> list[int]:
        """Return the ticks of all cores by kind; empty on a system without such counters."""
        try:
            first = self._source.read_text().partition("\n")[0].split()
        except OSError:
            return []
        return [int(ticks) for ticks in first[1 : 1 + _COUNTED]]


_LOOK_S = 2.0
_WINDOW = 20
_BOTTLENECK_EVERY_S = 5.0
_UNLEARNT_STEPS = 5
"""Steps in a row with a gradient of 0 after which an event says so."""
_MAX_TABLE_CHARS = 20_000
_FLUSH_S = 5.0
_CLOSE_S = 20.0
"""Time for trackers to log their numbers when a learner ends early."""
_MAX_UNWRITTEN = 10_000
"""Maximum number of steps whose numbers wait for an unwritable file."""


@dataclass
class Generators:
    """The numbers in the generators' last heartbeats."""

    tokens_per_s: float = 0.0
    drafted_per_s: float = 0.0
    """Tokens that speculative decoding proposes."""
    accepted_per_s: float = 0.0
    count: int = 0
    hosts: frozenset[str] = frozenset()
    """The generators' machines."""

    def speculation(self) -> dict[str, float]:
        """Return the metric of speculative decoding, if tokens are proposed."""
        proposed = self.drafted_per_s
        return {"rollout/accepted_share": self.accepted_per_s / proposed} if proposed else {}


@dataclass
class Reporter:
    """Publishes the metrics of one job."""

    context: JobContext
    trackers: Sequence[Tracker]
    total_steps: int
    first_step: int = 0
    """Steps up to this one were reported before a restart."""
    use: ModelUse | None = None
    """Measures MFU, on known GPUs."""
    generators: Generators = field(default_factory=Generators)
    tracer: StepTracer = field(default_factory=StepTracer)
    _traces: deque[StepTrace] = field(default_factory=lambda: deque[StepTrace](maxlen=_WINDOW))
    _last_report: float = 0.0
    _cores: CoreUse = field(default_factory=CoreUse)
    _unwritten: deque[tuple[int, Mapping[str, float]]] = field(
        default_factory=lambda: deque[tuple[int, Mapping[str, float]]](maxlen=_MAX_UNWRITTEN)
    )
    """Numbers that are not yet in the run's own file."""
    _is_unwritable: bool = False
    _num_unlearnt: int = 0
    """Steps in a row that changed nothing."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def report(
        self,
        step: int,
        groups: Sequence[Group],
        report: StepReport,
        trace: StepTrace,
        intake: Intake,
        drops: Drops,
        oldest: int = 0,
    ) -> None:
        """Publish the numbers and the trace of a step, unless reported before a restart.

        Tokens of versions before `oldest` were not trained.
        """
        numbers = self._numbers(groups, step, report, drops.waste, oldest)
        step_s = sum(trace.learner.values())
        tokens = numbers["rollout/generated_tokens"]
        if self.generators.hosts <= {self.context.presence.host}:
            trace = trace.model_copy(update={"cores_busy": self._cores.busy_share()})
        self._traces.append(trace)
        numbers.update(
            {
                "training/global_step": float(step),
                "training/total_steps": float(self.total_steps),
                "timing_s/step": step_s,
                "timing_s/wait": trace.learner.get("wait", 0.0),
                "timing_s/update_actor": report.model_s,
                "timing_s/publish": trace.learner.get("publish", 0.0),
                "timing_s/save_checkpoint": trace.learner.get("checkpoint", 0.0),
                "perf/total_num_tokens": float(
                    sum(len(item.mask) for group in groups for item in group.sampled)
                ),
                "perf/time_per_step": step_s,
                "perf/throughput": tokens / max(step_s, 1e-9),
                "perf/learner_wait_share": self._wait_share(),
                "rollout/tokens_per_s": self.generators.tokens_per_s,
                "rollout/num_generators": float(self.generators.count),
                "broker/groups_waiting": float(len(intake.candidates())),
                **self.generators.speculation(),
                **{f"rollout/dropped/{key}": float(n) for key, n in drops.num_by_reason.items()},
            }
        )
        if step <= self.first_step:
            return
        await publish_trace(self.context.broker, self.context.scope, trace)
        metric = Metric(step=step, values=numbers, time=time.time())
        await publish_metric(self.context.broker, self.context.scope, metric)
        await self._log(step, numbers)
        await self._log_episodes(step, groups)
        await self._report_bottleneck()
        await self._report_unlearnt(metric)

    async def _report_unlearnt(self, metric: Metric) -> None:
        """Send an event after some steps in a row that changed nothing."""
        self._num_unlearnt = self._num_unlearnt + 1 if metric.is_unlearnt else 0
        if self._num_unlearnt == _UNLEARNT_STEPS:
            first = metric.step - _UNLEARNT_STEPS + 1
            text = (
                f"nothing was learnt in steps {first} to {metric.step}: "
                f"the gradient is 0, since all groups have equal rewards. {WHY_EQUAL}"
            )
            await self.context.event("nothing_learnt", text, step=metric.step)

    async def _log(self, step: int, values: Mapping[str, float]) -> None:
        """Pass numbers to the trackers, each once; wait for room on a full disk.

        If the file cannot be written for another reason, they are written later. A failing tracker
        is reported and does not end the run.
        """
        self._unwritten.append((step, values))
        for tracker in self.trackers:
            if isinstance(tracker, GuardedTracker):
                tracker.log(values, step)
            else:
                async with self._writing:
                    await self._write(tracker)
        await self._report_to_trackers()

    async def _write(self, tracker: Tracker) -> None:
        """Write the numbers that are not yet in the run's own file."""

        async def report_full_disk(message: str) -> None:
            await self.context.event("disk_full", message, step=step)

        while self._unwritten:
            step, values = self._unwritten[0]
            log = in_thread(tracker.log, values, step)
            try:
                missing = self.context.missing
                await with_room(
                    log, f"metrics of step {step}", missing, first_word=report_full_disk
                )
            except (OSError, StorageError) as error:
                if not self._is_unwritable:
                    self._is_unwritable = True
                    text = f"the metrics of step {step} cannot be written, and wait: {error}"
                    await self.context.event("metrics_unwritable", text, step=step)
                return
            self._unwritten.popleft()
        self._is_unwritable = False

    async def _report_to_trackers(self) -> None:
        """Report the problems of trackers, each problem once."""
        for tracker in self.trackers:
            for event in tracker.take_events() if isinstance(tracker, GuardedTracker) else ():
                await self.context.event(event.kind, event.message, **event.data)

    async def _log_episodes(self, step: int, groups: Sequence[Group]) -> None:
        """Pass episodes of the step to the trackers, if configured."""
        tracking = self.context.config.tracking
        if tracking.episodes_every and step % tracking.episodes_every == 0:
            rows = await asyncio.to_thread(episode_rows, groups, tracking.max_episodes)
            for tracker in self.trackers:
                tracker.log_episodes(rows, step)

    async def watch_actors(self) -> None:
        """Read the heartbeats of generators and environment hosts, forever."""
        while True:
            try:
                self._note_generators(
                    await list_presences(self.context.broker, f"{self.context.scope.key}.")
                )
            except TinkermqError as error:  # training does not depend on it
                self.context.log.warning("actors_unknown", error=error.message, hint=error.hint)
            await asyncio.sleep(_LOOK_S)

    def _note_generators(self, entries: Sequence[Entry[Presence]]) -> None:
        generators = [entry.value for entry in entries if entry.value.role == "generator"]
        rates = ("tokens_per_s", "drafted_per_s", "accepted_per_s")
        self.generators = Generators(
            *(sum(item.numbers.get(key, 0.0) for item in generators) for key in rates),
            count=len(generators),
            hosts=frozenset(item.host for item in generators),
        )
        for entry in entries:
            if entry.value.role == "environment":
                self.tracer.take_host(entry.value)

    async def log_evaluation(self, step: int, values: dict[str, float]) -> None:
        """Pass an evaluation's result to the trackers."""
        await self._log(step, values)

    async def close(self, outcome: Outcome | None) -> None:
        """Let the trackers record how the run ended, for some seconds at most.

        None: it goes on elsewhere, and they log their numbers and stay open.
        """
        guarded = [tracker for tracker in self.trackers if isinstance(tracker, GuardedTracker)]
        ends = (
            partial(tracker.flush, _FLUSH_S)
            if outcome is None
            else partial(tracker.finish, outcome, _CLOSE_S)
            for tracker in guarded
        )
        await asyncio.gather(*(asyncio.to_thread(end) for end in ends))

    async def finish(self) -> None:
        """Close the trackers and wait for them, except for those that hang."""
        with self.context.waiting("the trackers to finish"):
            await asyncio.gather(*(asyncio.to_thread(tracker.finish) for tracker in self.trackers))
        await self._report_to_trackers()
        if self._is_unwritable:
            text = f"the metrics of {len(self._unwritten)} steps are not in metrics.jsonl"
            await self.context.event("metrics_lost", text, steps_lost=len(self._unwritten))

    def _numbers(
        self, groups: Sequence[Group], step: int, report: StepReport, waste: Waste, oldest: int
    ) -> dict[str, float]:
        """Return the numbers of the groups and of the step; an SFT job has no rewards or lag."""
        config = self.context.config
        use: dict[str, float] = {}
        if self.use is not None:
            lengths = [[prompt_and_others(item.mask) for item in group.sampled] for group in groups]
            use["perf/mfu"] = self.use.mfu(lengths, report.model_s)
        if config.sft.data:
            trained = {key: n for key, n in report.numbers.items() if key.startswith("actor/")}
            return {**demonstration_numbers(groups), **trained, **use}
        numbers = group_numbers(
            groups,
            step - 1,
            config.rollout.response_limit,
            config.evaluation.success_reward,
            oldest,
        )
        return {**numbers, **report.numbers, **waste.numbers(), **use}

    def _wait_share(self) -> float:
        waited = sum(trace.learner.get("wait", 0.0) for trace in self._traces)
        return waited / max(sum(sum(trace.learner.values()) for trace in self._traces), 1e-9)

    async def _report_bottleneck(self) -> None:
        now = time.monotonic()
        if now - self._last_report < _BOTTLENECK_EVERY_S or len(self._traces) < 3:
            return
        self._last_report = now
        record = self.context.record
        profile = profile_of(list(self._traces))
        first = advise(profile, record.name, bound_key(record.config))[0]
        await self.context.event("bottleneck", first.text, change=list(first.change))


def episode_rows(groups: Sequence[Group], most: int) -> list[dict[str, Any]]:
    """Return the rows of a table of the first episodes of a step."""
    rows = (
        {
            "task": group.task.task,
            "reward": item.reward,
            "version": item.max_version,
            "tokens": item.num_generated,
            "ended by": item.ended_by,
            "messages": "\n\n".join(
                f"{message.get('role', '')}: {plain_text(message.get('content', ''))}"
                for message in item.messages
            )[:_MAX_TABLE_CHARS],
        }
        for group in groups
        for item in group.sampled
    )
    return list(islice(rows, most))


def last_reported_step(run_dir: Path) -> int:
    """Return the newest step in the run's metrics.jsonl; 0 when there is none."""
    file = run_dir / "metrics.jsonl"
    if not file.is_file():
        return 0
    steps = (entry for entry in read_objects(file) if _is_training(entry))
    return max((int(entry["step"]) for entry in steps), default=0)


def forget_reported(run_dir: Path, behind: int) -> None:
    """Remove the numbers of steps after `behind` from the run's metrics.jsonl."""
    file, draft = run_dir / "metrics.jsonl", run_dir / ".metrics.jsonl"
    if file.is_file():
        entries = [entry for entry in read_objects(file) if int(entry.get("step", 0)) <= behind]
        draft.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        draft.replace(file)


async def store_reported(context: JobContext) -> None:
    """Store the numbers of the run's metrics.jsonl that the broker's store has lost."""
    file = context.run_dir / "metrics.jsonl"
    if not await asyncio.to_thread(file.is_file):
        return
    broker, scope = context.broker, context.scope
    stored = {
        (metric.step, _is_training(metric.values)) for metric in await read_metrics(broker, scope)
    }
    for entry in await asyncio.to_thread(lambda: list(read_objects(file))):
        step, time_s = entry.pop("step"), entry.pop("time")
        values = {name: math.nan if value is None else value for name, value in entry.items()}
        metric = Metric(step=step, values=values, time=time_s)
        if (metric.step, _is_training(values)) not in stored:
            await publish_metric(broker, scope, metric)


def _is_training(values: Mapping[str, float]) -> bool:
    """Whether numbers are those of a training step, not of a validation."""
    return "training/global_step" in values


async def restore_reported(context: JobContext) -> None:
    """Write the stored numbers of all steps into a run folder that was lost.

    So no step is reported to other trackers again.
    """
    file = context.run_dir / "metrics.jsonl"
    if await asyncio.to_thread(file.is_file):
        return
    stored = {metric.step: metric for metric in await read_metrics(context.broker, context.scope)}
    if not stored:
        return
    in_folder = ["jsonl", *{"tensorboard"}.intersection(context.config.logger_backends)]
    run = TrackedRun(context.config.project, context.record.name)
    opening = partial(make_trackers, in_folder, run, folder=context.run_dir, resumes=True)
    for tracker in await asyncio.to_thread(opening):
        for step, metric in sorted(stored.items()):
            log = in_thread(tracker.log, metric.values, step)
            await with_room(log, f"metrics of step {step}", context.missing)
        await asyncio.to_thread(tracker.finish)


async def open_reporter(context: JobContext, state: LearnerState) -> Reporter:
    """Open the trackers, pass them the configuration, and continue after the last reported step."""
    config, first_step = context.config, last_reported_step(context.run_dir)
    run = TrackedRun(
        project=config.project,
        name=context.record.name,
        id=context.record.job,
        entity=config.tracking.entity,
        group=config.group or "",
        tags=config.tags,
        notes=config.notes,
    )
    others = [name for name in config.logger_backends if name not in ("jsonl", "console")]
    opening = partial(
        make_trackers,
        ["jsonl", *others],
        run,
        folder=context.run_dir,
        resumes=max(first_step, state.step) > 0,
    )
    trackers = await asyncio.to_thread(opening)
    shown = config.model_dump(mode="json")
    for tracker in trackers:
        log = in_thread(tracker.log_config, shown)
        await with_room(log, "the run's config.json", context.missing)
    use = ModelUse.of(config, await asyncio.to_thread(find_models, config), own_card())
    return Reporter(context, trackers, state.total_steps, first_step, use)
