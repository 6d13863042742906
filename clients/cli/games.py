"""Commands for games, data and algorithms: `env list|check|play|serve`, `data`, `algorithm`."""

import asyncio
import contextlib
import importlib.util
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from ...envs.check import check_game
from ...envs.conversations import returns
from ...envs.data import HostData
from ...envs.game import ChatMessage, StepResult, game_failure
from ...envs.registry import companion, load_game
from ...envs.registry import list_games as registered_games
from ...envs.running.local import LocalEpisode, LocalGame
from ...schemas.config.job import EnvConfig, JobConfig
from ...schemas.config.load_config import load_config, read_overrides
from ...schemas.local.folder import temporary_folder
from ...schemas.wire.errors import ConfigError, GameError
from ...schemas.wire.foreign import blaming
from ...schemas.wire.images import plain_text
from ..base import quiet_logs
from . import output
from .checks import check_model, print_checks, run_process
from .run_host import host_run, make_host
from .session import positive


@dataclass(frozen=True)
class ChosenGame:
    """A game with its arguments and data."""

    env: EnvConfig
    """How it is hosted."""
    seed: int = 0
    """The run's seed."""
    job: JobConfig | None = None
    """The whole configuration, where a YAML file was named."""


@contextlib.contextmanager
def open_game(
    game: str,
    arguments: Sequence[str] = (),
    train_data: Sequence[str] = (),
    val_data: Sequence[str] = (),
) -> Iterator[ChosenGame]:
    """Yield the game that a command line names.

    `arguments` are `key=value`: of the game's constructor, or of the YAML file. A registered
    dataset game without data gets data from `make_data` for the duration of the block.

    Raises ConfigError.
    """
    quiet_logs()
    if _is_file(game, train_data, val_data):
        yield _from_yaml(game, arguments)
        return
    kwargs = read_overrides(arguments, None)
    env = EnvConfig(game=game, kwargs=kwargs, train_data=list(train_data), val_data=list(val_data))
    with temporary_folder("data") as folder:
        yield ChosenGame(_with_data(env, folder))


def _is_file(game: str, train_data: Sequence[str], val_data: Sequence[str]) -> bool:
    """Return whether a configuration file is named; ConfigError if data is named beside it."""
    is_file = game.endswith((".yaml", ".yml"))
    if is_file and (train_data or val_data):
        raise ConfigError("a YAML file names its own data", hint="leave --train-data out")
    return is_file


def _from_yaml(path: str, overrides: Sequence[str]) -> ChosenGame:
    job = load_config(Path(path), overrides)
    if job.agent.runs_programs:
        raise ConfigError(
            f"{path} is the configuration of an agent job: there is no game",
            hint=f"try its program: `tinkermq agent check {path}`",
        )
    return ChosenGame(job.env, job.seed, job)


def _with_data(env: EnvConfig, folder: Path) -> EnvConfig:
    if env.train_data:
        return env
    try:
        make_data = companion(load_game(env.game), "make_data")
    except GameError:
        return env  # the game generates its states, or the check reports why it cannot be imported
    with blaming(lambda error: game_failure(env.game, "make_data", error)):
        train, val = make_data(str(folder), num_train=64, num_val=16)
    return env.model_copy(update={"train_data": [str(train)], "val_data": [str(val)]})


# The part of `env check` that needs a tokenizer.


def _model_to_check(chosen: ChosenGame, model: str | None) -> tuple[JobConfig | None, str]:
    """Return the run whose tokenizer is used, or None and the reason.

    Raises ConfigError for a requested model that cannot be used here.
    """
    path = model or (chosen.job.model.path if chosen.job else None)
    if path is None:
        return None, ""
    has_transformers = importlib.util.find_spec("transformers") is not None
    if not has_transformers and model is not None:
        raise ConfigError(
            "--model needs transformers, which is not installed here",
            hint="pip install 'tinkermq[worker]', or leave --model out",
        )
    if not has_transformers:
        return None, "transformers is not installed here"
    if model is None and not Path(path).expanduser().is_dir():
        return None, f"{path} is not a folder here (--model names one)"
    job = chosen.job or JobConfig.model_validate({"model": {"path": path}, "env": chosen.env})
    return job.model_copy(update={"model": job.model.model_copy(update={"path": path})}), ""


# `tinkermq env list|check|serve`.


def list_games(*, json: bool = False) -> int:
    """List the registered games.

    Parameters
    ----------
    json
        Print JSON.
    """
    games = registered_games()
    rows = [(game.name, game.target, game.description) for game in games]
    document = [vars(game) for game in games]
    return output.print_rows(document, ("game", "class", "about"), rows, as_json=json)


def check(
    game: str,
    /,
    *arguments: str,
    model: str | None = None,
    train_data: list[str] | None = None,
    val_data: list[str] | None = None,
    json: bool = False,
) -> int:
    """Check a game without a model.

    Checks that it imports, resets and steps in time, returns the right types, reproduces an episode
    from its seed, leaves global random generators alone, and gives gold answers full reward. With
    a model: that its chat template only appends, and that prompts and gold answers fit the limits.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    model
        Folder (or hub name) of the model whose tokenizer is used; default: that of the YAML file,
        if it is a folder here.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    val_data
        Validation files of a dataset game.
    json
        Print JSON.
    """
    with open_game(game, arguments, train_data or [], val_data or []) as chosen:
        job, why_not = _model_to_check(chosen, model)
        results = check_game(chosen.env, seed=chosen.seed)
        if job is not None and all(result.ok for result in results):
            results += check_model(job, plays=True, whole=chosen.job is not None)
    code = print_checks(results, as_json=json)
    if why_not and not json:
        output.print_note(f"chat template and lengths in tokens were not checked: {why_not}")
    return code


def serve(
    target: str,
    /,
    *arguments: str,
    openenv: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_sessions: Annotated[int, Parameter(validator=Number(gte=1))] = 64,
    idle_s: Annotated[float, Parameter(validator=positive)] = 600.0,
    train_data: list[str] | None = None,
    val_data: list[str] | None = None,
    name: str = "",
    nats_url: str | None = None,
) -> int:
    """Host a run's game, or its agent programs, in this process until Ctrl-C or the run's end.

    The run's generators use it at once. A run that has ended cannot be hosted. With `--openenv`,
    serve any game as an OpenEnv environment instead, for other trainers; this needs no pool.

    Parameters
    ----------
    target
        Name or job id of the run. With `--openenv` a game: registered name, `package.module:Class`,
        or the YAML file of a run.
    arguments
        With `--openenv`, `key=value`: of the game's constructor, or of the YAML file.
    openenv
        Serve a game over OpenEnv's HTTP and WebSocket routes.
    host
        Address to listen on. Whoever reaches it can play.
    port
        Port to listen on; 0: a free one.
    max_sessions
        Sessions at once; further ones are refused with OpenEnv's capacity error.
    idle_s
        Close a session that is not used for so many seconds.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    val_data
        Validation files of a dataset game.
    name
        Name of this host of a run; default: a generated one.
    nats_url
        The broker of the run; default: $TINKERMQ_NATS_URL, or the local stack.
    """
    if not openenv:
        if arguments or train_data or val_data:
            raise ConfigError(
                "a run is hosted with the game, the arguments and the data that it has",
                hint="name the run alone; to serve a game to other trainers, add --openenv",
            )
        return host_run(target, nats_url, lambda pool, record: make_host(pool, record, name))
    with open_game(target, arguments, train_data or [], val_data or []) as chosen:
        _serve_openenv(chosen, host, port, max_sessions, idle_s)
    return 0


def _serve_openenv(
    chosen: ChosenGame, host: str, port: int, max_sessions: int, idle_s: float
) -> None:
    """Serve a game until Ctrl-C or SIGTERM."""
    from ...envs.openenv_server import OpenEnvServer, ServerBounds

    bounds = ServerBounds(max_sessions=max_sessions, idle_s=idle_s)
    server = OpenEnvServer(chosen.env, seed=chosen.seed, bounds=bounds)

    async def work() -> None:
        stopping = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C interrupts
                asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        async with server.listening(host, port) as listening:
            shown_host = f"[{host}]" if ":" in host else host
            output.print_note(
                f"serving {server.game.name} at http://{shown_host}:{listening} "
                f"({max_sessions} sessions at once); Ctrl-C stops it"
            )
            await stopping.wait()

    asyncio.run(work())


# `tinkermq env play`: a human is the policy.

NOT_ENDED = 1
_CONTINUES = "\\"


def play(
    game: str,
    /,
    *arguments: str,
    seed: int = 0,
    row: int | None = None,
    gold: bool = False,
    train_data: list[str] | None = None,
    json: bool = False,
) -> int:
    """Play an episode yourself: every typed line is an action.

    Actions can come from a pipe: `printf '3\\n5\\n' | tinkermq env play guess`. A backslash at the
    end of a line continues the action on the next. The exit code is 0 if the game is over, 1 if
    the input ended before.

    Parameters
    ----------
    game
        Registered name, `package.module:Class`, or the YAML file of a run.
    arguments
        `key=value`: of the game's constructor, or of the YAML file.
    seed
        Seed of the episode.
    row
        Row of a dataset game; default: the row that `seed` selects.
    gold
        Play the game's own `gold_action`.
    train_data
        Parquet or JSONL files of a dataset game; default: what its `make_data` makes.
    json
        Print the prompt, each turn and the end as a JSON document each.
    """
    show = _Json() if json else _Text()
    with open_game(game, arguments, train_data or []) as chosen:
        game_class = load_game(chosen.env.game)
        if gold and not hasattr(game_class, "gold_action"):
            raise ConfigError(
                f"{game_class.__name__} has no gold_action",
                hint="write one, or play without --gold",
            )
        max_turns = chosen.job.rollout.max_turns if chosen.job else None
        with (
            contextlib.closing(HostData(chosen.env, chosen.seed)) as data,
            contextlib.closing(LocalGame(chosen.env, game_class, data)) as local_game,
        ):
            episode = local_game.start(seed, row=row)
            if not episode.roles:
                show.prompt(episode.messages)
            actions = (
                _gold_actions(episode, echo=not json) if gold else _typed_actions(echo=not json)
            )
            num_turns: Counter[str] = Counter()
            played: list[tuple[str, StepResult]] = []
            while not episode.done:
                role, messages = episode.turn() if episode.roles else ("", [])
                show.role(role, messages)
                action = None if num_turns[role] == max_turns else next(actions, None)
                if action is None:
                    break
                num_turns[role] += 1
                result = episode.step(action)
                show.turn(action, result)
                played.append((role, result))
            show.end(episode, dict.fromkeys(episode.roles or ("",), 0.0) | returns(played))
    return 0 if episode.done else NOT_ENDED


def _gold_actions(episode: LocalEpisode, *, echo: bool) -> Iterator[str]:
    while True:
        action = episode.gold_action()
        if echo:
            output.print_plain(f"> {action}")
        yield action


def _typed_actions(*, echo: bool) -> Iterator[str]:
    """Yield actions from the keyboard, or from a pipe, which are also printed."""
    is_terminal = sys.stdin.isatty()
    lines: list[str] = []
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            return
        lines.append(line.removesuffix(_CONTINUES))
        if line.endswith(_CONTINUES):
            continue
        action, lines = "\n".join(lines), []
        if echo and not is_terminal:
            output.print_plain(f"> {action}")
        yield action


class _Text:
    """Prints an episode as text."""

    def prompt(self, messages: list[ChatMessage]) -> None:
        for message in messages:
            output.print_plain(f"[{message['role']}]\n{plain_text(message['content'])}")

    def role(self, role: str, messages: list[ChatMessage]) -> None:
        if role:
            output.print_plain(f"[it is {role}'s turn]")
            self.prompt(messages)

    def turn(self, action: str, result: StepResult) -> None:
        del action  # already shown
        others = "".join(f", {role} gets {reward:g}" for role, reward in result.rewards.items())
        info = f"  {result.info}" if result.info else ""
        if result.observation:
            output.print_plain(result.observation)
        output.print_plain(
            f"[reward {result.reward:g}{others}{', the game is over' if result.done else ''}]{info}"
        )

    def end(self, episode: LocalEpisode, returns: dict[str, float]) -> None:
        turns = len(episode.results)
        totals = ", ".join(f"{role} {total:g}".strip() for role, total in returns.items())
        ended = "" if episode.done else ", not over"
        output.print_plain(f"return {totals} after {turns} turn{'s' * (turns != 1)}{ended}")


class _Json:
    """Prints an episode as JSON."""

    def prompt(self, messages: list[ChatMessage]) -> None:
        output.print_json_line({"messages": messages})

    def role(self, role: str, messages: list[ChatMessage]) -> None:
        if role:
            output.print_json_line({"role": role, "messages": messages})

    def turn(self, action: str, result: StepResult) -> None:
        output.print_json_line({"action": action, **vars(result)})

    def end(self, episode: LocalEpisode, returns: dict[str, float]) -> None:
        turns = len(episode.results)
        by_role = {"returns": returns} if "" not in returns else {"return": returns[""]}
        output.print_json_line({**by_role, "turns": turns, "done": episode.done})


# `tinkermq algorithm check`: custom functions on small random tensors.


def check_algorithm(
    function: str,
    /,
    *,
    kind: Literal["loss", "advantage", "correction", "mask", "filter", "curriculum"] = "loss",
    json: bool = False,
) -> int:
    """Check a custom function of the learner, without a model or a pool.

    Checks for one finite value per token, the same twice. A loss must have a finite gradient, make
    tokens with positive advantages likelier, and depend only on a token's own sequence.

    Parameters
    ----------
    function
        `module:function`, also from the working folder, or a registered name.
    kind
        Kind of the function.
    json
        Print JSON.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "`algorithm check` needs torch, which is not installed here",
            hint="pip install 'tinkermq[worker]'",
        )
    module = "tinkermq.actors.learner.custom_check"
    results = run_process("function", module, kind, function, error=ConfigError)
    return print_checks(list(results), as_json=json)
