"""Notify users of ended jobs, and publish events of the jobs' state changes.

The scheduler sends notifications, so that they arrive while the user's laptop sleeps. apprise
supports the services behind the URLs; each notification is sent by a process with a deadline, and
neither URLs nor answers are logged. The notifications of a user are sent one after the other.
"""

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import structlog

from ...broker.client.connection import Broker
from ...broker.client.login import without_secrets
from ...broker.feed import recent_values
from ...broker.jetstream.streams import settle_job_streams, stream_info
from ...broker.jobs import JobStore, is_final
from ...envs.user_http import VARIABLE
from ...schemas.job import NOTIFY_URL, JobRecord
from ...schemas.local.process import die_with
from ...schemas.wire.errors import NotFoundError, TinkermqError
from ...schemas.wire.subjects import DEFAULT_USER
from ..notify import NO_APPRISE, TOLD
from .jobs.secrets import SecretStore

_SEND_S = 30.0
_AT_ONCE = 8
"""Number of concurrent sending processes."""
_TOLD = {"COMPLETED": "has finished", "FAILED": "has failed", "CANCELLED": "was stopped"}
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _Notification(NamedTuple):
    """A message about a job."""

    record: JobRecord
    text: str
    revision: int
    """Revision of the job's secrets, which are removed after its end unless they were replaced."""


class Notifier:
    """Sends notifications; one user's notifications do not delay another's."""

    def __init__(self, broker: Broker, secrets: SecretStore) -> None:
        """There are no notifications yet."""
        self._broker = broker
        self._secrets = secrets
        self._queue: asyncio.Queue[tuple[JobRecord, str]] = asyncio.Queue()
        self._waiting: dict[str, deque[_Notification]] = {}
        self._free = asyncio.Semaphore(_AT_ONCE)

    def ended(self, record: JobRecord) -> None:
        """Notify about the end of a job, and remove its secrets."""
        if record.secrets:
            self._queue.put_nowait((record, _TOLD[record.state]))

    async def run(self) -> None:
        """Send notifications left by a previous scheduler, then new ones."""
        for left in await self._secrets.left_behind():
            if isinstance(left, JobRecord):
                self.ended(left)
            else:
                await self._secrets.forget(left)
        async with asyncio.TaskGroup() as group:
            while True:
                record, text = await self._queue.get()
                try:
                    revision = await self._secrets.revision(record.scope)
                except TinkermqError as error:
                    _log.warning("notification_failed", job=record.job, error=error.message)
                    continue
                waiting = self._waiting.get(record.user)
                if waiting is None:
                    waiting = self._waiting[record.user] = deque()
                    sending = self._tell_all(record.user, waiting)
                    group.create_task(sending, name=f"notifications of {record.user}")
                waiting.append(_Notification(record, text, revision))

    async def _tell_all(self, user: str, waiting: deque[_Notification]) -> None:
        """Send the waiting notifications of one user."""
        while waiting:
            notification = waiting.popleft()
            async with self._free:
                try:
                    await self._publish_event(*notification)
                except TinkermqError as error:
                    _log.warning(
                        "notification_failed", job=notification.record.job, error=error.message
                    )
        del self._waiting[user]

    async def _publish_event(self, record: JobRecord, text: str, revision: int) -> None:
        scope = record.scope
        url = (await self._secrets.values(scope)).get(NOTIFY_URL)
        if url is not None:
            title, body = f"{record.name} {text}", f"{record.name} ({record.state}): {text}"
            if record.reason:
                body += f"\n{record.reason}"
            is_told = await _send(url, title, body, checks=self._broker.user != DEFAULT_USER)
            _log.info("notification_sent" if is_told else "notification_lost", job=record.job)
        if record.state in _TOLD:
            await self._secrets.forget(scope, revision)


async def _send(url: str, title: str, text: str, *, checks: bool) -> bool:
    """Send a notification; return False if the service does not accept it in time.

    `checks`: only to addresses that users of the pool may reach.
    """
    allowed = {VARIABLE: os.environ.get(VARIABLE, "")} if checks else {}
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tinkermq.actors.notify"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,  # a library's output may contain the URL
            env={**without_secrets(os.environ), **allowed},
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
    except OSError as error:  # the machine has no room for a process
        _log.warning("notification_not_started", error=str(error))
        return False
    try:
        async with asyncio.timeout(_SEND_S):
            await process.communicate(json.dumps([url, title, text]).encode())
    except TimeoutError:
        return False
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == NO_APPRISE:
        _log.warning("apprise_missing", hint="pip install 'tinkermq[notify]' where schedulers run")
    return process.returncode == TOLD


# Events of state changes, which the jobs' records hold until they are published. Each job has a
# separate task, so that one blocked stream delays no other; failures are retried in the next turn.
# The streams of an ended job shrink after its last event is published, and only then is its record
# final. A limited number of jobs is processed at a time, oldest first, so that on a slow server
# some of them finish.

_TELL_S = 10.0
_CLOSING = 8
_LATER = (TinkermqError, TimeoutError)


class MoveEvents:
    """Publishes the events that records hold."""

    def __init__(self, broker: Broker, jobs: JobStore) -> None:
        """There are no events yet."""
        self._broker = broker
        self._jobs = jobs
        self._telling: dict[str, JobRecord] = {}

    def publish(self, records: Iterable[JobRecord], group: asyncio.TaskGroup) -> None:
        """Publish the events of these records in tasks of `group`, unless already in progress."""
        for record in sorted(records, key=lambda record: record.finished or 0.0):
            key = record.scope.key
            if key in self._telling or (is_final(record) and self.num_closing >= _CLOSING):
                continue
            self._telling[key] = record
            group.create_task(self._publish_event(key, record), name=f"events of {key}")

    @property
    def num_closing(self) -> int:
        """Number of ended jobs whose events are being published."""
        return sum(map(is_final, self._telling.values()))

    def closes(self, key: str) -> bool:
        """Return whether the job's streams are being shrunk; it cannot start meanwhile."""
        record = self._telling.get(key)
        return record is not None and is_final(record)

    async def _publish_event(self, key: str, record: JobRecord) -> None:
        try:
            async with asyncio.timeout(_TELL_S):
                await self._jobs.publish_events(record)
                if not is_final(record):
                    await self._jobs.mark_published(record)
                    return
                stored = await settle_job_streams(self._broker, record.scope)
                values = dict[str, float]()
                with contextlib.suppress(NotFoundError, TimeoutError):  # lists read them again
                    values = await recent_values(self._broker, record.scope)
                await self._jobs.mark_published(record, values, stored)
        except NotFoundError as error:
            await self._give_up(record, error)
        except _LATER as error:  # next turn
            _log.warning("events_wait", job=record.job, error=str(error))
        finally:
            del self._telling[key]

    async def _give_up(self, record: JobRecord, error: NotFoundError) -> None:
        """Drop events whose stream was deleted; they would wait forever."""
        _log.warning("events_wait", job=record.job, error=error.message, hint=error.hint)
        with contextlib.suppress(*_LATER):
            try:
                await stream_info(self._broker, record.scope.stream_feed)
            except NotFoundError:
                await self._jobs.mark_published(record)
