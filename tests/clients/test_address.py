"""URLs name a broker, or a job at a broker."""

import pytest
from tinkermq.clients.address import parse_broker_url, parse_server_url
from tinkermq.schemas.errors import ConfigError


def test_a_server_url_names_broker_user_and_job() -> None:
    address = parse_server_url("nats://127.0.0.1:4222/local/01abc")
    assert address.broker_url == "nats://127.0.0.1:4222"
    assert (address.scope.user, address.scope.job) == ("local", "01abc")
    assert address.server_url == "nats://127.0.0.1:4222/local/01abc"


def test_a_host_and_port_alone_mean_nats() -> None:
    assert parse_broker_url("127.0.0.1:4222") == "nats://127.0.0.1:4222"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8780", "nats://", ""])
def test_another_kind_of_url_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a broker") as caught:
        parse_broker_url(url)
    assert "nats://host:port" in caught.value.hint


def test_a_broker_url_alone_names_no_job() -> None:
    with pytest.raises(ConfigError, match="does not name a job") as caught:
        parse_server_url("nats://127.0.0.1:4222")
    assert "submit_job" in caught.value.hint
