"""A proxy of the environment is for hosts elsewhere, and exclusions are read in any form."""

import socket

import pytest
from tinkermq.schemas.local.proxies import Proxy, keep_proxies_out, proxy_of

PROXIES = {"HTTP_PROXY": "http://p:1", "https_proxy": "p:2", "ALL_PROXY": "socks5://p:3"}


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://judge.example/x", Proxy("HTTP_PROXY", "http://p:1")),
        ("ws://judge.example/ws", Proxy("HTTP_PROXY", "http://p:1")),
        ("https://judge.example", Proxy("https_proxy", "http://p:2")),
        ("ftp://judge.example", Proxy("ALL_PROXY", "socks5://p:3")),
        ("http://8.8.8.8:8000", Proxy("HTTP_PROXY", "http://p:1")),
        ("http://localhost:8000", None),
        ("http://app.localhost", None),
        ("http://127.0.0.1", None),
        ("http://127.8.9.1:5", None),
        ("http://[::1]:8000", None),
        (f"http://{socket.gethostname()}:80", None),
    ],
)
def test_a_proxy_is_for_hosts_elsewhere(url: str, proxy: Proxy | None) -> None:
    assert proxy_of(url, PROXIES) == proxy
    assert proxy_of(url, {}) is None


@pytest.mark.parametrize(
    ("excluded", "url", "is_direct"),
    [
        ("*", "http://judge.example", True),
        ("judge.example", "http://judge.example", True),
        ("judge.example", "http://a.judge.example", True),
        (".judge.example", "http://a.judge.example", True),
        ("*.judge.example", "http://A.Judge.Example.", True),
        ("judge.example", "http://notjudge.example", False),
        ("x, judge.example:80", "http://judge.example", True),
        ("judge.example:81", "http://judge.example", False),
        ("10.1.0.0/16", "http://10.1.2.3:8000", True),
        ("10.1.0.0/16", "http://10.2.2.3:8000", False),
        ("10.1.2.3", "http://10.1.2.3:8000", True),
        ("fd00::/8", "http://[fd12::1]:8000", True),
        ("10.1.2.3/16", "http://10.1.9.9", True),
        ("10.1.0.0/99", "http://10.1.2.3", False),
        ("[::1, x:port", "http://x", False),
        ("10.0.0.0/8", "http://judge.example", False),
        ("", "http://judge.example", False),
    ],
)
def test_what_is_excluded_is_reached_directly(excluded: str, url: str, is_direct: bool) -> None:
    assert (proxy_of(url, {**PROXIES, "NO_PROXY": excluded}) is None) == is_direct


def test_libraries_are_told_of_this_machine_beside_what_is_excluded() -> None:
    environment = {"NO_PROXY": "10.0.0.0/8,localhost"}
    for _ in range(2):
        keep_proxies_out(environment)
    told = environment["no_proxy"].split(",")
    assert told[:2] == ["10.0.0.0/8", "localhost"]
    assert {"127.0.0.1", "::1", socket.gethostname().lower()} <= set(told)
    assert len(told) == len(set(told))
    assert environment["NO_PROXY"] == environment["no_proxy"]
