"""`tinkermq env list|check|serve`."""

from collections.abc import Sequence

from ....envs.check import CheckResult, check_game
from ....envs.registry import list_games as registered_games
from ....schemas.wire.errors import ConfigError
from ..models.check_model import check_with_model, model_to_check
from ..output import literal, note, print_json, print_table, say
from ..run_host import host_run, make_host
from .chosen_game import choosing_game
from .on_node import checks_of_node

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
    *arguments: str,
    model: str | None = None,
    train_data: list[str] | None = None,
    val_data: list[str] | None = None,
    on_node: bool = False,
    nats_url: str | None = None,
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
    on_node
        Let a node of the pool play it, where a job would, with its packages, files and sandbox.
    nats_url
        The broker that leads to that node; default: $TINKERMQ_NATS_URL, or the local stack.
    json
        Print JSON.
    """
    if on_node:
        if model is not None:
            raise ConfigError("--on-node plays without a model", hint="leave --model out")
        data = (train_data or [], val_data or [])
        node, results = checks_of_node(game, arguments, *data, nats_url)
        return say_checks(results, json=json, node=node)
    with choosing_game(game, arguments, train_data or [], val_data or []) as chosen:
        asked, why_not = model_to_check(chosen, model)
        results = check_game(chosen.env, seed=chosen.seed)
        passed = all(result.ok for result in results)
        if asked is not None and passed:
            results += check_with_model(chosen, asked)
    code = say_checks(results, json=json)
    if why_not and not json:
        note(f"chat template and lengths in tokens were not checked: {why_not}")
    return code


def say_checks(results: Sequence[CheckResult], *, json: bool, node: str = "") -> int:
    """Print what was checked, here or by a node; return the exit code."""
    passed = all(result.ok for result in results)
    if json:
        by = {"node": node} if node else {}
        print_json({"ok": passed, **by, "checks": [vars(result) for result in results]})
        return 0 if passed else FAILED
    if node:
        note(f"played by node {node}")
    for result in results:
        mark = "[green]ok[/]  " if result.ok else "[red]fail[/]"
        say(f"{mark} {result.name}  {literal(result.detail)}")
        if result.hint and not result.ok:
            say(f"       {literal(result.hint)}")
    return 0 if passed else FAILED


def serve(run: str, /, *, name: str = "", nats_url: str | None = None) -> int:
    """Host a run's game, or its agent programs, in this process until Ctrl-C or the run's end.

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

    return host_run(run, nats_url, lambda pool, record: make_host(pool, record, name))
