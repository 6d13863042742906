"""Sets of task numbers.

There are few half-open ranges, since numbers come nearly in order. Queries stay fast with many
ranges: the numbers before each range are counted once, and recounted only after a changed range.
"""

import bisect
from collections.abc import Iterable, Iterator


class NumberSet:
    """A set of non-negative integers, stored as ascending, disjoint ranges [start, end)."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._before: list[int] = []
        """Count of numbers before each range, for the ranges counted so far."""
        for start, end in ranges:
            self._add_range(start, end)

    def add(self, number: int) -> None:
        """Add one number."""
        self._add_range(number, number + 1)

    def update(self, other: "NumberSet") -> None:
        """Add every number of another set."""
        for start, end in other.ranges():
            self._add_range(start, end)

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        return self.count_below(self._ends[-1]) if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        for start, end in self.ranges():
            yield from range(start, end)

    def count_below(self, limit: int) -> int:
        """Count the numbers under `limit`."""
        at = bisect.bisect_left(self._starts, limit) - 1
        if at < 0:
            return 0
        while len(self._before) <= at:
            last = len(self._before) - 1
            size = self._ends[last] - self._starts[last] if self._before else 0
            self._before.append(self._before[-1] + size if self._before else 0)
        return self._before[at] + min(self._ends[at], limit) - self._starts[at]

    def gaps(self, limit: int) -> Iterator[int]:
        """Return the numbers under `limit` that are not in the set, ascending."""
        after = 0
        for start, end in self.ranges():
            yield from range(after, min(start, limit))
            after = end
        yield from range(after, limit)

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges, ascending."""
        return list(zip(self._starts, self._ends, strict=True))

    def _add_range(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect.bisect_left(self._ends, start)
        last = bisect.bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        del self._before[first + 1 :]
