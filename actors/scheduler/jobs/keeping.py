"""Which jobs that have ended are archived by themselves. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Keeping:
    """How many jobs that have ended stay at hand, with their streams at the broker."""

    of_user: int = 100
    """Of each user: the newest."""
    of_all: int = 1000
    """Of all users together: whoever has the most gives up the oldest."""


Ended = Mapping[str, Mapping[str, float]]
"""By user, the jobs that have ended and when, by key."""


def beyond(ended: Ended, keeping: Keeping) -> Iterator[str]:
    """Yield the keys of the jobs to archive, in this order."""
    counts = {user: len(of_user) for user, of_user in ended.items() if of_user}
    oldest: dict[str, Iterator[str]] = {}
    total = sum(counts.values())
    while counts:
        user = max(counts, key=lambda one: (counts[one], one))
        if counts[user] <= keeping.of_user and total <= keeping.of_all:
            return
        if user not in oldest:
            oldest[user] = iter(sorted(ended[user], key=lambda key: (ended[user][key], key)))
        yield next(oldest[user])
        counts[user] -= 1
        total -= 1
        if not counts[user]:
            del counts[user]
