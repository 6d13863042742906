"""One task: runs its episodes concurrently, retries failed ones, and makes a group of them.

With `rollout.oversample` more episodes run than the group needs. The first ones to end form the
group. The others are cancelled, and the group records their generated tokens.

In a game with several roles the conversation of each role is an episode. The game is reset first.
Then each role runs an ordinary agent loop, whose requests wait at the environment host for the
role's turns. The roles share only the game; each has its own prompt, mask, rewards and limits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ...broker.feed import publish_dead
from ...broker.partial_rollouts import Fenced
from ...broker.rollouts import CUT_MARKS_BYTES, RolloutLog
from ...envs.host_client import Environments, RoleAddress, Start
from ...schemas.config.job import JobConfig
from ...schemas.rollout import Group, Trajectory
from ...schemas.task import Blame, DeadLetter, Task
from ...schemas.wire.codec import INFO_CUT, packed_bytes
from ...schemas.wire.errors import MessageError, TinkermqError, root_cause
from ..policy.policies import learning_roles
from ..runtime import JobContext
from .agent_loop import AgentLoop, EpisodeFailed, EpisodePlan, NoTurn, blaming, until_played
from .players import Players
from .recording import EpisodeRecorder, TaskRecorder, Transcript

# -- games with several roles ----------------------------------------------------------------------


async def play_table(
    environments: Environments, plan: EpisodePlan, players: Mapping[str, AgentLoop]
) -> dict[str, Trajectory]:
    """Play one game with an agent loop for each role; return the trajectories by role.

    A role without a turn has none. Raises EpisodeFailed if any role failed.
    """
    with blaming("environment"):
        started = await environments.reset(plan.episode, plan.start)
    try:
        async with asyncio.TaskGroup() as tasks:
            seats = [
                tasks.create_task(_seat(loop, plan, RoleAddress(started.host, plan.episode, role)))
                for role, loop in players.items()
            ]
    except BaseExceptionGroup as raised:
        raise root_cause(raised) from raised
    finally:
        environments.close(started.host, plan.episode)
    outcomes = [seat.result() for seat in seats]
    failures = [outcome for outcome in outcomes if isinstance(outcome, EpisodeFailed)]
    by_role = {played.role: played for played in outcomes if isinstance(played, Trajectory)}
    if failures:
        wasted = sum(failure.tokens_wasted for failure in failures)
        wasted += sum(trajectory.num_generated for trajectory in by_role.values())
        first = failures[0]
        raise EpisodeFailed(first.cause, first.blame.boundary, wasted) from first
    return by_role


async def _seat(loop: AgentLoop, plan: EpisodePlan, seat: RoleAddress) -> Trajectory | Exception:
    """Play one role; if it fails, the game ends for all roles."""
    named = {"episode": f"{plan.episode}.{seat.role}"}
    if plan.draws is not None:
        named["draws"] = f"{plan.draws} {seat.role}"
    try:
        return await loop.run(replace(plan, **named, start=replace(plan.start, seat=seat)))
    except (EpisodeFailed, NoTurn) as outcome:
        return outcome


_NO_TURN = Blame(
    boundary="task",
    code="no_turn",
    message="no role that learns had a turn in any episode of the task",
    hint="end the game only after every role has had a turn",
)


PlayAlone: TypeAlias = Callable[
    [EpisodePlan, Transcript | None, EpisodeRecorder], Awaitable[list[Trajectory]]
]
"""Plays one episode without other roles; returns its rows."""


class GroupFailed(TinkermqError):
    """A task has no tries left; the exception has the group that records the failure."""

    def __init__(self, group: Group, blame: Blame, num_attempts: int) -> None:
        super().__init__(blame.message, hint=blame.hint)
        self.group = group
        self.blame = blame
        self.num_attempts = num_attempts


@dataclass(eq=False)
class _Episode:
    """One episode of a group, over all of its tries."""

    plan: EpisodePlan
    recorder: EpisodeRecorder
    transcript: Transcript = field(default_factory=Transcript)
    """Progress of the current try."""
    trajectories: list[Trajectory] = field(default_factory=list[Trajectory])
    """Its trajectories: one for each learning role that had a turn."""
    failures: list[EpisodeFailed] = field(default_factory=list[EpisodeFailed])
    """Of earlier tries."""


class GroupRunner:
    """Runs the episodes of tasks for one generator."""

    def __init__(
        self,
        players: Players,
        environments: Environments,
        config: JobConfig,
        source: str,
        past: Players | None = None,
        play_alone: PlayAlone | None = None,
    ) -> None:
        """`past` plays earlier versions, if the configuration asks for them; `play_alone` plays
        episodes without roles, by default with the main policy's loop."""
        self._players = players
        self._past = past
        self._play_alone = play_alone or self._play_game
        self._environments = environments
        self._config = config
        self._source = source
        self._roles: list[str] | None = None

    async def run_group(
        self,
        task: Task,
        attempt: str,
        traceparent: str = "",
        recorder: TaskRecorder | None = None,
    ) -> Group:
        """Roll out a task `group_size` times, and once greedily if requested.

        `attempt` makes the episodes' ids unique among generators that hold the same task,
        `traceparent` is the trace context of the task, `recorder` stores its episodes. Raises
        GroupFailed if an episode failed `rollout.max_tries` times, Fenced if another generator has
        taken the task over, and EngineError if the engine has failed.
        """
        if self._roles is None:
            self._roles = (await self._environments.describe()).roles
        started = time.time()
        misfit = _misfit(self._config, self._roles)
        if misfit is not None:
            raise self._given_up(task, misfit, [], started)
        recorder = recorder or TaskRecorder()
        episodes = [
            _Episode(plan, await recorder.open(number))
            for number, plan in enumerate(self._plans(task, attempt, traceparent))
        ]
        learning = learning_roles(self._config.self_play, self._roles, task.seed)
        try:
            complete = await self._play_all(episodes, learning)
        except EpisodeFailed as failure:
            raise self._given_up(task, failure.blame, episodes, started) from failure
        trajectories = [item for episode in complete for item in episode.trajectories]
        if not trajectories:
            raise self._given_up(task, _NO_TURN, episodes, started)
        return Group(
            task=task,
            trajectories=trajectories,
            source=self._source,
            kv_on_swap=self._config.generator.kv_on_swap,
            started=started,
            finished=time.time(),
            tokens_wasted=_tokens_wasted(episodes),
            tokens_cut=[
                episode.transcript.num_generated for episode in episodes if episode not in complete
            ],
            tokens_continued=sum(episode.recorder.num_continued for episode in complete),
        )

    async def _play_all(
        self, episodes: Sequence[_Episode], learning: Sequence[str]
    ) -> list[_Episode]:
        """Play episodes concurrently; return those of the group, and cancel the others.

        Raises the failure of an episode.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._play(episode, learning), name=episode.plan.episode)
                    for episode in episodes
                ]
                complete = await _first_to_end(
                    running, len(running) - self._config.rollout.oversample
                )
        except BaseExceptionGroup as raised:
            if fenced := raised.split(Fenced)[0]:
                raise root_cause(fenced) from raised
            failed, rest = raised.split(EpisodeFailed)
            if failed is None or rest is not None:
                raise
            raise root_cause(failed) from raised
        return [episodes[number] for number in sorted(complete)]

    def _plans(self, task: Task, attempt: str, traceparent: str) -> list[EpisodePlan]:
        """Return a plan for each episode; all of them start from the same state."""
        start = Start("train", task.sample, task.seed, task.reset_kwargs, traceparent=traceparent)
        repeats = self._config.training.max_staleness == 0
        return [
            EpisodePlan(
                episode=f"{attempt}-{task.task}-{number}",
                start=start,
                greedy=task.greedy_baseline and number == task.group_size,
                number=number,
                draws=f"{task.seed} {task.task} {number}" if repeats else None,
                time=task.issued or None,
            )
            for number in range(self._num_episodes(task))
        ]

    def _num_episodes(self, task: Task) -> int:
        return task.group_size + int(task.greedy_baseline) + self._config.rollout.oversample

    async def _play(self, episode: _Episode, learning: Sequence[str]) -> None:
        """Try an episode until it succeeds."""

        async def play(plan: EpisodePlan) -> list[Trajectory]:
            episode.transcript = Transcript()
            return await self._try(episode, plan, learning)

        max_tries, failures = self._config.rollout.max_tries, episode.failures
        played = await until_played(play, episode.plan, max_tries, self._check_engines, failures)
        blames = [failure.blame for failure in failures]
        blame_fields = {"num_tries": len(blames) + 1, "failures": blames} if blames else {}
        episode.trajectories = [item.model_copy(update=blame_fields) for item in played]

    def _check_engines(self) -> None:
        self._players.check_engines()
        if self._past is not None:
            self._past.check_engines()

    async def _try(
        self, episode: _Episode, plan: EpisodePlan, learning: Sequence[str]
    ) -> list[Trajectory]:
        """Play an episode once; return a trajectory for each learning role that had a turn."""
        if not self._roles:
            transcript = episode.transcript if self._config.rollout.oversample else None
            return await self._play_alone(plan, transcript, episode.recorder)
        loops = (self._past or self._players).of(self._roles) | self._players.of(learning)
        by_role = await play_table(self._environments, plan, loops)
        opponents = {
            role: item.min_version for role, item in by_role.items() if role not in learning
        }
        return [
            item.model_copy(update={"opponents": opponents})
            for role, item in by_role.items()
            if role in learning
        ]

    async def _play_game(
        self, plan: EpisodePlan, transcript: Transcript | None, recorder: EpisodeRecorder
    ) -> list[Trajectory]:
        return [await self._players.main.run(plan, transcript, recorder)]

    def _given_up(
        self,
        task: Task,
        blame: Blame,
        episodes: Sequence[_Episode],
        started: float,
    ) -> GroupFailed:
        group = Group(
            task=task,
            error=blame,
            source=self._source,
            started=started,
            finished=time.time(),
            tokens_wasted=_tokens_wasted(episodes),
        )
        return GroupFailed(group, blame, sum(len(episode.failures) for episode in episodes))


def _tokens_wasted(episodes: Sequence[_Episode]) -> int:
    """Count the tokens generated in failed tries."""
    return sum(failure.tokens_wasted for episode in episodes for failure in episode.failures)


async def append_group(log: RolloutLog, group: Group, source: str, traceparent: str = "") -> bool:
    """Append a finished group; return False if the log already has one for the task.

    Raises GroupFailed if the group is too large for a message.
    """
    try:
        return await log.append_fitting(group, source, traceparent=traceparent)
    except MessageError as error:
        raise _too_large(group, error) from error


def _too_large(group: Group, error: MessageError) -> GroupFailed:
    """Return a group that is too large for a message, without its episodes."""
    blame = Blame(boundary="task", code=error.code, message=error.message, hint=error.hint)
    wasted = group.tokens_wasted + sum(item.num_generated for item in group.trajectories)
    given_up = Group(
        task=group.task,
        error=blame,
        source=group.source,
        started=group.started,
        finished=group.finished or time.time(),
        tokens_wasted=wasted,
    )
    return GroupFailed(given_up, blame, 1)


def _fitting_task(task: Task, most: int) -> Task:
    """Return a task cut to leave room for its error."""
    size = packed_bytes(task.reset_kwargs)
    if size <= most - CUT_MARKS_BYTES:
        return task
    return task.model_copy(update={"reset_kwargs": {INFO_CUT: {"bytes": size}}})


async def append_given_up(context: JobContext, log: RolloutLog, failure: GroupFailed) -> bool:
    """Record a task that was given up: a dead letter and its group in the log.

    An event reports it, if tasks with the same error have doubled.
    Returns False if the log already has a group for the task.
    """
    task, blame = _fitting_task(failure.group.task, log.max_bytes), failure.blame
    letter = DeadLetter(
        task=task,
        blame=blame,
        num_attempts=max(1, failure.num_attempts),
        source=context.name,
        time=time.time(),
    )
    await publish_dead(context.broker, context.scope, letter)
    if count := context.given_up.due(blame.message):
        text = f"task {task.task}: {blame.message}"
        if count > 1:
            first_line = blame.message.partition("\n")[0]
            text = f"{count} tasks so far failed with the same error: {first_line}"
        await context.event(
            "task_given_up", text, task=task.task, boundary=blame.boundary, tasks=count
        )
    return await log.append(failure.group.model_copy(update={"task": task}))


def _misfit(config: JobConfig, roles: Sequence[str]) -> Blame | None:
    """Return the error of a configuration key that does not fit the game's roles, or None."""
    if roles and config.algorithm.advantage == "remax":
        return _wrong_key(
            "algorithm.advantage=remax has no baseline in a game with roles",
            "choose another advantage, such as grpo or rloo",
        )
    for key, value in (
        ("rollout.oversample", config.rollout.oversample),
        ("generator.segment_tokens", config.generator.segment_tokens),
    ):
        if roles and value:
            return _wrong_key(f"{key} does not support games with roles", f"remove {key}")
    if not roles and config.self_play.past_share > 0:
        return _wrong_key(
            "self_play.past_share has no effect: the game has no roles",
            "leave it out, or name the game's roles",
        )
    unknown = sorted(set(config.policies) - set(roles))
    if unknown:
        known = f"its roles are {', '.join(roles)}" if roles else "it has no roles"
        return _wrong_key(f"policies.{unknown[0]} is not a role of the game", known)
    return None


def _wrong_key(message: str, hint: str) -> Blame:
    return Blame(boundary="task", code="config", message=message, hint=hint)


async def _first_to_end(running: Sequence[asyncio.Task[None]], num: int) -> set[int]:
    """Wait until `num` tasks have ended, cancel the others, and return the indices of the first."""
    ended: list[int] = []
    enough = asyncio.Event()

    def note(number: int) -> None:
        ended.append(number)
        if len(ended) == num:
            enough.set()

    for number, task in enumerate(running):
        task.add_done_callback(lambda _, number=number: note(number))
    await enough.wait()
    first_ended = set(ended[:num])
    for number, task in enumerate(running):
        if number not in first_ended:
            task.cancel()
    return first_ended
