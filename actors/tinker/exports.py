"""Adapters for other programs: PEFT's two files, encrypted on request, and tickets to fetch them.

A ticket is signed by this trainer and stands for one checkpoint and one reader until it expires, so
that a URL with it needs no key. It opens only what its reader may read at that time.
"""

import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyrage import RecipientError, encrypt_file, x25519  # pyright: ignore[reportMissingModuleSource]

from ...schemas.config.sections import ADAPTER_CONFIG, ADAPTER_FILES
from ...schemas.tinker.checkpoints import (
    PART_BYTES,
    CheckpointExport,
    ExportedFile,
    FetchFile,
    FilePart,
)
from ...schemas.tinker.names import CheckpointName
from ...schemas.wire import errors
from ...schemas.wire.codec import from_base64url, to_base64url
from ..storage.tinker_checkpoints import CheckpointFolders, StoredCheckpoint


def make_external(stored: StoredCheckpoint, recipients: Sequence[str]) -> None:
    """Reduce a checkpoint's folder to PEFT's two files, encrypted if there are recipients.

    Recipients are X25519 keys of age (age-encryption.org/v1). Raises ConfigError for another key,
    StorageError.
    """
    try:
        keys = [_read_recipient(recipient) for recipient in recipients]
        (stored.folder / ADAPTER_CONFIG).write_bytes(config_of(stored))
        for file in list(stored.folder.iterdir()):
            if file.name not in ADAPTER_FILES:
                file.unlink()
            elif keys:
                encrypt_file(str(file), str(file.with_name(f"{file.name}.age")), keys)
                file.unlink()
    except OSError as error:
        raise errors.StorageError(
            f"{stored.folder} cannot be written: {error.strerror}", hint="see the disk of the pool"
        ) from error


def config_of(stored: StoredCheckpoint) -> bytes:
    """Return PEFT's configuration of an adapter, with the base model's name as its path."""
    settings: dict[str, Any] = json.loads((stored.folder / ADAPTER_CONFIG).read_text("utf-8"))
    settings["base_model_name_or_path"] = stored.info.base
    return json.dumps(settings, indent=1, sort_keys=True).encode()


def _read_recipient(text: str) -> x25519.Recipient:
    try:
        return x25519.Recipient.from_str(text)
    except RecipientError as error:
        raise errors.ConfigError(
            f"{text[:80]!r} is not an age recipient",
            hint="take a native key: age1 and 58 characters",
        ) from error


# -- tickets ---------------------------------------------------------------------------------------

TICKET_S = 1800.0
_SECRET = ".tickets"  # noqa: S105  the name of a file
_SECRET_BYTES = 32


class Exports:
    """Signs tickets, and reads files for them."""

    def __init__(self, folder: Path, folders: CheckpointFolders) -> None:
        """Keep the signing key in `folder`."""
        self._file = folder / _SECRET
        self._folders = folders
        self._secret = b""
        self._lock = threading.Lock()

    def export(self, user: str, path: str) -> CheckpointExport:
        """Return the files of a checkpoint that a user may read, with a ticket for them.

        Raises NotFoundError.
        """
        stored = self._folders.find(user, CheckpointName.parse(path))
        expires = time.time() + TICKET_S
        claims = json.dumps([user, str(stored.name), stored.seq, int(expires)]).encode()
        return CheckpointExport(
            ticket=f"{to_base64url(claims)}.{to_base64url(self._sign(claims))}",
            expires=expires,
            files=[ExportedFile(name=name, size_bytes=size) for name, size in _files(stored)],
        )

    def fetch(self, request: FetchFile) -> FilePart:
        """Return a part of a file; raises AuthError for an invalid ticket, NotFoundError."""
        stored = self._open_ticket(request.ticket)
        sizes = dict(_files(stored))
        if request.file not in sizes:
            raise errors.NotFoundError(f"{stored.name} has no file {request.file[:80]!r}")
        if request.file == ADAPTER_CONFIG:
            config = config_of(stored)
            return FilePart(data=config[request.offset :], size_bytes=len(config))
        try:
            with (stored.folder / request.file).open("rb") as file:
                file.seek(request.offset)
                return FilePart(data=file.read(PART_BYTES), size_bytes=sizes[request.file])
        except OSError as error:
            raise errors.StorageError(f"{request.file} of {stored.name} cannot be read") from error

    def _open_ticket(self, ticket: str) -> StoredCheckpoint:
        encoded_claims, _, encoded_signature = ticket.partition(".")
        try:
            claims = from_base64url(encoded_claims)
            signature = from_base64url(encoded_signature)
        except ValueError:
            raise _invalid_ticket() from None
        if not hmac.compare_digest(signature, self._sign(claims)):
            raise _invalid_ticket()
        user, path, seq, expires = json.loads(claims)
        if expires < time.time():
            raise errors.AuthError(
                "this URL has expired", hint="ask for the URLs of the checkpoint again"
            )
        stored = self._folders.find(user, CheckpointName.parse(path))
        if stored.seq != seq:
            raise errors.NotFoundError(f"{path} was saved anew", hint="ask for its URLs again")
        return stored

    def _sign(self, claims: bytes) -> bytes:
        with self._lock:  # requests run in threads, and the first one writes the key
            if not self._secret:
                self._secret = _read_secret(self._file)
        return hmac.digest(self._secret, claims, "sha256")


def _files(stored: StoredCheckpoint) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that a ticket opens."""
    names = [*ADAPTER_FILES, *(f"{name}.age" for name in ADAPTER_FILES)]
    return [
        (name, len(config_of(stored)) if name == ADAPTER_CONFIG else file.stat().st_size)
        for name, file in ((name, stored.folder / name) for name in names)
        if file.is_file()
    ]


def _read_secret(file: Path) -> bytes:
    """Return the signing key, which is made if it is missing or was cut off."""
    if not file.is_file() or file.stat().st_size < _SECRET_BYTES:
        file.parent.mkdir(parents=True, exist_ok=True)
        hidden = file.with_name(f"{file.name}.new")
        handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(secrets.token_bytes(_SECRET_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        hidden.rename(file)
    return file.read_bytes()


def _invalid_ticket() -> errors.AuthError:
    return errors.AuthError(
        "this is not a URL of a checkpoint", hint="ask for its URLs with your key"
    )
