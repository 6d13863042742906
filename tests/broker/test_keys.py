"""API keys, job keys and invitation codes."""

import pytest
from tinkermq.broker.client.keys import (
    EpisodeIdentity,
    JobIdentity,
    check_episode_key,
    check_job_key,
    episode_key,
    episode_secret,
    id_of_invitation,
    invitation_code,
    job_key,
    key_hash,
    new_api_key,
    read_episode_key,
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


EPISODE = EpisodeIdentity("ada", "01j", "generator-0-7-3-0-2")


def test_the_key_of_an_episode_is_signed_for_this_episode_and_cannot_be_changed() -> None:
    key = episode_key(EPISODE, episode_secret("ada", "01j", b"pool"))
    assert check_episode_key(key, b"pool") == read_episode_key(key) == EPISODE
    assert check_episode_key(key, b"other") is None
    for at in range(len(key)):
        changed = key[:at] + ("a" if key[at] != "a" else "b") + key[at + 1 :]
        assert check_episode_key(changed, b"pool") is None


@pytest.mark.parametrize("victim", [EPISODE._replace(user="bob"), EPISODE._replace(job="02j")])
def test_the_secret_of_a_job_signs_no_key_of_another(victim: EpisodeIdentity) -> None:
    own = episode_secret("ada", "01j", b"pool")
    assert check_episode_key(episode_key(victim, own), b"pool") is None


def test_without_users_the_key_of_an_episode_is_random() -> None:
    one, other = (episode_key(EPISODE, None) for _ in range(2))
    assert one != other
    assert read_episode_key(one) == read_episode_key(other) == EPISODE


@pytest.mark.parametrize(
    "text",
    ["", "tmqe_", "tmqe_a.b.c", "tmqe_a.b.*." + "0" * 64, "tmqe_a.b.c." + "0" * 63, "tmqe_x"],
)
def test_what_is_no_key_of_an_episode_stands_for_none(text: str) -> None:
    assert read_episode_key(text) is None
    assert check_episode_key(text, b"pool") is None
