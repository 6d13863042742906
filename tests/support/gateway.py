"""A gateway as a real process on a free port, and requests to it."""

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkermq.schemas.local.process import die_with

from tests.support.certificates import Certificate
from tests.support.configs import REPOSITORY
from tests.support.processes import listening_ports
from tests.support.waiting import PATIENCE_S, eventually


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Gateway:
    """A gateway that runs; make one with `run_gateway`."""

    def __init__(
        self,
        url: str,
        process: "subprocess.Popen[bytes]",
        log: Path,
        trusted: Path | None = None,
    ) -> None:
        """`trusted`: the certificate, or its authority, of a gateway that serves HTTPS."""
        self.url = url
        self._tls = ssl.create_default_context(cafile=trusted)
        self.process = process
        self.log = log

    async def get(self, path: str, **headers: str) -> Answer:
        """Ask for a path; underscores in the names of headers become dashes."""
        return await asyncio.to_thread(self._ask, "GET", path, None, headers)

    async def delete(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Delete what is at a path."""
        if body is None:
            return await asyncio.to_thread(self._ask, "DELETE", path, None, headers)
        headers = {"content_type": "application/json", **headers}
        return await asyncio.to_thread(
            self._ask, "DELETE", path, json.dumps(body).encode(), headers
        )

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        """Send JSON, or bytes as they are."""
        sent = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await asyncio.to_thread(
            self._ask, "POST", path, sent, {"content_type": "application/json", **headers}
        )

    async def form(self, path: str, fields: bytes, **headers: str) -> Answer:
        """Send a form as a browser does from one of the gateway's own pages."""
        own = {"content_type": "application/x-www-form-urlencoded", "origin": self.url}
        return await self.post(path, fields, **{**own, **headers})

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, body, named, method=method)
        secure = urllib.request.HTTPSHandler(context=self._tls)
        opener = urllib.request.build_opener(_NoRedirect, secure)
        try:
            with opener.open(request, timeout=PATIENCE_S) as reply:
                return Answer(reply.status, reply.read(), dict(reply.headers.items()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.read(), dict(error.headers.items()))

    async def alive(self) -> bool:
        """Whether it answers; fails when the process has ended."""
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError):
            return (await self.get("/healthz")).status == 200
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def start(nats: str, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
    """Start a gateway process whose output goes to `gateway.log` in a folder."""
    with (folder / "gateway.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tinkermq.actors.gateway", "--nats", nats, *words],
            cwd=REPOSITORY,
            env={**os.environ, "TINKERMQ_LOG_FORMAT": "json"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=die_with(os.getpid()),
        )


@contextlib.asynccontextmanager
async def run_gateway(
    nats: str, folder: Path, *words: str, tls: Certificate | None = None
) -> AsyncIterator[Gateway]:
    """Run a gateway until the block ends, with `tls` one of HTTPS; it must end at SIGTERM."""
    scheme, trusted, log = "http", None, folder / "gateway.log"
    if tls is not None:
        scheme, trusted = "https", tls.certificate
        words += ("--certificate", str(tls.certificate), "--certificate-key", str(tls.key))
    process = start(nats, folder, "--port", "0", *words)
    gateway = Gateway("", process, log, trusted)

    async def port() -> int:
        assert process.poll() is None, log.read_text()
        return next(iter(listening_ports(process.pid)), 0)

    try:
        gateway.url = f"{scheme}://127.0.0.1:{await eventually(port, 'the gateway to listen')}"
        await eventually(gateway.alive, "the gateway to answer")
        yield gateway
        gateway.process.terminate()  # a test may have killed the first one
        code = await asyncio.to_thread(gateway.process.wait, PATIENCE_S)
        assert code == 0, log.read_text()
    finally:
        gateway.process.kill()
        gateway.process.wait()
