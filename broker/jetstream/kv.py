"""Typed key-value buckets that change by compare-and-set.

A bucket is a stream in the layout of ADR-8, so that `nats kv` can read and write it. Keys may have
dots; a prefix is a number of whole tokens. An entry is damaged if it cannot be read or its fields
name another key (`Message.named_at`): it is logged and ignored.

All operations survive a restart of the server: reads and idempotent writes are repeated, and a
compare-and-set whose answer was lost is recognised by reading the key.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

import structlog
from nats.aio.msg import Msg

from ...schemas.wire.errors import ConflictError, MessageError, NotFoundError, ReleaseError
from ...schemas.wire.message import Message
from ..client.connection import Broker
from ..client.nats_internals import OPERATION, TTL
from ..client.replies import Listening
from .appending import Overtaken, append_behind
from .direct_get import StoredMessage, get_all, get_batch, get_last

M = TypeVar("M", bound=Message)
T = TypeVar("T")

DEADLINE_S = 30.0
_TOMBSTONE_TTL_S = 3600
_AT_ONCE = 50
_MAX_TRIES = 20
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_MAX_REPORTED = 1024

_reported: dict[tuple[str, str], str] = {}
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Entry(Generic[M]):
    """The value of a key, and the revision for its next update."""

    key: str
    value: M
    revision: int


class DamagedEntry(MessageError):
    """A value that is not of its bucket's kind, or names another key."""

    def __init__(self, message: str, *, hint: str = "", key: str = "", revision: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.revision = revision


class Bucket(Generic[M]):
    """A bucket whose values are messages of one kind.

    `ttl_s` (whole seconds) expires a key unless it is written again; each write sets it anew, and a
    write without it makes the key permanent.
    """

    def __init__(
        self, broker: Broker, name: str, model: type[M], *, deadline_s: float = DEADLINE_S
    ) -> None:
        """Name a bucket that `streams` has made."""
        self._broker = broker
        self.name = name
        self._model = model
        self._deadline_s = deadline_s
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."

    async def get(self, key: str) -> Entry[M] | None:
        """Return the entry, or None if there is none.

        Raises DamagedEntry for a value that is not of this bucket's kind, or names another key.
        """
        newest = await self._last(key)
        return None if newest is None or _is_deleted(newest) else self._entry(newest)

    async def find(self, key: str) -> Entry[M] | None:
        """Return the entry, or None if there is no readable one."""
        try:
            return await self.get(key)
        except DamagedEntry:
            return None

    async def was_deleted(self, key: str) -> bool:
        """Return whether a key was deleted: its marker is there, and not merely no value."""
        newest = await self._last(key)
        return newest is not None and _is_deleted(newest)

    async def put(self, key: str, value: M) -> int:
        """Write a key, whatever its present value; return the revision."""
        return await self._swap(key, value.to_bytes(), None)

    async def create(self, key: str, value: M) -> int:
        """Write a new key; return the revision.

        Raises ConflictError if it exists.
        """
        payload = value.to_bytes()
        try:
            return await self._swap(key, payload, 0)
        except ConflictError:
            newest = await self._last(key)
            if newest is None or not _is_deleted(newest):
                raise self._conflict(key, "it is there already") from None
            return await self._swap(key, payload, newest.seq)

    async def update(self, key: str, value: M, revision: int) -> int:
        """Write a key that is still at `revision`; return the new revision.

        Raises ConflictError if another writer was first.
        """
        return await self._swap(key, value.to_bytes(), revision)

    async def change(self, key: str, change: Callable[[M | None], M]) -> Entry[M]:
        """Replace a value by `change` of it; repeat this after conflicts; return the stored value.

        `change` receives None if there is no value. Nothing is written when it returns its
        argument; its exceptions are passed on. Raises ConflictError after repeated conflicts,
        DamagedEntry.
        """
        for _ in range(_MAX_TRIES):
            entry = await self.get(key)
            changed = change(entry.value if entry is not None else None)
            if entry is not None and changed == entry.value:
                return entry
            try:
                if entry is None:
                    return Entry(key, changed, await self.create(key, changed))
                return Entry(key, changed, await self.update(key, changed, entry.revision))
            except ConflictError:
                continue
        raise self._conflict(key, f"others wrote it first {_MAX_TRIES} times in a row")

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Delete a key; with `revision`, only if it is still at that revision.

        Raises ConflictError if another writer was first.
        """
        headers = {OPERATION: "DEL", TTL: f"{_TOMBSTONE_TTL_S}s"}
        await self._swap(key, b"", revision, headers)

    async def purge(self, key: str) -> None:
        """Remove a key without a trace; harmless when it is gone.

        A deleted key leaves a marker for an hour, for watchers, and lists read it, too. This leaves
        none: for keys without watchers that are made and deleted by the thousand.
        """
        verb, subject = f"STREAM.PURGE.{self._stream}", self._subject(key)
        await self._read(lambda: self._broker.api(verb, {"filter": subject}))

    async def changes(self, prefix: str, behind: int) -> list[Entry[M]]:
        """Return the entries below the tokens of `prefix` written after revision `behind`.

        With the last revision as `behind`, each change is read once, however many keys there are.
        An unreadable value is skipped and logged.
        """
        messages = await self._all(prefix, behind + 1)
        entries = (self._readable(message) for message in messages)
        return sorted((e for e in entries if e is not None), key=lambda entry: entry.revision)

    async def keys(self, prefix: str = "") -> list[str]:
        """Return all keys, or those below the tokens of `prefix`, in order."""
        return sorted(message.subject[len(self._prefix) :] for message in await self._all(prefix))

    async def items(self, prefix: str = "") -> list[Entry[M]]:
        """Return all entries, or those below the tokens of `prefix`, by key.

        Damaged entries are skipped: one bad key must not hide the rest. If there are no others and
        another release wrote them, the first one's DamagedEntry is raised.
        """
        entries, damaged = await self.read_all(prefix)
        if damaged and not entries and isinstance(damaged[0].__cause__, ReleaseError):
            raise damaged[0]
        return entries

    async def read_all(self, prefix: str = "") -> tuple[list[Entry[M]], list[DamagedEntry]]:
        """Return all entries, or those below the tokens of `prefix`, and damaged ones; by key.

        Damaged entries are logged, once for each reason.
        """
        entries: list[Entry[M]] = []
        damaged: list[DamagedEntry] = []
        for number, message in enumerate(await self._all(prefix)):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # a large bucket must not block the event loop
            try:
                entries.append(self._entry(message))
            except DamagedEntry as error:
                damaged.append(error)
        damaged.sort(key=lambda error: error.key)
        return sorted(entries, key=lambda entry: entry.key), damaged

    async def scan(self) -> AsyncIterator[tuple[Entry[M], int]]:
        """Yield each entry and its value's bytes, reading a part of the bucket at a time.

        For a large bucket, if the caller keeps little of it. Damaged entries are skipped and
        logged; a key that is written meanwhile may be yielded twice.
        """
        seq, more = 1, True
        while more:
            everything = f"{self._prefix}>"
            messages, more = await self._read(
                partial(get_batch, self._broker, self._stream, seq, everything)
            )
            for message in messages:
                entry = None if _is_deleted(message) else self._readable(message)
                if entry is not None:
                    yield entry, len(message.payload)
            if messages:
                seq = messages[-1].seq + 1

    def _readable(self, message: StoredMessage) -> Entry[M] | None:
        try:
            return self._entry(message)
        except DamagedEntry:
            return None

    async def _all(self, prefix: str, from_seq: int = 1) -> list[StoredMessage]:
        subject = f"{self._prefix}{prefix.rstrip('.')}.>" if prefix else f"{self._prefix}>"
        messages = await self._read(lambda: get_all(self._broker, self._stream, subject, from_seq))
        newest = {message.subject: message for message in messages}
        return [message for message in newest.values() if not _is_deleted(message)]

    async def _last(self, key: str) -> StoredMessage | None:
        subject = self._subject(key)
        return await self._read(lambda: get_last(self._broker, self._stream, subject))

    async def _read(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await self._broker.retry(
            attempt, deadline_s=self._deadline_s, waiting_for=f"bucket {self.name}"
        )

    async def _swap(
        self,
        key: str,
        payload: bytes,
        revision: int | None,
        headers: dict[str, str] | None = None,
    ) -> int:
        """Write if the key is at `revision` (None: at any); return the new one."""
        subject, deadline_s = self._subject(key), self._deadline_s
        waiting_for = f"key {key} of bucket {self.name}"
        if revision is None:
            return await self._broker.append(
                subject, payload, headers=headers, deadline_s=deadline_s, waiting_for=waiting_for
            )
        try:
            return await append_behind(
                self._broker,
                self._stream,
                subject,
                payload,
                revision,
                headers=headers,
                deadline_s=deadline_s,
                waiting_for=waiting_for,
            )
        except Overtaken as error:
            raise self._conflict(key, "another writer was first") from error

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise MessageError(
                f"{key!r} cannot be a key of bucket {self.name}",
                hint="use letters, digits and '-_/=', in parts with dots between them",
            )
        return self._prefix + key

    def _entry(self, message: StoredMessage) -> Entry[M]:
        key = message.subject[len(self._prefix) :]
        try:
            return Entry(key, self._model.from_bytes(message.payload, at=key), message.seq)
        except MessageError as error:
            _tell_once(self.name, key, error.message)
            raise DamagedEntry(
                error.message, hint=error.hint, key=key, revision=message.seq
            ) from error

    def _conflict(self, key: str, why: str) -> ConflictError:
        return ConflictError(
            f"key {key!r} of bucket {self.name} was not written: {why}",
            hint="read it again and decide anew",
        )


def _tell_once(bucket: str, key: str, error: str) -> None:
    """Log what is wrong with an entry, unless that was the last thing logged about it."""
    if _reported.get((bucket, key)) == error:
        return
    if len(_reported) >= _MAX_REPORTED:
        _reported.clear()
    _reported[bucket, key] = error
    _log.error("key_damaged", bucket=bucket, key=key, error=error)


def _is_deleted(message: StoredMessage) -> bool:
    return OPERATION in message.headers or "Nats-Marker-Reason" in message.headers


# Wait for writes to keys of a bucket, without a consumer or polling.


class KeyChanges:
    """Receives writes to keys below a prefix during its block.

    A write may be received just before it can be read, and none is received while the connection is
    down: so waiters read again after a reconnect, and at intervals.
    """

    def __init__(self, broker: Broker, bucket: str, prefix: str) -> None:
        """`prefix` are the leading tokens of the keys."""
        self._broker = broker
        self._subject = f"$KV.{bucket}.{prefix}.>"
        self._changed = asyncio.Event()
        self._listening: Listening | None = None
        self._forget = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        self._forget.callback(self._broker.on_reconnect(self._changed.set))
        self._listening = await self._broker.listen(self._subject, self._heard)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._forget.close()
        if self._listening is not None:
            await self._listening.stop()

    async def wait(self, longest_s: float) -> None:
        """Return when a key was written since the last call, or after `longest_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s):
                await self._changed.wait()
        self._changed.clear()

    def _heard(self, _: Msg) -> None:
        self._changed.set()


# A copy of a key-value bucket in memory, updated from the broker.
#
# Every write to the bucket arrives on its subject, without a consumer; written keys are read at the
# next `refresh`, and all keys after a reconnect and at intervals. Damaged entries are ignored as if
# they had not been written.

RELIST_S = 600.0
_READS_AT_ONCE = 64


class Mirror(Generic[M]):
    """The entries of a bucket as of the last `refresh`."""

    def __init__(self, broker: Broker, name: str, model: type[M], *, prefix: str = "") -> None:
        """Start empty; `open` starts listening.

        `prefix` is the leading tokens of the keys to copy. A missing bucket counts as empty; if the
        bucket is deleted later, the copy stays.
        """
        self._prefix = prefix
        self.bucket = Bucket(broker, name, model)
        self.entries: dict[str, Entry[M]] = {}
        self.damaged: dict[str, DamagedEntry] = {}
        """Damaged entries by key; such a key keeps its previous entry."""
        self.lost: dict[str, Entry[M]] = {}
        """Entries that are gone without having been deleted, or of which the last list had an older
        one."""
        self.num_lists = 0
        """How often all keys were listed."""
        self._broker = broker
        self._stale: set[str] = set()
        self._listed = float("-inf")
        self._closers: list[Callable[[], None]] = []
        self._listening: Listening | None = None
        self._reading = asyncio.Lock()

    async def open(self, on_change: Callable[[], None]) -> None:
        """Listen; `on_change` is called whenever a refresh would read something new."""
        below = f"{self._prefix}." if self._prefix else ""
        bucket = f"$KV.{self.bucket.name}."

        def heard(message: Msg) -> None:
            self._stale.add(message.subject[len(bucket) :])
            on_change()

        def reconnected() -> None:
            self.relist()
            on_change()

        self._listening = await self._broker.listen(f"{bucket}{below}>", heard)
        self._closers.append(self._broker.on_reconnect(reconnected))

    def relist(self) -> None:
        """List all keys at the next refresh."""
        self._listed = float("-inf")

    async def close(self) -> None:
        """Stop listening."""
        for close in self._closers:
            close()
        if self._listening is not None:
            await self._listening.stop()

    def put(self, entry: Entry[M]) -> Entry[M]:
        """Store an entry just read or written, if it is the newest; return the newest."""
        current = self.entries.get(entry.key)
        if current is None or current.revision < entry.revision:
            self.entries[entry.key] = current = entry
        return current

    def drop(self, key: str) -> None:
        """Remove a deleted entry."""
        self.entries.pop(key, None)

    async def refresh(self) -> set[str]:
        """Read the changes; return the keys read, present or gone.

        Concurrent callers share one read and its result.
        """
        async with self._reading:
            return await self._refresh()

    async def _refresh(self) -> set[str]:
        if time.monotonic() - self._listed >= RELIST_S:
            self._stale.clear()
            self._listed = time.monotonic()
            before = dict(self.entries)
            with contextlib.suppress(NotFoundError):
                entries, damaged = await self.bucket.read_all(self._prefix)
                self.damaged = {error.key: error for error in damaged}
                self.lost, self.num_lists = {}, self.num_lists + 1
                for key in set(before) - {entry.key for entry in entries} - set(self.damaged):
                    if (entry := self.entries.pop(key, None)) is not None:
                        self.lost[key] = entry
                for entry in entries:
                    self._relist(entry, before.get(entry.key))
            return set(before) | set(self.entries)
        keys, self._stale = sorted(self._stale), set()
        for first in range(0, len(keys), _READS_AT_ONCE):
            await asyncio.gather(*map(self._read, keys[first : first + _READS_AT_ONCE]))
        return set(keys)

    def _relist(self, entry: Entry[M], before: Entry[M] | None) -> None:
        """Store an entry of a list, also an older one than before the list was read.

        Then the broker's store was set back. In a cluster a replica may lag, and the newest stays.
        """
        unchanged = self.entries.get(entry.key) is before
        if unchanged and not self._broker.replication.reads_leader:
            if before is not None and before.revision > entry.revision:
                self.lost[entry.key] = before
            self.entries[entry.key] = entry
        else:
            self.put(entry)

    async def _read(self, key: str) -> None:
        try:
            entry = await self.bucket.get(key)
        except DamagedEntry as error:
            self.damaged[key] = error
            return
        except NotFoundError:
            return
        self.damaged.pop(key, None)
        if entry is not None:
            self.put(entry)
            return
        was_deleted = await self.bucket.was_deleted(key)
        known = self.entries.pop(key, None)
        if known is not None and not was_deleted:
            self.lost[key] = known
