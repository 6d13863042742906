"""What `train --dry-run` checks without starting anything: model, game, data, slots."""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ....broker.client.connection import Broker
from ....envs.check import check_game
from ....envs.data.pair_data import check_row, open_rows
from ....schemas.config.job import JobConfig
from ....schemas.wire.errors import (
    BrokerError,
    DataError,
    GameError,
    PlacementError,
    TinkermqError,
)
from ...home import find_url
from ...pool import Pool
from ...validation.files import look_at_model
from ...validation.paths import is_local_pool
from ..agents.private_broker import with_private_broker
from ..output import note, print_json, say, say_plain
from ..session import with_pool

if TYPE_CHECKING:
    from ....envs.agents.trial.report import TrialReport


def dry_run(
    config: JobConfig, nats_url: str | None, *, as_json: bool, from_run: str | None = None
) -> int:
    """Check everything, print what is set and what was found, and raise the first problem."""
    begins = f"that of run {from_run}: looked up when the job is submitted"
    checks: list[tuple[str, Callable[[], str]]] = [
        ("model", lambda: begins if from_run else check_model(config, nats_url)),
        *([("data", lambda: check_rows(config))] if config.sft.data else []),
        *_check_of_episodes(config),
        ("slots", lambda: check_slots(config, nats_url)),
    ]
    if not as_json:
        import yaml

        given = config.model_dump(mode="json", exclude_unset=True)
        say_plain(yaml.safe_dump(given, sort_keys=False))
        note("all other keys have their defaults: `tinkermq config show FILE` prints them too")
    results: list[dict[str, object]] = []
    problems: list[TinkermqError] = []
    for name, check in checks:
        try:
            results.append({"check": name, "ok": True, "detail": check()})
        except TinkermqError as error:
            problems.append(error)
            results.append({"check": name, "ok": False, "detail": error.message})
    if as_json:
        print_json({"config": config.model_dump(mode="json"), "checks": results})
    else:
        for result in results:
            mark = "[green]ok[/]  " if result["ok"] else "[red]fail[/]"
            say(f"{mark} {result['check']:<6} {result['detail']}")
    if problems:
        raise problems[0]
    if not as_json:
        note("nothing was submitted")
    return 0


def _check_of_episodes(config: JobConfig) -> list[tuple[str, Callable[[], str]]]:
    if config.agent.runs_programs:
        return [("agent", lambda: check_agent(config))]
    return [("game", lambda: check_env(config))] if config.env.game else []


def check_model(config: JobConfig, nats_url: str | None) -> str:
    """Look at a local model folder without loading it; one of the pool's or the hub's is named.

    Raises ModelError for a folder that is not a model.
    """
    has_tokenizer = config.model.tokenizer is not None
    return look_at_model(config.model.path, here=_is_here(nats_url), has_tokenizer=has_tokenizer)


def _is_here(nats_url: str | None) -> bool:
    """Whether the job would run on this machine, whose folders are seen."""
    try:
        return is_local_pool(find_url(nats_url))
    except BrokerError:  # no stack is up
        return True


def check_env(config: JobConfig) -> str:
    """Play the game without a model; raises GameError or DataError with the first failure."""
    if config.env.hosts == 0:
        return f"{config.env.game} is hosted by the client: not checked"
    results = check_game(config.env, seed=config.seed)
    for result in results:
        if not result.ok:
            kind = DataError if result.name == "the data can be read" else GameError
            raise kind(f"{result.name}? no: {result.detail}", hint=result.hint)
    return f"{config.env.game}: {len(results)} checks passed"


def check_agent(config: JobConfig) -> str:
    """Run an agent job's program once against a scripted model, behind the walls of a pool's host.

    Raises ConfigError or SandboxError where it cannot be run, GameError where it cannot be trained.
    """
    if config.agent.client or config.env.hosts == 0:
        return "its programs are run by clients: not checked"
    from ....envs.agents.trial.check import check_program  # needs an HTTP server

    async def work(broker: Broker) -> "TrialReport":
        return await check_program(broker, config, seed=config.seed, tries_context=False)

    report = with_private_broker(work)
    for finding in report.findings:
        if finding.level == "fail":
            raise GameError(f"agent.command: {finding.text}", hint=finding.remedy)
    assert report.reward is not None
    return (
        f"{config.agent.command[0]}: run once against a scripted model, {len(report.calls)} calls, "
        f"{report.rows} rows, {report.outcome}, reward {report.reward:g}"
    )


def check_rows(config: JobConfig) -> str:
    """Read every row of an SFT job's data; DataError for the first that cannot be learnt from."""
    counts: list[int] = []
    for files in filter(None, (config.sft.data, config.sft.val_data)):
        with contextlib.closing(open_rows(config.sft, files)) as data:
            for number in range(len(data)):
                check_row(data.row(number))
            counts.append(len(data))
    what = "pairs" if config.sft.has_pairs else "conversations"
    return f"{counts[0]} {what}" + "".join(f", {count} held out" for count in counts[1:])


def needed_slots(config: JobConfig) -> int:
    """Return the slots that the job's learner and generators take."""
    return config.learner.slots + config.generator.count * config.generator_slots


def check_slots(config: JobConfig, nats_url: str | None) -> str:
    """Compare what the job needs with what the pool has.

    Raises PlacementError when it can never fit.
    """
    needed = needed_slots(config)
    try:
        url = find_url(nats_url)
    except BrokerError:
        return f"{needed} needed; no stack is up, so not compared"

    async def work(pool: Pool) -> int:
        return sum(node.slots for node in await pool.nodes())

    there = with_pool(url, work)
    if needed > there:
        raise PlacementError(
            f"the job needs {needed} slots, the pool has {there}",
            hint="lower generator.count, or start the stack with more: `tinkermq up --slots N`",
        )
    return f"{needed} of {there}"
