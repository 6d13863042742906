"""`tinkermq rollouts`: read the episodes of a run from its rollout log."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ....broker.batches import BatchLog
from ....broker.rollouts import LogEntry
from ....broker.run_rollouts import RunRollouts
from ....envs.agents.call_lines import CallLine, call_lines
from ....schemas.images import plain_text, restore_images
from ....schemas.rollout import Group, Trajectory
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import JobScope
from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json_line, say, say_plain
from ..session import with_pool

_AT_ONCE = 64
_ROLE_STYLES = {"system": "dim", "user": "blue", "assistant": "green", "tool": "magenta"}


@dataclass(frozen=True)
class Episode:
    """One trajectory of the log, or the fate of a task without any."""

    seq: int
    group: Group
    number: int
    trajectory: Trajectory | None
    step: int | None

    @property
    def reward(self) -> float:
        """Return of the episode; a failed task sorts last."""
        return self.trajectory.reward if self.trajectory else float("-inf")

    def fields(self) -> dict[str, Any]:
        """Return what is printed as JSON."""
        shared = {
            "seq": self.seq,
            "task": self.group.task.task,
            "sample": self.group.task.sample,
            "step": self.step,
            "source": self.group.source,
        }
        if self.trajectory is None:
            return {**shared, "error": self.group.error.model_dump() if self.group.error else None}
        one = self.trajectory
        return {
            **shared,
            "episode": self.number,
            "reward": one.reward,
            "rewards": one.rewards,
            "finish": one.ended_by,
            "finish_reasons": one.finish_reasons,
            "versions": [one.min_version, one.max_version],
            "num_generated": one.num_generated,
            "logprob_mean": float(one.logprobs[one.mask == 1].mean()),
            "tries": one.num_tries,
            "failures": [failure.model_dump() for failure in one.failures],
            "messages": restore_images(one.messages, self.group.images),
            "row_of": one.episode if one.episode >= 0 else None,
            "kind": one.kind,
            "info": one.info,
        }


def rollouts(
    run: str,
    /,
    *,
    step: int | None = None,
    sort: Literal["log", "reward"] = "log",
    errors: bool = False,
    limit: int = 10,
    common: Common = COMMON,
) -> int:
    """Read a run's episodes: messages, rewards by turn, policy versions.

    The log holds what the run still needs, and at its end the newest groups (16 MiB); with
    `training.keep_rollouts=true` all of it. Older ones come from the run's folder, where that is on
    this machine: a sample of the whole run, and what is left of a run that was archived.

    Parameters
    ----------
    run
        Name or job id; or the folder of a run, whose rollouts are read without its broker.
    step
        Only the groups that this training step trained.
    sort
        `log`: newest first; `reward`: best first.
    errors
        Only what failed: tasks given up, and episodes with failed tries.
    limit
        Print at most so many.
    """

    async def work(pool: Pool) -> list[Episode]:
        record = await pool.find(run)
        there = await RunRollouts.open(pool.broker, record.scope, record.run_dir)
        return await read_episodes(there, await _steps(pool, record.scope, there), wanted)

    wanted = EpisodeFilter(step, errors=errors, most=limit if sort == "log" else None)
    if "/" in run:
        episodes = asyncio.run(_of_folder(run, wanted))
    else:
        episodes = with_pool(common.nats_url, work)
    if sort == "reward":
        episodes = sorted(episodes, key=lambda one: one.reward, reverse=True)
    if not episodes and not common.json:
        note("no such rollouts in the log (it is trimmed unless training.keep_rollouts=true)")
    for episode in episodes[:limit]:
        if common.json:
            print_json_line(episode.fields())
        else:
            _print(episode)
    return 0


@dataclass(frozen=True)
class EpisodeFilter:
    """Which episodes of a run are read."""

    step: int | None = None
    """Only those that this step trained."""
    errors: bool = False
    """Only what failed."""
    most: int | None = None
    """At most so many, the newest; None: all."""

    def has(self, episode: Episode) -> bool:
        """Whether an episode is one of them."""
        one = episode.trajectory
        return not self.errors or one is None or bool(one.failures)


async def _steps(pool: Pool, scope: JobScope, there: RunRollouts) -> dict[int, int]:
    """Return the step that trained each entry; what was archived is known by its file's name."""
    try:
        records = await BatchLog(pool.broker, scope).read_all()
    except NotFoundError:
        return there.steps
    return there.steps | {seq: record.step for _, record in records for seq in record.seqs}


async def _of_folder(folder: str, wanted: EpisodeFilter) -> list[Episode]:
    if not (there := RunRollouts.of_folder(folder)):
        raise NotFoundError(
            f"{folder} holds no rollouts",
            hint="name the folder of a run (`tinkermq ps --json` tells it), or the run itself",
        )
    return await read_episodes(there, there.steps, wanted)


async def read_episodes(
    there: RunRollouts, step_of: Mapping[int, int], wanted: EpisodeFilter
) -> list[Episode]:
    """Return the episodes of a run that are wanted, newest first.

    Raises NotFoundError for a step that was not trained.
    """
    step = wanted.step
    if step is not None and step not in step_of.values():
        trained = f"trained are 1 to {max(step_of.values())}" if step_of else "none is trained yet"
        raise NotFoundError(f"step {step} is not in the batch log", hint=trained)
    episodes: list[Episode] = []
    before: int | None = None
    while seqs := there.before(before, _AT_ONCE):
        before = seqs[-1]
        asked = [seq for seq in seqs if step is None or step_of.get(seq) == step]
        for entry in await asyncio.gather(*map(there.get, asked)):
            if entry is not None:
                found = _episodes(entry, step_of.get(entry.seq))
                episodes += filter(wanted.has, reversed(list(found)))
        if wanted.most is not None and len(episodes) >= wanted.most:
            break
    return episodes


def _episodes(entry: LogEntry, step: int | None) -> Iterator[Episode]:
    group = entry.group
    if group is None:
        note(f"entry {entry.seq} of the log cannot be read: {entry.error}")
        return
    if not group.trajectories:
        yield Episode(entry.seq, group, 0, None, step)
    for number, trajectory in enumerate(group.trajectories):
        yield Episode(entry.seq, group, number, trajectory, step)


def _cut_turns(one: Trajectory) -> str:
    """Name the turns that their limit cut, counted from 1."""
    cut = [str(turn) for turn, why in enumerate(one.finish_reasons, 1) if why == "length"]
    return f" (cut: turn {', '.join(cut)})" if cut else ""


def _name(episode: Episode) -> str:
    one = episode.trajectory
    if one is None or one.episode < 0:
        return f"episode {episode.number}"
    rows = [item for item in episode.group.trajectories if item.episode == one.episode]
    row = next(place for place, item in enumerate(rows) if item is one)
    return f"episode {one.episode}, row {row + 1} of {len(rows)} ({one.kind or 'main'})"


def _print_call(line: CallLine) -> None:
    """Print one call of a program's tree."""
    where = f"row {line.row + 1}" if line.row is not None else f"not trained: {line.why_not}"
    reward = f"  reward {line.reward:g}" if line.reward is not None else ""
    if line.branch_reward is not None:
        reward += f"  reward of its branch {line.branch_reward:g}"
    branch = (
        f" ({', '.join(named)})" if (named := [*filter(None, (line.name, line.branch))]) else ""
    )
    said = " ".join([*line.text.split(), *(f"→ {tool}" for tool in line.tools)])
    say_plain(
        f"  {'  ' * line.depth}call {line.call}{branch}: {line.tokens} tokens, {where}{reward}  "
        f"{said[:80]}"
    )


def _print(episode: Episode) -> None:
    task = episode.group.task
    trained = f"step {episode.step}" if episode.step is not None else "not trained"
    one = episode.trajectory
    head = f"[bold]task {task.task}[/] {_name(episode)}  {trained}"
    if one is None:
        error = episode.group.error
        say(f"{head}  [red]given up[/]")
        say_plain(f"  {error.boundary}: {error.message}" if error else "  (no reason)")
        return
    by_turn = " ".join(f"{reward:g}" for reward in one.rewards.tolist())
    versions = (
        f"{one.min_version}"
        if one.min_version == one.max_version
        else f"{one.min_version}-{one.max_version}"
    )
    say(
        f"{head}  reward [bold]{one.reward:g}[/] (by turn: {by_turn})  version {versions}  "
        f"{one.num_generated} tokens  ended by {one.ended_by}{_cut_turns(one)}  "
        f"from {episode.group.source}"
    )
    for message in one.messages:
        role = str(message.get("role", "?"))
        say(f"  [{_ROLE_STYLES.get(role, 'white')}]{role}[/]")
        for line in plain_text(message.get("content", "")).splitlines() or [""]:
            say_plain(f"    {line}")
        for call in message.get("tool_calls", ()):
            function = call.get("function", {})
            say_plain(f"    → {function.get('name')}({function.get('arguments')})")
    for line in call_lines(one.info):
        _print_call(line)
    for failure in one.failures:
        say_plain(f"  failed try: {failure.boundary}: {failure.message}")
    say("")
