"""Every subject, stream, bucket and consumer name of the system, built only here.

Subjects are lower case, most general token first; `<u>` is the user, `<j>` the job id. Stream and
bucket names hold user and job as whole tokens, so that permissions can name them.
"""

import re
from dataclasses import dataclass

from .errors import MessageError

PREFIX = "tmq.v1"
DEFAULT_USER = "local"
"""The only user of a pool without authentication."""

BUCKET_JOBS = "tmq-jobs"
BUCKET_ARCHIVE = "tmq-archive"
BUCKET_COPIES = "tmq-copies"
BUCKET_NODES = "tmq-nodes"
BUCKET_ACTORS = "tmq-actors"
BUCKET_EVALS = "tmq-evals"
BUCKET_REQUESTS = "tmq-requests"
BUCKET_LEASES = "tmq-leases"
BUCKET_MACHINES = "tmq-machines"
BUCKET_USERS = "tmq-users"
BUCKET_SECRETS = "tmq-secrets"
STREAM_AUDIT = "tmq-audit"
STREAM_REFUSALS = "tmq-refusals"
AUDIT = f"{PREFIX}.audit"
REFUSALS = f"{PREFIX}.refusals"

TASK_CONSUMER = "generators"
VALIDATION_CONSUMER = "validation"
SERVICES = ("auth", "scheduler", "node", "gateway")
"""Services of the pool, each with credentials of its own."""
RESERVED_USERS = frozenset({*SERVICES, "job", "pool", "sys", "tinker"})
"""Names that users cannot have, because subjects, keys and inboxes use them."""

_USER = re.compile(r"[a-z0-9][a-z0-9_]{0,31}")
_TOKEN = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,63}$"
"""A valid token of a subject; for fields whose value becomes one."""


def token(value: str, *, what: str) -> str:
    """Return `value` if it is a valid token of a subject, else raise MessageError."""
    if not _TOKEN.fullmatch(value):
        raise MessageError(
            f"{what} {value!r} cannot be part of a subject",
            hint="use 1 to 64 lower-case letters, digits, '-' and '_', starting with a letter "
            "or digit",
        )
    return value


def rpc(user: str, service: str, method: str) -> str:
    """Return the subject of a request to a service on behalf of `user` (`*`: for its own
    listening).
    """
    return f"{PREFIX}.rpc.{user}.{service}.{method}"


def acting(admin: str, user: str, service: str, method: str) -> str:
    """Subject of an admin's request on behalf of `user`; only the admin may publish it.

    It identifies the admin, unlike the reply subject, which the sender chooses.
    """
    return f"{PREFIX}.as.{admin}.{user}.{service}.{method}"


def user_name(value: str) -> str:
    """Return `value` if it is a valid user name, else raise MessageError.

    It has no '-', which joins user, job and kind in stream names.
    """
    if not _USER.fullmatch(value):
        raise MessageError(
            f"{value!r} cannot be the name of a user",
            hint="use 1 to 32 lower-case letters, digits and '_', starting with a letter or digit",
        )
    if value in RESERVED_USERS:
        raise MessageError(f"the name {value!r} is reserved", hint="choose another name")
    return value


def inbox(user: str) -> str:
    """Prefix of the inboxes of a user or service, where only they may listen."""
    return f"_INBOX_{user}"


def tinker_inbox(user: str) -> str:
    """Prefix of the inboxes for answers of other users' trainers.

    Only the user may listen there, and trainers may answer only there.
    """
    return f"{inbox('tinker')}.{user}"


def user_store(user: str, caller: str = "") -> str:
    """Subject prefix of a user's requests, or an admin's for the user, to the store proxy."""
    if caller not in ("", user):
        return acting(caller, user, "store", "").rstrip(".")
    return rpc(user, "store", "").rstrip(".")


def node(name: str, verb: str) -> str:
    """Subject of a request to a node: `sync` or `status`."""
    return f"{PREFIX}.node.{name}.{verb}"


def user_of_rpc(subject: str) -> str:
    """Return the user of a request, which only its subject identifies."""
    parts = subject.split(".")
    return parts[4] if parts[2] == "as" else parts[3]


def caller_of_rpc(subject: str) -> str:
    """Return the sender of a request: its user, or the acting admin."""
    return subject.split(".")[3]


def number_of(subject: str) -> int:
    """Return the task number at the end of a task or rollout subject.

    Raises MessageError when the last token is not a number.
    """
    last = subject.rsplit(".", 1)[-1]
    if not (last.isascii() and last.isdigit()) or len(last) > 18:
        raise MessageError(f"subject {subject!r} does not end in a task number")
    return int(last)


_KIND_OF_STREAM = {"metric": "feed", "event": "feed"}


def stream_of(subject: str) -> str:
    """Return the stream that stores a subject of a job, a bucket or an object store.

    Any other subject is returned unchanged.
    """
    parts = subject.split(".")
    if parts[0] in ("$KV", "$O") and len(parts) > 2:
        return f"{'KV' if parts[0] == '$KV' else 'OBJ'}_{parts[1]}"
    if subject.startswith(f"{PREFIX}.job.") and len(parts) > 5:
        return f"tmq-{parts[3]}-{parts[4]}-{_KIND_OF_STREAM.get(parts[5], parts[5])}"
    return subject


@dataclass(frozen=True)
class JobScope:
    """The names of one job of one user."""

    user: str
    job: str
    session: str = ""
    """One caller's games within an inference job; empty for those of the job itself."""

    def __post_init__(self) -> None:
        token(self.user, what="user")
        token(self.job, what="job id")
        if self.session:
            token(self.session, what="session")

    @property
    def key(self) -> str:
        """Key of the job in the shared buckets."""
        return f"{self.user}.{self.job}"

    def _subject(self, tail: str) -> str:
        inside = f"play.{self.session}." if self.session else ""
        return f"{PREFIX}.job.{self.user}.{self.job}.{inside}{tail}"

    def _stream(self, kind: str) -> str:
        return f"tmq-{self.user}-{self.job}-{kind}"

    @staticmethod
    def all_batches() -> str:
        """Subject of the batch records of all jobs."""
        return f"{PREFIX}.job.*.*.batch"

    def task(self, number: int | str) -> str:
        """Subject of task `number` (`*` for all)."""
        return self._subject(f"task.{number}")

    @property
    def appended(self) -> str:
        """Subject on which the server announces a new entry of the rollout log."""
        return self._subject("appended")

    def rollout(self, number: int | str) -> str:
        """Subject of the group of task `number` (`*` for all)."""
        return self._subject(f"rollout.{number}")

    def segment(self, number: int | str, episode: int | str = "*") -> str:
        """Subject of the segments of one episode of task `number` (`*` for all)."""
        return self._subject(f"segment.{number}.{episode}")

    def validation_task(self, version: int | str, number: int | str) -> str:
        """Subject of a task that validates a version (`*` for all)."""
        return self._subject(f"validation.task.{version}.{number}")

    def validation_result(self, version: int | str, number: int | str) -> str:
        """Subject of the result of such a task (`*` for all)."""
        return self._subject(f"validation.result.{version}.{number}")

    @property
    def validated(self) -> str:
        """Subject on which the server announces a stored result of a validation task."""
        return self._subject("validated")

    @property
    def batch(self) -> str:
        """Subject of the learner's batch records."""
        return self._subject("batch")

    @property
    def dead(self) -> str:
        """Subject of failed tasks."""
        return self._subject("dead")

    @property
    def metric(self) -> str:
        """Subject of the metrics by step."""
        return self._subject("metric")

    @property
    def event(self) -> str:
        """Subject of the job's events."""
        return self._subject("event")

    @property
    def trace(self) -> str:
        """Subject of the traces by step."""
        return self._subject("trace")

    def operation(self, user: str, session: str, number: int | str, seq: int | str) -> str:
        """Subject of one operation of a user's model (`*` for all)."""
        return self._subject(f"op.{user}.{token(session, what='session')}.{number}.{seq}")

    @property
    def all_operations(self) -> str:
        """Subjects of all operations."""
        return self._subject("op.>")

    def result(self, user: str, session: str, number: int | str, seq: int | str) -> str:
        """Subject of the result of an operation."""
        return self._subject(f"result.{user}.{token(session, what='session')}.{number}.{seq}")

    @property
    def claim_of_results(self) -> str:
        """Subject under which a trainer claims the log of results."""
        return self._subject("result.claim")

    @property
    def all_results(self) -> str:
        """Subjects of all results."""
        return self._subject("result.>")

    def snapshot(self, verb: str) -> str:
        """Subject of `find` or `fetch`: samplers' requests to their trainer."""
        return self._subject(f"snapshot.{verb}")

    def log(self, actor: str) -> str:
        """Subject of one actor's log lines (`*` for all)."""
        return self._subject(f"log.{actor}")

    @property
    def weights(self) -> str:
        """Subject on which a new version is announced (core NATS, no stream)."""
        return self._subject("weights")

    @property
    def weights_join(self) -> str:
        """Subject on which receivers join the learner's next transfer."""
        return self._subject("weights.join")

    @property
    def env_describe(self) -> str:
        """Subject on which any environment host describes its game."""
        return self._subject("env.describe")

    @property
    def env_reset(self) -> str:
        """Subject on which one of the environment hosts starts an episode."""
        return self._subject("env.reset")

    @property
    def env_give(self) -> str:
        """Subject on which a host in the pool gives an episode to a client."""
        return self._subject("env.give")

    def env(self, host: str, verb: str) -> str:
        """Subject of `step` or `close` at the host that holds the episode."""
        return self._subject(f"env.{host}.{verb}")

    def episode(self, episode: str, verb: str) -> str:
        """Subject of `call`, `cancel` or `delivered` at an episode's generator, or of `post` at its
        host."""
        return self._subject(f"episode.{token(episode, what='episode')}.{verb}")

    @property
    def episode_posts(self) -> str:
        """Subjects on which hosts receive posts of programs."""
        return self._subject("episode.*.post")

    @property
    def episode_keys(self) -> str:
        """Subject on which a host requests the secret for episode keys."""
        return self._subject("episode.keys")

    @staticmethod
    def all_episode_keys() -> str:
        """Subject of requests for the secrets of all jobs."""
        return f"{PREFIX}.job.*.*.episode.keys"

    def episode_inbox(self, episode: str) -> str:
        """Prefix of the inboxes of an episode key's holder."""
        return self.inbox(f"episode.{token(episode, what='episode')}")

    @property
    def episodes(self) -> str:
        """Subjects of all episodes of programs."""
        return self._subject("episode.>")

    def store(self, role: str) -> str:
        """Subject prefix of requests of one role's actors to the store proxy."""
        return self._subject(f"store.{role}")

    def inbox(self, actor: str) -> str:
        """Prefix of the inboxes of one actor (`>` below the job: of all)."""
        return f"_INBOX_job.{self.user}.{self.job}.{actor}"

    def of_session(self, session: str) -> "JobScope":
        """Return the names of one caller's games within an inference job."""
        return JobScope(self.user, self.job, session)

    def infer(self, verb: str) -> str:
        """Subject of `chat`, `complete` or `play` at any server, or of `cancel` at all of them."""
        return self._subject(f"infer.{verb}")

    def infer_at(self, actor: str, verb: str) -> str:
        """Subject of `chat` or `complete` at one server, which refuses what would wait there."""
        return self._subject(f"infer.{verb}.{actor}")

    def rank(self, actor: str, verb: str) -> str:
        """Subject of `begin`, `order-<process>` or `look-<process>`: learner to rank."""
        return self._subject(f"rank.{actor}.{verb}")

    def control(self, actor: str) -> str:
        """Subject of control requests to one actor."""
        return self._subject(f"ctl.{actor}")

    def gpu_turn(self, learner: str) -> str:
        """Subject on which a generator requests a turn on a shared GPU."""
        return f"{self.control(learner)}.turn"

    def control_by(self, admin: str, actor: str) -> str:
        """Subject of an admin's control requests to an actor of another user's job."""
        return acting(admin, self.user, self.job, f"ctl.{actor}")

    @property
    def stream_task(self) -> str:
        """Work-queue stream of tasks."""
        return self._stream("task")

    @property
    def stream_rollout(self) -> str:
        """Log stream of finished groups."""
        return self._stream("rollout")

    @property
    def stream_validation(self) -> str:
        """Work-queue stream of validation tasks, and of results until the version's are known."""
        return self._stream("validation")

    @property
    def stream_segment(self) -> str:
        """Stream of the segments of running episodes."""
        return self._stream("segment")

    @property
    def stream_batch(self) -> str:
        """Log stream of batch records."""
        return self._stream("batch")

    @property
    def stream_dead(self) -> str:
        """Log stream of failed tasks."""
        return self._stream("dead")

    @property
    def stream_operation(self) -> str:
        """Log stream of operations on users' models."""
        return self._stream("op")

    @property
    def stream_result(self) -> str:
        """Limited stream of operations' results."""
        return self._stream("result")

    @property
    def stream_feed(self) -> str:
        """Limited stream of metrics and events."""
        return self._stream("feed")

    @property
    def stream_trace(self) -> str:
        """Limited stream of the traces."""
        return self._stream("trace")

    @property
    def stream_log(self) -> str:
        """Limited stream of the actors' log lines."""
        return self._stream("log")

    @property
    def bucket_weights(self) -> str:
        """KV bucket of the weight manifests."""
        return self._stream("weights")

    @property
    def object_weights(self) -> str:
        """Object store of the weight payloads."""
        return self._stream("weights")

    @property
    def object_checkpoints(self) -> str:
        """Object store of the checkpoints, with `storage.url: "broker:"`."""
        return self._stream("checkpoints")
