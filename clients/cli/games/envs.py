"""`tinkermq env list|check|serve`."""

import asyncio
import os
import signal

from ....broker.client.login import KEY_VARIABLE
from ....broker.programs.systemd import told_to_systemd
from ....envs.check import check_game
from ....envs.registry import list_games as registered_games
from ....schemas.config.job import EnvConfig
from ....schemas.job import FINAL_STATES
from ....schemas.wire.errors import BrokerError, DeadlineError, StateError
from ...pool import Pool
from ..models.check_model import check_with_model, model_to_check
from ..output import literal, note, print_json, print_table, say
from ..session import with_pool
from .chosen_game import choosing_game

FAILED = 1
END_POLL_S = 2.0
"""How often a host looks whether its run has ended."""


def list_games(*, json: bool = False) -> int:
    """List the games that are registered here.

    Parameters
    ----------
    json
        Print JSON.
    """
    games = registered_games()
    if json:
        print_json([vars(game) for game in games])
    else:
        print_table(
            ("game", "class", "about"), [(one.name, one.target, one.description) for one in games]
        )
    return 0


def check(
    game: str,
    /,
    *arguments: str,
    model: str | None = None,
    train_data: list[str] | None = None,
    val_data: list[str] | None = None,
    json: bool = False,
) -> int:
    """Prove that a game is sound, without generating anything.

    It imports, resets and steps in time, returns the right types, a seed reproduces an episode,
    the global random generators are left alone, gold answers score full marks; with a model, its
    chat template only appends, and prompts and gold answers fit the limits in tokens.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    model
        Folder (or hub name) of a model whose tokenizer is asked; default: that of the YAML file,
        if it is a folder here.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    val_data
        Validation files of a dataset game.
    json
        Print JSON.
    """
    with choosing_game(game, arguments, train_data or [], val_data or []) as chosen:
        asked, why_not = model_to_check(chosen, model)
        results = check_game(chosen.env, seed=chosen.seed)
        passed = all(result.ok for result in results)
        if asked is not None and passed:
            results += check_with_model(chosen, asked)
            passed = all(result.ok for result in results)
    if json:
        print_json({"ok": passed, "checks": [vars(result) for result in results]})
        return 0 if passed else FAILED
    for result in results:
        mark = "[green]ok[/]  " if result.ok else "[red]fail[/]"
        say(f"{mark} {result.name}  {literal(result.detail)}")
        if result.hint and not result.ok:
            say(f"       {literal(result.hint)}")
    if why_not:
        note(f"chat template and lengths in tokens were not checked: {why_not}")
    return 0 if passed else FAILED


def serve(run: str, /, *, name: str = "", nats_url: str | None = None) -> int:
    """Host a run's game in this process until Ctrl-C or the run's end.

    The run's generators use it at once. Of a run that has ended nothing is hosted.

    Parameters
    ----------
    run
        Name or job id.
    name
        Name of this host; default: one of its own.
    nats_url
        The broker; default: $TINKERMQ_NATS_URL, or the local stack.
    """

    async def work(pool: Pool) -> None:
        from ....envs.serving.host import EnvironmentHost

        os.environ.pop(KEY_VARIABLE, None)  # not for the processes of the game
        record = await pool.find(run)
        if record.state in FINAL_STATES:
            raise StateError(
                f"run {record.name} is {record.state}: nobody plays its game any more",
                hint=f"let it go on first: `tinkermq resume {record.name}`",
            )
        config = EnvConfig.model_validate(record.config["env"])
        host = EnvironmentHost(
            pool.broker, record.scope, config, name=name, seed=record.config.get("seed", 0)
        )
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.set)
        async with asyncio.TaskGroup() as tasks:
            hosting = tasks.create_task(host.run(stopping), name="host the game")
            await host.ready.wait()
            watching = tasks.create_task(_until_end(pool, record.job, stopping), name="see the end")
            note(f"{host.name} serves {config.game} for {record.name}; Ctrl-C stops it")
            async with told_to_systemd():
                await hosting
            watching.cancel()

    with_pool(nats_url, work)
    return 0


async def _until_end(pool: Pool, job: str, stopping: asyncio.Event) -> None:
    """Set `stopping` when a job has ended; a broker that is away for a while is waited for."""
    while True:
        await asyncio.sleep(END_POLL_S)
        try:
            record = await pool.find(job)
        except (BrokerError, DeadlineError):
            if pool.broker.closed.is_set():
                raise
            continue
        if record.state in FINAL_STATES:
            note(f"{record.name} is {record.state}")
            stopping.set()
            return
