"""HTTP for users of a pool: where a job's URLs may lead."""

import asyncio
import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from tinkermq.actors.policy.chat import ChatTokenizer
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.rollout.teachers import EndpointTeacher
from tinkermq.envs.adapters.mcp_http import HttpClients
from tinkermq.envs.adapters.openenv_client import Access, HttpRoutes, OpenEnvSession
from tinkermq.envs.reward_sources import HttpSource, RefusedError
from tinkermq.envs.user_http import (
    VARIABLE,
    AddressRefused,
    Reachable,
    checked_socket,
    http_client,
    is_public,
    shown_body,
)
from tinkermq.schemas.config.sections import RewardConfig
from tinkermq.schemas.wire.errors import ConfigError, RewardError

SECRET = "the-cloud-key"
FORMS = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1"),
    *("::1", "::", "fe80::1", "fc00::1", "fd00::1", "ff02::1", "fec0::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    *("64:ff9b:1::7f00:1", "::ffff:0:127.0.0.1", "2a00:1450::5efe:7f00:1", "2a00::200:5efe:a00:1"),
    *("3fff::1", "5f00::1", "100:0:0:1::1", "2001:db8::1", "192.0.0.8", "192.88.99.1"),
]


class Server:
    """A service of the pool's host, which answers a secret or a redirect, and counts requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.location = ""
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.split("\r\n")[0])
            status = f"307 Go\r\nLocation: {self.location}" if self.location else "403 No"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(SECRET)}\r\n"
                f"Connection: close\r\n\r\n{SECRET}".encode()
            )
            await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server on loopback."""
    service = Server()
    async with await asyncio.start_server(service.answer, "127.0.0.1", 0) as listening:
        service.port = listening.sockets[0].getsockname()[1]
        yield service


@pytest.fixture(params=["http://127.0.0.1", "http://localhost", "http://[::ffff:127.0.0.1]"])
def base(request: pytest.FixtureRequest, server: Server) -> str:
    """A URL of the server."""
    return f"{request.param}:{server.port}"


@pytest.fixture
def in_pool_with_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is one of a pool with users."""
    monkeypatch.setenv(VARIABLE, "")


async def score(url: str) -> None:
    """Request a reward."""
    source = HttpSource(RewardConfig(source="endpoint", url=url, tries=1))
    await source.start()
    try:
        await source.post(url, {})
    finally:
        await source.stop()


@pytest.mark.parametrize("address", FORMS)
def test_an_address_of_no_public_host_is_none_in_any_form(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    with pytest.raises(AddressRefused, match="may not reach"):
        Reachable().checked("anywhere.example", 80, [address])


def test_public_addresses_are_public() -> None:
    for address in ("1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(ipaddress.ip_address(address))
    assert Reachable().checked("x", 80, ["10.0.0.1", "1.1.1.1"]) == ["1.1.1.1"]


@pytest.mark.usefixtures("in_pool_with_users")
async def test_nothing_of_a_pool_with_users_is_reached_by_configuration(
    server: Server, base: str
) -> None:
    with pytest.raises(AddressRefused, match="may not reach"):
        await score(f"{base}/reward")
    client = HttpClients().take(base)
    with pytest.raises(AddressRefused):
        await client.post(f"{base}/mcp", headers={"Metadata-Flavor": "Google"})
    await client.aclose()
    async with HttpRoutes(base, Access()) as routes:
        with pytest.raises(AddressRefused):
            await routes.ask("/schema")
    pytest.importorskip("websockets")
    with pytest.raises(AddressRefused):
        await OpenEnvSession.connect(base, Access())
    teacher = EndpointTeacher(f"{base}/v1", "m", ChatTokenizer(make_tokenizer()))
    with pytest.raises(AddressRefused):
        await teacher._post({})  # pyright: ignore[reportPrivateUsage]
    await teacher.close()
    assert server.requests == []


async def test_what_the_operator_names_is_reached_and_nothing_beside_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = f"http://127.0.0.1:{server.port}"
    for named in (f"127.0.0.1:{server.port}", "127.0.0.1", "127.0.0.0/8", f"{base}/open"):
        monkeypatch.setenv(VARIABLE, f"https://judge.example/v1, {named}")
        with pytest.raises(RefusedError):
            await score(f"{base}/open/reward")
    assert len(server.requests) == 4
    for other in ("/opened", "/open/../metadata", "/open/%2e%2e/metadata", "/"):
        with pytest.raises(AddressRefused):
            await score(f"{base}{other}")
    with pytest.raises(AddressRefused):
        await checked_socket(f"{base}/other", 5.0)
    assert len(server.requests) == 4
    connection = await checked_socket(f"{base}/open/ws", 5.0)
    assert connection is not None
    connection.close()


async def test_a_redirect_is_not_followed_and_a_body_not_shown(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"127.0.0.1:{server.port}")
    with pytest.raises(RefusedError) as refused:
        await score(f"http://127.0.0.1:{server.port}/")
    assert SECRET not in str(refused.value)
    server.location = "http://169.254.169.254/latest"
    with pytest.raises(RefusedError, match="status 307"):
        await score(f"http://127.0.0.1:{server.port}/")
    assert len(server.requests) == 2


async def test_a_users_own_process_reaches_everything_without_a_proxy_for_loopback(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RefusedError, match=SECRET):
        await score(f"http://localhost:{server.port}/")
    assert await checked_socket("http://127.0.0.1", 5.0) is None
    assert shown_body(SECRET) == SECRET


async def test_an_error_of_a_request_through_a_proxy_names_the_variable(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://user:password@127.0.0.1:9")
    with pytest.raises(RewardError, match=r"through 127.0.0.1:9, the proxy of \$HTTP_PROXY"):
        await score("http://192.0.2.1/")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
    with pytest.raises(RefusedError):
        await score("http://192.0.2.1/")
    assert len(server.requests) == 1
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"the proxy of \$HTTP_PROXY cannot be used"):
        await score("http://192.0.2.1/")


@pytest.mark.usefixtures("in_pool_with_users")
async def test_a_name_is_resolved_once_and_its_address_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that would lead elsewhere when it is resolved again leads nowhere else."""
    resolved: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: object) -> list[object]:
        resolved.append(host)
        address = "127.0.0.1" if len(resolved) > 1 else "192.0.2.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with http_client() as client:
        with pytest.raises(AddressRefused):
            await client.get("http://rebinding.example/")
    assert resolved == ["rebinding.example"]


def test_an_entry_of_the_operator_that_cannot_be_read_is_named() -> None:
    for entry in ("ftp://x/", "10.0.0.0/99", "http://x:port/"):
        with pytest.raises(ConfigError, match=VARIABLE):
            Reachable.read(f"judge.example, {entry}")


async def test_a_notification_leads_to_no_host_of_the_pool(server: Server) -> None:
    code = (
        "import urllib.request, socket, sys\n"
        "from tinkermq.envs.user_http import guard_process, reachable\n"
        "guard_process(reachable())\n"
        "def told(call):\n"
        "    try:\n"
        "        call()\n"
        "        return 'connected'\n"
        "    except Exception as error:\n"
        "        reason = getattr(error, 'reason', None)\n"
        "        return type(reason if isinstance(reason, Exception) else error).__name__\n"
        "port = int(sys.argv[1])\n"
        "url = f'http://{sys.argv[2]}:{port}/'\n"
        "print(told(lambda: urllib.request.urlopen(url)))\n"
        "print(told(lambda: socket.socket().connect((sys.argv[2], port))))\n"
        "udp = socket.socket(type=socket.SOCK_DGRAM)\n"
        "print(told(lambda: udp.sendto(b'x', (sys.argv[2], port))))\n"
        "print(told(lambda: socket.socket(socket.AF_UNIX).connect('/run/x')))\n"
    )

    async def attempt(host: str, named: str) -> list[str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, str(server.port), host),
            stdout=subprocess.PIPE,
            env={**os.environ, VARIABLE: named, "no_proxy": "*"},
        )
        return (await process.communicate())[0].decode().split()

    refused = "AddressRefused"
    for host in ("127.0.0.1", "localhost"):
        assert await attempt(host, "") == [refused] * 4
    assert server.requests == []
    allowed = await attempt("127.0.0.1", f"127.0.0.1:{server.port}")
    assert allowed == ["HTTPError", "connected", "connected", refused]
