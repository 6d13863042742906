"""`tinkermq env list|check|serve`."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

from ...broker.login import KEY_VARIABLE
from ...broker.systemd import told_to_systemd
from ...envs.check import check_game
from ...envs.registry import companion, load_game
from ...envs.registry import list_games as registered_games
from ...schemas.config import EnvConfig
from ...schemas.errors import BrokerError, ConfigError, DeadlineError, GameError, StateError
from ...schemas.job import FINAL_STATES
from ...schemas.load_config import load_config
from ..pool import Pool
from .output import literal, note, print_json, print_table, say
from .session import with_pool

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
    *,
    train_data: list[str] | None = None,
    val_data: list[str] | None = None,
    json: bool = False,
) -> int:
    """Prove that a game is sound, without a model.

    It imports, resets and steps, returns the right types, a seed reproduces an episode, and gold
    answers score full marks.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or a YAML file with an `env` section.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    val_data
        Validation files of a dataset game.
    json
        Print JSON.
    """
    config, seed = _env_config(game, train_data or [], val_data or [])
    with tempfile.TemporaryDirectory(prefix="tinkermq-check-") as folder:
        results = check_game(_with_data(config, folder), seed=seed)
    passed = all(result.ok for result in results)
    if json:
        print_json({"ok": passed, "checks": [vars(result) for result in results]})
        return 0 if passed else FAILED
    for result in results:
        mark = "[green]ok[/]  " if result.ok else "[red]fail[/]"
        say(f"{mark} {result.name}  {literal(result.detail)}")
        if result.hint and not result.ok:
            say(f"       {literal(result.hint)}")
    return 0 if passed else FAILED


def _env_config(game: str, train: list[str], val: list[str]) -> tuple[EnvConfig, int]:
    if not game.endswith((".yaml", ".yml")):
        return EnvConfig(game=game, train_data=train, val_data=val), 0
    if train or val:
        raise ConfigError("a YAML file names its own data", hint="leave --train-data out")
    config = load_config(Path(game))
    return config.env, config.seed


def _with_data(config: EnvConfig, folder: str) -> EnvConfig:
    """Let a registered dataset game make its data, if none was named."""
    if config.train_data:
        return config
    try:
        make_data = companion(load_game(config.game), "make_data")
    except GameError:
        return config  # it generates its states, or the check says why it cannot be imported
    train, val = make_data(folder, num_train=64, num_val=16)
    return config.model_copy(update={"train_data": [str(train)], "val_data": [str(val)]})


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
        from ...envs.host import EnvironmentHost

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
