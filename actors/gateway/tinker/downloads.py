"""The files of checkpoints: URLs that need no key, and what stands behind them.

A URL holds a ticket that the checkpoint's trainer has signed. Who fetches it is nobody's program,
so the trainer is asked by the gateway itself; where the pool has users that takes its credentials.
"""

import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from ....broker.client.connection import Broker
from ....schemas.tinker.checkpoints import CheckpointExport, FetchFile, FilePart
from ....schemas.wire.errors import NotFoundError, StateError
from ..web import gateway_of
from .kept import KeptByTrainers
from .reading import visitor_of_key
from .rest import checkpoint_in, iso
from .trainers import Trainers

Handler = Callable[[Request], Awaitable[Response]]
FILES = "/tinker/api/v1/files"
_GATEWAY = "gateway"
_ARCHIVE = "checkpoint.tar"
_ARCHIVED = ("adapter_config.json", "adapter_model.safetensors")
_COMPLETE = "checkpoint_complete"
"""A file by which the SDK knows that an archive is whole."""
_FILE = "training_runs/{run}/checkpoints/{kind}/{name}"


class Downloads:
    """The endpoints."""

    def __init__(self, trainers: Trainers, kept: KeptByTrainers) -> None:
        """Ask trainers for parts of files."""
        self._trainers = trainers
        self._kept = kept

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and endpoint of each."""
        return [
            ("GET", f"{_FILE}/external_weights_urls", self.urls),
            ("GET", f"{_FILE}/archive", self.archive),
            ("GET", "files/{job}/{ticket}/{file}", self.file),
        ]

    async def urls(self, request: Request) -> Response:
        """Tell a URL for each file of a checkpoint."""
        job, export = await self._exported(request)
        place = _place(request, job, export)
        urls = {one.name: f"{place}/{one.name}" for one in export.files}
        return JSONResponse({"urls": urls, "expires": iso(export.expires)})

    async def archive(self, request: Request) -> Response:
        """Lead to the archive of a checkpoint, as SDKs before the URLs of files ask for it."""
        job, export = await self._exported(request)
        if {one.name for one in export.files} != set(_ARCHIVED):
            raise NotFoundError(
                "an encrypted checkpoint is not given as an archive",
                hint="take the URLs of its files",
            )
        return RedirectResponse(
            f"{_place(request, job, export)}/{_ARCHIVE}",
            302,
            headers={"expires": _http_date(export.expires)},
        )

    async def file(self, request: Request) -> Response:
        """Answer with a file, or with all of a checkpoint as an archive."""
        broker, named = await self._own(request), request.path_params
        job, ticket, name = named["job"], named["ticket"], named["file"]

        async def part(file: str, offset: int) -> FilePart:
            try:
                asked = FetchFile(ticket=ticket, file=file, offset=offset)
            except ValidationError:
                raise NotFoundError("this is no URL of a checkpoint's file") from None
            user = _GATEWAY if gateway_of(request).sessions.with_keys else "local"
            return await self._trainers.ask(user, broker, job, "fetch", asked, FilePart)

        if name != _ARCHIVE:
            first = await part(name, 0)
            return _streamed(_contents(part, name, first), first.size_bytes, name)
        firsts = [await part(one, 0) for one in _ARCHIVED]
        sizes = [tarfile.BLOCKSIZE + _padded(one.size_bytes) for one in firsts]
        size = sum(sizes) + 3 * tarfile.BLOCKSIZE
        return _streamed(_archived(part, firsts), size, name)

    async def _exported(self, request: Request) -> tuple[str, CheckpointExport]:
        visitor = await visitor_of_key(request)
        await self._own(request)
        return await self._kept.export(visitor, checkpoint_in(request))

    async def _own(self, request: Request) -> Broker:
        """Return the gateway's own connection; raises StateError where it has none."""
        gateway = gateway_of(request)
        if not gateway.sessions.with_keys:
            return (await gateway.sessions.visitor(session=None, key=None)).broker
        if gateway.own is None:
            raise StateError(
                "this gateway cannot give out files: it has no credentials of its own",
                hint="start it with TINKERMQ_CREDENTIALS (gateway.creds of `tinkermq init`)",
            )
        return gateway.own


Fetch = Callable[[str, int], Awaitable[FilePart]]


async def _contents(fetch: Fetch, name: str, first: FilePart) -> AsyncIterator[bytes]:
    """Yield a file whose first part is there."""
    yield first.data
    sent = len(first.data)
    while sent < first.size_bytes:
        part = await fetch(name, sent)
        if not part.data or part.size_bytes != first.size_bytes:
            raise StateError(f"{name} was saved anew while it was sent")
        sent += len(part.data)
        yield part.data


async def _archived(fetch: Fetch, firsts: list[FilePart]) -> AsyncIterator[bytes]:
    """Yield a tar archive of a checkpoint."""
    for name, first in zip(_ARCHIVED, firsts, strict=True):
        yield _header(name, first.size_bytes)
        async for some in _contents(fetch, name, first):
            yield some
        yield bytes(-first.size_bytes % tarfile.BLOCKSIZE)
    yield _header(_COMPLETE, 0)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(time.time()), 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def _padded(size: int) -> int:
    return size + -size % tarfile.BLOCKSIZE


def _streamed(parts: AsyncIterator[bytes], size: int, name: str) -> Response:
    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{name}"',
    }
    return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


def _place(request: Request, job: str, export: CheckpointExport) -> str:
    base = str(request.base_url).rstrip("/")
    if gateway_of(request).secure:
        base = base.replace("http://", "https://", 1)
    return f"{base}{FILES}/{job}/{export.ticket}"


def _http_date(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(seconds))
