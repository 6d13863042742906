"""What an engine has done so far, and how fast of late."""

import time
from collections import deque

from .engine import EngineStats

_RATE_WINDOW_S = 10.0


class Meter:
    """Counters that one thread raises and any thread may read."""

    def __init__(self) -> None:
        self.generated = 0
        self.prefilled = 0
        self.reused = 0
        self.busy_s = 0.0
        self.last_pause_s = 0.0
        self.paused_s = 0.0
        self._marks = deque([(time.monotonic(), 0, 0.0)], maxlen=11)

    def paused(self, pause_s: float) -> None:
        """Count a pause of decoding for new weights."""
        self.last_pause_s = pause_s
        self.paused_s += pause_s

    def mark(self) -> None:
        """Remember the counters of now, at times; call it after each step."""
        now = time.monotonic()
        if now - self._marks[-1][0] > _RATE_WINDOW_S / 10:
            self._marks.append((now, self.generated, self.busy_s))

    def stats(
        self, *, version: int, running: int, waiting: int, cached_prefixes: int, cache_bytes: int
    ) -> EngineStats:
        """Return an engine's statistics: the counters, and what only the engine knows."""
        tokens_per_s, busy_share = self.rates()
        return EngineStats(
            version=version,
            running=running,
            waiting=waiting,
            cached_prefixes=cached_prefixes,
            tokens_per_s=tokens_per_s,
            busy_share=busy_share,
            generated_tokens=self.generated,
            prefilled_tokens=self.prefilled,
            reused_tokens=self.reused,
            busy_s=self.busy_s,
            last_pause_s=self.last_pause_s,
            paused_s=self.paused_s,
            cache_bytes=cache_bytes,
        )

    def rates(self) -> tuple[float, float]:
        """Return tokens per second and the busy share, over about the last 10 s."""
        now = time.monotonic()
        recent = [mark for mark in tuple(self._marks) if now - mark[0] <= _RATE_WINDOW_S]
        then, generated, busy_s = recent[0] if recent else (0.0, self.generated, self.busy_s)
        elapsed = max(now - then, 1e-6)
        share = min(1.0, (self.busy_s - busy_s) / elapsed)
        return (self.generated - generated) / elapsed, share
