"""The files of checkpoints, read by whoever has a ticket that this trainer has signed.

A ticket stands for one checkpoint and who may read it until it expires, so that a URL with it needs
no key. It opens nothing that this user could not read at that moment.
"""

import base64
import binascii
import hmac
import json
import os
import secrets
import threading
import time
from pathlib import Path

from ....schemas.config.lora import ADAPTER_CONFIG
from ....schemas.tinker.checkpoints import (
    PART_BYTES,
    CheckpointExport,
    ExportedFile,
    FetchFile,
    FilePart,
)
from ....schemas.tinker.names import CheckpointName
from ....schemas.wire.errors import AuthError, NotFoundError, StorageError
from .external import FILES, config_of
from .folders import CheckpointFolders, StoredCheckpoint

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
