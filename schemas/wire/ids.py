"""Ids that sort by time and that nobody can guess."""

import secrets
import time

from ulid import ULID


def new_id() -> str:
    """Return a ULID in lower case: milliseconds, and 80 random bits.

    The bits are drawn anew for each id. The library counts up within one millisecond, which would
    make the id of one job follow from that of another.
    """
    milliseconds = int(time.time() * 1000).to_bytes(6, "big")
    return str(ULID.from_bytes(milliseconds + secrets.token_bytes(10))).lower()
