"""The learner's intake: reads the rollout log and keeps what has not been decided on.

What it holds is bounded by the admission gate: generators cannot be further ahead than that.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

import structlog

from ...broker.rollouts import LogEntry, RolloutLog
from ...schemas.errors import MessageError
from ...schemas.rollout import Group, check_group
from .batching import Candidate

_log = structlog.get_logger()


@dataclass(frozen=True)
class Entry:
    """An entry of the log, checked."""

    seq: int
    number: int | None
    group: Group | None
    """The group, or None when it cannot be trained."""
    index: int | None
    """Its task's position in the data order."""
    digest: bytes
    """SHA-256 of its payload."""
    candidate: Candidate


class Intake:
    """Entries of the rollout log that are neither trained nor dropped."""

    def __init__(self, log: RolloutLog, *, vocab_size: int, max_tokens: int) -> None:
        self._log = log
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._entries: dict[int, Entry] = {}
        self.changed = asyncio.Event()
        """Set whenever an entry arrives."""
        self.last_seq = 0
        """Newest sequence that was read."""
        self.max_version = 0
        """Newest version that a group may have been made with."""
        self.bytes_held = 0
        """Bytes of the log since it was last trimmed."""
        self.arrived: list[Entry] = []
        """Entries that came since the learner last looked."""

    async def run(self, from_seq: int) -> None:
        """Read the log from a sequence on, for ever."""
        async with aclosing(self._log.read(from_seq)) as entries:
            async for entry in entries:
                self._take(entry)

    def candidates(self) -> list[Candidate]:
        """Return what may be trained or dropped."""
        return [entry.candidate for entry in self._entries.values()]

    def __getitem__(self, seq: int) -> Entry:
        return self._entries[seq]

    def __contains__(self, seq: int) -> bool:
        return seq in self._entries

    def forget(self, seqs: Iterable[int]) -> None:
        """Let go of entries that have been decided on."""
        for seq in seqs:
            del self._entries[seq]

    def first_undecided(self) -> int:
        """Return the first sequence that must stay in the log."""
        return min(self._entries, default=self.last_seq + 1)

    def _take(self, raw: LogEntry) -> None:
        if raw.seq <= self.last_seq:
            return
        entry = self._check(raw)
        self._entries[raw.seq] = entry
        self.last_seq = raw.seq
        self.bytes_held += len(raw.payload)
        self.arrived.append(entry)
        self.changed.set()

    def _check(self, raw: LogEntry) -> Entry:
        error, group = raw.error, raw.group
        if group is not None and group.error is None:
            try:
                check_group(
                    group,
                    vocab_size=self._vocab_size,
                    max_tokens=self._max_tokens,
                    version=self.max_version,
                )
            except MessageError as refused:
                error = refused
        if error is not None:
            _log.warning("rollout_malformed", seq=raw.seq, task=raw.number, error=error.message)
        usable = error is None and group is not None and group.error is None
        return Entry(
            seq=raw.seq,
            number=raw.number,
            group=group if usable else None,
            index=group.task.index if group is not None else None,
            digest=hashlib.sha256(raw.payload).digest(),
            candidate=_candidate(raw, group, usable=usable, malformed=error is not None),
        )


def _candidate(raw: LogEntry, group: Group | None, *, usable: bool, malformed: bool) -> Candidate:
    if not usable or group is None:
        return Candidate(raw.seq, raw.number, unusable="malformed" if malformed else "failed")
    episodes = group.sampled
    return Candidate(
        seq=raw.seq,
        number=raw.number,
        min_token_version=group.min_version,
        max_token_version=max(item.max_version for item in episodes),
        rewards=tuple(item.reward for item in episodes),
    )


def batch_digest(entries: Iterable[Entry]) -> str:
    """Return the digest that a batch record holds for its groups."""
    return hashlib.sha256(b"".join(entry.digest for entry in entries)).hexdigest()
