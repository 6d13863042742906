"""Whose turn it is: deficit round robin over users, by tokens and their weights.

A user whose turn it is computes pieces of work, each at most a micro-batch, until what it was given
for this round is used; then the next one is. Who comes anew goes before those who have had a round,
once: a user with little to do waits for one piece of another, not for a round of all. Pure.
"""

from collections import deque
from collections.abc import Collection


class FairTurns:
    """The users who have something to be done, in the order of their turns."""

    def __init__(self, quantum: int) -> None:
        """Give the user of the largest weight `quantum` tokens in each round."""
        self.weights: dict[str, float] = {}
        """Of users; 1 for those that are not there."""
        self._quantum = quantum
        self._left: dict[str, float] = {}
        self._fresh: deque[str] = deque()
        self._waiting: deque[str] = deque()

    def choose(self, ready: Collection[str]) -> str | None:
        """Return the user whose turn it is among those who have something to be done, or None."""
        known = {*self._fresh, *self._waiting}
        for user in ready:
            if user not in known:
                self._left[user] = self._share(user, ready) + min(0.0, self._left.get(user, 0.0))
                self._fresh.append(user)
        while ready:
            queue = self._fresh or self._waiting
            user = queue[0]
            if user not in ready:
                self._pass_over(queue)
            elif self._left[user] > 0:
                return user
            else:
                self._left[user] += self._share(user, ready)
                self._waiting.append(queue.popleft())
        return None

    def charge(self, user: str, tokens: float) -> None:
        """Note what a piece of a user's work has cost."""
        self._left[user] = self._left.get(user, 0.0) - tokens

    def _share(self, user: str, ready: Collection[str]) -> float:
        """Return a user's tokens of one round."""
        largest = max(self.weights.get(one, 1.0) for one in ready)
        return self._quantum * self.weights.get(user, 1.0) / largest

    def _pass_over(self, queue: "deque[str]") -> None:
        """Let a user who has nothing to be done go, who came anew only behind all others."""
        user = queue.popleft()
        if queue is self._fresh and self._waiting:
            self._waiting.append(user)
        elif self._left[user] >= 0:
            del self._left[user]  # debts stay until they are paid
