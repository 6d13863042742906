"""The secrets of a pool with authentication: files written by `tinkermq init`, readable by the
owner.

`<service>.creds` authenticates a service at the broker; `issuer.nk` signs the auth service's
answers, `callout.nk` and `sys.nk` are its keys for the broker's other accounts, `job.key` signs the
keys of job processes. The server's configuration holds public keys only.
"""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import nkeys
from nacl.exceptions import CryptoError
from nacl.public import PrivateKey, PublicKey, SealedBox

from ..schemas.job import JobSecrets
from ..schemas.user import UserRecord
from ..schemas.wire.errors import AuthError, MessageError, StateError, StorageError
from ..schemas.wire.subjects import SERVICES
from .client.keys import key_hash, new_api_key
from .permissions import service_permissions

ACCOUNT = "TMQ"
SECRETS_VARIABLE = "TINKERMQ_SECRETS"
_AUTH_ACCOUNT = "AUTH"
MAX_SUBSCRIPTIONS = 8192
"""Bound for any connection until the auth service has checked it."""
_SYSTEM_ACCOUNT = "SYS"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
_AUTH_TIMEOUT_S = 5


class PoolSecrets:
    """The folder of secrets of one pool."""

    def __init__(self, folder: Path) -> None:
        """Name the folder."""
        self.folder = folder

    @property
    def exist(self) -> bool:
        """Whether `tinkermq init` has written the secrets."""
        return (self.folder / "issuer.nk").exists()

    def create(self, admin: str, key_days: float) -> str:
        """Make all secrets and the first admin; return the admin's key, which is not stored.

        Raises StateError when there are secrets already, StorageError.
        """
        if self.exist:
            raise StateError(
                f"{self.folder} holds the secrets of a pool already",
                hint="use them (`tinkermq up`), or name another folder: --home DIR",
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=_FOLDER_MODE)
            self.folder.chmod(_FOLDER_MODE)
            return self._write_all(admin, key_days)
        except OSError as error:
            raise StorageError(
                f"the secrets cannot be written to {self.folder}: {error.strerror}",
                hint="name a folder that you may write to: --home DIR",
            ) from error

    def _write_all(self, admin: str, key_days: float) -> str:
        for name in SERVICES:
            self._write(f"{name}.creds", f"{name} {_new_seed(nkeys.PREFIX_BYTE_USER)}")
        for name in ("callout.nk", "sys.nk"):
            self._write(name, _new_seed(nkeys.PREFIX_BYTE_USER))
        self._write("job.key", secrets.token_hex(32))
        key, now = new_api_key(admin), time.time()
        record = UserRecord(
            user=admin,
            role="admin",
            key_hash=key_hash(key),
            created=now,
            expires=expiry(now, key_days),
        )
        self._write("first-admin.json", json.dumps(record.model_dump()))
        self._write("issuer.nk", _new_seed(nkeys.PREFIX_BYTE_ACCOUNT))
        self.accounts.write_text(self.server_config() + "\n", encoding="ascii")
        return key

    @property
    def accounts(self) -> Path:
        """File that the configuration of a separate nats-server includes; it holds no secret."""
        return self.folder.parent / "accounts.conf"

    def credentials(self, service: str) -> Path:
        """Return the credentials file of a service."""
        return self.folder / f"{service}.creds"

    def seed(self, name: str) -> str:
        """Return the seed in `<name>.nk`; raises StorageError."""
        return self._read(f"{name}.nk")

    def job_secret(self) -> bytes:
        """Return the secret that signs the keys of job processes; raises StorageError."""
        return bytes.fromhex(self._read("job.key"))

    def first_admin(self) -> UserRecord:
        """Return the admin that `create` made."""
        return UserRecord.model_validate_json(self._read("first-admin.json"))

    def server_config(self) -> str:
        """Return the configuration that nats-server needs: accounts, services, callout."""
        services = {name: _public(self._read(f"{name}.creds").split()[1]) for name in SERVICES}
        callout, system = (_public(self.seed(name)) for name in ("callout", "sys"))
        users = [{"nkey": key, "permissions": _in_config(name)} for name, key in services.items()]
        config: dict[str, Any] = {
            "accounts": {
                _AUTH_ACCOUNT: {"users": [{"nkey": callout}]},
                ACCOUNT: {"jetstream": "enabled", "users": users},
                _SYSTEM_ACCOUNT: {"users": [{"nkey": system}]},
            },
            "system_account": _SYSTEM_ACCOUNT,
            "max_subscriptions": MAX_SUBSCRIPTIONS,
            "authorization": {
                "timeout": _AUTH_TIMEOUT_S,
                "auth_callout": {
                    "issuer": _public(self.seed("issuer")),
                    "account": _AUTH_ACCOUNT,
                    "auth_users": [callout, system, *services.values()],
                },
            },
        }
        return "\n".join(f"{key}: {json.dumps(value)}" for key, value in config.items())

    def _read(self, name: str) -> str:
        try:
            return (self.folder / name).read_text(encoding="ascii").strip()
        except OSError as error:
            raise StorageError(
                f"the secret {self.folder / name} cannot be read: {error.strerror}",
                hint="`tinkermq init` writes it; only its owner may read it",
            ) from error

    def _write(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        (self.folder / name).unlink(missing_ok=True)
        with os.fdopen(os.open(self.folder / name, flags, _FILE_MODE), "w") as file:
            file.write(text + "\n")


def expiry(now: float, days: float) -> float | None:
    """Return when a key made now expires; 0 days: never."""
    return now + days * 86_400 if days else None


def _in_config(service: str) -> dict[str, Any]:
    claims = service_permissions(service).claims()
    return {"publish": claims["pub"], "subscribe": claims["sub"]}


def _new_seed(prefix: int) -> str:
    return nkeys.encode_seed(secrets.token_bytes(32), prefix).decode()


def _public(seed: str) -> str:
    return nkeys.from_seed(bytearray(seed.encode())).public_key.decode()


# Sealed boxes: anybody can encrypt to a public key, only its owner can decrypt (X25519).

__all__ = ["Seal", "close_seal"]


class Seal:
    """A private key that decrypts texts sealed to its public key."""

    def __init__(self, private: bytes) -> None:
        """Take 32 secret bytes."""
        self._key = PrivateKey(private)

    @property
    def public(self) -> bytes:
        """The public key to which clients seal."""
        return bytes(self._key.public_key)

    def open(self, sealed: bytes, user: str) -> JobSecrets:
        """Return the secrets that a user has sealed.

        Raises AuthError, without the content, for text that was not sealed to this key or that
        another user has sealed.
        """
        try:
            secrets = JobSecrets.from_bytes(SealedBox(self._key).decrypt(sealed))
        except (CryptoError, MessageError):
            raise _unreadable() from None
        if secrets.user != user:
            raise _unreadable()
        return secrets


def close_seal(public: bytes, secrets: JobSecrets) -> bytes:
    """Return secrets sealed so that only the owner of the key can open them."""
    return SealedBox(PublicKey(public)).encrypt(secrets.to_bytes())


def _unreadable() -> AuthError:
    return AuthError(
        "these secrets were not sealed to this pool's key",
        hint="hand them over again: the key is new when a scheduler without credentials starts",
    )
