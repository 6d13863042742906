"""The other ranks of a learner: orders from rank 0, and files on their disks.

All ranks run the same code on the same groups, synchronised by the collectives of FSDP2.
`actors/learner/ranks/` starts the ranks and sends their orders; the training step uses this module
only.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...schemas.config.job import JobConfig
from ...schemas.local.disk import remedy
from ...schemas.local.folder import process_folder
from ...schemas.rollout import Group
from ...schemas.wire.errors import StorageError
from .parallel import Meeting, Parallel
from .progress import Phases, ProcessPhases


@dataclass(frozen=True)
class Order:
    """One piece of work for all ranks."""

    do: Literal["begin", "step", "gather", "save", "end"]
    fields: dict[str, Any]
    """Arguments of the work, as JSON values."""
    groups: Sequence[Group] = ()
    seqs: Sequence[int] = ()
    """Sequences of its groups in the rollout log, if they are in the log."""

    @contextlib.contextmanager
    def during(self, phases: Phases) -> Iterator[None]:
        """Report the order's first phase, and after the block that nothing is done.

        The weights that are gathered in a dtype are those to be published.
        """
        names = {"begin": "meet", "step": "forward", "gather": "gather", "save": "copy"}
        name = "publish" if self.fields.get("dtype") else names[self.do]
        phases.enter(name, f"step {self.fields['step']}" if "step" in self.fields else "")
        yield
        phases.enter("")

    def send(self, pipe: Connection) -> None:
        """Write the order into a pipe."""
        pipe.send_bytes(json.dumps([self.do, self.fields, len(self.groups)]).encode())
        for group in self.groups:
            pipe.send_bytes(group.to_bytes())

    @classmethod
    def receive(cls, pipe: Connection) -> "Order":
        """Wait for the next order; EOFError if rank 0 has closed the pipe or ended."""
        do, fields, num_groups = json.loads(pipe.recv_bytes())
        return cls(do, fields, [Group.from_bytes(pipe.recv_bytes()) for _ in range(num_groups)])


class Ranks:
    """The ranks other than rank 0; none for a learner of one process."""

    def __init__(self, config: JobConfig) -> None:
        """There are no other ranks."""
        self._config = config
        self._parallel = Parallel()
        self._progress = ProcessPhases()

    @contextlib.contextmanager
    def beginning(
        self, folder: Path | None, total_steps: int, hidden: Path | None
    ) -> Iterator[Parallel]:
        """Start all ranks with a checkpoint or the initial model; yield this rank's `Parallel`.

        `hidden` is what the job's own functions must not see (`OwnFunctions`). Raises EngineError
        if one of them ends meanwhile.
        """
        learner = self._config.learner
        if not learner.sharded:
            yield Parallel.alone()
            return
        meeting = self._meet()
        fields = {
            "config": self._config.model_dump_json(exclude_unset=True),
            "folder": None if folder is None else str(folder),
            "settings": learner.settings,
            "total_steps": total_steps,
            "hidden": None if hidden is None else str(hidden),
            "meeting": meeting.to_map(),
        }
        with self.doing(Order("begin", fields)):
            self._parallel = Parallel.join(0, learner, meeting, self._progress)
            self._parallel.phases.enter("load")
            yield self._parallel

    @contextlib.contextmanager
    def doing(self, order: Order) -> Iterator[None]:
        """Send an order to all ranks for the duration of the block, which does the same here.

        Raises EngineError if one of them has ended.
        """
        yield

    @contextlib.contextmanager
    def explaining(self, order: Order) -> Iterator[None]:
        """Raise EngineError in place of torch's error in the block, if a rank has ended.

        Also for threads other than the one that sends orders.
        """
        yield

    async def watch(self) -> None:
        """Raise EngineError as soon as a rank ends."""

    def close(self) -> None:
        """End all ranks."""
        self._parallel.leave()

    def _meet(self) -> Meeting:
        return Meeting.open()


# -- files of a checkpoint between ranks that see one disk, and ranks that do not ------------------
# Each rank tests whether it sees rank 0's folder; nothing is configured. A rank that does not
# receives the files that it reads, and sends the files that it wrote, over the connections of the
# ranks, in pieces. All ranks call these functions together.

_PIECE_BYTES = 1 << 26
_NOT_SENT = ("model*.safetensors", "SHA256SUMS")
"""Files that only rank 0 reads, whose contents others receive by collectives; and digests of
incomplete folders."""


@contextlib.contextmanager
def folder_here(folder: Path | None, parallel: Parallel) -> Iterator[Path | None]:
    """Yield a checkpoint's folder that this rank can read: the same one, or a temporary copy.

    The copy has all files but the weights of models.
    """
    if folder is None or parallel.size == 1:
        yield folder
        return
    seen = parallel.gather(_listing(folder))
    blind = [rank for rank, theirs in enumerate(seen) if theirs != seen[0]]
    with _own_place(parallel.rank in blind, folder) as here:
        for rank in blind:
            names = [name for name, _, _ in seen[0] if not any(map(Path(name).match, _NOT_SENT))]
            failed = _copy(names, folder if parallel.rank == 0 else here, parallel, 0, rank)
            if failed is not None:
                raise failed
        yield here


@contextlib.contextmanager
def folder_of_all(folder: Path, parallel: Parallel) -> Iterator[Path]:
    """Create a folder into which all ranks write; yield this rank's folder.

    Afterwards, files written elsewhere are copied to rank 0's folder, unless this rank's writing
    raised: then the writing of all ranks raised. Raises StorageError on all ranks if rank 0 cannot
    write.
    """
    mark = _marked(folder) if parallel.rank == 0 else OSError()
    mark = parallel.gather(mark)[0]
    _raise_together(folder, mark if isinstance(mark, OSError) else None)
    sees = parallel.gather((folder / str(mark)).is_file())
    if parallel.rank == 0:
        (folder / str(mark)).unlink()
    with _own_place(not sees[parallel.rank], folder) as here:
        yield here
        if all(sees):
            return
        written = parallel.gather([] if sees[parallel.rank] else _names(here))
        failed: OSError | None = None
        for rank, names in enumerate(written):
            into = folder if parallel.rank == 0 else here
            failed = _copy(names, into, parallel, rank, 0) or failed
    _raise_together(folder, parallel.gather(failed)[0])


def _marked(folder: Path) -> str | OSError:
    """Create a folder with a file by which it is recognised."""
    name = f".{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    except OSError as error:
        return error
    return name


def _raise_together(folder: Path, failed: OSError | None) -> None:
    if failed is not None:
        raise StorageError(
            f"{folder} could not be written: {failed}",
            hint=remedy(failed, folder),
        ) from failed


@contextlib.contextmanager
def _own_place(blind: bool, folder: Path) -> Iterator[Path]:
    if not blind:
        yield folder
        return
    place = process_folder("rank")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """List the files of a folder with sizes and times, by which a disk is recognised."""
    paths = [folder / name for name in _names(folder)]
    stats = [(path, path.stat()) for path in paths]
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in stats]


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths)


def _copy(
    names: list[str], folder: Path, parallel: Parallel, source: int, target: int
) -> OSError | None:
    """Copy files of `folder` from one rank to another; other ranks do nothing.

    Returns why the target could not write them.
    """
    if parallel.rank == source:
        for name in names:
            _send(folder / name, target, parallel.group)
    failed: OSError | None = None
    if parallel.rank == target:
        for name in names:
            failed = _receive(folder / name, source, parallel.group) or failed
    return failed


def _send(path: Path, target: int, group: dist.ProcessGroup | None) -> None:
    size = path.stat().st_size
    dist.send(torch.tensor([size]), target, group=group)
    with path.open("rb") as file:
        while piece := bytearray(file.read(_PIECE_BYTES)):
            dist.send(torch.frombuffer(piece, dtype=torch.uint8), target, group=group)


def _receive(path: Path, source: int, group: dist.ProcessGroup | None) -> OSError | None:
    """Receive one file; the data are received even if they cannot be written, so no rank waits."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=group)
    failed: OSError | None = None
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("wb"))
        except OSError as error:
            failed, file = error, None
        for begin in range(0, int(size), _PIECE_BYTES):
            piece = torch.empty(min(int(size) - begin, _PIECE_BYTES), dtype=torch.uint8)
            dist.recv(piece, source, group=group)
            try:
                if file is not None:
                    file.write(piece.numpy().data)
            except OSError as error:
                failed, file = error, None
    return failed
