"""Keys, and permissions: `permissions.txt` has every subject and who may use it."""

import re
from pathlib import Path

import pytest
from tinkermq.broker.client.keys import (
    EpisodeIdentity,
    JobIdentity,
    check_episode_key,
    check_job_key,
    episode_key,
    episode_secret,
    job_key,
    key_hash,
    new_api_key,
    read_episode_key,
    read_job_key,
    user_of_key,
)
from tinkermq.broker.permissions import (
    Guest,
    is_stream_of,
    job_permissions,
    may_read,
    may_store,
    service_permissions,
)
from tinkermq.schemas.wire.errors import AuthError
from tinkermq.schemas.wire.subjects import REFUSALS, STREAM_AUDIT, STREAM_REFUSALS

from tests.support.permission_matrix import ROLES, TABLE, ask_server, everybody, table
from tests.support.snapshots import assert_snapshot

JOB = "tmq.v1.job.ada.j1"
GUESTS = ("user", "admin", "environment", "environment+judge", "program")
"""Who runs code of users."""


async def test_the_broker_grants_to_each_kind_of_connection_what_the_table_says(
    tmp_path: Path,
) -> None:
    assert_snapshot(TABLE, table(await ask_server(tmp_path)))


def test_guests_have_no_right_to_ask_jetstream_nor_to_hear_or_answer_who_looks_for_services() -> (
    None
):
    for name in GUESTS:
        permissions = everybody()[name]
        for subject in (*permissions.publish, *permissions.subscribe):
            assert not subject.startswith(("$", "_INBOX.", ">", "*")), (name, subject)


def test_a_process_is_given_subjects_with_its_user_in_them() -> None:
    common = ("$SRV.>", "_INBOX.>", "$JS.API.INFO", "_INBOX_scheduler.>", "_INBOX_tinker.>")
    for name in ("user", "program", *ROLES):
        permissions = everybody()[name]
        for subject in (*permissions.publish, *permissions.subscribe):
            of_trainer = subject.startswith("tmq.v1.rpc.*.tinker-j1.")
            assert subject in common or of_trainer or "ada" in subject, (name, subject)


def test_nobody_but_scheduler_and_auth_service_makes_or_changes_consumers_or_streams() -> None:
    verbs = re.compile(
        r"\$JS\.API\.(CONSUMER\.(?!MSG\.NEXT)|STREAM\.(CREATE|UPDATE|DELETE|RESTORE))"
    )
    assert not [line for line in TABLE.read_text().splitlines() if verbs.match(line)]


def test_the_scheduler_changes_neither_users_nor_the_audit() -> None:
    denied = service_permissions("scheduler").deny_publish
    assert {"$KV.tmq-users.>", "$JS.API.STREAM.*.KV_tmq-users", REFUSALS} <= set(denied)
    assert {f"$JS.API.STREAM.*.{name}" for name in (STREAM_AUDIT, STREAM_REFUSALS)} <= set(denied)


def test_a_role_or_service_that_is_none_has_no_permissions() -> None:
    with pytest.raises(KeyError):
        job_permissions(JobIdentity("ada", "j1", "admin", "admin-0", 1))
    with pytest.raises(KeyError):
        service_permissions("somebody")


@pytest.mark.parametrize(
    ("user", "stream", "owns"),
    [
        ("ada", "tmq-ada-j1-log", True),
        ("ada", "KV_tmq-ada-j1-weights", True),
        ("ada", "OBJ_tmq-ada-j1-weights", True),
        ("ad", "tmq-ada-j1-log", False),
        ("ada", "tmq-ada_b-j1-log", False),
        ("ada", "tmq-ada-log", False),
        ("ada", "tmq-users", False),
        ("ada", "KV_tmq-users", False),
        ("ada", "tmq-ada-j1-secrets", False),
    ],
)
def test_a_stream_belongs_to_the_user_in_its_name(user: str, stream: str, owns: bool) -> None:
    assert is_stream_of(user, stream) == owns


@pytest.mark.parametrize(
    ("guest", "stream", "subject", "allowed"),
    [
        (Guest("ada"), "tmq-ada-j1-log", ">", True),
        (Guest("bob"), "tmq-ada-j1-log", ">", False),
        (Guest("ada"), "KV_tmq-jobs", "$KV.tmq-jobs.ada.>", True),
        (Guest("ada"), "KV_tmq-jobs", "$KV.tmq-jobs.ada2.>", False),
        (Guest("ada"), "KV_tmq-jobs", "$KV.tmq-jobs.>", False),
        (Guest("ada"), "KV_tmq-jobs", "", False),
        (Guest("ada"), "KV_tmq-actors", "$KV.tmq-actors.pool.>", True),
        (Guest("ada"), "KV_tmq-actors", "$KV.tmq-actors.bob.>", False),
        (Guest("ada", "j1", "environment"), "KV_tmq-jobs", "$KV.tmq-jobs.ada.j1", True),
        (Guest("ada", "j1", "environment"), "KV_tmq-jobs", "$KV.tmq-jobs.ada.>", False),
        (Guest("ada", "j1", "environment"), "tmq-ada-j1-log", ">", False),
        (Guest("ada", "j1", "environment"), "KV_tmq-evals", "$KV.tmq-evals.ada.j1.>", False),
        (Guest("ada", "j1", "learner"), "KV_tmq-evals", "$KV.tmq-evals.ada.j1.>", True),
        (Guest("ada", "j1", "nonsense"), "KV_tmq-evals", "$KV.tmq-evals.ada.j1.>", False),
    ],
)
def test_the_store_proxy_reads_ones_own(
    guest: Guest, stream: str, subject: str, allowed: bool
) -> None:
    assert may_read(guest, stream, subject) == allowed


@pytest.mark.parametrize(
    ("guest", "subject", "stream"),
    [
        (Guest("ada"), f"{JOB}.rollout.7", "tmq-ada-j1-rollout"),
        (Guest("bob"), f"{JOB}.rollout.7", None),
        (Guest("ada"), f"{JOB}.dead", "tmq-ada-j1-dead"),
        (Guest("bob"), f"{JOB}.dead", None),
        (Guest("ada", "j1", "environment"), f"{JOB}.dead", None),
        (Guest("ada"), f"{JOB}.rollout.*", None),
        (Guest("ada"), f"{JOB}.rollout.x", None),
        (Guest("ada"), f"{JOB}.metric", None),
        (Guest("ada"), "$KV.tmq-evals.ada.j1.3", "KV_tmq-evals"),
        (Guest("ada"), "$KV.tmq-evals.bob.j1.3", None),
        (Guest("ada"), "$KV.tmq-jobs.ada.j1", None),
        (Guest("ada"), "$JS.API.STREAM.DELETE.x", None),
        (Guest("ada", "j1", "environment"), f"{JOB}.event", "tmq-ada-j1-feed"),
        (Guest("ada", "j1", "environment"), "$KV.tmq-actors.ada.j1.e", "KV_tmq-actors"),
        (Guest("ada", "j1", "environment"), "$KV.tmq-actors.ada.j2.e", None),
        (Guest("ada", "j1", "environment"), f"{JOB}.rollout.7", None),
        (Guest("ada", "j1", "learner"), f"{JOB}.rollout.7", None),
    ],
)
def test_the_store_proxy_stores_ones_own(guest: Guest, subject: str, stream: str | None) -> None:
    assert may_store(guest, subject) == stream


# -- API keys and job keys -------------------------------------------------------------------------


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
