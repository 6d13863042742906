"""A local S3 server of a package (moto), and a proxy before it that does what networks do."""

import contextlib
import http.client
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tinkermq.schemas.local.process import die_with

from tests.support.processes import listening_ports
from tests.support.waiting import PATIENCE_S

BUCKET = "runs"
SLOW_S = 6.0
"""How long a slow request hangs before its connection ends."""


class Faults:
    """What the proxy does to the next requests: a kind of fault, and to how many of a method."""

    def __init__(self) -> None:
        self.kind = ""
        self.left = 0
        self.method = ""
        self.only = ""
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def set(self, kind: str, count: int = 1 << 30, *, method: str = "", only: str = "") -> None:
        """Do so to the next `count` requests of a method whose path has `only` in it."""
        self.kind, self.left, self.method, self.only = kind, count, method, only

    def take(self, method: str, path: str) -> str:
        """Return the fault of one request, or nothing."""
        with self._lock:
            self.requests.append((method, path))
            hit = self.left > 0 and self.method in ("", method) and self.only in path
            self.left -= hit
            return self.kind if hit else ""


class S3:
    """The server, seen through its proxy."""

    def __init__(self, port: int, faults: Faults) -> None:
        self.faults = faults
        self.environment = {
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def url(self, path: str) -> str:
        return f"s3://{BUCKET}/{path}"


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Run both with an empty bucket."""
    faults = Faults()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with (folder / "s3.log").open("ab") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with(os.getpid()))
    try:
        port = _port_of(server)
        _make_bucket(port)
        with _proxy(port, faults) as own_port:
            yield S3(own_port, faults)
    finally:
        server.kill()
        server.wait()


def _port_of(server: "subprocess.Popen[bytes]") -> int:
    """Wait until a server listens; return where."""
    ends = time.monotonic() + PATIENCE_S
    while not (ports := listening_ports(server.pid)):
        assert server.poll() is None, "the S3 server has ended"
        assert time.monotonic() < ends, "the S3 server has not started"
        time.sleep(0.05)
    return ports.pop()


@contextlib.contextmanager
def _proxy(port: int, faults: Faults) -> Iterator[int]:
    """Run the proxy before a port; yield its own."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(port, faults))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield int(proxy.server_address[1])
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process as long as the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _make_bucket(port: int) -> None:
    ends = time.monotonic() + PATIENCE_S
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{BUCKET}",
        method="PUT",
        data=b"",
        headers={"Authorization": "AWS4-HMAC-SHA256 Credential=key/20200101/us-east-1/s3/aws4"},
    )
    while True:
        try:
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()
            return
        except OSError:
            assert time.monotonic() < ends, "the S3 server has not started"
            time.sleep(0.2)


def _handler(port: int, faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = faults.take(self.command, self.path)
            if fault in ("503", "507", "403"):
                self.answer(int(fault), b"<Error><Code>Fault</Code></Error>", {})
            elif fault == "slow":
                time.sleep(SLOW_S)
                self.close_connection = True
            else:
                self.forward(body, fault)

        def forward(self, body: bytes, fault: str) -> None:
            upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            upstream.request(self.command, self.path, body, headers)
            got = upstream.getresponse()
            data = got.read()
            kept = {k: v for k, v in got.getheaders() if k.lower() not in _HOP}
            upstream.close()
            if fault == "wrong" and data:
                data = bytes([data[0] ^ 1]) + data[1:]
            self.answer(got.status, data, kept, cut=fault == "cut")

        def answer(
            self, status: int, data: bytes, headers: Mapping[str, str], *, cut: bool = False
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            length = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[: len(data) // 2] if cut else data)
            self.close_connection = self.close_connection or cut

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    return Handler


_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}
