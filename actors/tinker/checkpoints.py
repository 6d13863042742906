"""The named checkpoints of a trainer: saved, listed, changed, exported, bounded for each user."""

import base64
import binascii
import hmac
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pyrage import RecipientError, encrypt_file, x25519  # pyright: ignore[reportMissingModuleSource]

from ...schemas.config.sections import ADAPTER_CONFIG, ADAPTER_FILES
from ...schemas.tinker.checkpoints import (
    MAX_METADATA_BYTES,
    PART_BYTES,
    ChangeCheckpoint,
    CheckpointExport,
    CheckpointPage,
    ExportedFile,
    FetchFile,
    FilePart,
    ListCheckpoints,
    Metadata,
    TinkerCheckpoint,
)
from ...schemas.tinker.names import CheckpointName, ModelName
from ...schemas.wire import errors
from ..storage.tinker_checkpoints import CheckpointFolders, Gone, StoredCheckpoint, missing
from .models import TrainedModel
from .operations import Adapters

# -- small JSON files, each there whole or not at all ----------------------------------------------


def write_record(file: Path, value: dict[str, Any], *, lasting: bool = True) -> None:
    """Write a file; one that is `lasting` is on the disk when this returns. Raises StorageError."""
    hidden = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with hidden.open("w", encoding="utf-8") as opened:
            json.dump(value, opened)
            opened.flush()
            if lasting:
                os.fsync(opened.fileno())
        hidden.rename(file)
    except OSError as error:
        raise errors.StorageError(
            f"{file} cannot be written: {error.strerror}", hint="see the disk of the pool"
        ) from error


def read_record(file: Path) -> dict[str, Any] | None:
    """Return what a file holds, None for one that is not there or damaged: nothing hangs on it."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def metadata_of(given: Any) -> Metadata | None:
    """Return what a user says about something as texts; raises ConfigError if it is too large."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise errors.ConfigError(
            "user_metadata must be a JSON object", hint="leave it out, or correct it"
        )
    pairs = cast("dict[Any, Any]", given).items()
    texts = {
        str(key): one if isinstance(one, str) else json.dumps(one, default=str)
        for key, one in pairs
    }
    size = len(json.dumps(texts).encode())
    if size > MAX_METADATA_BYTES:
        raise errors.ConfigError(
            f"user_metadata has {size:,} bytes", hint=f"{MAX_METADATA_BYTES:,} are kept at most"
        )
    return texts


# Adapters for other programs: as PEFT reads them, or encrypted for an age key (the format
# age-encryption.org/v1 with X25519 recipients).


def make_external(stored: StoredCheckpoint, recipients: Sequence[str]) -> None:
    """Leave an adapter's two files in its folder, encrypted if there are recipients.

    Raises ConfigError for a recipient that is no age key, StorageError.
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
    except errors.ConfigError:
        shutil.rmtree(stored.folder, ignore_errors=True)
        raise


def config_of(stored: StoredCheckpoint) -> bytes:
    """Return PEFT's configuration of an adapter, with the name of its base, not our folder."""
    settings: dict[str, Any] = json.loads((stored.folder / ADAPTER_CONFIG).read_text("utf-8"))
    settings["base_model_name_or_path"] = stored.info.base
    return json.dumps(settings, indent=1, sort_keys=True).encode()


def _read_recipient(text: str) -> x25519.Recipient:
    """Return the X25519 key of `age1…`; raises ConfigError for what is none."""
    try:
        return x25519.Recipient.from_str(text)
    except RecipientError as error:
        raise errors.ConfigError(
            f"{text[:80]!r} is no recipient of age",
            hint="take a native key: age1 and 58 characters",
        ) from error


# A ticket, signed by this trainer, stands for one checkpoint and its reader until it
# expires, so that a URL with it needs no key. It opens nothing that this user could not read then.

TICKET_S = 1800.0
_SECRET = ".tickets"  # noqa: S105  the name of a file
_SECRET_BYTES = 32


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
        claims = json.dumps([user, str(stored.name), stored.seq, int(expires)]).encode()
        return CheckpointExport(
            ticket=f"{_text(claims)}.{_text(self._signed(claims))}",
            expires=expires,
            files=[ExportedFile(name=name, size_bytes=size) for name, size in _files(stored)],
        )

    def fetch(self, request: FetchFile) -> FilePart:
        """Return a part of a file; raises AuthError for a ticket that is none, NotFoundError."""
        stored = self._opened(request.ticket)
        sizes = dict(_files(stored))
        if request.file not in sizes:
            raise errors.NotFoundError(f"{stored.name} has no file {request.file[:80]!r}")
        if request.file == ADAPTER_CONFIG:
            whole = config_of(stored)
            return FilePart(data=whole[request.offset :], size_bytes=len(whole))
        try:
            with (stored.folder / request.file).open("rb") as file:
                file.seek(request.offset)
                return FilePart(data=file.read(PART_BYTES), size_bytes=sizes[request.file])
        except OSError as error:
            raise errors.StorageError(f"{request.file} of {stored.name} cannot be read") from error

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
            raise errors.AuthError(
                "this URL has expired", hint="ask for the URLs of the checkpoint again"
            )
        stored = self._folders.find(user, CheckpointName.parse(path))
        if stored.seq != seq:
            raise errors.NotFoundError(f"{path} was saved anew", hint="ask for its URLs again")
        return stored

    def _signed(self, said: bytes) -> bytes:
        with self._reading:  # calls are answered in threads, and one of them makes the file
            if not self._secret:
                self._secret = _read_secret(self._file)
        return hmac.digest(self._secret, said, "sha256")


def _files(stored: StoredCheckpoint) -> list[tuple[str, int]]:
    """Return the names and sizes of the files that are given out."""
    names = [*ADAPTER_FILES, *(f"{name}.age" for name in ADAPTER_FILES)]
    matches = [(name, stored.folder / name) for name in names]
    return [
        (name, len(config_of(stored)) if name == ADAPTER_CONFIG else file.stat().st_size)
        for name, file in matches
        if file.is_file()
    ]


def _read_secret(file: Path) -> bytes:
    """Return what tickets are signed with, made if need be."""
    if not file.is_file() or file.stat().st_size < _SECRET_BYTES:  # an empty one is guessed
        file.parent.mkdir(parents=True, exist_ok=True)
        hidden = file.with_name(f"{file.name}.new")
        handle = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as opened:
            opened.write(secrets.token_bytes(_SECRET_BYTES))
            opened.flush()
            os.fsync(opened.fileno())
        hidden.rename(file)
    return file.read_bytes()


def _no_ticket() -> errors.AuthError:
    return errors.AuthError("this is no URL of a checkpoint", hint="ask for its URLs with your key")


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


MAX_CHECKPOINTS = 10_000
"""Of one user, those that are gone but known counted."""
MAX_BYTES = 64 << 30
KEPT_PASSING = 64
"""Of one model: those that were saved to be sampled from for a while."""
PASSING_S = 24 * 3600.0
"""How long such a one is kept."""
KNOWN_S = 30 * 86400.0
"""How long it is known of a checkpoint that it was deleted, or has expired."""
_Named = dict[CheckpointName, StoredCheckpoint]


class CheckpointCatalog:
    """All users' named checkpoints of one trainer."""

    def __init__(self, folders: CheckpointFolders, *, max_bytes: int = MAX_BYTES) -> None:
        """Keep them in `folders`, at most `max_bytes` of each user."""
        self.folders = folders
        self._max_bytes = max_bytes
        self._users: dict[str, _Named] = {}
        self._lock = threading.RLock()

    def load(self) -> None:
        """Read what is there."""
        for stored in self.folders.read_all():
            self._users.setdefault(stored.user, {})[stored.name] = stored

    def note(self, stored: StoredCheckpoint) -> None:
        """Know of a checkpoint that is on disk: the scheduler takes over those of runs."""
        with self._lock:
            self._users.setdefault(stored.user, {}).setdefault(stored.name, stored)

    def of_user(self, user: str, model: ModelName | None = None) -> list[StoredCheckpoint]:
        """Return a user's checkpoints that are there, newest first, of one model or all."""
        now = time.time()
        with self._lock:
            mine = list(self._users.get(user, {}).values())
        matches = (item for item in mine if item.is_there(now) and model in (None, item.name.model))
        return sorted(matches, key=lambda one: one.time, reverse=True)

    def page(self, user: str, request: ListCheckpoints) -> CheckpointPage:
        """Return a part of the list of a user's checkpoints that have names."""
        model = ModelName.parse(request.model) if request.model else None
        matches = [item for item in self.of_user(user, model) if not item.passing]
        part = matches[request.offset : request.offset + request.limit]
        return CheckpointPage(checkpoints=[item.describe() for item in part], total=len(matches))

    def save(
        self,
        adapters: Adapters,
        model: TrainedModel,
        name: CheckpointName,
        seq: int,
        result: dict[str, Any],
    ) -> StoredCheckpoint:
        """Write a checkpoint for operation `seq`; done again, it changes nothing.

        Raises StateError where the name is given away, ModelError where it is that of a damaged
        one, neither with `overwrite`; QuotaError, StorageError.
        """
        overwrite = bool(result.get("overwrite"))
        is_damaged = overwrite and self.folders.is_damaged(model.user, name)
        known = None if is_damaged else self.folders.read(model.user, name)
        if known is not None and known.is_there(time.time()):
            if known.seq >= seq:
                return known
            if not overwrite:
                raise errors.StateError(
                    f"there is a checkpoint {name} already",
                    hint="choose another name, or set overwrite",
                )
        stored = _new(model, name, seq, result, self.folders.place_of(model.user, name))
        adapters.save(
            model.key,
            stored.folder,
            with_optimizer=name.kind == "weights",
            lasting=not stored.passing,
        )
        try:
            if name.kind == "external_weights":
                make_external(stored, result.get("age_encryption_recipients") or [])
            stored = replace(stored, size_bytes=_size(stored.folder))
            self._make_room(stored)
            self._commit(stored)
        except Exception:
            shutil.rmtree(stored.folder, ignore_errors=True)  # nobody would know of it
            raise
        return stored

    def change(
        self, user: str, request: ChangeCheckpoint, *, wanted: Callable[[CheckpointName], bool]
    ) -> TinkerCheckpoint:
        """Change an own checkpoint; `wanted` says whether an operation that waits needs it.

        One that is damaged can be deleted. Raises NotFoundError, also for another user's published
        one; ConflictError.
        """
        name = CheckpointName.parse(request.path)
        is_deleted = request.action == "delete"
        with self._lock:
            match = self._users.get(user, {}).get(name)
            is_damaged = match is None and is_deleted and self.folders.is_damaged(user, name)
            if not is_damaged and (match is None or not match.is_there(time.time())):
                raise missing(name, match)
            if is_deleted and wanted(name):
                raise errors.ConflictError(
                    f"{name} is about to be loaded", hint="wait for the result of load_weights"
                )
            if match is None:
                self.folders.forget(self.folders.place_of(user, name))
                return TinkerCheckpoint(path=str(name), time=time.time(), size_bytes=0)
            if is_deleted:
                return self._remove(match, "deleted").describe()
            if request.action == "expire":
                match = replace(
                    match, expires=time.time() + request.ttl_s if request.ttl_s else 0.0
                )
            else:
                match = replace(match, is_public=request.action == "publish")
            self._commit(match)
            return match.describe()

    def sweep(self, *, wanted: Callable[[CheckpointName], bool]) -> int:
        """Remove what has expired; return how many that were."""
        now, removed = time.time(), 0
        for found in self._all():
            with self._lock:
                one = self._users[found.user].get(found.name)
                if one is None or one.is_there(now) or wanted(one.name):
                    continue
                if not one.gone and not one.passing:
                    self._remove(one, "expired")
                    removed += 1
                elif one.time < now - KNOWN_S or not one.gone:
                    self._forget(one)
        return removed

    def _all(self) -> Iterable[StoredCheckpoint]:
        with self._lock:
            return [item for mine in self._users.values() for item in mine.values()]

    def _make_room(self, new: StoredCheckpoint) -> None:
        """Raise QuotaError where a user has too much; what was saved for a while goes first."""
        passing = [entry for entry in self.of_user(new.user) if entry.passing]
        of_model = [entry for entry in passing if entry.name.model == new.name.model]
        for item in of_model[KEPT_PASSING:]:
            self._forget(item)
        while (over := self._over(new)) and passing:
            self._forget(passing.pop())
        if over:
            raise errors.QuotaError(over, hint="delete some, or save them with a TTL")

    def _over(self, new: StoredCheckpoint) -> str:
        """Return by how much a user would have too much; empty: not too much."""
        with self._lock:
            others = [
                item for item in self._users.get(new.user, {}).values() if item.name != new.name
            ]
        used = sum(other.size_bytes for other in others)
        if used + new.size_bytes > self._max_bytes:
            return (
                f"the checkpoints of user {new.user!r} have {used:,} bytes; {new.size_bytes:,} "
                f"more are over the limit of {self._max_bytes:,} (tinker.checkpoint_mb)"
            )
        if len(others) >= MAX_CHECKPOINTS:
            return f"user {new.user!r} has {len(others):,} checkpoints, as many as one may have"
        return ""

    def _commit(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self.folders.commit(stored)
            self._users.setdefault(stored.user, {})[stored.name] = stored

    def _remove(self, stored: StoredCheckpoint, why: Gone) -> StoredCheckpoint:
        gone = self.folders.remove(stored, why)
        self._users[stored.user][stored.name] = gone
        return gone

    def _forget(self, stored: StoredCheckpoint) -> None:
        with self._lock:
            self._users.get(stored.user, {}).pop(stored.name, None)
        self.folders.forget(stored.place)


def _new(
    model: TrainedModel, name: CheckpointName, seq: int, result: dict[str, Any], place: Path
) -> StoredCheckpoint:
    assert model.info is not None
    passing, at = bool(result.get("passing")), float(result.get("time") or time.time())
    ttl = result.get("ttl_seconds") or (PASSING_S if passing else 0)
    return StoredCheckpoint(
        user=model.user,
        name=name,
        place=place,
        info=model.info.model_copy(update={"applied": seq}),
        seq=seq,
        time=at,
        expires=at + ttl if ttl else 0.0,
        passing=passing,
        user_metadata=result.get("user_metadata"),
    )


def _size(folder: Path) -> int:
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())


# The newest weights of a model, for samples that move on while they run. A file `.inflight` beside
# the model's checkpoints names the current one. It is written when a save is done and never goes
# back: a repeated operation leaves it.

_KIND = "sampler_weights"
_FILE = ".inflight"


class InflightWeights:
    """What the samples of each model move on to."""

    def __init__(self, folders: CheckpointFolders) -> None:
        """Keep it beside the checkpoints."""
        self._folders = folders

    def move(self, stored: StoredCheckpoint) -> None:
        """Let samples move on to a checkpoint, unless they are past it; raises StorageError."""
        file = self._file(stored.user, stored.name.model)
        known = read_record(file)
        if known is not None and int(known["seq"]) >= stored.seq:
            return
        record = {"name": stored.name.name, "seq": stored.seq}
        write_record(file, record, lasting=False)

    def newest(self, user: str, least: CheckpointName) -> StoredCheckpoint:
        """Return what samples of a user's model move on to: `least`, or what was saved later.

        Raises NotFoundError.
        """
        known = read_record(self._file(user, least.model))
        if known is None:
            raise errors.NotFoundError(
                f"{least} moves on to nothing", hint="save_weights_for_sampler with kind=inflight"
            )
        name = replace(least, name=str(known["name"]))
        return self._folders.find(user, name)

    def _file(self, user: str, model: ModelName) -> Path:
        place = self._folders.place_of(user, CheckpointName(model, _KIND, "-"))
        return place.parent / _FILE
