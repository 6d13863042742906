"""What each process of a learner computes, and how far it is, for those who wait for it.

A step has the phases forward and backward (once for each micro-batch), update, and gather. A
checkpoint is written by another thread, which has phases of its own.
"""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import contextlib
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch.distributed import distributed_c10d

BEAT_S = 1.0
BACKGROUND = "background"
"""Description of the process group in which checkpoints are written."""
_RECORD = struct.Struct("<dqq16s32s16s")


class RankProgress(NamedTuple):
    """What the process of a rank last reported about itself: at each phase, and every `BEAT_S`."""

    at: float
    """When, on the machine's monotonic clock; 0: not yet."""
    collectives: int
    """Number of collectives that it has begun, the meeting included, those of saves excluded."""
    saves: int
    """Number of collectives of saves."""
    phase: str
    """What it computes; empty while it waits for an order."""
    order: str
    """The step of which that is a part; empty: none."""
    saving: str
    """What its thread for checkpoints does: `write`, or nothing."""

    def write(self, descriptor: int) -> None:
        """Write it into a file, in place of the last one."""
        texts = (text.encode() for text in self[3:])
        os.pwrite(descriptor, _RECORD.pack(*self[:3], *texts), 0)

    @classmethod
    def read(cls, descriptor: int) -> "RankProgress":
        """Read the last one."""
        data = os.pread(descriptor, _RECORD.size, 0).ljust(_RECORD.size, b"\0")
        at, collectives, saves, *texts = _RECORD.unpack(data)
        return cls(at, collectives, saves, *(text.rstrip(b"\0").decode() for text in texts))

    def __str__(self) -> str:
        """Return what it does, in words."""
        words = [f"{self.phase} of {self.order}" if self.order else self.phase]
        words += [f"{self.saving} of a checkpoint" if self.saving else ""]
        return " and ".join(filter(None, words)) or "no phase of an order"


class Phases:
    """The phases of a thread, each of which ends as the next one begins."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """`changed` is called at the begin of each phase."""
        self.name = self.order = ""
        self.longest_s: dict[str, float] = {}
        """Longest duration of each phase so far, the present one excluded."""
        self._since = time.monotonic()
        self._changed = changed

    def enter(self, name: str, order: str | None = None) -> None:
        """Begin a phase, of another order if one is given; without a name nothing is done.

        It is also an audit event of Python, by which a tool can act in the middle of a phase.
        """
        now = time.monotonic()
        longest_s = self.longest_s.get(self.name, 0.0)
        self.longest_s[self.name] = max(longest_s, now - self._since)
        self.name, self._since = name, now
        self.order = self.order if order is None else order
        self._changed()
        sys.audit("tinkermq.phase", name)


class ProcessPhases:
    """The phases of this process; its other threads, and processes with its file, may read them."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Report into a file, if given, from a thread of its own, too."""
        self.training, self.saving = Phases(self._report), Phases(self._report)
        self._descriptor = descriptor
        if descriptor is not None:
            threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def read(self) -> RankProgress:
        """Return the present state."""
        training, saving = self.training, self.saving.name
        begun = num_collectives() + bool(training.longest_s)
        numbers = begun, num_collectives(of_saves=True)
        order = training.order if training.name else ""
        return RankProgress(time.monotonic(), *numbers, training.name, order, saving)

    def _report(self) -> None:
        if self._descriptor is not None:
            self.read().write(self._descriptor)

    def _beat(self) -> None:
        while True:
            self._report()
            time.sleep(BEAT_S)


def num_collectives(*, of_saves: bool = False) -> int:
    """Return the number of collectives that this process has begun, of training or `of_saves`.

    Ranks that wait for another one have begun more than it. Any thread may call it.
    """
    number = 0
    for group in [*cast(Any, distributed_c10d)._world.pg_map]:
        if (group.group_desc == BACKGROUND) != of_saves:
            continue
        with contextlib.suppress(RuntimeError):  # torch is making or ending the group
            for backend in {group._get_backend(device) for device in group._device_types}:
                number += int(backend._get_sequence_number_for_group())
    return number
