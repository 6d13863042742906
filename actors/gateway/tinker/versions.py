"""What is said to programs whose SDK this service was not tested with."""

import re

OLDEST, NEWEST = (0, 25), (0, 38)
"""Tested with: make test-tinker."""
_EXTERNAL = (0, 28)
_AGENT = re.compile(r"Tinker/Python ([0-9]{1,4})\.([0-9]{1,4})")
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(\..*)?")


def note_to(version: str) -> dict[str, str]:
    """Return what a session's client shows its user: nothing, for a version that was tested."""
    found = _VERSION.fullmatch(version)
    tested = f"{_shown(OLDEST)} to {_shown(NEWEST)}"
    if found is None:
        return {"warning_message": f"this service was tested with tinker {tested}"}
    number = int(found[1]), int(found[2])
    if number < OLDEST:
        return {
            "error_message": f"tinker {version} sends requests that this service does not take: "
            f"install tinker>={_shown(OLDEST)}"
        }
    if number > NEWEST:
        return {
            "warning_message": f"this service was tested with tinker {tested}, not with {version}: "
            "if a call fails, install a tested one, or a newer tinkermq"
        }
    return {}


def knows_external(user_agent: str) -> bool:
    """Whether an SDK reads lists in which checkpoints for other programs stand.

    Those before cannot read a list that has one. What is no SDK is told everything.
    """
    found = _AGENT.search(user_agent)
    return found is None or (int(found[1]), int(found[2])) >= _EXTERNAL


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
