"""What nats-server asks and is answered, and the bound of what is written down."""

import base64
import json
from typing import Any

import nkeys
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinkermq.actors.auth.callout import ClaimIssuer, LoginRequest, read_request
from tinkermq.actors.auth.store_proxy import read_request as read_stored_request
from tinkermq.actors.auth.store_proxy import read_subject
from tinkermq.broker.permissions import Guest, user_permissions
from tinkermq.schemas.wire.errors import MessageError

SEED = nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT).decode()
REQUEST = LoginRequest("NSERVER", "UKEY", "ada", "secret", "::1", "test")


def packed(value: Any) -> bytes:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=")


def claims_of(token: str) -> dict[str, Any]:
    part = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))


def test_the_servers_request_is_read() -> None:
    nats = {
        "server_id": {"id": "NSERVER"},
        "user_nkey": "UKEY",
        "connect_opts": {"user": "ada", "pass": "secret", "name": "test"},
        "client_info": {"host": "::1"},
    }
    assert read_request(b"x." + packed({"nats": nats}) + b".y") == REQUEST
    nats["connect_opts"] = {"user": "a\u2028\n" + "b" * 100, "pass": 7}
    odd = read_request(b"x." + packed({"nats": nats}) + b".y")
    assert odd.user.startswith("a??b")
    assert len(odd.user) == 64
    assert odd.password == ""
    nats["connect_opts"] = {"user": "a\ud800"}
    with pytest.raises(MessageError, match="half a character"):
        read_request(b"x." + packed({"nats": nats}) + b".y")


@given(st.binary(max_size=200))
def test_whatever_comes_is_a_request_or_an_error(payload: bytes) -> None:
    with pytest.raises(MessageError):
        read_request(payload)


def test_an_answer_is_signed_and_names_server_and_connection() -> None:
    issuer = ClaimIssuer(SEED)
    token = issuer.admit(REQUEST, "ada", user_permissions("ada"), 1e9 - 0.9).decode()
    answer = claims_of(token)
    assert (answer["aud"], answer["sub"]) == ("NSERVER", "UKEY")
    user = claims_of(answer["nats"]["jwt"])
    assert (user["name"], user["aud"], user["exp"]) == ("ada", "TMQ", 1_000_000_000)
    assert user["nats"]["pub"]["allow"][0] == "tmq.v1.rpc.ada.>"
    text, _, signature = token.rpartition(".")
    raw = base64.urlsafe_b64decode(signature + "=" * (-len(signature) % 4))
    assert nkeys.from_seed(bytearray(SEED.encode())).verify(text.encode(), raw)
    refusal = claims_of(issuer.refuse(REQUEST, "why").decode())
    assert refusal["nats"]["error"] == "why"
    assert "jwt" not in refusal["nats"]


@pytest.mark.parametrize(
    ("subject", "told"),
    [
        ("tmq.v1.rpc.ada.store.get.s", (Guest("ada"), "get", "s")),
        ("tmq.v1.rpc.ada.store.put.a.b.c", (Guest("ada"), "put", "a.b.c")),
        (
            "tmq.v1.job.ada.j.store.environment.get.s.k",
            (Guest("ada", "j", "environment"), "get", "s.k"),
        ),
    ],
)
def test_the_subject_tells_who_asks_the_store_proxy_for_what(subject: str, told: object) -> None:
    assert read_subject(subject) == told


def test_the_store_proxy_writes_requests_anew() -> None:
    given_ = {"seq": 5, "next_by_subj": "a.>", "batch": 10**9, "multi_last": [">"], "x": 1}
    assert json.loads(read_stored_request(json.dumps(given_).encode())) == {
        "seq": 5,
        "next_by_subj": "a.>",
        "batch": 1000,
    }
    assert json.loads(read_stored_request(b'{"seq": "1", "batch": -1}')) == {"seq": 1}
    for payload in (b"", b"[]", b"nonsense", b"\xff"):
        with pytest.raises(MessageError):
            read_stored_request(payload)
