"""`tinkermq env list|check|serve`."""

import asyncio
import signal
import tempfile
from pathlib import Path

from ...envs.check import check_game
from ...envs.registry import companion, load_game
from ...envs.registry import list_games as registered_games
from ...schemas.config import EnvConfig
from ...schemas.errors import ConfigError, GameError
from ...schemas.load_config import load_config
from ..pool import Pool
from .output import literal, note, print_json, print_table, say
from .session import with_pool

FAILED = 1


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
    """Host a run's game in this process until Ctrl-C; the run's generators use it at once.

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

        record = await pool.find(run)
        config = EnvConfig.model_validate(record.config["env"])
        host = EnvironmentHost(
            pool.broker, record.scope, config, name=name, seed=record.config.get("seed", 0)
        )
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopping.set)
        note(f"{host.name} serves {config.game} for {record.name}; Ctrl-C stops it")
        await host.run(stopping)

    with_pool(nats_url, work)
    return 0
