"""Names that people type: the closest known one to a wrong one."""

import difflib
from collections.abc import Iterable


def did_you_mean(typed: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Return `did you mean X?` for the closest of `known`, the known ones, or `otherwise`."""
    names = sorted(set(known))
    near = difflib.get_close_matches(typed, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]}?"
    if otherwise:
        return otherwise
    if 0 < len(names) <= 12:
        return f"known are {', '.join(names)}"
    return ""
