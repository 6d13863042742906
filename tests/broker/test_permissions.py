"""Keys, and the table of permissions as pure functions."""

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
from tinkermq.broker.permissions import (
    Guest,
    Permissions,
    admin_permissions,
    episode_permissions,
    invited_permissions,
    is_stream_of,
    job_permissions,
    may_read,
    may_store,
    service_permissions,
    user_permissions,
)
from tinkermq.schemas.wire.errors import AuthError
from tinkermq.schemas.wire.subjects import SERVICES, rpc, stream_of

ROLES = ("learner", "rank", "generator", "evaluator", "environment", "server")
JOB = "tmq.v1.job.ada.j1"


INVITED = invited_permissions("_INBOX_invited.x")


def of_role(role: str) -> Permissions:
    return job_permissions(JobIdentity("ada", "j1", role, f"{role}-0", 1))


def covers(pattern: str, subject: str) -> bool:
    """Whether a subject with wildcards covers another."""
    ours, theirs = pattern.split("."), subject.split(".")
    for at, part in enumerate(ours):
        if part == ">":
            return len(theirs) > at
        if at >= len(theirs) or (part != "*" and part != theirs[at]):
            return False
    return len(ours) == len(theirs)


def may_publish(permissions: Permissions, subject: str) -> bool:
    allowed = any(covers(pattern, subject) for pattern in permissions.publish)
    return allowed and not any(covers(pattern, subject) for pattern in permissions.deny_publish)


def test_users_and_environment_hosts_have_no_right_to_ask_jetstream() -> None:
    for permissions in (
        user_permissions("ada"),
        admin_permissions("root"),
        INVITED,
        of_role("environment"),
    ):
        for subject in (*permissions.publish, *permissions.subscribe):
            assert not subject.startswith(("$JS", "$KV", "$O.", "$SYS", ">", "*"))


def test_everybody_but_the_pool_itself_is_given_subjects_with_a_user_in_them() -> None:
    for permissions in (user_permissions("ada"), *map(of_role, ROLES)):
        for subject in (*permissions.publish, *permissions.subscribe):
            common = subject in ("$SRV.>", "_INBOX.>", "$JS.API.INFO", "_INBOX_scheduler.>")
            assert common or "ada" in subject, subject


@pytest.mark.parametrize("role", ROLES)
def test_only_the_learner_tells_its_ranks_what_to_do(role: str) -> None:
    permissions = of_role(role)
    assert may_publish(permissions, f"{JOB}.rank.rank-1.begin") == (role == "learner")
    hears = any(covers(one, f"{JOB}.rank.rank-0.begin") for one in permissions.subscribe)
    assert hears == (role == "rank")
    assert not may_publish(of_role("rank"), f"{JOB}.rollout.1")


@pytest.mark.parametrize("role", ROLES)
def test_only_the_learner_publishes_weights_tasks_and_batches(role: str) -> None:
    permissions = of_role(role)
    for subject in (
        f"{JOB}.batch",
        f"{JOB}.task.1",
        f"{JOB}.weights",
        "$KV.tmq-ada-j1-weights.latest",
        "$O.tmq-ada-j1-weights.C.x",
        "tmq.v1.rpc.ada.scheduler.weights-room",
    ):
        assert may_publish(permissions, subject) == (role == "learner")
    update = "$JS.API.STREAM.UPDATE.OBJ_tmq-ada-j1-weights"  # would let it change more than a bound
    assert not may_publish(permissions, update)
    can_append = role in ("learner", "generator")
    assert may_publish(permissions, f"{JOB}.rollout.1") == can_append
    assert not may_publish(permissions, "tmq.v1.job.ada.j2.rollout.1")
    purge = "$JS.API.STREAM.PURGE.tmq-ada-j1-segment"
    for subject in (f"{JOB}.segment.1.0", purge):
        assert may_publish(permissions, subject) == (role == "generator")


@pytest.mark.parametrize("role", ROLES)
def test_who_stores_something_may_see_whether_its_stream_is_there(role: str) -> None:
    permissions = of_role(role)
    for last in ("task.1", "rollout.1", "segment.1.0", "batch", "dead", "metric", "event"):
        subject = f"{JOB}.{last}"
        if may_publish(permissions, subject):
            assert may_publish(permissions, f"$JS.API.STREAM.INFO.{stream_of(subject)}")


def test_who_runs_code_of_users_neither_hears_who_looks_for_services_nor_answers_him() -> None:
    for permissions in (
        of_role("environment"),
        user_permissions("ada"),
        INVITED,
    ):
        assert not [one for one in permissions.subscribe if one.startswith("$SRV")]
        assert not may_publish(permissions, "_INBOX.x.1")


def test_only_the_admin_himself_publishes_where_he_is_named_as_acting_for_others() -> None:
    root, subject = admin_permissions("root"), "tmq.v1.as.root.ada.scheduler.stop"
    assert may_publish(root, subject)
    assert not may_publish(root, "tmq.v1.rpc.ada.scheduler.stop")
    assert not may_publish(root, f"{JOB}.ctl.learner")
    others = (user_permissions("root"), admin_permissions("rooter"), *map(of_role, ROLES))
    services = [service_permissions(name) for name in ("node", "gateway")]
    for permissions in (
        *others,
        *services,
        user_permissions("ada"),
        INVITED,
    ):
        assert not may_publish(permissions, subject)


def test_nobody_but_scheduler_and_auth_service_makes_consumers_or_streams() -> None:
    verbs = ("CONSUMER.CREATE.s.c.f", "CONSUMER.DURABLE.CREATE.s.c", "STREAM.CREATE.s")
    for permissions in (
        user_permissions("ada"),
        admin_permissions("root"),
        *map(of_role, ROLES),
        service_permissions("node"),
        service_permissions("gateway"),
    ):
        assert not any(may_publish(permissions, f"$JS.API.{verb}") for verb in verbs)


def test_nobody_listens_in_the_inbox_of_another() -> None:
    inboxes = {name: f"_INBOX_{name}.x.1" for name in (*SERVICES, "ada", "bob")}
    for name in ("node", "gateway", "ada"):
        table = user_permissions if name == "ada" else service_permissions
        for owner, subject in inboxes.items():
            heard = any(covers(pattern, subject) for pattern in table(name).subscribe)
            assert heard == (owner == name)


def test_a_role_or_service_that_is_none_has_no_permissions() -> None:
    with pytest.raises(KeyError):
        of_role("admin")
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


def test_a_server_reads_the_weights_of_the_run_that_it_follows_and_of_no_other() -> None:
    identity = JobIdentity("ada", "j1", "server", "server-0", 1)
    alone, following = job_permissions(identity), job_permissions(identity, "j2")
    read = "$JS.API.DIRECT.GET.KV_tmq-ada-{}-weights"
    assert not may_publish(alone, read.format("j2"))
    assert may_publish(following, read.format("j2"))
    assert not may_publish(following, read.format("j3"))
    assert "tmq.v1.job.ada.j2.weights" in following.subscribe


def test_receivers_ask_the_learner_for_a_place_and_it_answers_those_that_follow_its_run() -> None:
    join = f"{JOB}.weights.join"
    learner = of_role("learner")
    assert join in learner.subscribe
    for role in ("generator", "evaluator"):
        assert may_publish(of_role(role), join)
    assert not may_publish(of_role("environment"), join)
    follower = JobIdentity("ada", "j2", "server", "server-0", 1)
    assert may_publish(job_permissions(follower, "j1"), join)
    assert not may_publish(job_permissions(follower), join)
    assert may_publish(learner, "_INBOX_job.ada.j2.server-0.x.1")
    assert not may_publish(learner, "_INBOX_job.bob.j2.server-0.x.1")


def test_generators_and_evaluators_validate_and_the_learner_alone_issues_and_removes() -> None:
    result, task = f"{JOB}.validation.result.3.0", f"{JOB}.validation.task.3.0"
    pull = "$JS.API.CONSUMER.MSG.NEXT.tmq-ada-j1-validation.validation"
    for role in ROLES:
        validates = role in ("generator", "evaluator")
        assert may_publish(of_role(role), result) == validates
        assert may_publish(of_role(role), pull) == validates
        assert may_publish(of_role(role), task) == (role == "learner")
        purge = "$JS.API.STREAM.PURGE.tmq-ada-j1-validation"
        assert may_publish(of_role(role), purge) == (role == "learner")
        evaluation = "$KV.tmq-evals.ada.j1.3"
        assert may_publish(of_role(role), evaluation) == (role == "learner")
    assert f"{JOB}.validated" in of_role("learner").subscribe


def test_an_environment_host_asks_the_judge_of_its_job_and_nobody_else() -> None:
    identity = JobIdentity("ada", "j1", "environment", "environment-0", 1)
    hosts = job_permissions(identity, None, "j2")
    assert may_publish(hosts, "tmq.v1.job.ada.j2.infer.chat")
    assert not may_publish(hosts, "tmq.v1.job.ada.j2.infer.play")
    assert not may_publish(hosts, "tmq.v1.job.ada.j3.infer.chat")
    assert not may_publish(job_permissions(identity), "tmq.v1.job.ada.j2.infer.chat")
    judge = job_permissions(JobIdentity("ada", "j2", "server", "server-0", 1))
    assert may_publish(judge, "_INBOX_job.ada.j1.environment-0.x.1")
    assert not may_publish(judge, "_INBOX_job.bob.j1.environment-0.x.1")
    generator = job_permissions(JobIdentity("ada", "j2", "generator", "generator-0", 1))
    assert not may_publish(generator, "_INBOX_job.ada.j1.environment-0.x.1")


def test_only_a_generator_asks_the_learner_for_the_gpu_and_may_not_steer_it() -> None:
    for role in ROLES:
        permissions = job_permissions(JobIdentity("ada", "j1", role, f"{role}-0", 1))
        turn = "tmq.v1.job.ada.j1.ctl.learner.turn"
        assert may_publish(permissions, turn) == (role == "generator")
        assert not may_publish(permissions, "tmq.v1.job.ada.j1.ctl.learner")
        assert not may_publish(permissions, "tmq.v1.job.ada.j2.ctl.learner.turn")


def test_a_generator_asks_the_teachers_of_its_job_and_nobody_else() -> None:
    identity = JobIdentity("ada", "j1", "generator", "generator-0", 1)
    generator = job_permissions(identity, teachers=["j2"])
    assert may_publish(generator, "tmq.v1.job.ada.j2.infer.complete")
    assert may_publish(generator, "tmq.v1.job.ada.j2.infer.cancel")
    assert not may_publish(generator, "tmq.v1.job.ada.j2.infer.chat")
    assert not may_publish(generator, "tmq.v1.job.ada.j3.infer.complete")
    assert not may_publish(job_permissions(identity), "tmq.v1.job.ada.j2.infer.complete")
    learner = JobIdentity("ada", "j1", "learner", "learner", 1)
    asks = job_permissions(learner, teachers=["j2"])
    assert not may_publish(asks, "tmq.v1.job.ada.j2.infer.complete")


def test_users_ask_servers_and_host_their_games_in_sessions() -> None:
    user, server = user_permissions("ada"), of_role("server")
    assert may_publish(user, f"{JOB}.infer.play")
    assert may_publish(user, f"{JOB}.env.describe")
    assert may_publish(user, f"{JOB}.env.give")
    assert not may_publish(user, f"{JOB}.env.reset")
    assert any(covers(one, f"{JOB}.play.s1.env.reset") for one in user.subscribe)
    assert any(covers(one, f"{JOB}.infer.play") for one in server.subscribe)
    assert may_publish(server, f"{JOB}.play.s1.env.reset")
    assert not may_publish(server, "tmq.v1.job.ada.j2.play.s1.env.reset")
    assert not any(covers(one, f"{JOB}.infer.play") for one in user.subscribe)


def test_a_programs_calls_reach_who_plays_its_episode_and_nobody_else() -> None:
    call = f"{JOB}.episode.generator-0-1-3-0-1.call"
    for caller in (of_role("environment"), user_permissions("ada")):
        assert may_publish(caller, call)
        assert not may_publish(caller, call.replace(".ada.", ".bob."))
        assert not any(covers(one, call) for one in caller.subscribe)
    assert not may_publish(of_role("environment"), call.replace(".j1.", ".j2."))
    for role in ROLES:
        hears = any(covers(one, call) for one in of_role(role).subscribe)
        assert hears == (role in ("generator", "evaluator"))


def test_the_key_of_an_episode_is_good_for_this_episode_and_nothing_else() -> None:
    program = episode_permissions(EpisodeIdentity("ada", "j1", "g-1-0"))
    for verb in ("call", "cancel", "delivered", "post"):
        assert may_publish(program, f"{JOB}.episode.g-1-0.{verb}")
        assert not may_publish(program, f"{JOB}.episode.g-1-0-2.{verb}")
        assert not may_publish(program, f"tmq.v1.job.ada.j2.episode.g-1-0.{verb}")
        assert not may_publish(program, f"tmq.v1.job.bob.j1.episode.g-1-0.{verb}")
    for subject in (
        f"{JOB}.episode.keys",
        f"{JOB}.env.reset",
        f"{JOB}.infer.chat",
        f"{JOB}.rollout.1",
        f"{JOB}.store.environment.get",
        "tmq.v1.rpc.ada.store.get",
        "$JS.API.INFO",
        "$SRV.PING",
        "_INBOX_job.ada.j1.episode.g-1-0.x",
    ):
        assert not may_publish(program, subject)
    assert program.subscribe == ("_INBOX_job.ada.j1.episode.g-1-0.>",)


def test_hosts_hear_what_programs_elsewhere_post_and_answer_them() -> None:
    post, answer = f"{JOB}.episode.g-1-0.post", "_INBOX_job.ada.j1.episode.g-1-0.x.1"
    for host in (of_role("environment"), user_permissions("ada")):
        assert any(covers(one, post) for one in host.subscribe)
        assert not any(covers(one, post.replace(".ada.", ".bob.")) for one in host.subscribe)
        assert may_publish(host, answer)
        assert may_publish(host, f"{JOB}.episode.keys")
        assert not may_publish(host, "tmq.v1.job.bob.j1.episode.keys")
    for role in ("generator", "evaluator"):
        assert may_publish(of_role(role), answer)
    assert not any(covers(one, post) for one in of_role("learner").subscribe)


def test_a_gateway_asks_trainers_for_nothing_but_files() -> None:
    gateway = service_permissions("gateway")
    assert may_publish(gateway, rpc("gateway", "tinker-j1", "fetch"))
    for subject in (
        rpc("ada", "tinker-j1", "fetch"),
        rpc("gateway", "tinker-j1", "export"),
        rpc("gateway", "tinker-j1", "submit"),
        rpc("gateway", "scheduler", "submit"),
    ):
        assert not may_publish(gateway, subject)
    assert any(covers(one, "_INBOX_tinker.gateway.x") for one in gateway.subscribe)
    assert not any(covers(one, "_INBOX_tinker.ada.x") for one in gateway.subscribe)


# -- API keys, job keys and invitation codes -------------------------------------------------------


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
