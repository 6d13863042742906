"""The checks before a submission, on this machine and in the pool; `--dry-run` only shows them."""

import itertools
import math

from ...broker.client.connection import Broker
from ...envs.check import check_game
from ...envs.registry import find_game
from ...schemas.checks import CheckResult, CheckSkipped, failed_check, raise_failed, run_check
from ...schemas.config.job import JobConfig
from ...schemas.plan.settings import refuse_models
from ...schemas.wire import errors
from ..base import quiet_logs
from ..home import find_url
from ..pool import Pool
from ..validation import (
    check_files_exist,
    check_model_folder,
    full_checkpoint_name,
    is_local_pool,
    resolve_paths,
)
from .checks import can_check_model, check_model, check_rows, print_checks
from .output import print_note, print_plain
from .session import with_pool, with_private_broker

_PLAY_S = 10.0
"""Time for which a game is played before a submission; a slow one is played once."""
Results = dict[str, list[CheckResult]]
"""Local results that a node's check of the same name replaces for a pool on other machines."""


def dry_run(
    config: JobConfig, nats_url: str | None, *, as_json: bool, from_run: str | None = None
) -> int:
    """Check a run, print its configuration and the results, and raise the first failure."""
    if not as_json:
        from ...schemas.config.load_config import write_yaml

        print_plain(write_yaml(config.model_dump(mode="json", exclude_unset=True)))
        print_note(
            "all other keys have their defaults: `tinkermq config show FILE` prints them too"
        )
    try:
        url = find_url(nats_url)
    except errors.BrokerError:
        url = None  # no stack is up
    results = check_job(config, url, from_run)
    print_checks(results, as_json=as_json, config=config.model_dump(mode="json"))
    raise_failed(results)
    if not as_json:
        print_note("nothing was submitted")
    return 0


def check_first(
    config: JobConfig, url: str, from_run: str | None = None, *, quiet: bool = False
) -> None:
    """Raise the error of the first check that fails, before the run is submitted."""
    if not quiet:
        print_note("checking model, data and game first, as --dry-run does")
    raise_failed(check_job(config, url, from_run, within_s=_PLAY_S))


def check_job(
    config: JobConfig, url: str | None, from_run: str | None = None, within_s: float = math.inf
) -> list[CheckResult]:
    """Check a run as it would be submitted to the pool at `url`; `within_s` bounds the game's play.

    This machine checks the files that it has. If a pool answers, its scheduler checks slots, names
    and quotas, and its nodes check models, data and games.
    """
    here = _check_here(config, url, from_run, within_s)
    if url is None:
        return [*itertools.chain(*here.values()), *_count_slots(config, from_run)]
    in_pool = _check_in_pool(config, url, from_run)
    if not is_local_pool(url):
        here = _without_overruled(here, in_pool, runs_programs=config.agent.runs_programs)
    return [*itertools.chain(*here.values()), *in_pool]


# -- on this machine -------------------------------------------------------------------------------


def _check_here(
    config: JobConfig, url: str | None, from_run: str | None, within_s: float
) -> Results:
    """Run the checks of files, data, game or program, and of the model if it is here."""
    quiet_logs()
    results: Results = {"model": [], "data": [], "game": []}
    if url is None or is_local_pool(url):
        results["data"].append(run_check("files", lambda: _find_files(config)))
    if from_run is None:
        results["model"].append(run_check("model", lambda: check_model_files(config, url)))
    if config.sft.data:
        results["data"].append(run_check("data", lambda: check_rows(config)))
    if config.agent.runs_programs:
        results["game"] = _check_program(config)
    elif config.env.game:
        results["game"] = _check_env(config, url, within_s)
    is_sound = all(result.ok for result in (*results["model"], *results["data"]))
    if from_run is None and is_sound and can_check_model(config):
        passed = {result.name for result in results["game"] if result.outcome == "ok"}
        plays = "types are right" in passed and all(result.ok for result in results["game"])
        try:
            results["model"] += check_model(config, plays=plays)
        except errors.TinkermqError as error:
            results["model"].append(failed_check("model", error))
    return results


def _find_files(config: JobConfig) -> str:
    """Look for the data files and the folders of programs that a run on this machine reads."""
    check_files_exist(config.model_dump(), "nats://127.0.0.1", has_model=True)
    return "those of data and programs are there"


def check_model_files(config: JobConfig, url: str | None) -> str:
    """Check a local model folder without loading it; a model elsewhere is only named.

    Raises ModelError for a folder that is not a model, or of a kind that cannot be trained.
    """
    has_tokenizer = config.model.tokenizer is not None
    is_here = url is None or is_local_pool(url)
    description = check_model_folder(config.model.path, here=is_here, has_tokenizer=has_tokenizer)
    refuse_models(config)
    return description


def _check_env(config: JobConfig, url: str | None, within_s: float) -> list[CheckResult]:
    """Play the game without a model; if it is not here, the nodes look for it alone."""
    if config.env.hosts == 0:
        reason = f"{config.env.game} is hosted by the client: not checked"
        return [failed_check("game", CheckSkipped(reason))]
    try:
        find_game(str(config.env.game))
    except errors.GameError as error:
        if url is not None:
            return [failed_check("game", CheckSkipped(f"{error.message} here: not played"))]
    return check_game(config.env, seed=config.seed, within_s=within_s)


def _check_program(config: JobConfig) -> list[CheckResult]:
    """Run an agent program once against a scripted model, in the sandbox of a pool's host."""
    if config.agent.client or config.env.hosts == 0:
        return [
            failed_check("program", CheckSkipped("its programs are run by clients: not checked"))
        ]
    from ...envs.agents.agent_check import AgentReport, check_program  # needs an HTTP server

    async def work(broker: Broker) -> AgentReport:
        return await check_program(broker, config, seed=config.seed)

    try:
        report = with_private_broker(work)
    except errors.TinkermqError as error:
        return [failed_check("program", error)]
    summary = (
        f"{config.agent.command[0]}: run once against a scripted model, {len(report.calls)} calls, "
        f"{report.rows} rows, {report.outcome or 'no outcome'}"
    )
    return [CheckResult(name="program", outcome="ok", detail=summary), *report.checks]


# -- in the pool -----------------------------------------------------------------------------------


def _count_slots(config: JobConfig, from_run: str | None) -> list[CheckResult]:
    """Return the checks that need a pool as skipped, since no pool runs."""
    needed = f"{needed_slots(config)} needed; no stack is up, so not compared"
    skipped = [failed_check("slots", CheckSkipped(needed))]
    if from_run is not None:
        begins = f"that of run {from_run}: looked up when the run is submitted"
        skipped.insert(0, failed_check("model", CheckSkipped(begins)))
    return skipped


def needed_slots(config: JobConfig) -> int:
    """Return the number of slots for the run's learner and generators."""
    return config.learner.slots + config.generator.count * config.generator_slots


def _check_in_pool(config: JobConfig, url: str, from_run: str | None) -> list[CheckResult]:
    """Return the results of scheduler and nodes; a node inspects a model that is not here."""
    inspects = from_run is None and not can_check_model(config)

    async def work(pool: Pool) -> list[CheckResult]:
        values = config.model_dump(exclude_unset=True)
        values = resolve_paths(values, url, has_users=pool.has_users)
        results = await pool.try_out(
            values,
            fork_of=from_run and full_checkpoint_name(from_run),
            weights_only=from_run is not None,
        )
        if inspects and all(result.ok for result in results):
            print_note("a node checks the model: two minutes at most")
            results += await pool.inspect_model(values)
        return results

    try:
        return with_pool(url, work)
    except errors.TinkermqError as error:
        return [failed_check("pool", error)]


def _without_overruled(
    here: Results, in_pool: list[CheckResult], *, runs_programs: bool
) -> Results:
    """Skip checks that failed here and passed on a node of a pool on other machines.

    Programs, which only this machine tried, may lack here what the nodes have, such as a sandbox.
    """
    there = {result.name for result in in_pool if result.ok and result.by.startswith("node ")}
    if runs_programs:
        there.add("game")
    skipped = {"outcome": "skipped", "hint": "a node decides"}
    return {
        topic: [
            result if result.ok or topic not in there else result.model_copy(update=skipped)
            for result in results
        ]
        for topic, results in here.items()
    }
