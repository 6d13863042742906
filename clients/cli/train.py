"""`tinkermq train`, `sft`, `watch` and `notify`: submit a run, and follow a run until it ends."""

import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from getpass import getpass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...broker.calls import new_request_id
from ...schemas.config.job import JobConfig
from ...schemas.config.load_config import load_config
from ...schemas.job import FINAL_STATES, NOTIFY_URL, JobRecord
from ...schemas.wire.errors import ConfigError
from ..follow import RunProgress, follow_run
from ..home import find_url
from ..pool import Pool, secrets_for, with_tracker_settings
from ..validation import full_checkpoint_name, resolve_paths
from .dry_run import check_first
from .dry_run import dry_run as only_check
from .live import open_display, print_submitted
from .output import print_json_line, print_note, print_plain, print_result, print_text
from .session import COMMON, Common, with_pool

FAILED, INTERRUPTED = 1, 130


From = Annotated[str | None, Parameter(name="--from")]


def train(
    config: Path,
    /,
    *overrides: str,
    from_: From = None,
    dry_run: bool = False,
    detach: Annotated[bool, Parameter(alias="-d")] = False,
    priority: int = 0,
    common: Common = COMMON,
) -> int:
    """Submit a training run and watch it. Ctrl-C detaches; the run continues.

    Parameters
    ----------
    config
        YAML file; the repository's examples/ has one for each game.
    overrides
        `section.key=value`, such as `learner.lr=1e-5 training.num_steps=20`.
    from_
        `RUN@STEP`, or `RUN` for its newest checkpoint: start from its weights instead of
        `model.path`. (`fork` continues the whole run.)
    dry_run
        Check configuration, model, game, data and slots, here and in the pool, without submitting.
    detach
        Do not watch the run.
    priority
        From -10 to 10; runs with a higher priority are placed first.
    """
    effective = _load(config, overrides, from_)
    return _submit(effective, from_, dry_run, detach=detach, priority=priority, common=common)


def sft(
    config: Path,
    /,
    *overrides: str,
    from_: From = None,
    dry_run: bool = False,
    detach: Annotated[bool, Parameter(alias="-d")] = False,
    priority: int = 0,
    common: Common = COMMON,
) -> int:
    """Submit a supervised fine-tuning run and watch it.

    Parameters
    ----------
    config
        YAML file; examples/sft.yaml is one.
    overrides
        `section.key=value`, such as `learner.lr=1e-5 training.num_epochs=2`.
    from_
        `RUN@STEP`, or `RUN` for its newest checkpoint: start from its weights instead of
        `model.path`.
    dry_run
        Check configuration, model, data and slots, here and in the pool, without submitting.
    detach
        Do not watch the run.
    priority
        From -10 to 10; runs with a higher priority are placed first.
    """
    effective = _load(config, overrides, from_)
    if not effective.sft.data:
        raise ConfigError(
            f"{config} names no conversations to learn from",
            hint="set sft.data to parquet or JSONL files with the column messages",
        )
    return _submit(effective, from_, dry_run, detach=detach, priority=priority, common=common)


def _load(config: Path, overrides: Sequence[str], from_run: str | None) -> JobConfig:
    """Read the configuration; with `from_`, that run is the model."""
    model = [] if from_run is None else [f"model.path={from_run}"]
    return load_config(config, [*overrides, *model])


def _submit(
    effective: JobConfig,
    from_run: str | None,
    dry_run: bool,
    *,
    detach: bool,
    priority: int,
    common: Common,
) -> int:
    """Submit a run and watch it, or only check it."""
    if dry_run:
        return only_check(effective, common.nats_url, as_json=common.json, from_run=from_run)
    url = find_url(common.nats_url)
    check_first(effective, url, from_run, quiet=common.json)
    request_id = new_request_id()

    watched: list[str] = []

    async def work(pool: Pool) -> int:
        # Only keys that were set are sent; the scheduler adds the defaults and stores the result.
        values = with_tracker_settings(effective.model_dump(exclude_unset=True))
        values = resolve_paths(values, pool.broker.url, has_users=pool.has_users)
        record = await pool.submit(
            values,
            fork_of=from_run and full_checkpoint_name(from_run),
            weights_only=from_run is not None,
            request_id=request_id,
            priority=priority,
            secrets=secrets_for(values),
        )
        watched.append(record.name)
        if common.json:
            print_json_line({"job": record.model_dump(exclude={"config"})})
        else:
            print_submitted(record)
        return 0 if detach else await _follow(pool, record, as_json=common.json)

    return _detachable(url, work, watched, as_json=common.json)


def watch(run: str, /, *, common: Common = COMMON) -> int:
    """Watch a run until it ends. Ctrl-C detaches; the run continues.

    Parameters
    ----------
    run
        Name or job id.
    """

    async def work(pool: Pool) -> int:
        return await _follow(pool, await pool.find(run), as_json=common.json)

    return _detachable(find_url(common.nats_url), work, [run], as_json=common.json)


def _detachable(
    url: str, work: Callable[[Pool], Awaitable[int]], watched: Sequence[str], *, as_json: bool
) -> int:
    """Run `work`; Ctrl-C detaches. `watched` holds the run's name once it is known."""
    try:
        return with_pool(url, work)
    except KeyboardInterrupt:
        if not as_json and watched:
            print_note(f"detached; the run continues (see `tinkermq watch {watched[0]}`)")
        elif not as_json:
            print_note(
                "interrupted before the run was accepted (`tinkermq ps` shows whether it was)"
            )
        return INTERRUPTED


async def show_run(pool: Pool, record: JobRecord, *, as_json: bool = False) -> RunProgress:
    """Display a run until it ends; return its final record."""
    progress = RunProgress(record)
    with open_display(progress, as_json=as_json) as display:
        updates = follow_run(pool, record, with_actors=display.needs_actors)
        async with aclosing(updates):
            async for update in updates:
                display.show(update)
    return progress


async def _follow(pool: Pool, record: JobRecord, *, as_json: bool) -> int:
    """Display a run until it ends; return the exit code for its final state."""
    progress = await show_run(pool, record, as_json=as_json)
    if not as_json:
        _print_end(progress)
    return FAILED if progress.record.state == "FAILED" else 0


def _print_end(progress: RunProgress) -> None:
    """Print how a run ended, and possible next commands."""
    record = progress.record
    if progress.validation:
        steps = sorted(progress.validation)
        shown = dict.fromkeys((steps[0], steps[-1]))
        scores = ", ".join(f"{progress.validation[step]:.3f} at step {step}" for step in shown)
        print_text(f"validation {scores}")
    print_plain(f"run folder  {record.run_dir}")
    if record.state == "FAILED":
        print_text(f"  tinkermq logs {record.name}      what its actors wrote")
        print_text(f"  tinkermq resume {record.name}    go on from the last checkpoint, if any")
    elif record.kind == "sft":
        print_text(
            f"  tinkermq train CONFIG --from {record.name}    go on with a game, from its weights"
        )
    else:
        print_text(f"  tinkermq rollouts {record.name} --sort reward")


# `tinkermq notify`: a notification at the end of a run.


def notify(run: str, /, *, common: Common = COMMON) -> int:
    """Get a notification when a run finishes or fails.

    The pool sends it, so this machine need not stay on. Its target is an Apprise URL, read from
    $TINKERMQ_NOTIFY_URL or standard input. The URL is a secret, so there is no option for it.

    Parameters
    ----------
    run
        Name or job id.
    """
    url = os.environ.get(NOTIFY_URL) or _read_url()

    async def work(pool: Pool) -> JobRecord:
        record = await pool.find(run)
        if record.state in FINAL_STATES:
            raise ConfigError(
                f"run {record.name} is {record.state}: it has ended already",
                hint=f"its end: `tinkermq ps --all`; continue it: `tinkermq resume {record.name}`",
            )
        return await pool.hand_over(record.job, {NOTIFY_URL: url})

    record = with_pool(common.nats_url, work)
    text = f"the pool will send a notification when {record.name} ends"
    return print_result(record.model_dump(), text, as_json=common.json)


def _read_url() -> str:
    url = getpass("URL: ") if sys.stdin.isatty() else sys.stdin.readline()
    if "://" not in url:
        raise ConfigError(
            "there is no URL to send notifications to",
            hint=f"export {NOTIFY_URL}=ntfys://ntfy.sh/my-topic, or another URL of Apprise's",
        )
    return url.strip()
