"""API keys, job keys and invitation codes."""

import pytest
from tinkermq.broker.client.keys import (
    JobIdentity,
    check_job_key,
    id_of_invitation,
    invitation_code,
    job_key,
    key_hash,
    new_api_key,
    read_job_key,
    user_of_key,
)
from tinkermq.schemas.wire.errors import AuthError

IDENTITY = JobIdentity("ada", "01j", "generator", "generator-0", 3)


@pytest.mark.parametrize("user", ["ada", "ada_l", "a_b_c", "0"])
def test_a_key_names_its_user_and_no_two_are_the_same(user: str) -> None:
    key = new_api_key(user)
    assert user_of_key(key) == user
    assert new_api_key(user) != key
    assert key not in key_hash(key)


@pytest.mark.parametrize("text", ["", "hello", "tmq_ada_", "tmq__" + "x" * 43, "x_ada_" + "x" * 43])
def test_what_is_no_key_is_refused_without_telling_it(text: str) -> None:
    with pytest.raises(AuthError) as raised:
        user_of_key(text)
    assert not text or text not in raised.value.message


def test_a_job_key_stands_for_one_process_and_cannot_be_changed() -> None:
    key = job_key(IDENTITY, b"secret")
    assert read_job_key(key) == check_job_key(key, b"secret") == IDENTITY
    assert check_job_key(key, b"other") is None
    for at in range(len(key)):
        changed = key[:at] + ("a" if key[at] != "a" else "b") + key[at + 1 :]
        assert check_job_key(changed, b"secret") is None


@pytest.mark.parametrize(
    "text", ["", "tmqj", "tmqj.a.b.c.d.1", "tmqj.a.b.c.*.1.s", "tmqj.a.b.c.d.x.s"]
)
def test_what_is_no_job_key_stands_for_nobody(text: str) -> None:
    assert read_job_key(text) is None
    assert check_job_key(text, b"secret") is None


def test_an_invitation_is_found_by_its_id() -> None:
    number, code = invitation_code(b"s" * 32, "a request")
    assert id_of_invitation(code) == number
    assert id_of_invitation("tmqinv_x_y") is None
    assert id_of_invitation(new_api_key("ada")) is None
