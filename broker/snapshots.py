"""Backups of the broker's streams to files, and their restoration, by JetStream's snapshots.

Each stream is a pair of files: its configuration and state as JSON, and the server's own archive of
its messages and consumers, with their sequences. A running server can be backed up; each stream is
consistent in itself. An archive may lack messages that are removed meanwhile: in a bucket, keys
that are rewritten; so a bucket is saved again until none was. Heartbeats, nodes and leases are
omitted, since actors recreate them. Folders of runs and users' secrets are not covered.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ..schemas.version import VERSION
from ..schemas.wire.errors import BrokerError, NotFoundError, StateError, StorageError
from ..schemas.wire.subjects import BUCKET_ACTORS, BUCKET_LEASES, BUCKET_NODES
from .client.connection import Broker, Msg
from .client.faults import ConnectionLost
from .client.nats_internals import DESCRIPTION, END_OF_BATCH, header, status_of
from .client.parts import Inbox
from .jetstream.streams import StreamConfig, delete_stream, num_replicas, stream_info

MANIFEST = "backup.json"
CHUNK_BYTES = 512 * 1024
_FORMAT = 1
_OURS = re.compile(r"^(KV_|OBJ_)?tmq-")
_PASSING = frozenset(f"KV_{bucket}" for bucket in (BUCKET_ACTORS, BUCKET_LEASES, BUCKET_NODES))
_ORDER = {"task": 0, "batch": 1, "rollout": 3}
"""A task may be in its queue and in the log, but never in neither; a recorded batch needs its
groups in the log.
"""
_SILENCE_S = 30.0
_TRIES, _PAUSE_S = 50, 0.05
_END = b""


@dataclass(frozen=True, slots=True)
class Saved:
    """One stream of a backup."""

    name: str
    num_messages: int
    num_bytes: int


async def save_all(broker: Broker, folder: Path) -> list[Saved]:
    """Write all streams of the pool to a folder, which must be new or empty.

    The manifest is written last: a folder without it is not a backup. Raises StateError for a
    folder that is in use, StorageError, BrokerError.
    """
    try:
        _begin(folder)
        saved: list[Saved] = []
        names = [stream["config"]["name"] for stream in await _streams(broker)]
        ours = [name for name in names if _OURS.match(name) and name not in _PASSING]
        for name in sorted(ours, key=lambda name: (_ORDER.get(name.rpartition("-")[2], 2), name)):
            with contextlib.suppress(NotFoundError):  # its job was deleted or archived meanwhile
                saved.append(await _save(broker, name, folder))
        manifest = {
            "format": _FORMAT,
            "time": time.time(),
            "streams": [stream.name for stream in saved],
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _unusable(folder, error) from error
    return saved


async def restore_all(broker: Broker, folder: Path) -> list[Saved]:
    """Restore all streams of a backup to a server where they are missing or empty.

    If interrupted and repeated, restores and returns the missing streams; each stream is restored
    atomically. Raises StateError when a stream has other contents or nothing is missing,
    StorageError if the folder does not hold a backup, BrokerError.
    """
    manifest = _read(folder, MANIFEST, "streams")
    if manifest.get("format") != _FORMAT:
        raise StorageError(
            f"{folder} is a back-up of format {manifest.get('format')!r}, and tinkermq {VERSION} "
            f"reads {_FORMAT}",
            hint="restore it with the release that wrote it (docs/stability.md)",
        )
    names: list[str] = manifest["streams"]
    present = {stream["config"]["name"]: stream["state"] for stream in await _streams(broker)}
    held = [name for name in names if name in present and int(present[name]["messages"])]
    others = [name for name in held if not _is_restored(folder, name, present[name])]
    if others:
        raise StateError(
            f"the broker holds messages in {others[0]} already, and not those of the back-up",
            hint="restore into a new server, before the scheduler and the auth service start",
        )
    if held and present.keys() >= set(names):
        raise StateError(
            f"the broker holds messages in {held[0]} already: all of this back-up is there",
            hint="start the scheduler and the other services",
        )
    missing = [name for name in names if name not in held]
    for name in missing:
        if name in present:
            await delete_stream(broker, name)
    return [await _restore(broker, name, folder) for name in missing]


async def save_streams(broker: Broker, names: Sequence[str], folder: Path) -> None:
    """Write the existing ones of some streams to a folder, which must be new or empty.

    Their consumers are omitted: no reader continues.

    Raises StateError for a folder that is in use, StorageError, BrokerError.
    """
    try:
        _begin(folder)
        for name in names:
            with contextlib.suppress(NotFoundError):
                await _save(broker, name, folder, consumers=False)
    except OSError as error:
        raise _unusable(folder, error) from error


async def restore_streams(broker: Broker, configs: Sequence[StreamConfig], folder: Path) -> None:
    """Restore those streams that are in the folder but not on the server.

    Their configurations are `configs`, not those in the folder, but bounded by their contents:
    nothing more is stored there. Raises StorageError, BrokerError.
    """
    for config in configs:
        name = str(config["name"])
        if (folder / f"{name}.json").is_file():
            try:
                await stream_info(broker, name)
            except NotFoundError:
                held = int(_read(folder, f"{name}.json", "state")["state"]["bytes"])
                await _restore(broker, name, folder, {**config, "max_bytes": max(held, 1)})


def _is_restored(folder: Path, name: str, state: dict[str, Any]) -> bool:
    """Return whether a stream equals its saved state.

    It may lack messages that have expired since, or that were removed while it was saved.
    """
    saved = _read(folder, f"{name}.json", "state")
    then, fields = saved["state"], ["last_seq", "last_ts"]
    if not saved["config"].get("max_age") and not saved.get("num_removed"):
        fields += ["messages", "bytes", "first_seq"]
    return all(state.get(field) == then.get(field) for field in fields)


def _read(folder: Path, name: str, key: str) -> dict[str, Any]:
    """Return a backup's JSON file, which must have `key`."""
    try:
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        return {**values, key: values[key]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(folder, error) from error


async def _request(broker: Broker, verb: str, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return await broker.api(verb, request)
    except TimeoutError:
        raise ConnectionLost(f"no answer to {verb}", hint="try again") from None


def _begin(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        raise StateError(f"{folder} is not empty", hint="name a new folder for each back-up")


async def _streams(broker: Broker) -> list[dict[str, Any]]:
    streams: list[dict[str, Any]] = []
    while True:
        answer = await _request(broker, "STREAM.LIST", {"offset": len(streams)})
        page = cast("list[dict[str, Any]]", answer.get("streams") or [])
        streams += page
        if not page or len(streams) >= int(answer["total"]):
            return streams


async def _save(broker: Broker, name: str, folder: Path, *, consumers: bool = True) -> Saved:
    for _ in range(_TRIES):
        stream = await _save_once(broker, name, folder, consumers=consumers)
        now = (await stream_info(broker, name))["state"]
        stream["num_removed"] = _num_removed(stream["state"], now)
        if not stream["num_removed"] or not name.startswith("KV_"):
            path = folder / f"{name}.json"
            path.write_text(json.dumps(stream, indent=2) + "\n", encoding="utf-8")
            return _saved(name, stream["state"])
        await asyncio.sleep(_PAUSE_S)
    raise BrokerError(
        f"{name} is written so often that none of {_TRIES} snapshots of it is whole",
        hint="pause the runs, or stop what writes there, and back up again",
    )


def _num_removed(then: dict[str, Any], now: dict[str, Any]) -> int:
    """Return how many messages a stream lost between two states."""
    appended = int(now["last_seq"]) - int(then["last_seq"])
    return int(then["messages"]) + appended - int(now["messages"])


async def _save_once(broker: Broker, name: str, folder: Path, *, consumers: bool) -> dict[str, Any]:
    inbox = Inbox(broker)
    try:
        request = {"deliver_subject": await inbox.only_subject(), "chunk_size": CHUNK_BYTES}
        request["no_consumers"] = not consumers
        answer = await _request(broker, f"STREAM.SNAPSHOT.{name}", request)
        with (folder / f"{name}.snapshot").open("wb") as file:
            while (chunk := await _next(inbox, name)).data != _END:
                await asyncio.to_thread(file.write, chunk.data)
                if chunk.reply:
                    await broker.publish(chunk.reply)
        if error := _error_in(chunk):
            raise BrokerError(f"the snapshot of {name} broke off: {error}", hint="try again")
    finally:
        await inbox.close()
    return {"config": answer["config"], "state": answer["state"]}


async def _next(inbox: Inbox, name: str) -> Msg:
    try:
        return await inbox.next(_SILENCE_S)
    except (ConnectionLost, TimeoutError):
        raise ConnectionLost(f"the snapshot of {name} broke off", hint="try again") from None


async def _restore(
    broker: Broker, name: str, folder: Path, config: StreamConfig | None = None
) -> Saved:
    stream = _read(folder, f"{name}.json", "config")
    configured = {**(config or stream["config"]), "num_replicas": num_replicas()}
    request = {"config": configured, "state": stream["state"]}
    with _opened(folder, f"{name}.snapshot") as file:
        place = (await _request(broker, f"STREAM.RESTORE.{name}", request))["deliver_subject"]
        for chunk in _chunks_of(file):
            try:
                reply = await broker.request(place, chunk, timeout_s=_SILENCE_S)
            except TimeoutError:
                raise ConnectionLost(
                    f"{name} is not restored: no answer", hint="restore again: it goes on here"
                ) from None
            if error := _error_in(reply):
                raise BrokerError(
                    f"{name} is not restored: {error}",
                    hint="see the server's log; restored again, it goes on here",
                )
    return _saved(name, stream["state"])


def _opened(folder: Path, name: str) -> IO[bytes]:
    try:
        return (folder / name).open("rb")
    except OSError as error:
        raise _unusable(folder, error) from error


def _chunks_of(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the archive in chunks, and the empty one that ends it."""
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
    yield _END


def _error_in(message: Msg) -> str:
    """Return the server's error text, which it reports in several ways."""
    status = status_of(message)
    if status and status != END_OF_BATCH:
        return f"{status} {header(message, DESCRIPTION)}".strip()
    if message.data.startswith(b"-ERR"):
        return message.data.decode(errors="replace")
    if message.data.startswith(b"{"):
        return str(json.loads(message.data).get("error", {}).get("description", ""))
    return ""


def _saved(name: str, state: dict[str, Any]) -> Saved:
    return Saved(name, int(state["messages"]), int(state["bytes"]))


def _unusable(folder: Path, error: Exception) -> StorageError:
    return StorageError(
        f"the back-up {folder} cannot be used: {error}",
        hint=f"a whole one has a file {MANIFEST}; name a folder that you may write to",
    )
