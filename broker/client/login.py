"""The login of a process: its identity and its secret.

In this order: a key passed as an argument, the file that `$TINKERMQ_CREDENTIALS` names, with a
service's credentials or a key, the key in `$TINKERMQ_API_KEY`, else anonymous: a broker without
authentication trusts the name that a client states. Secrets come from the environment or from
files, never from a command line.
"""

import hmac
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...schemas.local.process import erase_variable
from ...schemas.wire.errors import AuthError, BrokerError
from ...schemas.wire.subjects import (
    DEFAULT_USER,
    SERVICES,
    JobScope,
    acting,
    inbox,
    rpc,
    token,
    user_store,
)
from . import keys

KEY_VARIABLE = "TINKERMQ_API_KEY"
CREDENTIALS_VARIABLE = "TINKERMQ_CREDENTIALS"
CA_VARIABLE = "TINKERMQ_CA"
_SEED = "nkeys_seed_str"
AS_VARIABLE = "TINKERMQ_AS"
"""Variable by which an admin names the user whose jobs to read or stop."""
SECRET_VARIABLES = (CREDENTIALS_VARIABLE, KEY_VARIABLE, AS_VARIABLE)
"""Variables of the login, which started processes do not inherit."""
_GUESTS = frozenset({"environment"})


@dataclass(frozen=True)
class Login:
    """Identity and secret of one connection."""

    user: str
    """The user on whose behalf requests are sent, or the service."""
    inbox: str
    """Prefix of its inboxes."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """Options for nats-py, including the secret."""
    store: str = ""
    """Subject prefix of requests to the store proxy; empty if they are not needed."""
    is_guest: bool = False
    """Whether all stored data, not only the shared buckets, is accessed through the store proxy."""
    caller: str = ""
    """The admin who acts for the user; empty for the user himself."""

    @property
    def is_authenticated(self) -> bool:
        """Whether it has a secret, as every login in a pool with users."""
        return bool(self.options)

    def rpc(self, service: str, method: str) -> str:
        """Return the subject of a request to a service, on behalf of the user."""
        if self.caller:
            return acting(self.caller, self.user, service, method)
        return rpc(self.user, service, method)

    def control(self, scope: JobScope, actor: str) -> str:
        """Return the subject of a control request to an actor of a job of the user."""
        return scope.control_by(self.caller, actor) if self.caller else scope.control(actor)

    def derived_key(self, purpose: str) -> bytes | None:
        """Return 32 secret bytes for `purpose`, derived from a service's seed, or None."""
        seed = self.options.get(_SEED)
        if seed is None:
            return None
        return hmac.digest(str(seed).encode(), purpose.encode(), "sha256")


def find_login(user: str, api_key: str | None, credentials_file: Path | None = None) -> Login:
    """Return the login from the arguments and the environment.

    A given key takes precedence; an empty one means no key. Raises AuthError for a malformed key,
    BrokerError for an unreadable credentials file.
    """
    if api_key is not None:
        return _of_key(api_key)
    path = credentials_file or os.environ.get(CREDENTIALS_VARIABLE)
    if path:
        return _of_file(Path(path))
    key = os.environ.get(KEY_VARIABLE)
    return _of_key(key) if key else anonymous(user)


def anonymous(user: str = DEFAULT_USER) -> Login:
    """Return a login without any secret; the environment is ignored."""
    return Login(token(user, what="user"), inbox(user))


def of_program(key: str, *, with_users: bool = True) -> Login:
    """Return the login of a program with its episode's key; AuthError for another key.

    Without users the broker admits everyone, and the episode's host checks its key.
    """
    episode = keys.read_episode_key(key)
    if episode is None:
        raise AuthError("this is not the key of an episode", hint="a key looks like tmqe_…")
    options = {"user": "job", "password": key} if with_users else {}
    scope = episode.scope
    inboxes, store = scope.episode_inbox(episode.episode), scope.store("episode")
    return Login(episode.user, inboxes, options, store, is_guest=with_users)


def take_login() -> Login:
    """Return the login of a service, and remove every secret from its environment.

    A service calls this before it listens: connections and processes that it starts for others then
    have their rights, not its own. Raises what `find_login` raises.
    """
    try:
        return find_login(DEFAULT_USER, None)
    finally:
        erase_login()


def erase_login() -> None:
    """Remove the login from the environment, so that started processes do not have it."""
    for name in SECRET_VARIABLES:
        erase_variable(name)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the login of the one who starts a process in it."""
    return {name: value for name, value in environment.items() if name not in SECRET_VARIABLES}


def _of_key(key: str) -> Login:
    key = key.strip()  # the line end that secret files and editors add
    process = keys.read_job_key(key)
    if process is not None:
        return Login(
            user=process.user,
            inbox=process.scope.inbox(process.actor),
            options={"user": "job", "password": key},
            store=process.scope.store(process.role),
            is_guest=process.role in _GUESTS,
        )
    if keys.read_episode_key(key) is not None:
        return of_program(key)
    owner = keys.user_of_key(key)
    options = {"user": owner, "password": key}
    user = token(os.environ.get(AS_VARIABLE) or owner, what=f"${AS_VARIABLE}")
    caller = owner if user != owner else ""
    store = user_store(user, caller)
    return Login(user, inbox(owner), options, store, is_guest=True, caller=caller)


def _of_file(path: Path) -> Login:
    """Read a file with a secret: one line, a key or `<service> <nkey seed>`."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        raise BrokerError(
            f"the credentials file {path} cannot be read: {error}",
            hint=f"${CREDENTIALS_VARIABLE} names a file that `tinkermq init` has written, or one "
            "with a user's key",
        ) from error
    if len(words) == 1:
        return _of_key(words[0])
    if len(words) != 2 or words[0] not in SERVICES:
        raise AuthError(
            f"{path} has neither the credentials of a service nor a key",
            hint="take a file that `tinkermq init` has written, or write a user's key into it",
        )
    return Login(words[0], inbox(words[0]), options={_SEED: words[1]})


def tls_options(url: str) -> dict[str, Any]:
    """Return nats-py's options for a URL: `tls://` demands TLS, checked against `$TINKERMQ_CA`.

    Raises BrokerError when the CA file cannot be read.
    """
    path = os.environ.get(CA_VARIABLE)
    if not url.startswith("tls://") and not path:
        return {}
    try:
        return {"tls": ssl.create_default_context(cafile=path or None)}
    except OSError as error:
        raise BrokerError(
            f"the certificate authority {path} cannot be read: {error}",
            hint=f"${CA_VARIABLE} names a file with certificates in PEM",
        ) from error
