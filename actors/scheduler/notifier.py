"""Notify users of the end of their jobs, and of a plateau, and record the jobs' changes of state.

The scheduler sends them, so that it works while the laptop sleeps. apprise supports the services
behind the URLs; it runs in a thread, and neither a URL nor an answer is logged.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from ...broker.client.connection import Broker
from ...broker.feed import recent_values
from ...broker.jetstream.streams import settle_job_streams, stream_info
from ...broker.jobs import JobStore, is_final
from ...schemas.job import NOTIFY_URL, JobRecord
from ...schemas.wire.errors import NotFoundError, TinkermqError
from .jobs.secrets import SecretStore
from .jobs.view import last_version

_SEND_S = 30.0
_LOOK_S = 2.0
_MEASURES = ("val/mean_score", "training_step_reward")
_TOLD = {"COMPLETED": "has finished", "FAILED": "has failed", "CANCELLED": "was stopped"}
_log: structlog.stdlib.BoundLogger = structlog.get_logger()

Send = Callable[[str, str, str], bool]


@dataclass
class Plateau:
    """Finds out when a measure has not improved for so many steps; pure."""

    patience: int
    """Steps without improvement."""
    measure: str = ""
    best: float = float("-inf")
    best_step: int = 0
    is_reported: bool = False

    def observe(self, values: Mapping[str, float]) -> bool:
        """Take the newest numbers; True once for each plateau.

        Validation counts if there is any, else the reward.
        """
        step = int(values.get("step", 0))
        measure = next((name for name in _MEASURES if name in values), "")
        if not measure:
            return False
        if measure != self.measure:
            self.measure, self.best = measure, float("-inf")
        if values[measure] > self.best:
            self.best, self.best_step, self.is_reported = values[measure], step, False
        if self.is_reported or step - self.best_step < self.patience:
            return False
        self.is_reported = True
        return True


class Notifier:
    """Sends notifications, one after the other."""

    def __init__(self, broker: Broker, secrets: SecretStore, send: Send | None = None) -> None:
        """Tell by `send(url, title, text)`, by default with apprise."""
        self._broker = broker
        self._secrets = secrets
        self._send = send or send_by_apprise
        self._queue: asyncio.Queue[tuple[JobRecord, str]] = asyncio.Queue()
        self._plateaus: dict[str, Plateau] = {}
        self._looked = float("-inf")

    def ended(self, record: JobRecord) -> None:
        """Tell of the end of a job, and remove its secrets."""
        self._plateaus.pop(record.job, None)
        if record.secrets:
            self._queue.put_nowait((record, _TOLD[record.state]))

    async def check_jobs(self, active: list[JobRecord]) -> None:
        """Look for plateaus among running jobs with notifications."""
        if time.monotonic() - self._looked < _LOOK_S:
            return
        self._looked = time.monotonic()
        for record in active:
            training: dict[str, Any] = record.config.get("training") or {}
            steps = int(training.get("plateau_steps") or 0)
            if steps and NOTIFY_URL in record.secrets and record.state == "RUNNING":
                await self._look_at(record, self._plateaus.setdefault(record.job, Plateau(steps)))

    async def _look_at(self, record: JobRecord, plateau: Plateau) -> None:
        try:
            values = await recent_values(self._broker, record.scope)
        except (NotFoundError, TimeoutError):
            return
        if plateau.observe(values):
            text = f"has not improved {plateau.measure} since step {plateau.best_step}"
            self._queue.put_nowait((record, f"{text} ({plateau.best:.4g})"))

    async def run(self) -> None:
        """Send what a previous scheduler did not send any more, then new notifications."""
        for left in await self._secrets.left_behind():
            if isinstance(left, JobRecord):
                self.ended(left)
            else:
                await self._secrets.forget(left)
        while True:
            record, text = await self._queue.get()
            try:
                await self._tell(record, text)
            except TinkermqError as error:
                _log.warning("notification_failed", job=record.job, error=error.message)

    async def _tell(self, record: JobRecord, text: str) -> None:
        scope = record.scope
        url = (await self._secrets.values(scope)).get(NOTIFY_URL)
        if url is not None:
            title, body = f"{record.name} {text}", f"{record.name} ({record.state}): {text}"
            if record.reason:
                body += f"\n{record.reason}"
            done = False
            try:
                async with asyncio.timeout(_SEND_S):
                    done = await asyncio.to_thread(self._send, url, title, body)
            except TimeoutError:
                pass
            except Exception as error:  # noqa: BLE001  a service's library; its text may name the URL
                _log.warning("notification_refused", job=record.job, kind=type(error).__name__)
            _log.info("notification_sent" if done else "notification_lost", job=record.job)
        if record.state in _TOLD:
            await self._secrets.forget(scope)


def send_by_apprise(url: str, title: str, text: str) -> bool:
    """Send one notification; False when the service does not take it, or apprise is missing."""
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # it names URLs
    try:
        from apprise import Apprise
    except ImportError:
        _log.warning("apprise_missing", hint="pip install 'tinkermq[notify]' where schedulers run")
        return False
    service: Any = Apprise()
    return bool(service.add(url)) and bool(service.notify(title=title, body=text))


# Events of state changes, which the jobs' records hold until they are published. Each job has a
# task of its own, so that one blocked stream delays no other; failures wait for the next turn. The
# streams of an ended job shrink after its last event is published, and only then its record is
# final. A bounded number of jobs does so at a time, the oldest first, so that a slow server
# finishes some of a thousand.

_TELL_S = 10.0
_CLOSING = 8
_LATER = (TinkermqError, TimeoutError)


class MoveEvents:
    """Publishes the events that records hold."""

    def __init__(self, broker: Broker, jobs: JobStore) -> None:
        """Be telling nothing."""
        self._broker = broker
        self._jobs = jobs
        self._telling: dict[str, JobRecord] = {}

    def publish(self, records: Iterable[JobRecord], group: asyncio.TaskGroup) -> None:
        """Tell what these records hold, in tasks of `group`, unless that is under way."""
        for record in sorted(records, key=lambda one: one.finished or 0.0):
            key = record.scope.key
            if key in self._telling or (is_final(record) and self.num_closing >= _CLOSING):
                continue
            self._telling[key] = record
            group.create_task(self._tell(key, record), name=f"events of {key}")

    @property
    def num_closing(self) -> int:
        """Number of ended jobs whose events are being published."""
        return sum(map(is_final, self._telling.values()))

    def closes(self, key: str) -> bool:
        """Whether the streams of a job are being shrunk: it cannot be started again just now."""
        record = self._telling.get(key)
        return record is not None and is_final(record)

    async def _tell(self, key: str, record: JobRecord) -> None:
        try:
            version = record.version
            async with asyncio.timeout(_TELL_S):
                await self._jobs.publish_events(record)
                stored = None
                if is_final(record):
                    stored = await settle_job_streams(self._broker, record.scope)
                    version = await last_version(self._broker, record)
                await self._jobs.mark_published(record, version, stored)
        except NotFoundError as error:
            await self._give_up(record, error)
        except _LATER as error:  # next turn
            _log.warning("events_wait", job=record.job, error=str(error))
        finally:
            del self._telling[key]

    async def _give_up(self, record: JobRecord, error: NotFoundError) -> None:
        """Drop events whose stream was deleted; they would wait for ever."""
        _log.warning("events_wait", job=record.job, error=error.message, hint=error.hint)
        with contextlib.suppress(*_LATER):
            try:
                await stream_info(self._broker, record.scope.stream_feed)
            except NotFoundError:
                await self._jobs.mark_published(record)
