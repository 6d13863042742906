"""The files of checkpoints, read by whoever has a ticket that this trainer has signed.

A ticket stands for one checkpoint and who may read it until it expires, so that a URL with it needs
no key. It opens nothing that this user could not read at that moment.
"""

import base64
import binascii
import hashlib
import hmac
import json
import os
import secrets
import shutil
import threading
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nacl.bindings import crypto_aead_chacha20poly1305_ietf_encrypt as seal
from nacl.bindings import crypto_scalarmult, crypto_scalarmult_base

from ....schemas.config.sections import ADAPTER_CONFIG
from ....schemas.tinker.checkpoints import (
    PART_BYTES,
    CheckpointExport,
    ExportedFile,
    FetchFile,
    FilePart,
)
from ....schemas.tinker.names import CheckpointName
from ....schemas.wire.errors import AuthError, ConfigError, NotFoundError, StorageError
from ...storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint

# Adapters for other programs: as PEFT reads them, or encrypted for somebody's age key.
#
# The encryption is the format of age (age-encryption.org/v1) with X25519 recipients.

WEIGHTS = "adapter_model.safetensors"
FILES = (ADAPTER_CONFIG, WEIGHTS)
_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_GENERATOR = (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
_CHUNK = 64 << 10
_KEY_BYTES = 32


def make_external(stored: StoredCheckpoint, recipients: Sequence[str]) -> None:
    """Leave an adapter's two files in its folder, encrypted if there are recipients.

    Raises ConfigError for a recipient that is no age key, StorageError.
    """
    try:
        keys = [read_recipient(one) for one in recipients]
        (stored.folder / ADAPTER_CONFIG).write_bytes(config_of(stored))
        for file in list(stored.folder.iterdir()):
            if file.name not in FILES:
                file.unlink()
            elif keys:
                with file.with_name(f"{file.name}.age").open("wb") as sealed:
                    encrypt(file, sealed.write, keys)
                file.unlink()
    except OSError as error:
        raise StorageError(
            f"{stored.folder} cannot be written: {error.strerror}", hint="see the disk of the pool"
        ) from error
    except ConfigError:
        shutil.rmtree(stored.folder, ignore_errors=True)
        raise


def config_of(stored: StoredCheckpoint) -> bytes:
    """Return PEFT's configuration of an adapter, with the name of its base, not our folder."""
    settings: dict[str, Any] = json.loads((stored.folder / ADAPTER_CONFIG).read_text("utf-8"))
    settings["base_model_name_or_path"] = stored.info.base
    return json.dumps(settings, indent=1, sort_keys=True).encode()


def read_recipient(text: str) -> bytes:
    """Return the X25519 key of `age1…`; raises ConfigError for what is none."""
    data = [_BECH32.find(one) for one in text.removeprefix("age1")]
    good = text.startswith("age1") and len(data) == 58 and min(data) >= 0
    if not good or _checksum([3, 3, 3, 0, 1, 7, 5, *data]) != 1:
        raise ConfigError(
            f"{text[:80]!r} is no recipient of age",
            hint="take a native key: age1 and 58 characters",
        )
    number = 0
    for five in data[:-6]:
        number = number << 5 | five
    return (number >> 4).to_bytes(_KEY_BYTES, "big")


def encrypt(file: Path, write: Any, recipients: Sequence[bytes]) -> None:
    """Write a file, encrypted so that each of the recipients can read it."""
    key = os.urandom(16)
    header = b"age-encryption.org/v1\n"
    for recipient in recipients:
        secret = os.urandom(_KEY_BYTES)
        share = crypto_scalarmult_base(secret)
        wrap = _derived(
            crypto_scalarmult(secret, recipient), share + recipient, b"age-encryption.org/v1/X25519"
        )
        sealed = seal(key, None, bytes(12), wrap)
        header += b"-> X25519 " + _plain64(share) + b"\n" + _plain64(sealed) + b"\n"
    header += b"---"
    mac = hmac.digest(_derived(key, b"", b"header"), header, "sha256")
    write(header + b" " + _plain64(mac) + b"\n")
    nonce = os.urandom(16)
    write(nonce)
    payload = _derived(key, nonce, b"payload")
    with file.open("rb") as source:
        number, chunk = 0, source.read(_CHUNK)
        while True:
            following = source.read(_CHUNK)
            last = b"\x00" if following else b"\x01"
            write(seal(chunk, None, number.to_bytes(11, "big") + last, payload))
            if not following:
                return
            number, chunk = number + 1, following


def _derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """Return a key by HKDF with SHA-256."""
    drawn = hmac.digest(salt or bytes(hashlib.sha256().digest_size), secret, "sha256")
    return hmac.digest(drawn, info + b"\x01", "sha256")


def _plain64(value: bytes) -> bytes:
    return b64encode(value).rstrip(b"=")


def _checksum(values: Sequence[int]) -> int:
    found = 1
    for value in values:
        top = found >> 25
        found = (found & 0x1FFFFFF) << 5 ^ value
        for bit, one in enumerate(_GENERATOR):
            if top >> bit & 1:
                found ^= one
    return found


TICKET_S = 1800.0
_SECRET = ".tickets"  # noqa: S105  the name of a file


class Exports:
    """Signs tickets, and reads files for them."""

    def __init__(self, folder: Path, folders: CheckpointFolders) -> None:
        """Keep what tickets are signed with in `folder`."""
        self._file = folder / _SECRET
        self._folders = folders
        self._secret = b""
        self._reading = threading.Lock()

    def export(self, user: str, path: str) -> CheckpointExport:
        """Return the files of a checkpoint that a user may read, with a ticket for them.

        Raises NotFoundError.
        """
        stored = self._folders.find(user, CheckpointName.parse(path))
        expires = time.time() + TICKET_S
        said = json.dumps([user, str(stored.name), stored.seq, int(expires)]).encode()
        return CheckpointExport(
            ticket=f"{_text(said)}.{_text(self._signed(said))}",
            expires=expires,
            files=[ExportedFile(name=name, size_bytes=size) for name, size in _files(stored)],
        )

    def fetch(self, asked: FetchFile) -> FilePart:
        """Return a part of a file; raises AuthError for a ticket that is none, NotFoundError."""
        stored = self._opened(asked.ticket)
        sizes = dict(_files(stored))
        if asked.file not in sizes:
            raise NotFoundError(f"{stored.name} has no file {asked.file[:80]!r}")
        if asked.file == ADAPTER_CONFIG:
            whole = config_of(stored)
            return FilePart(data=whole[asked.offset :], size_bytes=len(whole))
        try:
            with (stored.folder / asked.file).open("rb") as file:
                file.seek(asked.offset)
                return FilePart(data=file.read(PART_BYTES), size_bytes=sizes[asked.file])
        except OSError as error:
            raise StorageError(f"{asked.file} of {stored.name} cannot be read") from error

    def _opened(self, ticket: str) -> StoredCheckpoint:
        said, _, signature = ticket.partition(".")
        try:
            body, signed = _bytes(said), _bytes(signature)
        except (ValueError, binascii.Error):
            raise _no_ticket() from None
        if not hmac.compare_digest(signed, self._signed(body)):
            raise _no_ticket()
        user, path, seq, expires = json.loads(body)
        if expires < time.time():
            raise AuthError("this URL has expired", hint="ask for the URLs of the checkpoint again")
        stored = self._folders.find(user, CheckpointName.parse(path))
        if stored.seq != seq:
            raise NotFoundError(f"{path} was saved anew", hint="ask for its URLs again")
        return stored

    def _signed(self, said: bytes) -> bytes:
        with self._reading:  # calls are answered in threads, and one of them makes the file
            if not self._secret:
                self._secret = _read_secret(self._file)
        return hmac.digest(self._secret, said, "sha256")


def _files(stored: StoredCheckpoint) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that are given out."""
    names = [*FILES, *(f"{name}.age" for name in FILES)]
    found = [(name, stored.folder / name) for name in names]
    return [
        (name, len(config_of(stored)) if name == ADAPTER_CONFIG else file.stat().st_size)
        for name, file in found
        if file.is_file()
    ]


def _read_secret(file: Path) -> bytes:
    """Return what tickets are signed with, made if need be."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        hidden = file.with_name(f"{file.name}.new")
        handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(secrets.token_bytes(32))
        hidden.rename(file)
    return file.read_bytes()


def _no_ticket() -> AuthError:
    return AuthError("this is no URL of a checkpoint", hint="ask for its URLs with your key")


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
