"""`tinkermq rollouts`: read the episodes of a run from its rollout log."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from ....broker.batches import BatchLog
from ....broker.rollouts import LogEntry, RolloutLog
from ....envs.agents.call_lines import CallLine, call_lines
from ....schemas.images import plain_text, restore_images
from ....schemas.rollout import Group, Trajectory
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.subjects import JobScope
from ...pool import Pool
from ..options import COMMON, Common
from ..output import note, print_json_line, say, say_plain
from ..session import with_pool

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
    `training.keep_rollouts=true` all of it.

    Parameters
    ----------
    run
        Name or job id.
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
        return await read_episodes(pool, record.scope, step=step)

    episodes = with_pool(common.nats_url, work)
    if errors:
        episodes = [one for one in episodes if one.trajectory is None or one.trajectory.failures]
    if sort == "reward":
        episodes = sorted(episodes, key=lambda one: one.reward, reverse=True)
    else:
        episodes = episodes[::-1]
    if not episodes and not common.json:
        note("no such rollouts in the log (it is trimmed unless training.keep_rollouts=true)")
    for episode in episodes[:limit]:
        if common.json:
            print_json_line(episode.fields())
        else:
            _print(episode)
    return 0


async def read_episodes(pool: Pool, scope: JobScope, *, step: int | None) -> list[Episode]:
    """Return the log's episodes in order; those of one step only if `step` is given.

    Raises NotFoundError for a step that was not trained.
    """
    records = await BatchLog(pool.broker, scope).read_all()
    step_of = {seq: record.step for _, record in records for seq in record.seqs}
    if step is not None and step not in step_of.values():
        trained = f"trained are 1 to {max(step_of.values())}" if step_of else "none is trained yet"
        raise NotFoundError(f"step {step} is not in the batch log", hint=trained)
    log = RolloutLog(pool.broker, scope)
    wanted = {seq for seq, trained in step_of.items() if step in (None, trained)}
    episodes: list[Episode] = []
    async with aclosing(_entries(log, wanted if step is not None else None)) as entries:
        async for entry in entries:
            episodes += _episodes(entry, step_of.get(entry.seq))
    return episodes


async def _entries(log: RolloutLog, seqs: set[int] | None) -> AsyncGenerator[LogEntry, None]:
    """Yield the entries at `seqs` that are still there, or all that are there now."""
    if seqs is not None:
        for seq in sorted(seqs):
            entry = await log.get(seq)
            if entry is not None:
                yield entry
        return
    first, last = await log.first_seq(), await log.last_seq()
    if last < first:
        return
    async with aclosing(log.read(first)) as entries:
        async for entry in entries:
            yield entry
            if entry.seq >= last:
                return


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
