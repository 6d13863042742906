"""The only table of permissions, as pure functions.

There are four groups. *Services* (scheduler, auth, node, gateway) are the pool itself. *Job
processes* read and write the streams of their own job, by their role. *Guests* are users and the
environment hosts of jobs, which run code of users: they have no access to JetStream, because a
request also names the subject of its answer, for which the server checks no rights. Guests read and
store through the store proxy (`actors/auth/store_proxy.py`), which checks `may_read` and
`may_store`. *Programs* whose episodes run elsewhere have the key of one episode: they reach its
generator and its host, and no stored data.

`allow_responses` is never set: a client that may publish and listen on the same subject could give
itself the right to any reply subject. Processes that answer requests may publish to the inboxes of
their callers, and every service refuses reply subjects that are not inboxes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..schemas.wire.subjects import (
    BUCKET_ACTORS,
    BUCKET_ARCHIVE,
    BUCKET_EVALS,
    BUCKET_JOBS,
    BUCKET_NODES,
    BUCKET_USERS,
    PREFIX,
    REFUSALS,
    STREAM_AUDIT,
    STREAM_REFUSALS,
    TASK_CONSUMER,
    VALIDATION_CONSUMER,
    JobScope,
    acting,
    inbox,
    node,
    rpc,
    tinker_inbox,
)
from .client.keys import EpisodeIdentity, JobIdentity

# What guests may read and store through the store proxy.

STREAMS = (
    *("task", "validation", "rollout", "segment", "batch"),
    *("dead", "feed", "trace", "log", "op", "result"),
)
"""Kinds of a job's streams."""
_JOB_KINDS = frozenset({*STREAMS, "weights", "checkpoints"})
SHARED = (BUCKET_JOBS, BUCKET_ARCHIVE, BUCKET_ACTORS, BUCKET_EVALS)
"""Buckets that all jobs share."""
_NUMBER = re.compile(r"[0-9]{1,18}")


class Guest(NamedTuple):
    """The sender of a request to the store proxy, from its subject."""

    user: str
    job: str = ""
    """Empty for the user himself."""
    role: str = ""
    """Role of a process of the job."""


def may_read(guest: Guest, stream: str, subject: str) -> bool:
    """Return whether a guest may read messages on `subject` (wildcards allowed) of a stream."""
    for bucket in SHARED:
        if stream == f"KV_{bucket}":
            return _below(subject, f"$KV.{bucket}", _keys(guest, bucket))
    return not guest.job and is_stream_of(guest.user, stream)


def may_store(guest: Guest, subject: str) -> str | None:
    """Return the stream in which a guest may store a message on `subject`, or None."""
    parts = subject.split(".")
    if any(part in ("", "*", ">") for part in parts):
        return None
    if guest.job:
        scope = JobScope(guest.user, guest.job)
        if guest.role == "environment" and subject == scope.event:
            return scope.stream_feed
        is_beat = subject.startswith(f"$KV.{BUCKET_ACTORS}.{scope.key}.") and len(parts) == 5
        return f"KV_{BUCKET_ACTORS}" if guest.role == "environment" and is_beat else None
    if len(parts) == 5 and parts[:3] == ["$KV", BUCKET_EVALS, guest.user]:
        return f"KV_{BUCKET_EVALS}"
    if parts[:4] != [*PREFIX.split("."), "job", guest.user]:
        return None
    if parts[5:] == ["dead"]:  # decisions of the run's owner about failed tasks
        return JobScope(guest.user, parts[4]).stream_dead
    if len(parts) == 7 and parts[5] == "rollout" and _NUMBER.fullmatch(parts[6]):
        return JobScope(guest.user, parts[4]).stream_rollout
    return None


def is_stream_of(user: str, stream: str) -> bool:
    """Return whether a stream, bucket or object store belongs to a job of the user."""
    plain = stream.removeprefix("KV_").removeprefix("OBJ_")
    head, _, kind = plain.rpartition("-")
    return head.startswith(f"tmq-{user}-") and kind in _JOB_KINDS and "." not in stream


def _keys(guest: Guest, bucket: str) -> tuple[str, ...]:
    """Return the keys, as leading tokens, that a guest may read in a shared bucket."""
    if guest.job:
        readable = {
            "environment": (BUCKET_JOBS,),
            "learner": (BUCKET_JOBS, BUCKET_ACTORS, BUCKET_EVALS),
            "rank": (BUCKET_JOBS,),
            "generator": (BUCKET_JOBS,),
            "evaluator": (BUCKET_JOBS,),
            "server": (BUCKET_JOBS,),
            "trainer": (BUCKET_JOBS,),
            "sampler": (BUCKET_JOBS,),
        }.get(guest.role, ())
        own_beat = bucket == BUCKET_ACTORS
        kind = BUCKET_JOBS if bucket == BUCKET_ARCHIVE else bucket
        return (f"{guest.user}.{guest.job}",) if kind in readable or own_beat else ()
    return (guest.user, "pool") if bucket == BUCKET_ACTORS else (guest.user,)


def _below(subject: str, bucket: str, keys: tuple[str, ...]) -> bool:
    return any(
        subject == f"{bucket}.{key}" or subject.startswith(f"{bucket}.{key}.") for key in keys
    )


_DISCOVERY = "$SRV.>"
_TOOLS_INBOX = "_INBOX.>"
"""Inbox prefix of the stock NATS tools: only operators can listen there."""
_INFO = "$JS.API.INFO"
_FED = ("metric", "event", "trace", "log.*", "rollout.*", "appended", "batch", "dead", "weights")
_EPISODE_VERBS = ("call", "cancel", "delivered", "post")


@dataclass(frozen=True)
class Permissions:
    """Subjects that one connection may publish to and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deny_publish: tuple[str, ...] = ()

    def claims(self) -> dict[str, dict[str, list[str]]]:
        """Return the permissions in the form of a NATS user claim, and of the server's
        configuration.
        """
        publish = {"allow": list(self.publish)}
        if self.deny_publish:
            publish["deny"] = list(self.deny_publish)
        return {"pub": publish, "sub": {"allow": list(self.subscribe)}}


# -- users -----------------------------------------------------------------------------------------


def user_permissions(user: str) -> Permissions:
    """Return a user's permissions: own requests, own jobs, and hosting their games."""
    own = f"{PREFIX}.job.{user}.*"
    return Permissions(
        publish=(
            rpc(user, ">", "").rstrip("."),
            f"{own}.ctl.>",
            f"{own}.infer.>",
            f"{own}.env.describe",
            f"{own}.env.give",
            f"{own}.episode.>",
            f"_INBOX_job.{user}.>",
        ),
        subscribe=(
            f"{inbox(user)}.>",
            f"{tinker_inbox(user)}.>",
            f"{own}.env.>",
            f"{own}.play.*.env.>",
            f"{own}.episode.*.post",
            *(f"{own}.{kind}" for kind in _FED),
        ),
    )


def admin_permissions(user: str) -> Permissions:
    """Return an admin's permissions: a user's, and reading and controlling everybody's jobs."""
    own = user_permissions(user)
    everybody = f"{PREFIX}.job.*.*"
    return Permissions(
        publish=(
            *own.publish,
            *(acting(user, "*", service, ">") for service in ("scheduler", "store")),
            acting(user, "*", "*", "ctl.>"),
        ),
        subscribe=(*own.subscribe, *(f"{everybody}.{kind}" for kind in _FED)),
    )


# -- processes of jobs -----------------------------------------------------------------------------


def job_permissions(
    identity: JobIdentity,
    follow: str | None = None,
    judge: str | None = None,
    teachers: Iterable[str] = (),
) -> Permissions:
    """Return the permissions of a process of a job, by its role.

    `follow` is the user's run whose weights an inference job serves, `judge` the user's inference
    job that its environment hosts call for rewards, `teachers` those that its generators call for
    log-probs. Raises KeyError for an unknown role.
    """
    scope, actor = identity.scope, identity.actor
    # servers also answer environment hosts of the user's other jobs, whose episodes they judge, and
    # learners the servers that follow their runs
    answers_others = identity.role in ("server", "learner")
    own = f"{scope.user}" if answers_others else f"{scope.user}.{scope.job}"
    inboxes = (f"_INBOX_job.{own}.>", f"{inbox(scope.user)}.>")
    listed = identity.role != "environment"
    loads = identity.role in ("rank", "generator", "evaluator", "server")
    publish = {
        "learner": _learner,
        "rank": _rank,
        "generator": _generator,
        "evaluator": _evaluator,
        "environment": _environment,
        "server": _server,
        "trainer": _trainer,
        "sampler": _sampler,
    }[identity.role](scope, actor)
    evaluations = f"$KV.{BUCKET_EVALS}.{scope.key}.>"
    hears = {
        "learner": (
            *(scope.appended, scope.validated, scope.weights, scope.weights_join),
            evaluations,
        ),
        "rank": (scope.rank(actor, "*"),),
        "environment": (
            f"{PREFIX}.job.{scope.user}.{scope.job}.env.>",
            scope.episode_posts,
        ),
        "generator": (scope.weights, scope.episodes),
        "evaluator": (scope.weights, scope.episodes),
        "server": (scope.infer(">"),),
        "trainer": (rpc("*", f"tinker-{scope.job}", "*"), scope.snapshot("*")),
        "sampler": tuple(
            rpc("*", f"tinker-{scope.job}", verb)
            for verb in ("sample", f"sampled-{actor}", "chat", "complete", "cancel")
        ),
    }.get(identity.role, (scope.weights,))
    if follow is not None and identity.role == "server":
        followed = JobScope(scope.user, follow)
        weights = followed.bucket_weights
        readable = _readable(f"KV_{weights}", f"OBJ_{weights}")
        publish = (*publish, followed.weights_join, *readable)
        hears = (*hears, followed.weights)
    if judge is not None and identity.role == "environment":
        judging = JobScope(scope.user, judge)
        publish = (*publish, judging.infer("chat"), judging.infer("cancel"))
    for job in teachers if identity.role == "generator" else ():
        teacher = JobScope(scope.user, job)
        publish = (*publish, teacher.infer("complete"), teacher.infer("cancel"))
    return Permissions(
        publish=(
            *publish,
            scope.store(identity.role) + ".>",
            *(_readable(f"OBJ_{scope.object_checkpoints}") if loads else ()),
            *inboxes,
            *((_TOOLS_INBOX,) if listed else ()),
        ),
        subscribe=(
            f"{scope.inbox(actor)}.>",
            scope.control(actor),
            f"{scope.control(actor)}.>",
            scope.control_by("*", actor),
            *hears,
            *((_DISCOVERY,) if listed else ()),
        ),
    )


def _learner(scope: JobScope, actor: str) -> tuple[str, ...]:
    weights, checkpoints = scope.bucket_weights, scope.object_checkpoints
    return (
        *_common(scope, actor),
        scope.rank("*", "*"),
        scope.task("*"),
        scope.validation_task("*", "*"),
        scope.rollout("*"),
        scope.batch,
        scope.metric,
        scope.trace,
        scope.weights,
        f"$KV.{BUCKET_EVALS}.{scope.key}.*",
        f"$KV.{weights}.>",
        f"$O.{weights}.>",
        f"$JS.API.STREAM.PURGE.{scope.stream_rollout}",
        f"$JS.API.STREAM.PURGE.{scope.stream_task}",
        f"$JS.API.STREAM.PURGE.{scope.stream_validation}",
        f"$JS.API.STREAM.PURGE.KV_{weights}",
        f"$JS.API.STREAM.PURGE.OBJ_{weights}",
        f"$O.{checkpoints}.>",
        f"$JS.API.STREAM.PURGE.OBJ_{checkpoints}",
        *_readable(f"OBJ_{checkpoints}"),
        *_readable(*(f"tmq-{scope.user}-{scope.job}-{kind}" for kind in STREAMS)),
        rpc(scope.user, "scheduler", "weights-room"),
        _env(scope),
    )


def _rank(scope: JobScope, actor: str) -> tuple[str, ...]:
    return (*_common(scope, actor), *_readable(scope.stream_rollout))


def _generator(scope: JobScope, actor: str) -> tuple[str, ...]:
    return (
        *_common(scope, actor),
        scope.rollout("*"),
        scope.weights_join,
        scope.gpu_turn("learner"),
        scope.segment("*"),
        scope.dead,
        f"$JS.API.CONSUMER.MSG.NEXT.{scope.stream_task}.{TASK_CONSUMER}",
        f"$JS.ACK.{scope.stream_task}.{TASK_CONSUMER}.>",
        *_validates(scope),
        f"$JS.API.STREAM.PURGE.{scope.stream_segment}",
        _there(scope.stream_dead),
        *_readable(scope.stream_task, scope.stream_rollout, scope.stream_segment),
        _env(scope),
    )


def _evaluator(scope: JobScope, actor: str) -> tuple[str, ...]:
    return (
        *_common(scope, actor),
        scope.weights_join,
        scope.metric,
        *_validates(scope),
        _env(scope),
    )


def _validates(scope: JobScope) -> tuple[str, ...]:
    """Return the right to take validation tasks and to store their results."""
    stream = scope.stream_validation
    return (
        scope.validation_result("*", "*"),
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{VALIDATION_CONSUMER}",
        f"$JS.ACK.{stream}.{VALIDATION_CONSUMER}.>",
        *_readable(stream),
    )


def _server(scope: JobScope, actor: str) -> tuple[str, ...]:
    games = f"{PREFIX}.job.{scope.user}.{scope.job}.play.*.env.>"
    return (*_common(scope, actor), _env(scope), games)


def _sampler(scope: JobScope, actor: str) -> tuple[str, ...]:
    usage = rpc(scope.user, "scheduler", "tinker-usage")
    return (*_common(scope, actor), f"{inbox('tinker')}.>", scope.snapshot("*"), usage)


def _trainer(scope: JobScope, actor: str) -> tuple[str, ...]:
    """Return the rights to the logs of all operations and results."""
    streams = (scope.stream_operation, scope.stream_result)
    return (
        *_common(scope, actor),
        scope.all_operations,
        scope.all_results,
        scope.metric,
        rpc(scope.user, "scheduler", "tinker-usage"),
        *(f"$JS.API.STREAM.PURGE.{stream}" for stream in streams),
        *_readable(*streams),
        f"{inbox('tinker')}.>",
    )


def _environment(scope: JobScope, actor: str) -> tuple[str, ...]:
    """Return an environment host's rights: no JetStream, like the users whose code it runs.

    It forwards calls of programs to its episodes' generators.
    """
    return (scope.episodes,)


def _common(scope: JobScope, actor: str) -> tuple[str, ...]:
    """Return what learner, generators and evaluators may publish to."""
    weights = scope.bucket_weights
    return (
        _INFO,
        scope.event,
        f"{inbox('scheduler')}.>",
        f"$KV.{BUCKET_ACTORS}.{scope.key}.{actor}",
        _there(scope.stream_feed),
        *_readable(f"KV_{weights}", f"OBJ_{weights}"),
    )


def _readable(*streams: str) -> tuple[str, ...]:
    verbs = (
        "$JS.API.DIRECT.GET.{}",
        "$JS.API.DIRECT.GET.{}.>",
        "$JS.API.STREAM.MSG.GET.{}",
    )
    rights = (verb.format(stream) for stream in streams for verb in verbs)
    return (*rights, *map(_there, streams))


def _there(stream: str) -> str:
    """Return the right to check whether a stream exists."""
    return f"$JS.API.STREAM.INFO.{stream}"


def _env(scope: JobScope) -> str:
    return f"{PREFIX}.job.{scope.user}.{scope.job}.env.>"


# -- programs --------------------------------------------------------------------------------------


def episode_permissions(identity: EpisodeIdentity) -> Permissions:
    """Return the permissions of an episode's key: its calls and posts, and their answers.

    Its holder is any program, or a gateway on a program's behalf.
    """
    scope, episode = identity.scope, identity.episode
    return Permissions(
        publish=tuple(scope.episode(episode, verb) for verb in _EPISODE_VERBS),
        subscribe=(f"{scope.episode_inbox(episode)}.>",),
    )


# -- services --------------------------------------------------------------------------------------


def service_permissions(name: str) -> Permissions:
    """Return the permissions of a service of the pool.

    Raises KeyError for an unknown name.
    """
    own = (f"{inbox(name)}.>", _DISCOVERY)
    beats = f"$KV.{BUCKET_ACTORS}.pool.>"
    return {
        "auth": Permissions((">",), (">",)),
        "scheduler": Permissions(
            (">",),
            (">",),
            deny_publish=(
                f"$KV.{BUCKET_USERS}.>",
                f"$JS.API.STREAM.*.KV_{BUCKET_USERS}",
                f"$JS.API.STREAM.*.{STREAM_AUDIT}",
                f"$JS.API.STREAM.*.{STREAM_REFUSALS}",
                REFUSALS,
            ),
        ),
        "node": Permissions(
            (
                _INFO,
                beats,
                f"$KV.{BUCKET_NODES}.>",
                f"{PREFIX}.job.*.*.log.*",
                node("*", "status"),
                rpc("node", "keys", "job"),
                rpc("node", "secrets", "open"),
                f"{inbox('scheduler')}.>",
                f"{inbox('node')}.>",
                _TOOLS_INBOX,
                *_readable(f"KV_{BUCKET_NODES}", f"KV_{BUCKET_ACTORS}"),
            ),
            (*own, node("*", "*")),
        ),
        "gateway": Permissions(
            (
                _INFO,
                beats,
                _TOOLS_INBOX,
                rpc("gateway", "*", "fetch"),  # of trainers, with tickets signed by them
                *_readable(*(f"KV_{bucket}" for bucket in (*SHARED, BUCKET_NODES))),
            ),
            (*own, f"{tinker_inbox('gateway')}.>", f"{PREFIX}.job.*.*.metric"),
        ),
    }[name]
