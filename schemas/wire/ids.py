"""Ids that sort by time and cannot be guessed."""

import secrets
import time

from ulid import ULID


def new_id() -> str:
    """Return a ULID in lower case: milliseconds, and 80 random bits.

    The bits are drawn anew for each id. The library counts up within a millisecond, which would
    make ids predictable.
    """
    milliseconds = int(time.time() * 1000).to_bytes(6, "big")
    return str(ULID.from_bytes(milliseconds + secrets.token_bytes(10))).lower()
