"""Find the action in what a policy wrote, behind its reasoning."""

import re

from .reasoning import behind_reasoning


def tagged(text: str, tag: str) -> str | None:
    """Return what stands in the last `<tag>…</tag>`, without surrounding blanks, or None."""
    found = re.findall(
        rf"<{tag}>(.*?)</{tag}>", behind_reasoning(text), flags=re.DOTALL | re.IGNORECASE
    )
    return found[-1].strip() if found else None


def tagged_or_last_line(text: str, tag: str) -> str:
    """Return what stands in the last `<tag>…</tag>`, or else the last line that is not empty."""
    inside = tagged(text, tag)
    if inside is not None:
        return inside
    lines = [line.strip() for line in behind_reasoning(text).splitlines() if line.strip()]
    return lines[-1] if lines else ""
