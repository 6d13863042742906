"""Who may publish to which subject and listen to which: asked of a broker, as a table.

The subjects are all that `schemas/wire/subjects.py` builds for a job, and what JetStream is asked
about each of its streams and buckets.
"""

import inspect
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nats
from nats.aio.client import Client
from tinkermq.broker.client.keys import EpisodeIdentity, JobIdentity
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.permissions import (
    Permissions,
    admin_permissions,
    episode_permissions,
    job_permissions,
    service_permissions,
    user_permissions,
)
from tinkermq.schemas.wire import subjects as names
from tinkermq.schemas.wire.subjects import JobScope, acting, rpc

from tests.support.waiting import until

TABLE = Path(__file__).parents[1] / "broker" / "permissions.txt"
JOB = JobScope("ada", "j1")
OTHERS = (JobScope("ada", "j2"), JobScope("bob", "j1"))
"""Another job of the same user, and one of somebody else."""
ROLES = (
    *("learner", "rank", "generator", "evaluator"),
    *("environment", "server", "trainer", "sampler"),
)
BUCKETS = sorted(value for name, value in vars(names).items() if name.startswith("BUCKET_"))
WILDCARDS = (
    *(">", "*", "tmq.>", "tmq.v1.>", "tmq.v1.job.>", "tmq.v1.job.*.*.metric", "tmq.v1.job.ada.>"),
    *("tmq.v1.rpc.>", "tmq.v1.rpc.*.scheduler.submit", "tmq.v1.rpc.ada.>", "tmq.v1.as.>"),
    *("tmq.v1.as.*.ada.>", "tmq.v1.node.>", "tmq.v1.job.ada.*.store.>", "tmq.v1.job.ada.*.ctl.>"),
    *("$SRV.>", "$SRV.PING", "$KV.>", "$KV.tmq-evals.>", "$O.>", "$JS.>", "$SYS.>"),
    *("_INBOX.>", "_INBOX_ada.>", "_INBOX_bob.>", "_INBOX_job.>", "_INBOX_job.ada.>"),
    *("_INBOX_scheduler.>", "_INBOX_tinker.ada.>"),
)
_API = (
    *("STREAM.INFO.{}", "STREAM.CREATE.{}", "STREAM.UPDATE.{}", "STREAM.DELETE.{}"),
    *("STREAM.PURGE.{}", "STREAM.MSG.GET.{}", "STREAM.MSG.DELETE.{}", "DIRECT.GET.{}"),
    *("DIRECT.GET.{}.x", "CONSUMER.CREATE.{}", "CONSUMER.CREATE.{}.c.x", "CONSUMER.NAMES.{}"),
    *("CONSUMER.DURABLE.CREATE.{}.c", "CONSUMER.DELETE.{}.c", "CONSUMER.MSG.NEXT.{}.generators"),
    "CONSUMER.MSG.NEXT.{}.validation",
)
_VERBS = {
    "env": ("step", "close"),
    "episode": ("call", "cancel", "delivered", "post"),
    "infer": ("chat", "complete", "play", "cancel"),
    "infer_at": ("chat",),
    "rank": ("begin", "order-rank-0"),
    "snapshot": ("find", "fetch"),
}
_VALUES: dict[str, tuple[str, ...]] = {
    "actor": ("learner", "generator-0", "server-0"),
    "admin": ("root", "ada"),
    "episode": ("g-1-0",),
    "host": ("environment-0",),
    "learner": ("learner",),
    "number": ("1",),
    "role": (*ROLES,),
    "seq": ("1",),
    "session": ("s1",),
    "user": ("ada", "bob"),
    "version": ("3",),
}


_SUBJECT = re.compile(r""" to ["']([^"']+)["']""")
_LAST = "$SYS.nobody"
"""Refused to everybody: the refusals of all before it have come."""


class Rights(NamedTuple):
    """Subjects to which one connection may publish, and to which it may listen."""

    publish: frozenset[str]
    listen: frozenset[str]


def _names(scope: JobScope) -> Iterator[tuple[str, str]]:
    """Yield each name that a scope builds, with the attribute that builds it."""
    for name, member in vars(JobScope).items():
        if name.startswith("_") or name in ("key", "user", "job", "session", "of_session"):
            continue
        if isinstance(member, property):
            yield name, getattr(scope, name)
        elif not isinstance(member, staticmethod):
            parameters = list(inspect.signature(member).parameters)[1:]
            values = [_VERBS[name] if each == "verb" else _VALUES[each] for each in parameters]
            for arguments in itertools.product(*values):
                yield name, getattr(scope, name)(*arguments)


def _stored(scope: JobScope) -> list[str]:
    """Return the names of the scope's streams, as JetStream has them."""
    prefixes = {"stream_": "", "bucket_": "KV_", "object_": "OBJ_"}
    return [
        prefix + value
        for name, value in _names(scope)
        for start, prefix in prefixes.items()
        if name.startswith(start)
    ]


def subjects_of(scope: JobScope) -> list[str]:
    """Return the subjects of one job, its inboxes, and its keys in the buckets."""
    plain = [
        f"{value}.x" if "inbox" in name else value.replace(">", "x").replace("*", "x")
        for name, value in _names(scope)
        if not name.startswith(("stream_", "bucket_", "object_"))
    ]
    buckets = [f"$KV.{bucket}.{scope.key}" for bucket in BUCKETS]
    inside = [f"$KV.{scope.bucket_weights}.x", f"$O.{scope.object_weights}.C.x"]
    session = scope.of_session("s1")
    return [
        *plain,
        *(session.env_reset, session.env("h", "step")),
        *(f"{bucket}{more}" for bucket in buckets for more in ("", ".learner", ".generator-0")),
        *(*inside, f"$O.{scope.object_checkpoints}.C.x", f"{scope.store('learner')}.get.x"),
        *(f"$JS.ACK.{scope.stream_task}.generators.1.1.1.1.0", f"_INBOX_{scope.user}.x"),
        *(rpc(scope.user, service, "x") for service in ("scheduler", "users", "store")),
        *(rpc(scope.user, f"tinker-{scope.job}", verb) for verb in ("sample", "submit", "fetch")),
    ]


def all_subjects() -> list[str]:
    """Return all subjects that the table has, in its order."""
    pool = (
        *(f"$JS.API.{verb}" for verb in ("INFO", "STREAM.LIST", "STREAM.NAMES")),
        *(f"$JS.API.{verb.format('KV_tmq-users')}" for verb in _API),
        *(f"$JS.API.{verb.format(f'KV_{bucket}')}" for bucket in BUCKETS for verb in _API),
        *(f"$JS.API.{verb.format(names.STREAM_AUDIT)}" for verb in _API),
        *(names.AUDIT, names.REFUSALS, "$SYS.REQ.USER.AUTH", "$SRV.PING", "_INBOX.x"),
        *("$KV.tmq-users.user.ada", "$KV.tmq-nodes.n", "$KV.tmq-actors.pool.n"),
        *(f"_INBOX_{name}.x" for name in (*names.SERVICES, "root")),
        *(names.node("n", verb) for verb in ("sync", "status", "remove")),
        *(rpc("node", service, verb) for service, verb in (("keys", "job"), ("secrets", "open"))),
        *(rpc("gateway", "tinker-j1", verb) for verb in ("fetch", "export", "submit")),
        *(rpc("ada", "scheduler", verb) for verb in ("weights-room", "tinker-usage")),
        *(f"_INBOX_tinker.{user}.x" for user in ("ada", "bob", "gateway")),
        *(
            acting(admin, user, service, "stop")
            for admin in ("root", "ada")
            for user in ("ada", "bob")
            for service in ("scheduler", "store", "users")
        ),
    )
    found = [*pool, *subjects_of(JOB)]
    found += [f"$JS.API.{verb.format(stream)}" for stream in _stored(JOB) for verb in _API]
    for scope in OTHERS:
        found += subjects_of(scope)
        found += [
            f"$JS.API.{verb.format(stream)}"
            for stream in _stored(scope)
            for verb in ("DIRECT.GET.{}", "STREAM.INFO.{}", "STREAM.PURGE.{}")
        ]
    return list(dict.fromkeys(found))


ALL = Rights(frozenset(all_subjects()), frozenset([*all_subjects(), *WILDCARDS]))


def everybody() -> dict[str, Permissions]:
    """Return the permissions of each kind of connection, all but those of the pool's heads."""

    def process(role: str, **more: Any) -> Permissions:
        actor = role if role in ("learner", "trainer") else f"{role}-0"
        return job_permissions(JobIdentity("ada", "j1", role, actor, 1), **more)

    return {
        "user": user_permissions("ada"),
        "admin": admin_permissions("root"),
        **{role: process(role) for role in ROLES},
        "server+follow": process("server", follow="j2"),
        "environment+judge": process("environment", judge="j2"),
        "generator+teacher": process("generator", teachers=["j2"]),
        "program": episode_permissions(EpisodeIdentity("ada", "j1", "g-1-0")),
        "node": service_permissions("node"),
        "gateway": service_permissions("gateway"),
    }


async def refused(client: Client, errors: list[str], subjects: Rights) -> Rights:
    """Try subjects with a connection, whose errors are added to `errors`; return those refused."""
    answers: list[frozenset[str]] = []
    for do, tried in ((client.publish, subjects.publish), (client.subscribe, subjects.listen)):
        errors.clear()
        for subject in (*tried, _LAST):
            await do(subject)
        await until(lambda: _LAST.lower() in "".join(errors[-1:]).lower(), "the last refusal")
        named = {found[1].lower() for text in errors if (found := _SUBJECT.search(text))}
        answers.append(frozenset(subject for subject in tried if subject.lower() in named))
    return Rights(*answers)


async def ask_server(folder: Path) -> dict[str, Rights]:
    """Start a server with the permissions of everybody, and try them."""
    users = [
        {"user": name, "password": "x", "permissions": permissions.claims()}
        for name, permissions in everybody().items()
    ]
    text = json.dumps(users).replace('"pub"', '"publish"').replace('"sub"', '"subscribe"')
    found: dict[str, Rights] = {}
    with NatsServer(
        folder, jetstream=False, extra_config=f"authorization {{ users: {text} }}"
    ) as it:
        for name in everybody():
            errors: list[str] = []

            async def note(error: Exception, errors: list[str] = errors) -> None:
                errors.append(str(error))

            client = await nats.connect(it.url, user=name, password="x", error_cb=note)
            denied = await refused(client, errors, ALL)
            found[name] = Rights(ALL.publish - denied.publish, ALL.listen - denied.listen)
            await client.close()
    return found


def table(found: dict[str, Rights]) -> str:
    """Return a line for each subject that somebody may use; nobody may use the others."""
    lines: list[str] = []
    for way in Rights._fields:
        lines += [f"== {way}"]
        for subject in dict.fromkeys([*all_subjects(), *WILDCARDS]):
            allowed = [name for name, granted in found.items() if subject in getattr(granted, way)]
            lines += [f"{subject}: {' '.join(allowed)}"] if allowed else []
    return "\n".join(lines) + "\n"


def in_table(name: str) -> Rights:
    """Return what the table grants to one kind of connection."""
    publish, _, listen = TABLE.read_text().partition("== listen\n")
    granted = [
        frozenset(
            subject
            for subject, _, allowed in (line.rpartition(": ") for line in part.splitlines())
            if name in allowed.split()
        )
        for part in (publish, listen)
    ]
    return Rights(*granted)
