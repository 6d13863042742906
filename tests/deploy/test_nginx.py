"""deploy/nginx: nginx accepts the configuration, and passes requests on within its bounds."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from tinkermq.schemas.http_server import HttpServer, listening_socket

from tests.support.certificates import self_signed
from tests.support.configs import REPOSITORY
from tests.support.processes import listening_ports
from tests.support.waiting import PATIENCE_S, until

CONFIG = (REPOSITORY / "deploy" / "nginx" / "tinkermq.conf").read_text()
MAIN = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 2048; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies; proxy_temp_path {folder}/answers;
    fastcgi_temp_path {folder}/1; uwsgi_temp_path {folder}/2; scgi_temp_path {folder}/3;
    include {folder}/tinkermq.conf;
}}
"""


async def echo(request: Request) -> Response:
    body = await request.body()
    return PlainTextResponse(f"{request.headers['host']} {len(body)}")


@contextlib.asynccontextmanager
async def in_front(folder: Path, port: int) -> AsyncIterator[tuple[int, ssl.SSLContext]]:
    """Run nginx in front of a port; yield its own port and a context that trusts it."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")
    made = self_signed(folder)
    with listening_socket("127.0.0.1", 0) as free:
        own = int(free.getsockname()[1])
    config = CONFIG.replace("/etc/tinkermq/tls/gateway.crt", str(made.certificate))
    config = config.replace("/etc/tinkermq/tls/gateway.key", str(made.key))
    config = config.replace("listen 443", f"listen 127.0.0.1:{own}").replace("8780", str(port))
    (folder / "tinkermq.conf").write_text(config)
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder))
    process = await asyncio.create_subprocess_exec(nginx, "-c", str(folder / "nginx.conf"))
    try:
        await until(lambda: own in listening_ports(process.pid), "nginx to listen")
        yield own, ssl.create_default_context(cafile=made.certificate)
    finally:
        process.terminate()
        await process.wait()


async def test_nginx_passes_requests_on_and_bounds_connections_and_heads(tmp_path: Path) -> None:
    server = HttpServer("gateway", Starlette(routes=[Route("/echo", echo, methods=["POST"])]))
    async with contextlib.AsyncExitStack() as stack:
        listening = stack.enter_context(listening_socket("127.0.0.1", 0))
        await server.listen(listening)
        stack.push_async_callback(server.stop)
        port = int(listening.getsockname()[1])
        own, trusted = await stack.enter_async_context(in_front(tmp_path, port))
        for _ in range(300):  # idle ones of one address
            _, writer = await asyncio.open_connection("127.0.0.1", own)
            stack.callback(writer.close)
        async with httpx.AsyncClient(verify=trusted, timeout=PATIENCE_S) as client:
            url = f"https://127.0.0.1:{own}/echo"
            answer = await client.post(url, content=b"x" * (9 << 20))
            assert (answer.status_code, answer.text) == (200, f"127.0.0.1:{own} {9 << 20}")
            refused = await client.post(url, headers={"x-large": "y" * (65 << 10)})
            assert refused.status_code in (400, 431)
            assert (await client.post(url, content=b"ab")).text.endswith(" 2")
