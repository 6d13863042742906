"""The checks of `train --dry-run`, here and in the pool."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...broker.client.connection import Broker
from ...envs.check import CheckResult, check_game
from ...envs.data import ChatData
from ...schemas.config.job import JobConfig
from ...schemas.job import SubmissionFinding
from ...schemas.node import GameCheckReply
from ...schemas.plan.settings import refuse_long_contexts
from ...schemas.wire import errors
from ..home import find_url
from ..pool import Pool
from ..validation import (
    check_model_folder,
    full_checkpoint_name,
    is_local_pool,
    resolve_paths,
)
from .games import can_check_model, check_job_here
from .output import literal, print_json, print_note, print_plain, print_text
from .session import with_pool, with_private_broker

if TYPE_CHECKING:
    from ...envs.agents.agent_check import AgentReport


_ERRORS: dict[str, type[errors.TinkermqError]] = {
    "job": errors.ConfigError,
    "model": errors.ModelError,
    "data": errors.DataError,
    "game": errors.GameError,
    "slots": errors.PlacementError,
    "memory": errors.PlacementError,
}


_KINDS: dict[str, type[errors.TinkermqError]] = {
    "the data can be read": errors.DataError,
    "each row can be read": errors.DataError,
    "the reward function answers": errors.ConfigError,
    "the judge's prompt demands a score": errors.ConfigError,
}
"""What is wrong with a job where the game is not."""


@dataclass(frozen=True)
class _Result:
    """The result of checking one requirement of a job."""

    what: str
    detail: str
    by: str
    error: errors.TinkermqError | None = None
    """Why the job would be refused."""
    overruled: bool = False
    """The pool has what this machine lacks, and the job would run there."""


def dry_run(
    config: JobConfig, nats_url: str | None, *, as_json: bool, from_run: str | None = None
) -> int:
    """Check a job, print its configuration and the results, and raise the first problem.

    This machine checks what it can reach. If a pool answers, its scheduler checks slots, names and
    quotas, and its nodes check models, data and games.
    """
    if not as_json:
        from ...schemas.config.load_config import write_yaml

        given = config.model_dump(mode="json", exclude_unset=True)
        print_plain(write_yaml(given))
        print_note(
            "all other keys have their defaults: `tinkermq config show FILE` prints them too"
        )
    here = [_run_check(*check) for check in _checks_here(config, nats_url, from_run)]
    if from_run is None:
        here += _check_inside_model(config, here)
    pool_results = _ask_pool(config, nats_url, from_run)
    if (
        from_run is None
        and not can_check_model(config)
        and all(result.error is None for result in pool_results)
    ):
        pool_results += _ask_node(config, nats_url)
    if not _is_here(nats_url):
        checked = {
            result.what
            for result in pool_results
            if result.error is None and result.by.startswith("node ")
        }
        here = [replace(result, overruled=result.what in checked) for result in here]
    results = [*here, *pool_results]
    _print(results, config, as_json=as_json)
    for result in results:
        if result.error is not None and not result.overruled:
            raise result.error
    if not as_json:
        print_note("nothing was submitted")
    return 0


def _checks_here(
    config: JobConfig, nats_url: str | None, from_run: str | None
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the checks that this machine can run."""
    if from_run is None:
        yield "model", lambda: check_model(config, nats_url)
    if config.sft.data:
        yield "data", lambda: check_rows(config)
    yield from _check_of_episodes(config)


def _run_check(what: str, check: Callable[[], str]) -> _Result:
    try:
        return _Result(what, check(), "this machine")
    except errors.TinkermqError as error:
        return _Result(what, error.message, "this machine", error)


def _check_inside_model(config: JobConfig, here: Sequence[_Result]) -> list[_Result]:
    """Check model, chat template, adapter, rows and saving with the run's own code.

    Returns nothing if this machine lacks the model, or if an earlier check failed.
    """
    sound = {result.what for result in here if result.error is None}
    if any(result.error is not None and result.what in ("model", "data") for result in here):
        return []
    if not can_check_model(config):
        return []
    plays = "game" in sound and config.env.hosts > 0
    try:
        results = check_job_here(config, plays=plays)
    except errors.TinkermqError as error:
        return [_Result("model", error.message, "this machine", error)]
    return _model_results(results, "this machine")


def _model_results(results: Sequence[CheckResult], by: str) -> list[_Result]:
    """Return the failed checks of a model, or one result that all passed."""
    wrong = [
        _Result("model", f"{result.name}? no: {result.detail}", by, _refusal(result))
        for result in results
        if not result.ok
    ]
    passed = f"{len(results)} checks with the code of the run passed"
    return wrong or [_Result("model", passed, by)]


def _refusal(result: CheckResult) -> errors.TinkermqError:
    return errors.ModelError(f"{result.name}? no: {result.detail}", hint=result.hint)


def _ask_pool(config: JobConfig, nats_url: str | None, from_run: str | None) -> list[_Result]:
    """Return the results of scheduler and nodes; without a running stack, only the needed slots."""
    try:
        url = find_url(nats_url)
    except errors.BrokerError:
        needed = f"{needed_slots(config)} needed; no stack is up, so not compared"
        begins = f"that of run {from_run}: looked up when the job is submitted"
        model = [] if from_run is None else [_Result("model", begins, "this machine")]
        return [*model, _Result("slots", needed, "this machine")]

    async def work(pool: Pool) -> list[SubmissionFinding]:
        given = config.model_dump(exclude_unset=True)
        return await pool.try_out(
            resolve_paths(given, url, has_users=pool.has_users),
            fork_of=from_run and full_checkpoint_name(from_run),
            weights_only=from_run is not None,
        )

    try:
        return [_make_result(finding) for finding in with_pool(url, work)]
    except errors.BrokerError as error:
        return [_Result("pool", error.message, "this machine", error)]


def _ask_node(config: JobConfig, nats_url: str | None) -> list[_Result]:
    """Return the results of a node that checks the model if this machine cannot."""
    try:
        url = find_url(nats_url)
    except errors.BrokerError:
        return []

    async def work(pool: Pool) -> GameCheckReply:
        print_note("a node checks the model: two minutes at most")
        given = config.model_dump(exclude_unset=True)
        return await pool.check_game(
            resolve_paths(given, url, has_users=pool.has_users), look="model"
        )

    try:
        reply = with_pool(url, work)
    except errors.TinkermqError as error:
        return [_Result("model", error.message, "the pool", error)]
    by = f"node {reply.node}"
    checks = [CheckResult(**check.model_dump()) for check in reply.checks]
    return _model_results(checks, by) if reply.node else []


def _make_result(finding: SubmissionFinding) -> _Result:
    kind = _ERRORS[finding.what]
    who = f"{finding.by}: " if finding.by.startswith("node ") else ""
    error = None if finding.ok else kind(f"{who}{finding.text}", hint=finding.hint)
    return _Result(finding.what, finding.text, finding.by, error)


def _print(results: Sequence[_Result], config: JobConfig, *, as_json: bool) -> None:
    if as_json:
        checks = [
            {
                "check": result.what,
                "ok": result.error is None or result.overruled,
                "detail": result.detail,
                "by": result.by,
            }
            for result in results
        ]
        print_json({"config": config.model_dump(mode="json"), "checks": checks})
        return
    for result in results:
        mark = "[green]ok[/]  " if result.error is None else "[red]fail[/]"
        mark = "[yellow]lack[/]" if result.overruled and result.error is not None else mark
        print_text(
            f"{mark} {result.what:<6} {literal(result.detail)}  [dim]({literal(result.by)})[/]"
        )


def _check_of_episodes(config: JobConfig) -> list[tuple[str, Callable[[], str]]]:
    if config.agent.runs_programs:
        return [("agent", lambda: check_agent(config))]
    return [("game", lambda: check_env(config))] if config.env.game else []


def check_model(config: JobConfig, nats_url: str | None) -> str:
    """Check a local model folder without loading it; a model elsewhere is only named.

    Raises ModelError for a folder that is not a model, and for sequences longer than it takes.
    """
    has_tokenizer = config.model.tokenizer is not None
    described = check_model_folder(
        config.model.path, here=_is_here(nats_url), has_tokenizer=has_tokenizer
    )
    refuse_long_contexts(config)
    return described


def _is_here(nats_url: str | None) -> bool:
    """Whether the job would run on this machine and see its folders."""
    try:
        return is_local_pool(find_url(nats_url))
    except errors.BrokerError:  # no stack is up
        return True


def check_env(config: JobConfig) -> str:
    """Play the game without a model; raises GameError or DataError with the first failure."""
    if config.env.hosts == 0:
        return f"{config.env.game} is hosted by the client: not checked"
    results = check_game(config.env, seed=config.seed)
    for result in results:
        if not result.ok:
            kind = _KINDS.get(result.name, errors.GameError)
            raise kind(f"{result.name}? no: {result.detail}", hint=result.hint)
    return f"{config.env.game}: {len(results)} checks passed"


def check_agent(config: JobConfig) -> str:
    """Run an agent job's program once against a scripted model, in the sandbox of a pool's host.

    Raises ConfigError or SandboxError where it cannot be run, GameError where it cannot be trained.
    """
    if config.agent.client or config.env.hosts == 0:
        return "its programs are run by clients: not checked"
    from ...envs.agents.agent_check import check_program  # needs an HTTP server

    async def work(broker: Broker) -> "AgentReport":
        return await check_program(broker, config, seed=config.seed)

    report = with_private_broker(work)
    for finding in report.findings:
        if finding.level == "fail":
            raise errors.GameError(f"agent.command: {finding.text}", hint=finding.remedy)
    assert report.reward is not None
    return (
        f"{config.agent.command[0]}: run once against a scripted model, {len(report.calls)} calls, "
        f"{report.rows} rows, {report.outcome}, reward {report.reward:g}"
    )


def check_rows(config: JobConfig) -> str:
    """Read every row of an SFT job's data; DataError for the first invalid one."""
    with contextlib.closing(ChatData(config.sft.data)) as data:
        for number in range(len(data)):
            data.check_row(number)
        return f"{len(data)} conversations"


def needed_slots(config: JobConfig) -> int:
    """Return the slots that the job's learner and generators take."""
    return config.learner.slots + config.generator.count * config.generator_slots
