"""`tinkermq rollouts`: read the episodes of a run from its rollout log."""

import asyncio
from typing import Literal

from ....broker.kept_rollouts import RunRollouts
from ....envs.agents.call_lines import CallLine, call_lines
from ....schemas.rollout import Trajectory
from ....schemas.wire.errors import NotFoundError
from ....schemas.wire.images import plain_text
from ...pool import Pool
from ...runs.episodes import EpisodeFilter, LoggedEpisode, read_episodes, steps_of
from ..options import COMMON, Common
from ..output import note, print_json_line, say, say_plain
from ..session import with_pool

_ROLE_STYLES = {"system": "dim", "user": "blue", "assistant": "green", "tool": "magenta"}


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

    async def work(pool: Pool) -> list[LoggedEpisode]:
        record = await pool.find(run)
        there = await RunRollouts.open(pool.broker, record.scope, record.run_dir)
        return await read_episodes(there, await steps_of(pool.broker, record.scope, there), wanted)

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


async def _of_folder(folder: str, wanted: EpisodeFilter) -> list[LoggedEpisode]:
    if not (there := RunRollouts.of_folder(folder)):
        raise NotFoundError(
            f"{folder} holds no rollouts",
            hint="name the folder of a run (`tinkermq ps --json` tells it), or the run itself",
        )
    return await read_episodes(there, there.steps, wanted)


def _cut_turns(one: Trajectory) -> str:
    """Name the turns that their limit cut, counted from 1."""
    cut = [str(turn) for turn, why in enumerate(one.finish_reasons, 1) if why == "length"]
    return f" (cut: turn {', '.join(cut)})" if cut else ""


def _name(episode: LoggedEpisode) -> str:
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


def _print(episode: LoggedEpisode) -> None:
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
