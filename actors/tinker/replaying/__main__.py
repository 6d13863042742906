"""Do a session again: `python -m tinkermq.actors.tinker.replaying --job JOB --session SESSION`.

The operations of its models are applied once more from the first one on, by a trainer of this
process's own; results, states and checkpoints are compared with those that are stored, to the bit.
Nothing of the service is changed, which may run meanwhile.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from ....broker.client.connection import connect
from ....broker.jobs import JobStore
from ....schemas.config.load_config import parse_config
from ....schemas.job import JobRecord
from ....schemas.tinker.names import ModelName
from ....schemas.wire.errors import NotFoundError, TinkermqError
from ...runtime import service_parser
from ...storage.tinker_checkpoints import TINKER_FOLDER
from ..service import base_info, open_trainer
from .archive import place_of, read_kept
from .replayer import ModelReplay, Replayer

IDENTICAL, DIFFERENT, FAILED = 0, 1, 2


def replay_session(
    record: JobRecord, session: str, progress: Callable[[str, int, int], None] | None = None
) -> list[ModelReplay]:
    """Do the models of a session again, in the order of their numbers.

    `session` may also be the id of one model. Raises NotFoundError.
    """
    config = parse_config(record.config)
    stored = Path(record.run_dir) / TINKER_FOLDER
    models = _models_of(stored, session)
    torch.set_num_threads(config.learner.threads)
    adapters = open_trainer(config)
    found: list[ModelReplay] = []
    with tempfile.TemporaryDirectory(prefix="tinkermq-replay-") as made:
        replayer = Replayer(adapters, base_info(config), made=Path(made), stored=stored)
        for user, name in models:
            kept = read_kept(place_of(stored, user, name))
            show = None if progress is None else partial(progress, str(name))
            found.append(replayer.replay(user, name, kept, show))
    return found


def _models_of(stored: Path, session: str) -> list[tuple[str, ModelName]]:
    """Return the models of a session of which operations were kept, or the one that is named."""
    named = ModelName.parse(session) if ":" in session else None
    pattern = f"*/{named.session if named else session}.train.*"
    found = [
        (place.parent.name, ModelName.parse(place.name.replace(".train.", ":train:")))
        for place in sorted(stored.glob(pattern))
    ]
    found = [
        (user, name)
        for user, name in sorted(found, key=lambda one: one[1].number)
        if named in (None, name) and place_of(stored, user, name).is_dir()
    ]
    if not found:
        raise NotFoundError(
            f"no operations of {session!r} were kept",
            hint="see the sessions on the dashboard; tinker.history_mb says how much is kept",
        )
    return found


async def _record(arguments: argparse.Namespace) -> JobRecord:
    broker = await connect(arguments.nats, name="replay", deadline_s=10)
    try:
        return await JobStore(broker).get(arguments.user, arguments.job)
    finally:
        await broker.close()


def _run(arguments: argparse.Namespace, console: Console) -> int:
    record = asyncio.run(_record(arguments))
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task(f"replaying {arguments.session}", total=None)

        def show(name: str, done: int, total: int) -> None:
            bars.update(bar, description=f"replaying {name}", completed=done, total=total)

        found = replay_session(record, arguments.session, show)
    if arguments.json:
        told = [{**asdict(one), "identical": one.identical} for one in found]
        sys.stdout.write(json.dumps(told) + "\n")
    for one in found:
        console.print(_told(one), style=None if one.identical else "red", markup=False)
    return IDENTICAL if all(one.identical for one in found) else DIFFERENT


def _told(one: ModelReplay) -> str:
    if one.identical:
        return (
            f"{one.model}: {one.operations} operations done again; every result is the same, and "
            f"every bit of {', '.join(one.compared) or 'no checkpoint, as there is none'}"
        )
    return (
        f"{one.model}: {one.operations} operations done again; {len(one.differing)} things differ, "
        f"first {one.differing[0]}"
    )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and replay; exit code 0 only if every bit is the same."""
    parser = service_parser("tinker.replaying")
    parser.add_argument("--user", default="local", help="owner of the job (default: local)")
    parser.add_argument("--job", required=True, help="job id")
    parser.add_argument("--session", required=True, help="id of a session, or of a model")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    console = Console(stderr=True)
    try:
        return _run(parser.parse_args(argv), console)
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
