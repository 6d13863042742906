"""Which earlier versions are opponents, and who learns in a task: pure functions.

The learner keeps the versions of the pool published; the generators draw from them. Both know the
pool from the policy's version alone, without messages.
"""

import random
from collections.abc import Sequence

from ...schemas.config.sections import SelfPlayConfig


def pool(config: SelfPlayConfig, version: int) -> list[int]:
    """Return the earlier versions that are opponents at `version`, ascending; none without a share.

    Before the first step the initial version is its own opponent.
    """
    if config.past_share == 0:
        return []
    newest = max(version - 1, 0) // config.pool_every
    first = max(0, newest - config.pool_size + 1)
    return [number * config.pool_every for number in range(first, newest + 1)]


def learning_roles(config: SelfPlayConfig, roles: Sequence[str], seed: int) -> list[str]:
    """Return the roles that learn in the task of a seed: all, or one against an earlier version."""
    rng = random.Random(f"seats {seed}")  # noqa: S311 - who sits where, not a secret
    if rng.random() < config.past_share:
        return [rng.choice(roles)]
    return list(roles)
