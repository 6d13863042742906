"""URLs name a broker, or a job at a broker."""

from pathlib import Path

import pytest
from tinkermq.clients.address import parse_broker_url, parse_server_url
from tinkermq.clients.home import Home, StackState, find_openai
from tinkermq.schemas.wire.errors import ConfigError


def test_a_server_url_names_broker_user_and_job() -> None:
    address = parse_server_url("nats://127.0.0.1:4222/local/01abc")
    assert address.broker_url == "nats://127.0.0.1:4222"
    assert (address.scope.user, address.scope.job) == ("local", "01abc")
    assert address.server_url == "nats://127.0.0.1:4222/local/01abc"


def test_a_host_and_port_alone_mean_nats() -> None:
    assert parse_broker_url("127.0.0.1:4222") == "nats://127.0.0.1:4222"


def test_the_servers_of_a_cluster_stand_in_one_url() -> None:
    address = parse_server_url("tls://a:4222,b,tls://c:4333/ada/01abc")
    assert address.broker_url == "tls://a:4222,b,c:4333"
    assert (address.scope.user, address.scope.job) == ("ada", "01abc")
    assert parse_server_url(address.server_url) == address


@pytest.mark.parametrize("url", ["nats://a,tls://b", "nats://a,", "nats://a,http://b"])
def test_servers_that_do_not_go_together_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a broker"):
        parse_broker_url(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8780", "nats://", ""])
def test_another_kind_of_url_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a broker") as caught:
        parse_broker_url(url)
    assert "nats://host:port" in caught.value.hint


def test_a_broker_url_alone_names_no_job() -> None:
    with pytest.raises(ConfigError, match="does not name a job") as caught:
        parse_server_url("nats://127.0.0.1:4222")
    assert "submit_job" in caught.value.hint


def test_the_gateway_of_the_local_stack_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKERMQ_HOME", str(tmp_path))
    monkeypatch.delenv("TINKERMQ_GATEWAY_URL", raising=False)
    home = Home()
    assert find_openai() is None
    with home.lock():
        state = StackState(url="nats://x", pid=1, home=str(tmp_path), started=0.0)
        home.write(state.model_copy(update={"gateway": "http://127.0.0.1:8780"}))
        assert find_openai() == "http://127.0.0.1:8780/v1"
    monkeypatch.setenv("TINKERMQ_GATEWAY_URL", "http://there")
    assert find_openai() == "http://there/v1"
    assert find_openai("http://given/") == "http://given/v1"
