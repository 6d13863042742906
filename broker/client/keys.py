"""API keys and job keys: creation, parsing and checks.

An API key is `tmq_<user>_<secret>`; the pool stores only its hash. A job key is
`tmqj.<user>.<job>.<role>.<actor>.<attempt>.<signature>`: it is not stored, is checked by its
signature, and is valid only while that attempt of the job has that actor. The key of an episode is
`tmqe_<user>.<job>.<episode>.<signature>`: the job's environment hosts sign it with a secret of the
job, derived from the pool's secret. In a pool without users the signature is random, and only the
host that created it has it.
"""

import hashlib
import hmac
import secrets
import string
from typing import NamedTuple

from ...schemas.wire.errors import AuthError, MessageError
from ...schemas.wire.subjects import JobScope, token

_SECRET_CHARS = 43  # 62**43 > 256**32
_LETTERS = string.digits + string.ascii_letters
_KEY, _JOB_KEY = "tmq", "tmqj"
EPISODE_KEY = "tmqe_"
"""Prefix of the keys of episodes."""
_RANDOM_BYTES = 32


class JobIdentity(NamedTuple):
    """The actor that a job key identifies."""

    user: str
    job: str
    role: str
    actor: str
    attempt: int

    @property
    def scope(self) -> JobScope:
        """The job's names."""
        return JobScope(self.user, self.job)


class EpisodeIdentity(NamedTuple):
    """The episode that a key identifies."""

    user: str
    job: str
    episode: str

    @property
    def scope(self) -> JobScope:
        """The job's names."""
        return JobScope(self.user, self.job)


def new_api_key(user: str) -> str:
    """Return a new API key of a user."""
    return f"{_KEY}_{user}_{_secret()}"


def api_key(user: str, pool_secret: bytes, *request: str) -> str:
    """Return the key of a user that a request creates: a repeated request gets the same key."""
    return f"{_KEY}_{user}_{_derived(pool_secret, 'key', user, *request)}"


def user_of_key(key: str) -> str:
    """Return the user that an API key names.

    Raises AuthError, without the key in it, for another text.
    """
    head, _, secret = key.rpartition("_")
    kind, _, user = head.partition("_")
    if kind != _KEY or not user or len(secret) != _SECRET_CHARS:
        raise AuthError(
            "this is not an API key" if key else "the API key is empty",
            hint="a key looks like tmq_<user>_<secret>; ask an admin for one (`tinkermq user add`)",
        )
    return token(user, what="user")


def key_hash(key: str) -> str:
    """Return the stored hash of a key: 256 random bits need no salt and no slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()


def is_same(first: str, other: str) -> bool:
    """Compare two hashes in constant time."""
    return hmac.compare_digest(first.encode(), other.encode())


def job_key(identity: JobIdentity, secret: bytes) -> str:
    """Return the signed key of an actor of a job."""
    text = ".".join([_JOB_KEY, *map(str, identity)])
    return f"{text}.{_signature(text, secret)}"


def read_job_key(key: str) -> JobIdentity | None:
    """Return the actor that a job key names, unchecked; None if this is not a job key."""
    parts = key.split(".")
    if len(parts) != 7 or parts[0] != _JOB_KEY or not parts[5].isdecimal():
        return None
    try:
        for part in parts[1:5]:
            token(part, what="part of a job key")
    except MessageError:
        return None
    return JobIdentity(parts[1], parts[2], parts[3], parts[4], int(parts[5]))


def check_job_key(key: str, secret: bytes) -> JobIdentity | None:
    """Return the actor of a job key, or None if it was not signed with `secret`."""
    text, _, signature = key.rpartition(".")
    if not is_same(signature, _signature(text, secret)):
        return None
    return read_job_key(key)


def episode_secret(user: str, job: str, pool_secret: bytes) -> bytes:
    """Return the secret that signs the keys of one job's episodes; it is useless for other jobs."""
    return hmac.digest(pool_secret, "\0".join(("episodes", user, job)).encode(), hashlib.sha256)


def episode_key(identity: EpisodeIdentity, secret: bytes | None) -> str:
    """Return the key of an episode; without a secret a random one."""
    text = EPISODE_KEY + ".".join(identity)
    signed = secrets.token_hex(_RANDOM_BYTES) if secret is None else _signature(text, secret)
    return f"{text}.{signed}"


def read_episode_key(key: str) -> EpisodeIdentity | None:
    """Return the episode that a key names, unchecked; None if this is not an episode key."""
    parts = key.removeprefix(EPISODE_KEY).split(".")
    if not key.startswith(EPISODE_KEY) or len(parts) != 4 or len(parts[3]) != 2 * _RANDOM_BYTES:
        return None
    try:
        for part in parts[:3]:
            token(part, what="part of an episode's key")
    except MessageError:
        return None
    return EpisodeIdentity(*parts[:3])


def check_episode_key(key: str, pool_secret: bytes) -> EpisodeIdentity | None:
    """Return the episode of a key, or None if it was not signed with the job's secret."""
    identity = read_episode_key(key)
    if identity is None:
        return None
    secret = episode_secret(identity.user, identity.job, pool_secret)
    return identity if is_same(key, episode_key(identity, secret)) else None


def _secret() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_SECRET_CHARS))


def _derived(secret: bytes, *parts: str) -> str:
    """Return a digest of a secret and some words that reveals neither."""
    digest = hmac.digest(secret, "\0".join(("made", *parts)).encode(), hashlib.sha512)
    number, letters = int.from_bytes(digest), ""
    for _ in range(_SECRET_CHARS):
        number, letter = divmod(number, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters


def _signature(text: str, secret: bytes) -> str:
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
