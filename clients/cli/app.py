"""The commands of the command line; each module is imported when its command is used."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from cyclopts import App, CycloptsError, Parameter

from .examples import epilogue


class _Command(NamedTuple):
    name: str
    place: str
    help: str
    """Shown in the list of commands, which imports none of them."""


_GROUPS: dict[str, list[_Command]] = {
    "Stack": [
        _Command(
            "quickstart",
            "quickstart.quickstart:quickstart",
            "Train a tiny model on this machine and watch its reward rise.",
        ),
        _Command(
            "up", "pool.stack:up", "Start broker, scheduler, node and dashboard on this machine."
        ),
        _Command("down", "pool.stack:down", "Stop what `up` started."),
        _Command("pool", "pool.machines:pool", "Show the pool's nodes, and machines on their way."),
        _Command("init", "pool.init:init", "Make a pool with authentication, and its first admin."),
        _Command("doctor", "pool.doctor:doctor", "Check this machine and the broker."),
        _Command("backup", "pool.backup:backup", "Write what the broker stores into a folder."),
        _Command("restore", "pool.backup:restore", "Bring a back-up to a new server."),
        _Command(
            "deploy check", "pool.deploy:check", "Check a machine that systemd runs the pool on."
        ),
        _Command("version", "version:version", "Print versions."),
    ],
    "Runs": [
        _Command("train", "runs.train:train", "Submit a training job and watch it."),
        _Command("sft", "runs.train:sft", "Submit a job that learns from conversations."),
        _Command("sweep", "runs.sweep:sweep", "Train a run for each combination of values."),
        _Command("ps", "runs.runs:ps", "List runs."),
        _Command("watch", "runs.train:watch", "Watch a run live."),
        _Command("attach", "runs.train:watch", "Watch a run live: another name of `watch`."),
        _Command(
            "notify", "runs.notify:notify", "Be told when a run finishes, fails or stagnates."
        ),
        _Command("stop", "runs.runs:stop", "Stop a run, with a checkpoint."),
        _Command("checkpoint", "runs.runs:checkpoint", "Have a run write a checkpoint now."),
        _Command("pause", "runs.runs:pause", "Let a run stand still."),
        _Command(
            "resume",
            "runs.runs:resume",
            "Let a run go on: after a pause, or from its last checkpoint.",
        ),
        _Command("archive", "runs.removing:archive", "Put a run that has ended into its folder."),
        _Command("delete", "runs.removing:delete", "Delete runs that have ended."),
        _Command("fork", "runs.runs:fork", "Start a new run from a checkpoint of another."),
        _Command("scale", "runs.runs:scale", "Change the number of generators or environments."),
        _Command("priority", "runs.queue:priority", "Change the priority of a run that waits."),
        _Command("label", "runs.labels:label", "Tag a run, group it, write notes on it."),
        _Command("cost", "runs.queue:cost", "Show the slot-hours that runs have used."),
    ],
    "Inference": [
        _Command("serve", "models.infer:serve", "Serve a model: a folder, a run, or RUN@STEP."),
        _Command("infer", "models.infer:infer", "Play a game with a model and tell how it did."),
    ],
    "Programs of others": [
        _Command(
            "tinker up", "tinker.up:up", "Let programs that speak the Tinker API train adapters."
        ),
    ],
    "Looking into a run": [
        _Command("logs", "runs.logs:logs", "Print what the actors of a run wrote."),
        _Command("rollouts", "runs.rollouts:rollouts", "Read a run's rollouts."),
        _Command(
            "profile", "runs.profile:profile", "Show where a run's time goes, and what to change."
        ),
        _Command("eval", "runs.evals:evaluate", "Evaluate a version of a run, or a checkpoint."),
        _Command("replay", "runs.evals:replay", "Train a finished run again from its log."),
        _Command(
            "decode", "models.decode:decode", "Print one msgpack payload from a pipe as text."
        ),
    ],
    "Users": [
        _Command("user add", "pool.users:add", "Make a user; shows the key once."),
        _Command("user list", "pool.users:list_users", "List the users."),
        _Command("user rotate", "pool.users:rotate", "Replace a user's key by a new one."),
        _Command("user revoke", "pool.users:revoke", "Shut a user out, and close his connections."),
        _Command("user quota", "pool.users:quota", "Change a user's share of the pool."),
        _Command("user invite", "pool.users:invite", "Let people register themselves."),
        _Command("user audit", "pool.users:audit", "Print what was done to users, and refused."),
        _Command("register", "pool.users:register", "Become a user by an invitation."),
    ],
    "Single actors, for debugging": [
        _Command("auth", "pool.actor:auth", "Run the auth service of a pool in the foreground."),
        _Command("scheduler", "pool.actor:scheduler", "Run a scheduler in the foreground."),
        _Command("node", "pool.actor:node", "Run a node in the foreground: it joins the pool."),
        _Command("gateway", "pool.actor:gateway", "Serve the dashboard and the REST interface."),
        _Command("learner", "pool.actor:learner", "Run the learner of a job."),
        _Command("generator", "pool.actor:generator", "Run one more generator of a job."),
        _Command("evaluator", "pool.actor:evaluator", "Run an evaluator of a job."),
        _Command("server", "pool.actor:server", "Run one more inference server of a job."),
        _Command("environment", "pool.actor:environment", "Run an environment host of a job."),
    ],
    "Writing one": [
        _Command("config show", "runs.config:show", "Print the effective configuration."),
        _Command("config schema", "runs.config:schema", "Print every key, or the JSON Schema."),
        _Command(
            "data prepare",
            "games.data:prepare",
            "Make data of a published set: gsm8k, math, geo3k.",
        ),
        _Command(
            "algorithm check",
            "runs.algorithms:check",
            "Check an advantage, loss or correction of your own.",
        ),
        _Command("agent new", "agents.new_agent:new", "Make a folder with an agent of your own."),
        _Command(
            "agent check", "agents.check:check", "Run a program once against a scripted model."
        ),
        _Command("agent play", "agents.play:play", "Be the model of an agent program yourself."),
        _Command("agent host", "agents.host:host", "Host a run's programs in this process."),
        _Command("env list", "games.envs:list_games", "List the games."),
        _Command("env check", "games.envs:check", "Prove that a game is sound, without a model."),
        _Command("env new", "games.new_game:new", "Make a package with a game of your own."),
        _Command("env play", "games.play:play", "Play a game yourself: you are the policy."),
        _Command(
            "env eval", "games.env_eval:evaluate", "Play a game with a model and tell how it did."
        ),
        _Command("env serve", "games.envs:serve", "Host a run's game in this process."),
    ],
}
_ALSO = {"version": ("version", "--version")}
_FAMILIES = {
    "algorithm": ("Writing one", "Write advantages, losses and corrections of your own."),
    "agent": ("Writing one", "Make, check, play and host agent programs."),
    "config": ("Writing one", "Look at the configuration of a job."),
    "data": ("Writing one", "Prepare data."),
    "tinker": ("Programs of others", "Serve programs that speak the Tinker API."),
    "deploy": ("Stack", "Look after a machine that systemd runs the pool on."),
    "env": ("Writing one", "Make, check, play, evaluate and serve games."),
    "user": ("Users", "Manage the users of a pool with authentication."),
}


def build_app() -> App:
    """Return the command line with all its commands."""
    app = App(
        name="tinkermq",
        help="Agentic reinforcement learning over NATS. Every command takes `--help`, and "
        "`--debug` to show the traceback of an error.",
        version_flags=[],  # `version` has this name, too
        default_parameter=Parameter(negative=()),
        # A wrong command line ends with 2, not with the parser's own exit.
        exit_on_error=False,
        suppress_keyboard_interrupt=False,
        result_action="return_value",
    )
    cast("Any", app).register_install_completion_command(
        group="Stack", help="Install shell completion."
    )
    families = {
        name: App(name=name, help=text, group=group) for name, (group, text) in _FAMILIES.items()
    }
    for family in families.values():
        app.command(family)
    for group, commands in _GROUPS.items():
        for command in commands:
            family, _, name = command.name.rpartition(" ")
            place = f"{__package__}.{command.place}"
            told = {"help": command.help, "help_epilogue": epilogue(command.name)}
            if family:
                families[family].command(place, name=name, **told)
            else:
                app.command(place, name=_ALSO.get(name, name), group=group, **told)
    return app


def find_command(tokens: Sequence[str]) -> Callable[[], int] | None:
    """Parse one command line, importing its command; return what runs it, which returns its code.

    None where it cannot be parsed: what is wrong was printed.
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
