"""A sum that is none."""


def add(one: int, other: int) -> int:
    """Return the sum of two numbers."""
    return one - other
