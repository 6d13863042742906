"""Fair scheduling of users: deficit round robin by tokens and weights, and their quotas.

The first user in the queue computes pieces of work, each at most a micro-batch, until the user's
tokens of this round are used; then the next user does. A newcomer goes first, once, so a user with
little work waits for one piece of another's, not for a round of all. `FairShare` is pure.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection

import structlog

from ...broker.client.rpc import call
from ...schemas.job import TenantShares, TrainerUsage
from ...schemas.wire.errors import ExhaustedError, TinkermqError
from ...schemas.wire.subjects import rpc
from ..runtime import JobContext


class FairShare:
    """The users with work, in the order of their turns."""

    def __init__(self, quantum: int) -> None:
        """Give the user of the largest weight `quantum` tokens in each round."""
        self.weights: dict[str, float] = {}
        """Weights of users; others have 1."""
        self._quantum = quantum
        self._left: dict[str, float] = {}
        self._fresh: deque[str] = deque()
        self._waiting: deque[str] = deque()

    def choose(self, ready: Collection[str]) -> str | None:
        """Return the user whose turn it is among those with ready work; None without any."""
        known = {*self._fresh, *self._waiting}
        for user in ready:
            if user not in known:
                self._left[user] = self._share(user, ready) + min(0.0, self._left.get(user, 0.0))
                self._fresh.append(user)
        while ready:
            queue = self._fresh or self._waiting
            user = queue[0]
            if user not in ready:
                self._skip_first(queue)
            elif self._left[user] > 0:
                return user
            else:
                self._left[user] += self._share(user, ready)
                self._waiting.append(queue.popleft())
        return None

    def charge(self, user: str, tokens: float) -> None:
        """Charge a user for a piece of work."""
        self._left[user] = self._left.get(user, 0.0) - tokens

    def _share(self, user: str, ready: Collection[str]) -> float:
        """Return a user's tokens per round."""
        largest = max(self.weights.get(item, 1.0) for item in ready)
        return self._quantum * self.weights.get(user, 1.0) / largest

    def _skip_first(self, queue: "deque[str]") -> None:
        """Skip a user without work; a returning user queues behind all others."""
        user = queue.popleft()
        if queue is self._fresh and self._waiting:
            self._waiting.append(user)
        elif self._left[user] >= 0:
            del self._left[user]  # debts stay until they are paid


# -- used tokens, reported to the scheduler, which returns weights and quotas ----------------------

REPORT_S = 4.0
_TIMEOUT_S = 10.0
_MAX_USERS = 1000
"""Maximum number of users in one report."""
_log: structlog.stdlib.BoundLogger = structlog.get_logger()


class ShareFollower:
    """The users' weights and quotas, a few seconds old; older while the scheduler is away."""

    def __init__(
        self,
        context: JobContext,
        weights: dict[str, float],
        used: Callable[[], dict[str, int]],
        *,
        sampler: str = "",
    ) -> None:
        """Report what `used` returns, and set the `weights` of users' turns.

        A `sampler`'s tokens are counted since it started, a trainer's since its service began.
        """
        self._context = context
        self._weights = weights
        self._used = used
        self._sampler, self._since = sampler, time.time()
        self._reported: dict[str, int] = {}
        self._left: dict[str, int] = {}

    def check(self, user: str) -> None:
        """Raise ExhaustedError if a user has used all tokens of the quota."""
        left = self._left.get(user)
        if left is not None and self._used().get(user, 0) - self._reported.get(user, 0) >= left:
            raise ExhaustedError(
                f"user {user!r} has used all tokens of the quota (max_tinker_tokens)",
                hint=f"an admin may raise it: tinkermq user quota {user} --tinker-tokens",
            )

    async def follow(self) -> None:
        """Report every few seconds, forever."""
        while True:
            try:
                await self.report()
            except TinkermqError as error:
                _log.debug("no_shares", reason=error.message)
            await asyncio.sleep(REPORT_S)

    async def report(self) -> None:
        """Report used tokens, and apply the scheduler's weights and quotas.

        Raises TinkermqError.
        """
        scope, used = self._context.scope, self._used()
        for part in _parts(used):
            shares = await call(
                self._context.broker,
                rpc(scope.user, "scheduler", "tinker-usage"),
                TrainerUsage(job=scope.job, tokens=part, sampler=self._sampler, since=self._since),
                TenantShares,
                timeout_s=_TIMEOUT_S,
                waiting_for="the scheduler",
            )
            self._reported |= part
            for user, share in shares.users.items():
                self._weights[user] = share.weight
                self._left.pop(user, None)
                if share.tokens_left is not None:
                    self._left[user] = share.tokens_left


def _parts(used: dict[str, int]) -> list[dict[str, int]]:
    users = sorted(used)
    starts = range(0, len(users), _MAX_USERS)
    return [{user: used[user] for user in users[start : start + _MAX_USERS]} for start in starts]
