"""Replay a session: `python -m tinkermq.actors.tinker.replay --job JOB --session SESSION`.

The operations of its models are applied again from the first one, by a trainer of this process's
own; results, states and checkpoints are compared with the stored ones, to the bit. The service may
run meanwhile: nothing of it changes.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from ...broker.client.connection import connect
from ...broker.jobs import JobStore
from ...schemas.config.load_config import parse_config
from ...schemas.job import JobRecord
from ...schemas.tinker.names import CheckpointName, ModelName
from ...schemas.tinker.operation import ModelInfo, OperationResult
from ...schemas.wire.errors import NotFoundError, TinkermqError
from ..runtime import service_parser
from ..storage.tinker_checkpoints import TINKER_FOLDER, CheckpointFolders
from .adapter_cache import AdapterStates, SavedState
from .apply import OperationApplier
from .models import TrainedModel
from .operations import ArchivedOperation, RunningOperation, digest_of, place_of, read_archived
from .service import base_info, open_trainer
from .training.folders import read_adapter
from .training.trainer import AdapterTrainer
from .user_records import UserRecords

# -- one model -------------------------------------------------------------------------------------

_NAMED = frozenset({"save_weights", "save_weights_for_sampler"})


@dataclass
class ModelReplay:
    """What became of one model."""

    model: str
    operations: int = 0
    """Operations that were done again."""
    compared: list[str] = field(default_factory=list[str])
    """Checkpoints and states that the adapter was compared with."""
    differing: list[str] = field(default_factory=list[str])
    """What was not the same, in words; empty if every bit was."""

    @property
    def identical(self) -> bool:
        """Whether every bit is the same."""
        return not self.differing


class ReplayStates(AdapterStates):
    """Checkpoints as the operations find them: those that were made again, then those stored."""

    def __init__(self, made: Path, stored: Path) -> None:
        """Look below `made` first."""
        super().__init__(made)
        self._stored = AdapterStates(stored)

    def info_of(self, user: str, name: CheckpointName) -> ModelInfo:
        """See States."""
        try:
            return super().info_of(user, name)
        except NotFoundError:
            return self._stored.info_of(user, name)

    def place_of(self, user: str, name: CheckpointName) -> Path:
        """See States."""
        try:
            return super().place_of(user, name)
        except NotFoundError:
            return self._stored.place_of(user, name)


class Replayer:
    """Does operations again with adapters of its own; what is stored is only read."""

    def __init__(
        self, adapters: AdapterTrainer, base: ModelInfo, *, made: Path, stored: Path
    ) -> None:
        """Write what is saved below `made`, and compare it with what lies below `stored`."""
        self._adapters = adapters
        self._applying = OperationApplier(
            adapters, ReplayStates(made, stored), UserRecords(made), base
        )
        self._made, self._stored = CheckpointFolders(made), CheckpointFolders(stored)
        self._states = AdapterStates(stored).read_all()[0]

    def replay(
        self,
        user: str,
        name: ModelName,
        archived: Sequence[ArchivedOperation],
        progress: Callable[[int, int], None] | None = None,
    ) -> ModelReplay:
        """Do all operations of a model again; raises NotFoundError if some were not kept."""
        _check_whole(name, archived)
        model, found = TrainedModel(user, name), ModelReplay(str(name))
        states = {
            state.applied: state
            for state in self._states
            if (state.user, state.name) == (user, name)
        }
        for item in archived:
            result = self._done(model, item)
            if digest_of(result) != item.digest:
                found.differing.append(f"the result of operation {item.operation.seq}")
            model.applied, found.operations = item.operation.seq, found.operations + 1
            if item.operation.kind in _NAMED and result.state == "done":
                self._compare_saved(model, result, found)
            if model.applied in states:
                self._compare_state(model, states[model.applied], found)
            if progress is not None:
                progress(found.operations, len(archived))
        if model.key in self._adapters.models:
            self._adapters.evict(model.key)
        return found

    def _done(self, model: TrainedModel, archived: ArchivedOperation) -> OperationResult:
        operation = archived.operation
        running = RunningOperation(self._applying.begin(model, operation, operation.companies))
        while not isinstance(piece := running.next(), OperationResult):
            if piece is None:
                try:
                    self._applying.advance([running.loss])
                except Exception as error:  # noqa: BLE001  it is the operation's result
                    return running.failed(error)
                running.computed()
        return piece

    def _compare_state(self, model: TrainedModel, state: SavedState, found: ModelReplay) -> None:
        what = f"the state behind operation {state.applied}"
        self._compare(model, state.folder, what, found, with_optimizer=True)

    def _compare_saved(
        self, model: TrainedModel, result: OperationResult, found: ModelReplay
    ) -> None:
        """Compare a named checkpoint, if it is still the one that this operation has saved."""
        for kind in ("weights", "sampler_weights"):
            for place in self._made.place_of(
                model.user, CheckpointName(model.name, kind, "-")
            ).parent.glob("*"):
                name = CheckpointName(model.name, kind, place.name)
                stored = self._stored.read(model.user, name)
                if stored is not None and stored.seq == model.applied and not stored.gone:
                    self._compare(model, stored.folder, str(name), found, with_optimizer=False)

    def _compare(
        self,
        model: TrainedModel,
        folder: Path,
        what: str,
        found: ModelReplay,
        *,
        with_optimizer: bool,
    ) -> None:
        stored = read_adapter(folder, with_optimizer=with_optimizer)
        pairs = [("", self._adapters.tensors(model.key), stored.tensors)]
        if with_optimizer and stored.moments is not None:
            made = self._adapters.moments(model.key)
            pairs += [("exp_avg of ", made.first, stored.moments.first)]
            pairs += [("exp_avg_sq of ", made.second, stored.moments.second)]
        found.compared.append(what)
        found.differing += [
            f"{part}{tensor} of {what}"
            for part, ours, theirs in pairs
            for tensor in theirs
            if tensor not in ours or not torch.equal(_bits(ours[tensor]), _bits(theirs[tensor]))
        ]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def _check_whole(name: ModelName, archived: Sequence[ArchivedOperation]) -> None:
    for seq, one in enumerate(archived):
        if one.operation.seq != seq:
            raise NotFoundError(
                f"operation {seq} of {name} was not kept",
                hint="tinker.history_mb bounds what is kept; the least recently used go first",
            )


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
    collected: list[ModelReplay] = []
    with tempfile.TemporaryDirectory(prefix="tinkermq-replay-") as made:
        replayer = Replayer(adapters, base_info(config), made=Path(made), stored=stored)
        for user, name in models:
            archived = read_archived(place_of(stored, user, name))
            show = None if progress is None else partial(progress, str(name))
            collected.append(replayer.replay(user, name, archived, show))
    return collected


def _models_of(stored: Path, session: str) -> list[tuple[str, ModelName]]:
    """Return the models of a session of which operations were kept, or the one that is named."""
    named = ModelName.parse(session) if ":" in session else None
    pattern = f"*/{named.session if named else session}.train.*"
    matches = [
        (place.parent.name, ModelName.parse(place.name.replace(".train.", ":train:")))
        for place in sorted(stored.glob(pattern))
    ]
    matches = [
        (user, name)
        for user, name in sorted(matches, key=lambda one: one[1].number)
        if named in (None, name) and place_of(stored, user, name).is_dir()
    ]
    if not matches:
        raise NotFoundError(
            f"no operations of {session!r} were kept",
            hint="see the sessions on the dashboard; tinker.history_mb bounds what is kept",
        )
    return matches


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

        result = replay_session(record, arguments.session, show)
    if arguments.json:
        shown = [{**asdict(entry), "identical": entry.identical} for entry in result]
        sys.stdout.write(json.dumps(shown) + "\n")
    for item in result:
        console.print(_told(item), style=None if item.identical else "red", markup=False)
    return IDENTICAL if all(entry.identical for entry in result) else DIFFERENT


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
    parser = service_parser("tinker.replay")
    parser.add_argument("--user", default="local", help="owner of the job (default: local)")
    parser.add_argument("--job", required=True, help="job id")
    parser.add_argument("--session", required=True, help="id of a session, or of a model")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    console = Console(stderr=True, emoji=False)
    try:
        return _run(parser.parse_args(argv), console)
    except TinkermqError as error:
        console.print(str(error), style="red", markup=False)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
