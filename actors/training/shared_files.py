"""Files of a checkpoint between ranks that see one disk, and ranks that do not.

Whether a rank sees the folder that rank 0 sees is found out by looking, never configured. A rank
that does not is sent what it needs to read, and sends what it has written, over the connections
that the ranks have anyway, in pieces. All ranks come here together.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ...broker.disk import remedy
from ...schemas.wire.errors import StorageError
from .parallel import Parallel

_PIECE_BYTES = 1 << 26
_NOT_SENT = ("model*.safetensors", "SHA256SUMS")
"""What rank 0 alone reads, and the others get by collectives; digests of what is not all there."""


@contextlib.contextmanager
def folder_here(folder: Path | None, parallel: Parallel) -> Iterator[Path | None]:
    """Yield a checkpoint's folder where this rank can read it: the same one, or a copy for now.

    The copy has all but the weights of models.
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
    """Make a folder that all ranks write into; yield where this one does.

    What was written elsewhere is in the folder of rank 0 behind this, unless this rank's writing
    raised, as then all ranks' did. Raises StorageError on all ranks if rank 0 cannot write.
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
    """Make a folder and a file in it by which it is known."""
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
    place = Path(tempfile.mkdtemp(prefix="tinkermq-rank-"))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Name the files of a folder with their sizes and times, by which a disk is known again."""
    paths = [folder / name for name in _names(folder)]
    stats = [(path, path.stat()) for path in paths]
    return [(str(path.relative_to(folder)), s.st_size, s.st_mtime_ns) for path, s in stats]


def _names(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(folder)) for path in paths)


def _copy(
    names: list[str], folder: Path, parallel: Parallel, source: int, target: int
) -> OSError | None:
    """Copy files of `folder` on one rank into that on another; the rest does nothing.

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
    """Take one file; what cannot be written is taken all the same, so that nobody waits."""
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
